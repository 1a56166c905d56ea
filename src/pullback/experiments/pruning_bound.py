"""The pruning theorem on real runs: its two terms, its premise and its corrected form beside the true error.

    python -m pullback.experiments.pruning_bound --model facebook/dinov2-small --decoder cls --stage 6 \
        --ratios 0.1,0.3,0.5 --images photos/ --count 32 --out rows.jsonl

One row per image, ratio and preset. A decoder that reads several layers gives two: "final", the theorem's own reading
(phi as a function of the final-layer tensor, the layers below held at what the unpruned model made of them), and "all",
where phi is a function of everything that it reads. ``output_error`` is what pruning really did to the output; at
"final" the theorem does not see the part of it that comes through the other layers.
Tokens are run, and block norms computed, in float32; the rest of the theorem is evaluated on them in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, cast

import torch
import typer
from torch import Tensor

from pullback.backbones import Backbone
from pullback.errors import PullbackError
from pullback.experiments.command import Device, NewRowsOut, Row, RowFile, explained
from pullback.geometry.importance import block_norms
from pullback.geometry.scores import block_energies, exact_modes
from pullback.geometry.theorem import PruningBound, pruning_bound
from pullback.operators import JacobianOperator
from pullback.probes import INPUTS, Features, ProbeMap, load_probe
from pullback.pruning import Modes, PrunePlan, Score, ScoreContext, StageRecord, preset, run_pruned
from pullback.randnla import Streams
from pullback.runs.progress import Lines
from pullback.runs.provenance import provenance
from pullback.runs.rows import finite
from pullback.scenes.render import normalised, render
from pullback.scenes.splits import QUERIES

PRESETS = ("paper", "best")
SCENES = "scenes"
"""The name of the procedural pictures in place of a folder: those that tiny-scenes is evaluated on."""
MEASURED = (
    *("output_norm", "true_error", "removed_error", "linear_change", "remainder"),
    *("beta", "beta_on_segment", "beta_where_read", "beta_needed", "remainder_order"),
    *("first_term", "second_term", "stated", "fails", "holds_for_sure"),
    *("corrected_first_term", "corrected_second_term", "corrected"),
    *("kept_moved", "kept_energy", "kept_residual", "removed_residual", "zero_blocks"),
)
"""Of a `PruningBound`, one number per image."""


@dataclass(frozen=True)
class Measured:
    """The two probes of one model: float32 for the pruned run and the many products, float64 for the remainder."""

    runner: ProbeMap  # at the stage
    judge: ProbeMap  # at the last layer

    @staticmethod
    def load(model: str | os.PathLike[str] | torch.nn.Module, decoder: str, stage: int, device: str) -> Measured:
        runner = load_probe(model, decoder, stage, device=device)
        judge = load_probe(model, decoder, runner.backbone.depth - 1, device=device, dtype=torch.float64)
        return Measured(runner, judge)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that the decoder reads, and the last one."""
        return tuple(sorted({*self.runner.decoder.layers, self.runner.backbone.depth - 1}))


def plan_for(name: str, ratio: float, measured: Measured) -> PrunePlan:
    """A preset whose removed tokens come back, because F^ needs a row for each of them.

    A class-token decoder never reads those rows. The theorem's rho_t = F_t^L - F_t^l without correction is "frozen".
    """
    probe = measured.runner
    dense = probe.decoder.rows is None
    plan = preset(name, ratio, probe.layers, dense=dense, depth=probe.backbone.depth)
    return plan if plan.reinsert != "none" else replace(plan, reinsert="frozen")


def bound_rows(
    measured: Measured,
    images: Tensor,
    ratios: Sequence[float],
    presets: Sequence[str] = PRESETS,
    *,
    rank: int = 20,
    num_probes: int | None = None,
    batch: int = 4,
    first: int = 0,
) -> Iterator[Row]:
    """Rows for images [B, 3, H, W]: every image with every ratio and preset. Selection by the exact imp*."""
    backbone = cast(Backbone, measured.runner.backbone)  # models of single images are ViTs
    for start in range(0, len(images), batch):
        part = images[start : start + batch]
        modes = once(exact_modes(measured.runner, rank))  # of the stage's tokens, which are the same for every plan
        unpruned = measured.runner.backbone.features(part, measured.layers)
        for ratio in ratios:
            for name in presets:
                plan = plan_for(name, ratio, measured)
                score = importance_of(modes)
                run = run_pruned(backbone, part, plan, [score], layers=measured.layers, modes=modes)
                pruned = dict(zip(measured.layers, run.taps, strict=True))
                removed = removed_mask(run.records, unpruned[measured.layers[-1]])
                known = {"preset": name, "ratio": ratio, "stage": measured.runner.layer, "reinsert": plan.reinsert}
                for tensor, found in judged(measured, unpruned, pruned, removed, part, num_probes):
                    error = output_error(measured, unpruned, pruned, part)
                    yield from rows_of(known | {"tensor": tensor}, found, error, first + start)


