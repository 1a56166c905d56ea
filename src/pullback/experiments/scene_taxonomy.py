"""The taxonomy's rows of VGGT on procedural scenes: how many directions, and which tokens, carry camera, points, depth.

    python -m pullback.experiments.scene_taxonomy --model runs/tiny-views/model --scenes 16 --views 2 --size 112 \
        --rank 20 --device cpu --out rows.jsonl

One row per decoder and place, over held-out scenes: after a middle layer, and at x_vis, what the head itself reads.
Beside it stands what the paper measured on `facebook/VGGT-1B` and photographs, where it did. The rank of a camera's
Jacobian is counted in float64: at most 9 a view (fewer where a field of view is clipped at 0, without a derivative),
which is why kappa_cap is 1 there whatever the weights are.
Rows that the file holds already are not measured again, so the same command goes on after a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

from pullback.backbones import AnyBackbone, load_any_backbone
from pullback.decoders import build_decoder
from pullback.errors import PullbackError
from pullback.experiments.command import Device, Row, RowFile, RowsOut, Vggt, explained
from pullback.geometry import Tractability, diagnose, layer_multiplicity
from pullback.geometry.document import number
from pullback.geometry.spectrum import in_batches
from pullback.geometry.summary import Summary, summarize
from pullback.operators import JacobianOperator, ProductCount
from pullback.probes import INPUTS, ProbeMap
from pullback.report.console import console
from pullback.report.wording import UNKNOWN, lower_bound, plain, plus_minus, regime_label, short_name
from pullback.runs.progress import Lines
from pullback.runs.provenance import provenance, weights_hash
from pullback.scenes.render import render
from pullback.scenes.splits import HELD_OUT

AT_LAYER, AT_HEAD = "layer", "x_vis"
SECOND_RANK = 50
"""The paper also states kappa_cap(50) at x_vis."""
IDENTITY = ("decoder", "at", "layer", "rank", "scenes", "views", "size", "first_seed", "seed", "weights")
"""Rows that agree in these are the same measurement."""

PAPER: dict[tuple[str, str], Row] = {
    # tab:regime_taxonomy "VGGT camera, L16"; r_0.90 from sec:multi_layer, "Probe-point effective ranks"
    ("camera of a view", AT_LAYER): {"layer": 16, "kappa": 1.0, "r_eff_slq": 9, "r90": "≤ 9", "regime": "iv"},
    # tab:regime_taxonomy "VGGT pointcloud, L08", whose effective rank is that at x_vis
    ("points", AT_LAYER): {"layer": 8, "kappa": 0.966, "cv": 0.59, "regime": "i"},
    ("points", AT_HEAD): {"r_eff_slq": 212, "r90": "≫ 100"},
    # tab:regime_taxonomy "VGGT depth, L16 (full)"; the rest from sec:multi_layer
    ("depth", AT_LAYER): {"layer": 16, "kappa": 0.762, "cv": 0.63, "regime": "i"},
    ("depth", AT_HEAD): {"kappa_50": 0.578, "r_eff_slq": 282.6, "r90": "≫ 100", "k_eff": 4.0},
}
"""Of facebook/VGGT-1B, r = 20, 50 images. It has no numbers for joint cameras or for depth maps of 8x8 cells."""


@dataclass(frozen=True)
class Settings:
    """What decides the rows, apart from the weights."""

    scenes: int = 16
    views: int = 2
    size: int | None = None  # None: the model's own
    layer: int | None = None  # None: the middle
    view: int | None = None  # of the single camera; None: the last
    rank: int = 20
    seed: int = 0
    full_depth: bool = False


@dataclass(frozen=True)
class Configuration:
    """One row: a decoder, read after an aggregator layer, or (None) at the head's own input."""

    decoder: str
    layer: int | None
    paper: str | None = None  # the decoder's name in `PAPER`

    @property
    def at(self) -> str:
        return AT_HEAD if self.layer is None else AT_LAYER

    def probe(self, backbone: AnyBackbone) -> ProbeMap:
        decoder = build_decoder(self.decoder, backbone)
        return ProbeMap(backbone, decoder, INPUTS if self.layer is None else self.layer)

    def in_paper(self) -> Row | None:
        return None if self.paper is None else PAPER.get((self.paper, self.at))


def configurations(layer: int, views: int, *, view: int | None = None, full_depth: bool = False) -> list[Configuration]:
    """List every decoder at ``layer`` and at x_vis. The single camera is of ``view``, by default the last one: poses
    are relative to the first view, whose own says little."""
    single = views - 1 if view is None else view
    decoders: dict[str, str | None] = {
        "camera": None,
        f"camera-{single}": "camera of a view",
        "points": "points",
        "depth-8x8": None,
    }
    if full_depth:
        decoders["depth"] = "depth"
    return [Configuration(name, at, paper) for name, paper in decoders.items() for at in (layer, None)]


