"""A pruning comparison as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pullback.report.wording import UNKNOWN, after_blocks, counted, p_value, plain, short_name, times
from pullback.runs.documents import MEASURES

_NAMED = 5


def prune_summary(document: dict[str, Any]) -> RenderableType:
    """Degradation with its tests, k-NN, cost, and what had to be left out."""
    parts: list[RenderableType] = [_heading(document), Text()]
    if document["rules"]:
        parts += [_degradation(document), Text(_legend(document), style="dim"), Text()]
    if document["unpruned"]["knn"] is not None:
        parts += [_neighbours(document), Text()]
    if any(rule["cost"] for rule in document["rules"]):
        parts += [_cost(document), Text()]
    parts += [Text(note, style="yellow") for note in notes(document)]
    return Group(*parts)


def _heading(document: dict[str, Any]) -> Text:
    removed = f"tokens removed {after_blocks(document['stages'])}"
    what = f"{short_name(document['model'])}, {document['decoder']}: {removed}"
    size = "x".join(map(str, document["size"]))
    return Text.assemble((what, "bold"), f", {counted(document['images_compared'], 'image')} of {size} pixels")


def _degradation(document: dict[str, Any]) -> Table:
    """Rows are rules, columns are ratios: the mean, and under it the factor and p of the test."""

    def cell(rule: dict[str, Any]) -> Text:
        test = rule["tests"][0] if rule["tests"] else None
        beside = "" if test is None else f"\n{times(test['factor'])}  p {p_value(test['p_value'])}"
        return Text.assemble(plain(rule["mean"]), (beside, "dim"))

    return _by_ratio(document, f"{MEASURES[document['measure']]}: mean", cell)


def _legend(document: dict[str, Any]) -> str:
    reference, first = document["reference"], document["presets"][0]
    return (
        f"Under each mean: the factor against {reference} of the same preset, and p of the paired Wilcoxon test; "
        f"{reference} itself, and presets with a score of their own, against {reference} of preset {first}. "
        "Intervals are in summary.json."
    )


def _neighbours(document: dict[str, Any]) -> Table:
    title = f"k-NN top-1 in % (unpruned {100 * document['unpruned']['knn']:.1f})"
    return _by_ratio(document, title, lambda rule: Text(f"{100 * rule['knn']:.1f}"))


def _by_ratio(document: dict[str, Any], title: str, cell: Callable[[dict[str, Any]], Text]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("preset", style="cyan", no_wrap=True)
    table.add_column("score", no_wrap=True)
    for ratio in document["ratios"]:
        table.add_column(f"η = {ratio:g}", justify="right", no_wrap=True)
    for preset, score, rules in by_rule(document):
        style = "bold" if score == document["reference"] else ""
        cells = [Text(UNKNOWN) if rule is None else cell(rule) for rule in rules]
        table.add_row(preset, Text(score, style=style), *cells)
    return table


def by_rule(document: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any] | None]]]:
    """Return (preset, score, its entry at each of the ratios) of every rule; None where there is no entry."""
    rows: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for rule in document["rules"]:
        rows.setdefault((rule["preset"], rule["score"]), {})[rule["ratio"]] = rule
    return [(*name, [found.get(ratio) for ratio in document["ratios"]]) for name, found in rows.items()]


def _cost(document: dict[str, Any]) -> Table:
    """One score per preset: the reference where its cost is known, otherwise the first whose cost is."""
    known = [rule for rule in document["rules"] if rule["cost"]]
    sizes = list(dict.fromkeys(size for rule in known for size in rule["cost"]["milliseconds"]))
    title = f"operations and time on {document['machine']}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for name in ("preset", "score", "η"):
        table.add_column(name, style="cyan" if name == "preset" else "", no_wrap=True)
    table.add_column("GFLOPs/image", justify="right")
    for size in sizes:
        table.add_column(f"ms, batch {size}", justify="right", no_wrap=True)
    first = _unpruned_times(known, sizes)
    flops = document["unpruned"]["flops"]
    table.add_row("unpruned", "", "0", plain(flops / 1e9), *first)
    for preset in document["presets"]:
        own = [rule for rule in known if rule["preset"] == preset]
        shown = document["reference"] if any(r["score"] == document["reference"] for r in own) else None
        for rule in own:
            if rule["score"] == (shown or own[0]["score"]):
                cost = rule["cost"]
                spent = f"{plain(cost['flops'] / 1e9)} ({times(flops / cost['flops'])})"
                timed = [_milliseconds(cost["milliseconds"].get(size)) for size in sizes]
                table.add_row(preset, rule["score"], f"{rule['ratio']:g}", spent, *timed)
    return table


def _unpruned_times(rules: list[dict[str, Any]], sizes: list[str]) -> list[str]:
    found = [
        next((rule["cost"]["milliseconds"][size] for rule in rules if size in rule["cost"]["milliseconds"]), None)
        for size in sizes
    ]
    return [UNKNOWN if entry is None else plain(entry["unpruned"]) for entry in found]


def _milliseconds(entry: dict[str, float] | None) -> str:
    return UNKNOWN if entry is None else f"{plain(entry['median'])} ({times(entry['speedup'])})"


def notes(document: dict[str, Any]) -> list[str]:
    """Write what was noticed, and what had to be left out."""
    said = list(document["notes"])
    left_out = document["images"] - document["images_compared"]
    if left_out:
        said.append(
            f"{counted(left_out, 'image')} left out: no degradation exists (an output that is nowhere positive)."
        )
    floored = max((rule.get("floored", 0.0) for rule in document["rules"]), default=0.0)
    if floored > 0:
        said.append(f"Up to {100 * floored:.2g} % of the pixels lie under the floor of log depth.")
    return [*said, *skipped_files(document)]


def skipped_files(document: dict[str, Any]) -> list[str]:
    """Write which files could not be read, if any."""
    skipped = document["skipped"]
    if not skipped:
        return []
    named = "; ".join(f"{image['file']}: {image['reason']}" for image in skipped[:_NAMED])
    more = f"; and {len(skipped) - _NAMED} more" if len(skipped) > _NAMED else ""
    return [f"skipped {counted(len(skipped), 'image file')}: {named}{more}"]