@torch.no_grad()
def judged(
    measured: Measured,
    unpruned: dict[int, Tensor],
    pruned: dict[int, Tensor],
    removed: Tensor,
    images: Tensor,
    num_probes: int | None,
) -> Iterator[tuple[str, PruningBound]]:
    """("final", ...), and for a decoder of several layers ("all", ...)."""
    runner, judge = measured.runner, measured.judge
    layout, last = judge.backbone.token_layout(images), judge.backbone.depth - 1
    below = {layer: unpruned[layer] for layer in judge.decoder.layers if layer != last}

    def read(quick: ProbeMap, exact: ProbeMap, layers: Sequence[int], held: dict[int, Tensor]) -> PruningBound:
        full, reached = (torch.cat([taps[layer] for layer in layers], -1) for taps in (unpruned, pruned))
        norms = block_norms_of(quick, Features.attach(reached, layout, held), num_probes)
        constants = {layer: constant.double() for layer, constant in held.items()}
        start = Features.attach(full.double(), layout, constants)
        return pruning_bound(exact, start, reached.double(), removed, block_norms=norms)

    yield "final", read(replace(runner, at=last), judge, (last,), below)
    if below:
        quick, exact = (ProbeMap(p.backbone, p.decoder, INPUTS, after_norm=False) for p in (runner, judge))
        yield "all", read(quick, exact, judge.decoder.layers, {})


def block_norms_of(probe: ProbeMap, features: Tensor, num_probes: int | None) -> Tensor:
    """|J_:,t|_F [B, N], exact or sampled, in the features' own precision."""
    operator, tokens = JacobianOperator(probe, features), features.shape[1]
    if num_probes is None:
        return block_energies(operator, tokens).sqrt()
    streams = Streams.from_seeds([0] * len(features))
    return block_norms(operator, tokens, num_probes=num_probes, streams=streams).squared.value.sqrt()


@torch.no_grad()
def output_error(measured: Measured, unpruned: dict[int, Tensor], pruned: dict[int, Tensor], images: Tensor) -> Tensor:
    """|y - y^| [B], with y^ decoded from everything that the pruned run left."""
    decoder, backbone = measured.judge.decoder, measured.judge.backbone
    layout = backbone.token_layout(images)

    def decode(taps: dict[int, Tensor]) -> Tensor:
        return decoder.output([taps[layer].double() for layer in decoder.layers], layout, backbone.norm).flatten(1)

    return (decode(unpruned) - decode(pruned)).norm(dim=1)


def rows_of(known: Row, found: PruningBound, error: Tensor, first: int) -> Iterator[Row]:
    for index in range(len(error)):
        numbers = {name: _plain(getattr(found, name)[index]) for name in MEASURED}
        counts = {"removed": int(found.removed[index].sum()), "tokens": found.removed.shape[1]}
        yield {**known, "image": first + index, **counts, "output_error": _plain(error[index]), **numbers}


def _plain(number: Tensor) -> float | bool | None:
    value = number.item()
    return value if isinstance(value, bool) else finite(value)


def removed_mask(records: Sequence[StageRecord], like: Tensor) -> Tensor:
    """[B, N] bool, of all stages, for tokens [B, N, D]."""
    mask = torch.zeros(like.shape[:2], dtype=torch.bool, device=like.device)
    for record in records:
        mask.scatter_(1, record.removed, True)
    return mask


def once(function: Modes) -> Modes:
    """What ``function`` said the first time, for tokens that are the same every time."""
    kept: list[Tensor] = []

    def remembered(tokens: Tensor, context: ScoreContext) -> Tensor:
        if not kept:
            kept.append(function(tokens, context))
        return kept[0]

    return remembered


def importance_of(modes: Modes) -> Score:
    """imp*_t = sqrt(sum_j |sigma_j v_j^(t)|^2) [B, N]."""
    return lambda tokens, context: modes(tokens, context).square().sum((1, 3)).sqrt()


