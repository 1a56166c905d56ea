"""An importance head from stores of targets: what `pullback train head` and `ImportanceHead.fit` do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pullback.data.images import ImageSource
from pullback.data.sources import Source
from pullback.errors import ModelError, PullbackError
from pullback.learning.fit import FitConfig, Fitted, fit
from pullback.learning.fit_head import HeadExamples, HeadTask, mean_map_scores
from pullback.learning.head import HeadConfig, ImportanceHead
from pullback.learning.origin import Origin
from pullback.learning.provenance import weights_hash
from pullback.learning.store import TargetStore
from pullback.learning.stored_examples import AnyProbe, StoredRows, fingerprint

Watch = Callable[[str, int], None]
"""Hears of progress: ("features" or "step", how many more)."""


def train_head(
    probe: AnyProbe,
    train: Sequence[TargetStore],
    held_out: TargetStore | float = 0.1,
    *,
    images: ImageSource | Source | None = None,
    width: int = 256,
    heads: int = 4,
    target: str = "importance",
    rank_weight: float = 0.5,
    start: ImportanceHead | None = None,
    keep_features: bool = True,
    config: FitConfig | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
    watch: Watch = lambda what, count: None,
) -> ImportanceHead:
    """Train on these stores (several for several resolutions) and validate on a store, or on a share of the images.

    ``start``: go on from a head instead of a random one, for instance one that learned cheap block norms; it stays as
    it is. ``keep_features``: compute features once and hold them, or recompute them in every step. ``images``: where
    the images are now, if not where the store says. The scores end up in the head's config.
    """
    if not train:
        raise PullbackError("train: expected at least one store of targets, got none.")
    config = config or FitConfig()
    stores = [*train, held_out] if isinstance(held_out, TargetStore) else list(train)
    check_stores(probe, stores)
    _check_start(start, train[0])
    read = [
        StoredRows.of(probe, store, images, keep_features=keep_features, on_progress=lambda n: watch("features", n))
        for store in stores
    ]
    parts, judge = _split(read, held_out)
    examples = [part.examples(target) for part in parts]
    if start is None:
        head = new_head(examples[0], width, heads, target=target, seed=config.seed)
    else:
        head = deepcopy(start).to(probe.device)
    task = HeadTask(examples, judge.examples(target), rank_weight)
    settings = {
        "target": target,
        "rank_weight": rank_weight,
        "start": None if start is None else weights_hash(start),
        "train": [fingerprint(rows.table, store.config) for rows, store in zip(read, train, strict=False)],
        "held_out": fingerprint(judge.table, stores[-1].config) if isinstance(held_out, TargetStore) else held_out,
    }
    fitted = fit(
        head,
        task,
        config,
        out=None if out is None else Path(out),
        settings=settings,
        tensorboard=tensorboard,
        on_step=counting_steps(watch),
    )
    scores = _scores(fitted, task.train, task.held_out)
    return head.describe(origin=_origin(train), target=target, scores=scores).eval()


def new_head(
    examples: HeadExamples, width: int = 256, heads: int = 4, *, target: str = "importance", seed: int = 0
) -> ImportanceHead:
    """A random head where the features are, with the spread and the level of the first 256 examples folded in."""
    rows = torch.arange(min(256, len(examples)))
    features = examples.features(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = ImportanceHead.from_config(HeadConfig(features.shape[-1], width, heads, target))
    return head.to(features.device).start_from(features, examples.target[rows])


def check_stores(probe: AnyProbe, stores: Sequence[TargetStore]) -> None:
    """Refuse targets of other features than the probe's."""
    asked: dict[str, Any] = {
        "family": probe.backbone.family,
        "weights": weights_hash(probe.backbone.model),
        "layer": probe.layer,
        "decoder": probe.decoder.name,
        "after_norm": getattr(probe, "after_norm", None),
    }
    for store in stores:
        different = [name for name, value in asked.items() if store.config.get(name) != value]
        if different:
            listing = "; ".join(f"{name}: {store.config.get(name)!r} there, {asked[name]!r} here" for name in different)
            raise ModelError(
                f"probe: {store.folder} holds targets of another one ({listing}). Load the one it was made for."
            )


def counting_steps(watch: Watch) -> Callable[[int, Mapping[str, float]], None]:
    """Steps that were done before the run went on count at once."""
    done = 0

    def on_step(step: int, numbers: Mapping[str, float]) -> None:
        nonlocal done
        watch("step", step - done)
        done = step

    return on_step


def _check_start(start: ImportanceHead | None, store: TargetStore) -> None:
    if start is not None and start.config.dim != store.config["dim"]:
        raise ModelError(f"start: expected a head for features of width {store.config['dim']}, got {start.config.dim}.")


def _split(read: Sequence[StoredRows], held_out: TargetStore | float) -> tuple[list[StoredRows], StoredRows]:
    """(to train on, to judge by). A share of the images is held out of every store; those of the first judge."""
    if isinstance(held_out, TargetStore):
        return list(read[:-1]), read[-1]
    pairs = [rows.split(held_out) for rows in read]
    return [train for train, _ in pairs], pairs[0][1]


def _origin(stores: Sequence[TargetStore]) -> Origin:
    resolutions = tuple(dict.fromkeys(size for store in stores for size in store.origin.resolutions))
    return replace(stores[0].origin, resolutions=resolutions)


def _scores(fitted: Fitted, parts: Sequence[HeadExamples], judge: HeadExamples) -> Mapping[str, float]:
    scores = {name: value for name, value in fitted.scores.items() if name != "score"}
    same_grid = [part for part in parts if part.target.shape[1] == judge.target.shape[1]]
    if same_grid:
        scores["rho_of_the_mean_map"] = mean_map_scores(same_grid[0], judge)["rho"]
    sizes = {"training_rows": float(sum(map(len, parts))), "held_out_rows": float(len(judge))}
    return {**scores, **sizes, "best_step": float(fitted.step)}