def draw_scenes(seeds: range, *, size: int, views: int, device: torch.device, batch: int = 32) -> Tensor:
    """The pictures of these scenes alone, [B, S, 3, H, W] in [0, 1]: depth, normals and instances stay behind."""
    parts = [seeds[first : first + batch] for first in range(0, len(seeds), batch)]
    return torch.cat([render(part, size=size, views=views, device=device).rgb for part in parts])


def taxonomy_rows(model: str, settings: Settings, *, device: str = "auto", out: Path | None = None) -> Iterator[Row]:
    """Row after row, old and new; with ``out``, from and to a file of JSON lines."""
    views, view, scenes = settings.views, settings.view, settings.scenes
    if view is not None and not 0 <= view < views:
        raise PullbackError(f"view: expected one of the {views} views, 0 to {views - 1}, got {view}.")
    backbone = replace(load_any_backbone(model, device=device), name=short_name(model))
    pixels = settings.size or backbone.preprocessing.size
    shared = {"model": backbone.name, "weights": weights_hash(backbone.model), "first_seed": HELD_OUT}
    shared |= {"rank": settings.rank, "scenes": scenes, "views": views, "size": pixels, "seed": settings.seed}
    layer = backbone.depth // 2 if settings.layer is None else settings.layer
    backbone.check_layer(layer)
    known = RowFile(out, IDENTITY)
    images: Tensor | None = None
    exact: AnyBackbone | None = None
    for own in configurations(layer, views, view=view, full_depth=settings.full_depth):
        begun = {"decoder": own.decoder, "at": own.at, "layer": own.layer, **shared}
        row = known.find(begun)
        if row is None:
            if images is None:  # a file that holds every row needs none of this
                seeds = range(HELD_OUT, HELD_OUT + scenes)
                images = draw_scenes(seeds, size=pixels, views=views, device=backbone.device)
                exact = load_any_backbone(model, device=device, dtype=torch.float64)
            measured = measure(own, backbone, images, rank=settings.rank, seed=settings.seed, exact=exact)
            row = known.add(begun | measured | {"provenance": provenance(backbone.device)})
        yield row


def measure(
    configuration: Configuration,
    backbone: AnyBackbone,
    images: Tensor,
    *,
    rank: int,
    seed: int = 0,
    exact: AnyBackbone | None = None,
) -> Row:
    """What one row says of scenes [B, S, 3, H, W]; ``exact``: the network in float64, for the rank of cameras."""
    probe = configuration.probe(backbone)
    ranks = (rank,) if configuration.layer is not None else tuple(dict.fromkeys((rank, SECOND_RANK)))
    report = diagnose(probe, images, rank=ranks, seed=seed, convergence_samples=0)
    row, spent = diagnosis_row(report), {"diagnosis": report.products}
    if exact is not None and configuration.decoder.startswith("camera"):
        found, spent["rank"] = numerical_ranks(configuration.probe(exact), images.double())
        row["jacobian_rank"] = {"least": min(found), "most": max(found), "bound": report.output_size}
    if len(probe.layers) > 1:
        row |= multiplicity(probe, images, seed)
        spent["k_eff"] = multiplicity_products(len(images), len(probe.layers))
    total = sum(spent.values(), ProductCount())
    row["products"] = {name: asdict(count) for name, count in {**spent, "total": total}.items()}
    return row | {"paper": configuration.in_paper()}


def diagnosis_row(report: Tractability) -> Row:
    """Means over scenes, with their standard errors; ``kappa_estimation_se`` is what more products would remove."""
    value, is_bound = report.r90
    row: Row = {
        "probe": report.probe,
        "output_size": report.output_size,
        "tokens": report.input_shape[0],
        "dim": report.input_shape[1],
        "rank_used": report.ranks_used[0],
        **_mean_and_error("kappa", report.kappa),
        "kappa_estimation_se": number(report.kappa.estimation_se),
        **_mean_and_error("r_eff_trunc", report.r_eff_trunc),
        **_mean_and_error("r_eff_slq", report.r_eff_slq),
        **_mean_and_error("cv", report.cv),
        "cv_null": number(report.cv_null),
        **_mean_and_error("cv_patches", report.cv_patches),
        "r90": {"value": value, "is_lower_bound": is_bound},
        "regime": report.regime.label,
        "regime_title": report.regime.title,
        "method": report.method,
        "seconds": round(report.seconds, 3),
    }
    for asked in report.ranks[1:]:
        row |= _mean_and_error(f"kappa_{asked}", report.kappa_at(asked))
    return row


def numerical_ranks(probe: ProbeMap, images: Tensor) -> tuple[list[int], ProductCount]:
    """rank(J) of every scene, from its dense matrix: singular values above max(M, N D) eps sigma_1 in float64."""
    features = probe.features(images)

    def work(part: Tensor, first: int) -> tuple[list[int], ProductCount]:
        operator = JacobianOperator(probe, part)
        found = torch.linalg.matrix_rank(operator.dense()).tolist()
        return found, operator.products * len(part)

    parts = list(in_batches(work, features, 8))
    return [rank for ranks, _ in parts for rank in ranks], sum((count for _, count in parts), ProductCount())