def read_pictures(probe: ProbeMap, source: str, count: int, size: int | None = None) -> Tensor:
    """[B, 3, H, W]: of a folder, or the procedural pictures ``scenes``."""
    if source != SCENES:
        return probe.load_images(source, size, limit=count)
    size = size or probe.backbone.preprocessing.size
    return normalised(render(range(QUERIES, QUERIES + count), size=size).rgb[:, 0])


COLUMNS: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
    ("error %", lambda row: 100 * row["output_error"] / row["output_norm"]),
    ("of φ %", lambda row: 100 * row["true_error"] / row["output_norm"]),
    ("removed %", lambda row: 100 * row["removed_error"] / row["output_norm"]),
    ("1st %", lambda row: 100 * row["first_term"] / row["output_norm"]),
    ("2nd %", lambda row: 100 * row["second_term"] / row["output_norm"]),
    ("fails %", lambda row: 100.0 * row["fails"]),
    ("sure %", lambda row: 100.0 * row["holds_for_sure"]),
    ("all 1st %", lambda row: 100 * row["corrected_first_term"] / row["output_norm"]),
    ("all 2nd %", lambda row: 100 * row["corrected_second_term"] / row["output_norm"]),
    ("all/error", lambda row: row["corrected"] / row["true_error"] if row["true_error"] else None),
    ("kept moved %", lambda row: 100 * row["kept_moved"]),
    ("kept ρ %", lambda row: 100 * row["kept_residual"]),
    ("gone ρ %", lambda row: 100 * row["removed_residual"]),
    ("kept ρ² %", lambda row: 100 * row["kept_energy"]),
    ("zero J %", lambda row: 100 * row["zero_blocks"]),
    ("order", lambda row: row["remainder_order"]),
)
"""Means over images. Errors and terms in percent of |phi(F)|; ρ relative to |F_t|."""


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line per tensor, ratio and preset."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["tensor"], row["ratio"], row["preset"]), []).append(row)
    head = ("tensor", "η", "preset", *(name for name, _ in COLUMNS))
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (tensor, ratio, name), group in sorted(groups.items(), key=lambda item: (item[0][0] != "final", *item[0])):
        means = [_mean([value(row) for row in group]) for _, value in COLUMNS]
        lines.append(f"| {tensor} | {ratio:g} | {name} | " + " | ".join(means) + " |")
    return "\n".join(lines)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3g}" if known else "–"


def shares_of(ratios: str) -> list[float]:
    try:
        return [float(share) for share in ratios.split(",")]
    except ValueError:
        raise PullbackError(f"ratios: expected numbers separated by commas, got {ratios!r}.") from None


def main(
    model: Annotated[str, typer.Option(help="The backbone.")],
    images: Annotated[str, typer.Option(help=f"A folder, or {SCENES!r} for procedural pictures.")],
    stage: Annotated[int, typer.Option(min=0, help="Tokens are removed after this block.")],
    decoder: Annotated[str, typer.Option(help="As for `pullback diagnose`.")] = "cls",
    ratios: Annotated[str, typer.Option(help="Separated by commas.")] = "0.1,0.3,0.5",
    presets: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(PRESETS),
    count: Annotated[int, typer.Option(min=1, help="Images.")] = 32,
    size: Annotated[int | None, typer.Option(help="Side of the images.", show_default="the model's own")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of imp* and d_task.")] = 20,
    num_probes: Annotated[int | None, typer.Option(help="VJPs for block norms.", show_default="exact")] = None,
    out: NewRowsOut = None,
    device: Device = "auto",
) -> None:
    """The pruning theorem beside the true error."""
    with explained():
        shares, names = shares_of(ratios), presets.split(",")
        measured = Measured.load(model, decoder, stage, device)
        pictures = read_pictures(measured.runner, images, count, size)
        shared = {"model": model, "decoder": decoder, "source": images, "rank": rank, "num_probes": num_probes}
        origin = {"provenance": provenance(measured.runner.device)}
        progress, file = Lines(), RowFile(out, anew=True)
        progress.work("pruned runs", len(pictures) * len(shares) * len(names), "images")
        for row in bound_rows(measured, pictures, shares, names, rank=rank, num_probes=num_probes):
            file.add(shared | row | origin)
            progress.advance(row["tensor"] == "final")
        typer.echo(table(file.rows))


if __name__ == "__main__":
    typer.run(main)
