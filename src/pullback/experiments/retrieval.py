"""Retrieval by the distance that a decoder would see (appendix "Task-Induced Retrieval").

A Distilled Riemannian Metric, from features alone, beside distances of the same features as they are. Each picture of
a set is a query for all others; the judge is the distance between the decoder's outputs, |a - b| over the mean of both.
A metric is trained on pictures of one kind and judged on others of that kind, and across data. Whether one distance is
better than another is judged by their difference on the same queries, which has rows of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback.data.images import normalised
from pullback.evaluation.distances import output_distances
from pullback.evaluation.retrieval import RetrievalScores, retrieval_scores
from pullback.experiments.experiment import (
    Cell,
    Claim,
    Column,
    Experiment,
    Figure,
    Found,
    Measured,
    Place,
    Verdict,
    overall,
)
from pullback.experiments.scales import DRAWN, Scale, ScaleName
from pullback.experiments.workshop import Workshop
from pullback.learning.distilled_metric import DistilledMetric, pairwise_distances
from pullback.learning.train_drm import (
    TRAINING_CELLS,
    MetricExamples,
    MetricOptions,
    averaged_output,
    drm_config,
    examples_of,
    fit_drm,
    items_of,
    varied_features,
)
from pullback.learning.train_head import MARGIN, HeadExamples, hash_of
from pullback.probes import ProbeMap
from pullback.retrieval.baselines import feature_distances
from pullback.runs.files import replaced_folder
from pullback.runs.provenance import weights_hash

L2, COSINE, DRM, REFERENCE = "L₂ of all tokens", "Cosine of class tokens", "DRM", "Reference (decoder distance)"
MEAN_COSINE, CONSTANT, NOTHING = "Cosine of mean patches", "Constant metric ḡ", "The same for all pairs"
BASELINES = {L2: "l2", COSINE: "cls-cosine", MEAN_COSINE: "mean-cosine"}
"""Distances of features as they are, by row; the paper has the first two."""
PAPERS_BASELINES = (L2, COSINE)
ROWS = (NOTHING, *BASELINES, CONSTANT, DRM, REFERENCE)
MEASURES = {
    "ρ": "spearman", "τ": "kendall", "MAE": "mae", "RMSE": "rmse", "MAE, scaled": "mae_scaled",
    "RMSE, scaled": "rmse_scaled",
}  # fmt: skip
"""Columns, and what `RetrievalScores` calls them."""
RHO, TAU, MAE, RMSE, MAE_SCALED, RMSE_SCALED = MEASURES
ORDERS = (RHO, TAU)
COMPARED = (L2, COSINE, MEAN_COSINE, CONSTANT)
NO_HEAD = "no depth head of DINOv2 ViT-B/14 is published; the one that comes with the package is of DINOv2-S"
_BATCH = 16
_RANK = 20
TIMES = 3.5
"""What the paper calls the improvement in correlation."""

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {
        "images": 64, "scenes to train": 224, "photos to train": 64, "validation": 32, "crops": 1, "importance": 16,
        "cells": 4, "steps": 300, "batch": 32, "rank": 32, "width": 128, "trained size": 112,
    },
    "small": {
        "images": 240, "scenes to train": 1500, "photos to train": 1840, "validation": 150, "crops": 2,
        "importance": 96, "cells": 6, "steps": 1000, "batch": 64, "rank": 32, "width": 256, "trained size": 224,
    },
    "paper": {
        "images": 200, "scenes to train": 4000, "photos to train": 1840, "validation": 150, "crops": 16,
        "importance": 256, "cells": 0, "steps": 5000, "batch": 64, "rank": 32, "width": 256, "trained size": 224,
    },
}  # fmt: skip
"""``cells``: of depth averaged over so many rows and columns the importance is distilled, 0: of the whole map."""


@dataclass(frozen=True)
class Searched:
    """A decoder at a layer, by whose outputs pictures are ordered.

    ``sets``: what it is judged on, title and role of data, the first of the kind that the metric was trained on.
    ``shipped``: the metric that comes with the package, in place of one that is trained here.
    """

    title: str
    model: str
    decoder: str
    layer: int
    trained: str
    sets: tuple[tuple[str, str], ...]
    shipped: str = ""
    absent_at_paper: str | None = None

    def table(self, title: str) -> str:
        return f"{self.title}, {title}"

    @property
    def own(self) -> str:
        """The table in distribution."""
        return self.table(self.sets[0][0])

    @property
    def across(self) -> list[str]:
        return [self.table(title) for title, _ in self.sets[1:]]

    @property
    def drawn(self) -> bool:
        return self.trained in DRAWN

    def probe(self, shop: Workshop) -> ProbeMap:
        return shop.probe(self.model, self.decoder, self.layer)

    def size(self, counts: Mapping[str, int]) -> int:
        """Return the side of a picture: metrics that ship are for 224 pixels, as all of photographs are."""
        return counts["trained size"] if self.drawn and not self.shipped else 224

    def train(self, counts: Mapping[str, int]) -> int:
        return counts[f"{'scenes' if self.drawn else 'photos'} to train"]

    def forwards(self, counts: Mapping[str, int], first: bool) -> float:
        """About how many passes judging on one set takes, on the first with training."""
        passes = 2.0 * counts["images"]
        if first and not self.shipped:
            pictures = (1 + counts["crops"]) * self.train(counts) + counts["validation"]
            products = counts["cells"] ** 2 if counts["cells"] and self.decoder == "depth" else 150
            passes += 2.0 * pictures + 3.0 * products * counts["importance"] + 0.02 * counts["steps"] * counts["batch"]
        return passes * (self.size(counts) / 224) ** 2


PHOTOGRAPHS = (("photographs", "photos"), ("rooms", "rooms"), ("sketches", "sketches"))
SCENES = (("scenes", "scenes"), ("shifted scenes", "scenes-shifted"))
DINOV2 = Searched("DINOv2 depth, L10", "dinov2", "depth", 10, "photos-train", PHOTOGRAPHS, absent_at_paper=NO_HEAD)
DEPTH_ANYTHING = Searched("DA V2 depth, L10", "depth-anything", "depth", 10, "photos-train", PHOTOGRAPHS[:2])
SALIENCY = Searched("Saliency on DINOv2-S, L10", "saliency", "saliency", 10, "photos-train", PHOTOGRAPHS)
SHIPPED = Searched("tiny-scenes depth, L08", "tiny-scenes", "depth", 8, "scenes-train", SCENES, "tiny-scenes-drm")
TRAINED = Searched("tiny-scenes depth, L10", "tiny-scenes", "depth", 10, "scenes-train", SCENES)
PAPERS, OURS = (DINOV2, DEPTH_ANYTHING), (SHIPPED, TRAINED, SALIENCY)


def cells(scale: Scale) -> list[Cell]:
    return [_cell(own, title, data, scale) for own in (*PAPERS, SALIENCY, SHIPPED, TRAINED) for title, data in own.sets]


def _cell(own: Searched, title: str, data: str, scale: Scale) -> Cell:
    table, counts = own.table(title), COUNTS[scale.name]
    places = [Place(table, row, column) for row in ROWS for column in MEASURES]
    places += [Place(ahead(table), row, column) for row in COMPARED for column in MEASURES]
    return Cell(
        table, tuple(places), partial(judge, own=own, table=table, data=data), own.model, data,
        () if own.shipped else (own.trained,), absent=own.absent_at_paper if scale.name == "paper" else None,
        forwards=own.forwards(counts, first=data == own.sets[0][1]),
    )  # fmt: skip


def ahead(table: str) -> str:
    """Return the name of the table of differences on the same queries, DRM less each row."""
    return f"{table}: DRM less another"


# Judging


def judge(shop: Workshop, *, own: Searched, table: str, data: str) -> Iterator[Measured]:
    """Compare all distances with the decoder's on a set of pictures, each a query for all others."""
    metric, said = metric_of(shop, own)
    scores = scored(distances(shop, own, metric, data), shop.seed)
    for row in ROWS:
        notes = {DRM: said, NOTHING: "the constant is fitted on the other half of the queries"}
        for column, measure in MEASURES.items():
            fitted = f"{measure}_scaled" if row == NOTHING and column in (MAE, RMSE) else measure
            values = scores[row].queries[fitted]
            yield shop.mean((table, row, column), values[~values.isnan()], over="queries", note=notes.get(row))
    for row in COMPARED:
        for column, measure in MEASURES.items():
            less = scores[DRM].queries[measure] - scores[row].queries[measure]
            yield shop.mean((ahead(table), row, column), less[~less.isnan()], over="queries")


