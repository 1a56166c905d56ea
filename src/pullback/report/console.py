"""A diagnosis as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pullback.registry import BackboneEntry, DecoderEntry, ScoreEntry
from pullback.report.wording import (
    UNKNOWN,
    counted,
    findings,
    lower_bound,
    missed,
    percent,
    plain,
    plus_minus,
    regime,
    samples,
    short_name,
    times,
    unit,
)
from pullback.runs.documents import in_picture, layer_name

_NAMED = 10
_LABEL_WIDTH, _LAYER_WIDTH, _GAP = 26, 15, 3


def diagnosis_summary(document: dict[str, Any], width: int) -> RenderableType:
    """Build what is printed at the end of a run: tables of at most ``width`` characters, then findings and notes."""
    layers = document["layers"]
    across = max(1, (width - _LABEL_WIDTH) // (_LAYER_WIDTH + _GAP))
    parts: list[RenderableType] = [_heading(document)]
    of = unit(document)
    parts += [layer_table(layers[first : first + across], width, of) for first in range(0, len(layers), across)]
    measured = [layer for layer in layers if layer["convergence"]]
    if measured:
        parts += [
            Text("Power iteration from a random start: share of the subspace above that it misses,", style="bold"),
            Text("and gradient signal of its first direction (1×: no better than random)", style="bold"),
            *(convergence_table(measured[first : first + across]) for first in range(0, len(measured), across)),
        ]
    parts += _advice(layers)
    parts += _multiplicity(layers)
    parts += _lowered(layers)
    parts += _without_errors(layers)
    parts += _notes(document)
    if document["skipped"]:
        parts += [Text(), *_skipped(document)]
    return Group(*parts)


def _heading(document: dict[str, Any]) -> Text:
    text = Text(f"{short_name(document['model'])}, {document['decoder']}", style="bold")
    details = f"  {samples(document)}, {document['precision']}, {document['machine']}"
    return text.append(details, style="dim")


def layer_table(layers: list[dict[str, Any]], width: int, unit: str) -> Table:
    """Build the table of a few layers, with quantities down and layers across, for narrow terminals."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    share = (width - _LABEL_WIDTH) // len(layers) - _GAP
    table.add_column("layer")
    for layer in layers:
        table.add_column(
            layer_name(layer["layer"]), justify="right", max_width=min(max(share, _LAYER_WIDTH), 2 * _LAYER_WIDTH)
        )
    for rank in layers[0]["kappa_at"]:
        table.add_row(f"captured energy κ({rank})", *(_kappa(layer["kappa_at"][rank], int(rank)) for layer in layers))
    for label, cell in _ROWS.items():
        cells = [cell(layer) for layer in layers]
        if any(cells):
            table.add_row(label.replace("image", unit), *cells)
    return table


_ROWS: dict[str, Callable[[dict[str, Any]], str | Text]] = {
    "rank for 90 % of it": lambda layer: lower_bound(layer["r90"]),
    "effective rank (first r)": lambda layer: plus_minus(layer["r_eff_trunc"], layer["r_eff_trunc_se"]),
    "effective rank (all)": lambda layer: plus_minus(layer["r_eff_slq"]["mean"], layer["r_eff_slq"]["se"]),
    "CV over tokens": lambda layer: plus_minus(layer["cv"]["mean"], layer["cv"]["se"]),
    "  of a random direction": lambda layer: _null(layer["cv"]),
    "CV over patches": lambda layer: _cv_over_patches(layer["cv"]) if in_picture(layer) else "",
    "regime": lambda layer: Text(regime(layer), style="cyan"),
    "  over patches": lambda layer: _over_patches(layer),
    "products per image": lambda layer: f"{layer['products_per_image']:,.0f} {layer['method']}",
    "seconds": lambda layer: f"{layer['seconds']:.1f}",
}


def _kappa(at: dict[str, Any], rank: int) -> str:
    return percent(at) + (f"\nat rank {at['rank_used']}" if at["rank_used"] != rank else "")


def _over_patches(layer: dict[str, Any]) -> Text:
    """The regime of the patches, which alone can be pruned; empty where all tokens are patches, or in older files."""
    found = layer.get("regime_over_patches")
    return Text("" if found is None else regime(found), style="cyan")


def _null(cv: dict[str, Any]) -> Text:
    if cv["indistinguishable_from_random"]:
        return Text(f"{plain(cv['null'], 2)} = CV", style="yellow")
    return Text(plain(cv["null"], 2), style="dim")


def _cv_over_patches(cv: dict[str, Any]) -> Text:
    text = plus_minus(cv["patches"], cv["patches_se"])
    at_the_null = cv.get("patches_indistinguishable_from_random", False)  # files of earlier versions do not say
    return Text(f"{text}, random", style="yellow") if at_the_null else Text(text)


