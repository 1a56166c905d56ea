"""A Spectral Pullback Network from images: what `pullback train spn` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pullback.data.images import ImageSource
from pullback.data.sources import Source, open_source
from pullback.errors import PullbackError
from pullback.learning.compute_targets import compute_table
from pullback.learning.fit import FitConfig, fit
from pullback.learning.fit_spn import SpnExamples, SpnTask, constant_subspace
from pullback.learning.origin import Origin
from pullback.learning.provenance import NOT_COMPARED, configuration, weights_hash
from pullback.learning.spn import SpectralPullbackNetwork, SpnConfig
from pullback.learning.stored_examples import (
    AnyProbe,
    feature_reader,
    hash_of,
    kept,
    readable_rows,
    rows_of_table,
)
from pullback.learning.supervision import DistanceMatching, RandNLA, RandomDirections, Spectral, Supervision
from pullback.learning.targets import Recipe
from pullback.learning.train_head import Watch, counting_steps

SUPERVISIONS = ("randnla", "spectral", "distances", "directions")


def supervision_of(
    name: str, probe: AnyProbe, *, power_iters: int, sketch_width: int | None, precision: str
) -> Supervision:
    """By the name it has on the command line."""
    choices: dict[str, Callable[[], Supervision]] = {
        "randnla": lambda: RandNLA(probe, power_iters, sketch_width, precision=precision),
        "spectral": lambda: Spectral(probe, precision=precision),
        "distances": lambda: DistanceMatching(probe),
        "directions": lambda: RandomDirections(probe, precision=precision),
    }
    if name not in choices:
        raise PullbackError(f"supervision: expected one of {', '.join(SUPERVISIONS)}, got {name!r}.")
    return choices[name]()


def train_spn(
    probe: AnyProbe,
    images: ImageSource | Source,
    held_out: ImageSource | Source,
    *,
    rank: int = 20,
    width: int = 256,
    heads: int = 4,
    supervision: str = "randnla",
    power_iters: int = 1,
    sketch_width: int | None = None,
    precision: str = "float32",
    size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    keep_features: bool = True,
    constant_images: int = 0,
    config: FitConfig | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
    watch: Watch = lambda what, count: None,
) -> SpectralPullbackNetwork:
    """Train on these images under one supervision; V_1 against the exact modes of ``held_out`` decides and is logged.

    ``keep_features``: compute features once and hold them, or recompute them in every step. Features of decoders that
    read layers below the probe are always recomputed: those layers belong to them.
    ``constant_images``: start at the best constant subspace of so many training images (`start_at`), which needs their
    modes; 0 starts at random, as the paper does.
    """
    config = config or FitConfig(steps=2000, batch=16, learning_rate=1e-3)
    wanted = probe.pixel_format(size)
    teacher = supervision_of(
        supervision, probe, power_iters=power_iters, sketch_width=sketch_width, precision=precision
    )
    judge = held_out_modes(probe, held_out, rank, size=wanted.size, watch=watch)
    rows = readable_rows(images, wanted, limit)
    reader = feature_reader(probe, rows, wanted)
    first = reader(torch.arange(min(8, len(rows))))
    if keep_features and type(first) is torch.Tensor:
        reader = kept(reader, len(rows), on_progress=lambda count: watch("features", count))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = SpectralPullbackNetwork.from_config(SpnConfig(first.shape[-1], rank, width, heads))
    network.to(first.device).start_from(first, judge.singular_values[: len(first)].to(first.device))
    if constant_images:
        known, _ = compute_table(
            probe,
            images,
            rank=rank,
            size=wanted.size,
            limit=constant_images if limit is None else min(limit, constant_images),
            keep_modes=True,
            on_progress=lambda n: watch("constant", n),
        )
        assert known.modes is not None
        network.start_at(constant_subspace(known.modes.to(first.device), rank, seed=config.seed))
    made_for = configuration(probe, Recipe(rank, precision=precision), wanted, crops=0, seed=config.seed, source="")
    settings = {f"probe.{name}": value for name, value in made_for.items() if name not in NOT_COMPARED} | {
        "supervision": supervision,
        "power_iters": power_iters,
        "sketch_width": sketch_width,
        "constant_images": constant_images,
        "images": hash_of([row.item.key for row in rows]),
        "held_out": hash_of([item.key for item in open_source(held_out)]),
    }
    fitted = fit(
        network,
        SpnTask(reader, len(rows), teacher, judge, probe=probe),
        config,
        out=None if out is None else Path(out),
        settings=settings,
        tensorboard=tensorboard,
        on_step=counting_steps(watch),
    )
    scores = {name: value for name, value in fitted.scores.items() if name != "score"}
    return network.describe(origin=origin_of(probe, rank, wanted.size), scores=scores).eval()


def held_out_modes(
    probe: AnyProbe,
    images: ImageSource | Source,
    rank: int,
    *,
    size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    watch: Watch = lambda what, count: None,
) -> SpnExamples:
    """Feature maps of these images with their leading modes, exact or accurate to 1e-3."""
    table, _ = compute_table(
        probe, images, rank=rank, size=size, limit=limit, keep_modes=True, on_progress=lambda n: watch("targets", n)
    )
    assert table.modes is not None
    wanted = probe.pixel_format(size)
    layout = probe.backbone.token_layout(torch.empty(0, 3, *wanted.size))
    reader = feature_reader(probe, rows_of_table(table, images), wanted)
    return SpnExamples(reader, table.modes, table.singular_values, table.total, layout.prefix)


def origin_of(probe: AnyProbe, rank: int, size: tuple[int, int]) -> Origin:
    """What a network that was trained on this probe is made for."""
    return Origin(
        family=probe.backbone.family,
        weights=weights_hash(probe.backbone.model),
        layer=probe.layer if isinstance(probe.layer, int) else None,
        decoder=probe.decoder.name,
        rank=rank,
        resolutions=(size,),
    )