_MULTIPLICITY_PROBES = 16


def multiplicity(probe: ProbeMap, images: Tensor, seed: int) -> Row:
    """K_eff over scenes: how many independent layers the head reads."""
    found = layer_multiplicity(probe, images, num_probes=_MULTIPLICITY_PROBES, seed=seed)
    pairs = list(zip(found.value.tolist(), found.se.tolist(), strict=True))
    return {**_mean_and_error("k_eff", summarize(pairs)), "layers": list(probe.layers)}


def multiplicity_products(scenes: int, layers: int) -> ProductCount:
    """One VJP and K JVPs for each random sign vector."""
    return ProductCount(scenes * _MULTIPLICITY_PROBES * layers, scenes * _MULTIPLICITY_PROBES)


COLUMNS: tuple[tuple[str, str | None, Callable[[Row], str]], ...] = (
    ("M", None, lambda row: str(row["output_size"])),
    ("κ %", "kappa", lambda row: plus_minus(row["kappa"], row["kappa_se"], scale=100)),
    ("κ(50) %", "kappa_50", lambda row: plus_minus(row.get("kappa_50"), row.get("kappa_50_se"), scale=100)),
    ("r_eff", "r_eff_slq", lambda row: plus_minus(row["r_eff_slq"], row["r_eff_slq_se"])),
    ("r_0.90", "r90", lambda row: lower_bound(row["r90"])),
    ("CV (null)", "cv", lambda row: f"{plain(row['cv'])} ({plain(row['cv_null'], 2)})"),
    ("K_eff", "k_eff", lambda row: plus_minus(row.get("k_eff"), row.get("k_eff_se"))),
    ("rank J", None, lambda row: _rank(row.get("jacobian_rank"))),
    ("regime", "regime", regime_label),
    ("products", None, lambda row: f"{sum(row['products']['total'].values()) / row['scenes']:,.0f}"),
)
"""Title, name in `PAPER`, cell. κ is that of ``--rank``, the null is the CV of a random direction, products are those
of one scene."""


def table(rows: Sequence[Row]) -> Table:
    """Under each row, where it has one, the paper's."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    found.add_column("probe", no_wrap=True)
    for title, _, _ in COLUMNS:
        found.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        place = AT_HEAD if row["layer"] is None else f"L{row['layer']:02d}"
        found.add_row(f"{row['decoder']} {place}", *(cell(row) for _, _, cell in COLUMNS))
        stated = row["paper"]
        if stated is not None:
            where = f"L{stated['layer']:02d}" if "layer" in stated else AT_HEAD
            found.add_row(f"  paper {where}", *(_stated(stated, name) for _, name, _ in COLUMNS), style="dim")
    return found


def _stated(paper: Row, name: str | None) -> str:
    value = None if name is None else paper.get(name)
    if value is None:
        return ""
    scale = 100 if name in ("kappa", "kappa_50") else 1
    return value if isinstance(value, str) else f"{scale * value:.4g}"


def _rank(found: Row | None) -> str:
    if found is None:
        return UNKNOWN
    least, most = found["least"], found["most"]
    return f"{least} of {found['bound']}" if least == most else f"{least}–{most} of {found['bound']}"


def _mean_and_error(name: str, value: Summary) -> Row:
    return {name: number(value.mean), f"{name}_se": number(value.se)}


def main(
    model: Vggt,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out procedural scenes.")] = 16,
    views: Annotated[int, typer.Option(min=1, help="Of each scene.")] = 2,
    size: Annotated[int | None, typer.Option(help="Side of the views.", show_default="the model's own")] = None,
    layer: Annotated[int | None, typer.Option(help="Of the aggregator.", show_default="the middle")] = None,
    view: Annotated[int | None, typer.Option(help="Of the single camera.", show_default="the last")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of kappa_cap.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the random probes.")] = 0,
    full_depth: Annotated[bool, typer.Option(help="Depth maps at full resolution as well.")] = False,
    out: RowsOut = None,
    device: Device = "auto",
) -> None:
    """VGGT's rows of the taxonomy, on procedural scenes."""
    with explained():
        settings = Settings(scenes, views, size, layer, view, rank, seed, full_depth)
        progress, rows = Lines(), []
        for row in taxonomy_rows(model, settings, device=device, out=out):
            rows.append(row)
            kappa = plus_minus(row["kappa"], row["kappa_se"])
            progress.finished(row["probe"], f"{row['probe']}: κ {kappa}, {row['seconds']:.1f} s")
        console().print(table(rows))


if __name__ == "__main__":
    typer.run(main)