@torch.no_grad()
def distances(shop: Workshop, own: Searched, metric: DistilledMetric, data: str) -> dict[str, Tensor]:
    """Return the distances [n, n] between the pictures of a set, by row."""
    probe, available = own.probe(shop), shop.available(data)
    count = min(shop.count("images"), available or shop.count("images"))
    pictures = shop.images(data, count, model=own.model, size=own.size(shop.experiment.counts[shop.scale.name]))
    shop.progress.describe(f"{own.title}: features and outputs of {count} pictures")
    features, outputs = [], []
    for part in pictures.split(_BATCH):
        known = probe.features(part, normalized=True)
        outputs.append(averaged_output(probe(known), None))
        features.append(known.as_subclass(Tensor))
        layout = probe.token_layout(known)
    plain, shown = torch.cat(features), torch.cat(outputs)
    items = items_of(metric, MetricExamples.of(plain, shown))
    embedded = metric.embed(items)
    return {
        NOTHING: plain.new_ones(count, count),
        **{row: feature_distances(plain, plain, kind, layout=layout) for row, kind in BASELINES.items()},
        CONSTANT: torch.cdist(embedded, embedded, compute_mode="donot_use_mm_for_euclid_dist"),
        DRM: pairwise_distances(items, items),
        REFERENCE: output_distances(shown, shown, metric.config.reference),
    }