def convergence_table(layers: list[dict[str, Any]]) -> Table:
    """Build the table of how far power iteration is from the modes after so many products with JᵀJ."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("rounds\nin all", justify="right")
    table.add_column("the paper's\nq", justify="right")
    for layer in layers:
        table.add_column(f"{layer_name(layer['layer'])}\nmissed", justify="right")
        table.add_column(f"{layer_name(layer['layer'])}\nsignal", justify="right")
    for rows in zip(*(layer["convergence"] for layer in layers), strict=True):
        cells = []
        for row in rows:
            cells += [missed(row["alignment_error"]), times(row["gradient_signal_ratio"])]
        first = rows[0]
        table.add_row(str(first["rounds"]), UNKNOWN if first["paper_q"] is None else str(first["paper_q"]), *cells)
    return table


def heads_table(scores: Mapping[int, Mapping[str, float]]) -> Table:
    """Build the table of importance heads by layer: rho on held-out images, and what each head costs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("layer", "rho, all tokens", "patches", "of the blocks' operations"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer, found in sorted(scores.items()):
        rho = plus_minus(found["rho"], found["rho_se"])
        table.add_row(layer_name(layer), rho, plain(found["rho_patches"], 3), f"{found['operations_share']:.1%}")
    return table


def _advice(layers: list[dict[str, Any]]) -> list[RenderableType]:
    """Write each distinct finding once, with the layers it holds for."""
    parts: list[RenderableType] = []
    for names, layer in findings(layers):
        parts.append(Text.assemble((f"{names}: ", "bold"), (f"regime {regime(layer)}.", "cyan")))
        parts.append(Padding(Text(layer["advice"]), (0, 0, 0, 2), expand=False))
    return parts


def _lowered(layers: list[dict[str, Any]]) -> list[RenderableType]:
    """Name the ranks that were asked for and do not exist."""
    parts: list[RenderableType] = []
    for layer in layers:
        lowered = [rank for rank, used in zip(layer["ranks"], layer["ranks_used"], strict=True) if used < rank]
        if lowered:
            limit = min(layer["output_size"], layer["tokens"] * layer["dim"])
            what = f"rank {', '.join(map(str, lowered))} lowered to {limit}, the smaller side of the Jacobian"
            parts.append(Text(f"{layer_name(layer['layer'])}: {what}.", style="yellow"))
    return parts


def _without_errors(layers: list[dict[str, Any]]) -> list[RenderableType]:
    """The layers whose modes come with no error of their own. Files of earlier versions do not say."""
    names = [layer_name(layer["layer"]) for layer in layers if layer["cv"].get("estimation_se", 0.0) is None]
    what = (
        "CV and effective rank (first r) have no estimation error: power iteration stops after a fixed number of "
        "rounds and cannot tell how far it is from the modes. Use --method krylov or exact for one."
    )
    return [Text(f"{', '.join(names)}: {what}", style="yellow")] if names else []


def _multiplicity(layers: list[dict[str, Any]]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for layer in layers:
        if "k_eff" in layer:
            k_eff = layer["k_eff"]
            value = plus_minus(k_eff["mean"], k_eff["se"])
            text = f"{value} of {len(k_eff['layers'])} layers ({', '.join(map(layer_name, k_eff['layers']))})"
            parts += [
                Text.assemble(("K_eff = ", "bold"), text),
                Padding(
                    Text("1: they act on the same output directions; all of them: on orthogonal ones."), (0, 0, 0, 2)
                ),
            ]
    return parts


def _notes(document: dict[str, Any]) -> list[RenderableType]:
    """Say what was done to the views of scenes."""
    noted = [scene for scene in document.get("scenes", []) if scene["note"]]
    return [Text(f"{scene['scene']}: {scene['note']}.", style="yellow") for scene in noted]


def _skipped(document: dict[str, Any]) -> list[RenderableType]:
    skipped, what = document["skipped"], "image file" if unit(document) == "image" else "scene"
    count = len(skipped)
    parts: list[RenderableType] = [Text(f"skipped {counted(count, what)}:", style="yellow")]
    parts += [
        Padding(Text(f"{image['file']}: {image['reason']}"), (0, 0, 0, 2), expand=False) for image in skipped[:_NAMED]
    ]
    if count > _NAMED:
        parts.append(Text(f"  and {count - _NAMED} more, all named in diagnosis.json"))
    return parts


def models_table(entries: Iterable[BackboneEntry]) -> Table:
    """Build the table of families of models for `pullback ls`."""
    rows = [(entry.name, ", ".join(entry.decoders), entry.example, ", ".join(entry.model_types)) for entry in entries]
    return _listing(("family", "decoders", "for example", "model type in config.json"), rows)


def decoders_table(entries: Iterable[DecoderEntry]) -> Table:
    """Build the table of decoders for `pullback ls`."""
    return _listing(("decoder", "for", "what it is"), [(e.name, e.family or "images", e.help) for e in entries])


def scores_table(entries: Iterable[ScoreEntry]) -> Table:
    """Build the table of scores per token for `pullback ls`."""
    return _listing(("score", "needs", "what it is"), [(e.name, e.needs or UNKNOWN, e.help) for e in entries])


def shipped_table(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Build the table of what comes with the package for `pullback ls`: (name, kind, decoders and layers) each."""
    return _listing(("comes with the package", "what it is", "decoders and layers"), rows)


def _listing(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for number, head in enumerate(heads):
        table.add_column(head, style="" if number else "cyan", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def console(*, stderr: bool = False) -> Console:
    """Make a console as wide as the terminal; in a file or a pipe, wide enough that no line is broken."""
    plain_console = Console(stderr=stderr, highlight=False)
    return plain_console if plain_console.is_terminal else Console(stderr=stderr, highlight=False, width=200)