def scored(found: Mapping[str, Tensor], seed: int = 0) -> dict[str, RetrievalScores]:
    """Compare distances [n, n] with those of the row `REFERENCE`, without that of a picture to itself."""
    truth = found[REFERENCE]
    itself = torch.eye(len(truth), dtype=torch.bool, device=truth.device)
    return {
        row: retrieval_scores(
            values.to(truth), truth, leave_out=itself, neighbours=(), generator=np.random.default_rng(seed),
            resamples=10,  # the intervals of rows are the workshop's
        )
        for row, values in found.items()
    }  # fmt: skip


# The metric


def metric_of(shop: Workshop, own: Searched) -> tuple[DistilledMetric, str]:
    """Return the metric of a decoder at a layer, trained when it is first wanted or the one that ships; and what it
    is."""
    if own.shipped:
        metric = DistilledMetric.from_pretrained(own.shipped, device=shop.device)
        backbone = shop.backbone(own.model)
        metric.check("shipped", family=backbone.family, layer=own.layer, weights=weights_hash(backbone.model))
        pictures = int(metric.config.scores["training_images"])
        return metric, f"{own.shipped}, which comes with the package, trained on {pictures:,} pictures"
    counts = {name: shop.count(name) for name in COUNTS[shop.scale.name] if name != "images"}
    key = {
        **shop.identity(own.probe(shop)), **counts, "data": own.trained, "folder": str(shop.scale.data[own.trained]),
        "seed": shop.seed,
    }  # fmt: skip
    folder = shop.store / f"drm-{hash_of(key)}"
    with shop.lacking(folder / "config.json") as lacks:
        if lacks:
            training = folder.with_name(f"{folder.name}-training")
            metric = _trained(shop, own, counts, training)
            with replaced_folder(folder) as temporary:
                metric.save_pretrained(temporary)
            shutil.rmtree(training)
    crops = f" and {counts['crops']} crops of each" if counts["crops"] > 1 else " and a crop of each"
    said = f"trained on {own.train(counts):,} {'scenes' if own.drawn else 'photographs'}{crops}"
    return DistilledMetric.from_pretrained(folder, device=shop.device), said


def _trained(shop: Workshop, own: Searched, counts: Mapping[str, int], folder: Path) -> DistilledMetric:
    """Train a metric on pictures and random crops of them; ``folder``: where a training that was stopped goes on."""
    probe, size, count = own.probe(shop), own.size(counts), own.train(counts)
    shop.progress.describe(f"{own.title}: training a metric on {count} pictures")
    pictures = _pictures(shop, own, size, count + counts["validation"])
    plain = (_middle(probe, part, size) for part in pictures[:count].split(_BATCH))
    crops = varied_features(probe, pictures[:count].to(probe.device), size, counts["crops"], seed=shop.seed)
    train = examples_of(probe, chain(plain, crops), (1 + counts["crops"]) * count, cells=TRAINING_CELLS)
    others = (_middle(probe, part, size) for part in pictures[count:].split(_BATCH))
    judge = examples_of(probe, others, counts["validation"])
    options = MetricOptions(counts["rank"], counts["width"])
    config = drm_config(
        steps=counts["steps"], batch=counts["batch"], validate_every=max(1, counts["steps"] // 6), seed=shop.seed
    )
    return fit_drm(
        probe, train, judge, _importance(shop, own, counts, size), options, config=config, out=folder,
        settings={name: counts[name] for name in ("crops", "importance", "cells")} | {"pictures": count},
    )  # fmt: skip


def _pictures(shop: Workshop, own: Searched, size: int, count: int) -> Tensor:
    """Return pictures [count, 3, S, S] uint8 to be cropped; photographs with a margin around the crops."""
    wanted = shop.backbone(own.model).pixel_format(size)
    side = size if own.drawn else round(MARGIN * size)
    read = shop.image_parts(own.trained, count, _BATCH, model=own.model, size=side)
    return torch.cat([wanted.rgb(part()).mul(255).round().byte().cpu() for part in read])


def _middle(probe: ProbeMap, pictures: Tensor, size: int) -> Tensor:
    """Return the features of the middle of pictures [n, 3, S, S] uint8."""
    margin = (pictures.shape[-1] - size) // 2
    middle = pictures[..., margin : margin + size, margin : margin + size].float() / 255
    wanted = probe.backbone.preprocessing
    return probe.features(normalised(middle, wanted.mean, wanted.std).to(probe.device), normalized=True)


def _importance(shop: Workshop, own: Searched, counts: Mapping[str, int], size: int) -> HeadExamples:
    """Return imp* of the first training pictures, which the weights are distilled to."""
    cells = counts["cells"] if own.decoder == "depth" else 0
    probe = shop.probe(own.model, f"depth-{cells}x{cells}" if cells else own.decoder, own.layer)
    rank = min(_RANK, cells * cells or _RANK)
    known = shop.targets(probe, own.trained, counts["importance"], size=size, rank=rank)
    return HeadExamples.kept(known["features"], known["importance"], probe.backbone.prefix)


# Reading finished rows


Part = dict[str, bool | None]


def judged_on(found: Found) -> list[Searched]:
    """Return whose rows decide a claim: the decoders of the paper that were measured, else ours."""

    def there(own: Searched) -> bool:
        return found.value(own.own, DRM, RHO) is not None

    return [own for own in PAPERS if there(own)] or [own for own in OURS if there(own)]


def better(found: Found, table: str, row: str, column: str) -> bool | None:
    """Whether the learned metric is better than another distance beyond the noise. None: it was not measured."""
    known = found.row(ahead(table), row, column)
    if known is None:
        return None
    return bool(known["low"] > 0 if column in ORDERS else known["high"] < 0)


def told(found: Found, table: str, column: str, rows: tuple[str, ...] = (DRM, *BASELINES)) -> str:
    """Say the values of a column, "TABLE: DRM 0.78, ..."."""
    values = ((row, found.value(table, row, column)) for row in rows)
    return f"{table}: {column} " + ", ".join(f"{row} {_short(value)}" for row, value in values if value is not None)


def _ranks_best(found: Found) -> Verdict:
    parts: Part = {
        f"{own.own} {row}": better(found, own.own, row, RHO) for own in judged_on(found) for row in PAPERS_BASELINES
    }
    return overall(parts, _said(told(found, own.own, RHO) for own in judged_on(found)))


def _times(found: Found) -> Verdict:
    """Judge whether 3.5 times the best baseline's correlation is within reach of both intervals."""
    parts: Part = {}
    why = []
    for own in judged_on(found):
        learned = found.row(own.own, DRM, RHO)
        rows = [found.row(own.own, row, RHO) for row in PAPERS_BASELINES]
        known = [row for row in rows if row is not None]
        if learned is None or not known:
            continue
        best = max(known, key=lambda row: row["value"])
        reached = best["low"] <= 0 or learned["high"] / best["low"] >= TIMES
        parts[own.own] = bool(learned["value"] > 0 and reached)
        by = f"{learned['value'] / best['value']:.2g} times" if best["value"] > 0 else "more than"
        why.append(f"{own.own}: ρ {learned['value']:.3f}, {by} that of {best['row']} ({best['value']:.3f})")
    return overall(parts, _said(why))


def _leads_across(found: Found) -> Verdict:
    parts: Part = {}
    why = []
    for table in _across(found):
        led = {
            (row, column): better(found, table, row, column)
            for row in PAPERS_BASELINES
            for column in (*ORDERS, MAE_SCALED, RMSE_SCALED)
        }
        parts |= {f"{table} {row} {column}": value for (row, column), value in led.items()}
        lost = [f"{column} of {row}" for (row, column), value in led.items() if value is False]
        behind = f"; not beyond the noise: {', '.join(lost)}" if lost else ""
        why.append(f"{told(found, table, RHO)}; {told(found, table, MAE_SCALED).removeprefix(f'{table}: ')}{behind}")
    return overall(parts, _said(why))


def _narrows(found: Found) -> Verdict:
    """Judge by the intervals of the lead over the best baseline of the paper."""
    parts: Part = {}
    why = []
    for own in judged_on(found):
        within = _lead(found, own.own)
        for table in own.across:
            beyond = _lead(found, table)
            if within is None or beyond is None:
                continue
            parts[f"{table} narrows"] = bool(beyond["high"] < within["low"])
            parts[f"{table} stays"] = bool(beyond["low"] > 0)
            why.append(f"{table}: ρ ahead by {_spanned(beyond)}, in distribution by {_spanned(within)}")
    return overall(parts, _said(why))


def _lead(found: Found, table: str) -> Mapping[str, Any] | None:
    """Return the difference of rho to the baseline that is closest."""
    rows = [found.row(ahead(table), row, RHO) for row in PAPERS_BASELINES]
    return min((row for row in rows if row is not None), key=lambda row: row["value"], default=None)


def _errors_drop(found: Found) -> Verdict:
    """Judge raw errors, as the paper does, and errors after the same fit for all."""
    parts: Part = {}
    why = []
    for own in judged_on(found):
        for column in (MAE, MAE_SCALED):
            for row in PAPERS_BASELINES:
                parts[f"{own.own} {row} {column}"] = better(found, own.own, row, column)
        scaled = told(found, own.own, MAE_SCALED, (DRM, *PAPERS_BASELINES, NOTHING)).removeprefix(f"{own.own}: ")
        why.append(f"{told(found, own.own, MAE, (DRM, *PAPERS_BASELINES))}; with one fitted factor each, {scaled}")
    return overall(parts, _said(why))


def _spanned(row: Mapping[str, Any]) -> str:
    """Say a difference and its interval."""
    return "{value:+.3f} ({low:+.3f} to {high:+.3f})".format(**row).replace("-", "−")


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _across(found: Found) -> list[str]:
    tables = [table for own in judged_on(found) for table in own.across]
    return [table for table in tables if found.value(table, DRM, RHO) is not None]


def _said(parts: Iterable[str]) -> str:
    return "; ".join(parts) + "." if (parts := list(parts)) else "No decoder of the scale was measured."


# Footnotes


def _units_note(found: Found) -> str | None:
    """Say what the raw error of L₂ comes to after the same fit for all."""
    if not judged_on(found):
        return None
    table = judged_on(found)[0].own
    places = ((L2, MAE), (L2, MAE_SCALED), (DRM, MAE_SCALED), (NOTHING, MAE_SCALED))
    raw, scaled, learned, nothing = (_short(found.value(table, *place) or 0.0) for place in places)
    return (
        "MAE and RMSE of distances that nothing brought to the scale of the reference are no comparison: they tell in "
        f"which units the features are. L₂ has an MAE of {raw} on {table}; with one factor, fitted on the other half "
        f"of the queries, it is {scaled}, where DRM has {learned} and a constant that knows no picture {nothing}."
    )


def _intervals_note(found: Found) -> str | None:
    if not judged_on(found):
        return None
    return (
        "Intervals draw queries anew. Each picture is also an item of all other queries, and each metric was trained "
        "once, so they are somewhat too narrow. The paper gives none."
    )


def _constant_note(found: Found) -> str | None:
    rows = [(table, found.row(ahead(table), CONSTANT, RHO)) for own in judged_on(found) for table in own.across]
    known = [(table, row) for table, row in rows if row is not None]
    if not known:
        return None
    gains = "; ".join(f"{_spanned(row)} ({table})" for table, row in known)
    return (
        "The paper names the constant metric ḡ, whose distances obey the triangle inequality, and does not measure it. "
        f"Across data the ρ of DRM less that of ḡ is {gains}."
    )


_PRINTED = {
    DINOV2.own: {
        L2: (0.223, 0.153, 11.43, 11.55), COSINE: (0.206, 0.139, 0.677, 0.805), DRM: (0.783, 0.581, 0.233, 0.289),
        REFERENCE: (1.0, 1.0, 0.0, 0.0),
    },
    DINOV2.across[0]: {
        L2: (0.266, 0.178, 7.77, 7.90), COSINE: (0.338, 0.229, 0.627, 0.707), DRM: (0.457, 0.312, 0.246, 0.310),
    },
}  # fmt: skip
"""tab:depth_retrieval_indist and tab:depth_retrieval_cross."""


def _paper() -> dict[Place, float]:
    found = {
        Place(table, row, column): value
        for table, rows in _PRINTED.items()
        for row, values in rows.items()
        for column, value in zip((RHO, TAU, MAE, RMSE), values, strict=True)
    }
    for table, rows in _PRINTED.items():  # differences follow from the rows
        for row in PAPERS_BASELINES:
            for column, own, other in zip((RHO, TAU, MAE, RMSE), rows[DRM], rows[row], strict=True):
                found[Place(ahead(table), row, column)] = round(own - other, 3)
    return found


RETRIEVAL = Experiment(
    name="retrieval",
    title="Pictures ordered by what a decoder sees",
    paper_label="sec:task_retrieval",
    about=(
        "Distances from features alone against the distance between the decoder's outputs: mean |a − b| over the mean "
        "of both for depth, |a − b| over the mean length for saliency. Each picture is a query for all others; numbers "
        "are means over queries. Scaled: every distance times one factor, fitted on the other half of the queries. "
        "Metrics are trained on pictures of the kind of the first table of each decoder, and judged on others."
    ),
    columns=(
        *(Column(column, "higher") for column in ORDERS),
        *(Column(column, "lower") for column in (MAE, RMSE, MAE_SCALED, RMSE_SCALED)),
    ),
    cells=cells,
    counts=COUNTS,
    paper=_paper(),
    claims=(
        Claim(
            "In distribution the learned distance ranks pictures best: ρ 0.783, against 0.223 for L₂ and 0.206 for "
            "cosine.", "tab:depth_retrieval_indist", _ranks_best,
        ),
        Claim("DRM has 3.5 times the correlation of the baselines.", "sec:task_retrieval", _times),
        Claim(
            "MAE drops from 11.43 (L₂) and 0.677 (cosine) to 0.233.", "tab:depth_retrieval_indist", _errors_drop,
        ),
        Claim(
            "Across data the learned distance keeps its lead over L₂ and cosine on every metric.",
            "tab:depth_retrieval_cross", _leads_across,
        ),
        Claim("The gap narrows under distribution shift but does not collapse.", "sec:task_retrieval", _narrows),
    ),
    figures=tuple(
        Figure(f"scatter-{number}", "scatter", f"ρ against MAE: {own.own}", "Upper left is better.", table=own.own,
               x=MAE_SCALED, y=RHO)
        for number, own in enumerate((DINOV2, SALIENCY, SHIPPED, TRAINED))
    ),
    footnotes=(_units_note, _intervals_note, _constant_note),
)  # fmt: skip
