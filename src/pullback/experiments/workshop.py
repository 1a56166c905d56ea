"""What the cells of an experiment work with: probes, pictures, targets and heads, each made once and found again.

Whatever takes long and is shared, such as a trained head, lies in the store of the run by a hash of everything that
decides it. It is put there whole or not at all, so that a run that was killed makes it anew and comes to the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback.backbones import AnyBackbone, load_any_backbone
from pullback.data.images import find_images, load_images
from pullback.decoders import OutputMetric, build_decoder, task_distance
from pullback.errors import ImageError
from pullback.evaluation.neighbours import classes_from_folders, classes_from_table
from pullback.evaluation.statistics import RESAMPLES, bootstrap_mean
from pullback.experiments.experiment import Experiment, Measured
from pullback.experiments.scales import DRAWN, Scale
from pullback.learning.fit import FitConfig, fit
from pullback.learning.head import ImportanceHead
from pullback.learning.train_head import HeadExamples, HeadTask, new_head
from pullback.probes import ProbeMap
from pullback.probes.probe import probe_at
from pullback.runs.files import make_folder, one_at_a_time, read_arrays, replaced_folder, write_arrays
from pullback.runs.progress import Progress
from pullback.runs.provenance import weights_hash
from pullback.scenes.render import CLASSES, normalised, render, scene_labels
from pullback.targets.recipe import targets_of

TRAINING = {"photos": "photos-train", "rooms": "rooms", "sketches": "photos-train", "scenes": "scenes-train"}
"""The role of data to train on, by the role to measure on."""
_BATCH = 8
_ON_GPU = 4
"""How many times as many pictures a GPU takes at a time: a few leave it waiting for the next kernel."""
_FEW = 400
"""Values of which the resamples of a bootstrap are held as a matrix."""


@dataclass(frozen=True)
class HeadRecipe:
    """Everything that decides an importance head, besides its probe.

    ``images`` training pictures of the role ``data``; an eighth as many more, at least 8, choose the best step.
    ``target``: "importance" or "block-norm". ``rank``: of imp*.
    """

    data: str
    images: int
    size: int | None = None
    steps: int = 300
    batch: int = 32
    width: int = 256
    heads: int = 4
    rank_weight: float = 0.5
    target: str = "importance"
    rank: int = 20
    seed: int = 0
    skip: int = 0


class Workshop:
    """What a cell works with."""

    def __init__(
        self, experiment: Experiment, scale: Scale, out: Path, device: torch.device, progress: Progress
    ) -> None:
        self.experiment, self.scale, self.device, self.progress = experiment, scale, device, progress
        self._out = out
        self._backbones: dict[str, AnyBackbone] = {}
        self._weights: dict[str, str] = {}
        self._probes: dict[tuple[Any, ...], ProbeMap] = {}
        self._images: dict[tuple[Any, ...], Tensor] = {}
        self._targets: dict[str, dict[str, Tensor]] = {}

    @property
    def seed(self) -> int:
        return self.scale.seed

    @property
    def folder(self) -> Path:
        """The folder of this experiment."""
        return self._out / self.experiment.name

    def count(self, name: str) -> int:
        """Return `Experiment.counts` of this scale."""
        return self.experiment.counts[self.scale.name][name]

    def generator(self, *key: object) -> torch.Generator:
        """Return a generator of its own for everything random that ``key`` names, the same in every run."""
        digest = hashlib.sha256(repr((self.seed, *key)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def mean(
        self, place: tuple[str, str, str], values: Tensor | Sequence[float] | np.ndarray, *, over: str = "images",
        note: str | None = None,
    ) -> Measured:  # fmt: skip
        """Return the mean of one value per image (or whatever ``over`` says) with its 95 % bootstrap interval."""
        known = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=float)
        if not (known.ndim == 1 and 1 < len(known) <= _FEW and np.isfinite(known).all()):
            interval = bootstrap_mean(known, generator=np.random.default_rng(self.seed))
            return Measured(*place, interval.mean, interval.low, interval.high, len(known), over, note)
        low, high = np.percentile(_resamples(self.seed, len(known)) @ known, [2.5, 97.5])
        return Measured(*place, float(known.mean()), float(low), float(high), len(known), over, note)

    def together(self, count: int) -> int:
        """Return how many pictures are taken at a time where a CPU takes ``count``."""
        return _ON_GPU * count if self.device.type == "cuda" else count

    # Models

    def backbone(self, model: str) -> AnyBackbone:
        """Return the frozen network of a role, loaded once."""
        if model not in self._backbones:
            self.progress.describe(f"loading {self.scale.models[model]}")
            self._backbones[model] = load_any_backbone(self.scale.models[model], device=self.device)
        return self._backbones[model]

    def weights(self, model: str) -> str:
        """Return the hash of the weights of a role."""
        if model not in self._weights:
            self._weights[model] = weights_hash(self.backbone(model).model)
        return self._weights[model]

    def probe(
        self, model: str, decoder: str, layer: int | str, *, output_metric: OutputMetric | None = None,
        distance: str | None = None, after_norm: bool = True,
    ) -> ProbeMap:  # fmt: skip
        """Return the probe map of a role, made once. ``layer``: a block, or "inputs", what the decoder reads: all its
        layers side by side."""
        key = (model, decoder, layer, output_metric, distance, after_norm)
        if key not in self._probes:
            backbone = self.backbone(model)
            self._probes[key] = probe_at(
                backbone, build_decoder(decoder, backbone), layer, distance=task_distance(distance),
                output_metric=output_metric, after_norm=after_norm,
            )  # fmt: skip
        return self._probes[key]

    # Pictures

    def images(self, data: str, count: int, *, model: str, size: int | None = None, skip: int = 0) -> Tensor:
        """Return ``count`` pictures [B, 3, H, W] of a role after the first ``skip``, normalised for the role of a
        model: always the same ones. Fewer than ``count`` is an error."""
        key = (data, count, size, skip, model if data not in DRAWN else "")
        if key not in self._images:
            self._images[key] = self._loaded(data, count, model, size, skip)
        return self._images[key].to(self.device)

    def image_parts(
        self, data: str, count: int, part: int, *, model: str, size: int | None = None
    ) -> list[Callable[[], Tensor]]:
        """Return what reads ``count`` pictures of a role, ``part`` at a time, for sets too large to be held."""
        firsts = range(0, count, part)
        return [partial(self._part, data, min(part, count - first), model, size, first) for first in firsts]

    def _part(self, *chosen: Any) -> Tensor:
        return self._loaded(*chosen).to(self.device)

    def _loaded(self, data: str, count: int, model: str, size: int | None, skip: int) -> Tensor:
        if data in DRAWN:
            first, ranges = DRAWN[data]
            seeds, step = range(first + skip, first + skip + count), self.together(_BATCH)
            parts = [
                normalised(render(seeds[at : at + step], size=size or 224, ranges=ranges, device=self.device).rgb[:, 0])
                for at in range(0, count, step)
            ]
            return torch.cat(parts)
        files = self._files(data)[skip : skip + count]
        self._check_count(data, len(files), count, skip)
        pixels = load_images(files, self.backbone(model), size=size)
        self._check_count(data, len(pixels), count, skip)
        return pixels

    def labels(self, data: str, count: int, *, skip: int = 0) -> Tensor:
        """Return the classes [B] of the pictures that `images` returns, numbered within their role."""
        if data in DRAWN:
            first, ranges = DRAWN[data]
            return scene_labels(range(first + skip, first + skip + count), ranges)
        names = self.classes(data, len(self._files(data)))
        numbers = {name: number for number, name in enumerate(sorted(set(names)))}
        return torch.tensor([numbers[name] for name in names[skip : skip + count]])

    def classes(self, data: str, count: int, *, skip: int = 0) -> list[str]:
        """Return the names of these classes, which are the same in every role: of a folder by the labels.csv in it or
        above it, or by its subfolders."""
        if data in DRAWN:
            return [CLASSES[label] for label in self.labels(data, count, skip=skip).tolist()]
        root = Path(self.scale.data[data]).expanduser()
        table = next((place / "labels.csv" for place in (root, root.parent) if (place / "labels.csv").is_file()), None)
        class_of = classes_from_folders(root) if table is None else classes_from_table(table)
        return [class_of(file) for file in self._files(data)[skip : skip + count]]

    def scenes(self, count: int, views: int, size: int = 112, *, data: str = "scenes", skip: int = 0) -> Tensor:
        """Return drawn scenes of several views [B, S, 3, H, W] in [0, 1], as a VGGT takes them."""
        first, ranges = DRAWN[data]
        seeds = range(first + skip, first + skip + count)
        return render(seeds, size=size, views=views, ranges=ranges, device=self.device).rgb

    def available(self, data: str) -> int | None:
        """Return how many pictures a role has; None for scenes, of which there is no end."""
        return None if data in DRAWN else len(self._files(data))

    def _files(self, data: str) -> list[Path]:
        """The pictures of a role; not the depth maps that lie beside them, NAME_depth.png of NAME.jpg."""
        return [file for file in find_images(self.scale.data[data]) if not file.stem.endswith("_depth")]

    def _check_count(self, data: str, found: int, count: int, skip: int) -> None:
        if found < count:
            raise ImageError(
                f"images: {data}={self.scale.data[data]} has {found} readable pictures after the first {skip}, "
                f"expected {count}. Name a folder with more of them."
            )

    # What is learned and shared

    def targets(
        self, probe: ProbeMap, data: str, count: int, *, size: int | None = None, skip: int = 0, rank: int = 20
    ) -> dict[str, Tensor]:
        """Return what heads learn from, of ``count`` pictures: "features" [n, N, D], "importance" [n, N], "block-norm"
        [n, N] and "singular_values" [n, r]; computed once for all experiments, in parts: more pictures go on where
        fewer ended."""
        key = {
            "what": "targets", **self.identity(probe), "data": self._data(data), "size": size, "skip": skip,
            "rank": rank, "seed": self.seed,
        }  # fmt: skip
        name = _hash({**key, "count": count})
        if name not in self._targets:
            pixels = self.images(data, count, model=self._role(probe), size=size, skip=skip)
            step = self.together(_BATCH) if probe.decoder.linear else _BATCH  # maps fill a GPU, and its memory
            parts = [probe.features(part) for part in pixels.split(step)]

            def part_of(number: int) -> dict[str, Tensor]:
                self.progress.describe(f"targets of {count} pictures")
                found = targets_of(probe, parts[number], rank, seed=self.seed + number * step, batch_size=step)
                return {
                    "importance": found.importance,
                    "block-norm": found.block_energy.value.clamp_min(0).sqrt(),
                    "singular_values": found.singular_values,
                }

            found = [
                self.kept({**key, "first": number * step, "count": len(part)}, partial(part_of, number))
                for number, part in enumerate(parts)
            ]
            features = torch.cat([part.as_subclass(Tensor) for part in parts])
            self._targets[name] = {"features": features, **{k: torch.cat([one[k] for one in found]) for k in found[0]}}
        return self._targets[name]

    def kept(self, key: Mapping[str, Any], compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors that are computed when they are first wanted, and lie in the store from then on. ``key``: what
        decides them, as plain JSON; see `identity`."""
        folder = self.store / f"{key['what']}-{_hash(key)}"
        with self.lacking(folder / "arrays.npz") as lacks:
            if lacks:
                arrays = {name: value.detach().cpu().numpy() for name, value in compute().items()}
                with replaced_folder(folder) as temporary:
                    write_arrays(temporary / "arrays.npz", arrays, compressed=False)  # modes take long to pack
        stored = read_arrays(folder / "arrays.npz")
        return {name: torch.from_numpy(np.ascontiguousarray(value)).to(self.device) for name, value in stored.items()}

    @contextmanager
    def lacking(self, file: Path) -> Iterator[bool]:
        """Yield whether the store lacks this file of one of its folders, so that it has to be made now: another process
        that wants the same waits meanwhile, and finds it."""
        if file.is_file():
            yield False
            return
        with one_at_a_time(file.parent):
            yield not file.is_file()

    def identity(self, probe: ProbeMap) -> dict[str, Any]:
        """Return what tells a probe from others, as plain JSON."""
        return {
            "weights": self.weights(self._role(probe)), "decoder": probe.decoder.name, "layer": str(probe.layer),
            **{name: str(value) for name, value in probe.identity.items()},
        }  # fmt: skip

    def head(
        self, probe: ProbeMap, recipe: HeadRecipe, teacher: tuple[object, Callable[[Tensor], Tensor]] | None = None
    ) -> ImportanceHead:
        """Return the importance head of a recipe, trained when it is first wanted. ``teacher``: what it learns in place
        of known targets, a function of features [n, N, D] to [n, N], and before it what decides that, as plain JSON."""
        key = {"what": "head", **self.identity(probe), **vars(recipe), "data": self._data(recipe.data)}
        if teacher is not None:
            key["teacher"] = teacher[0]
        folder = self.store / f"head-{_hash(key)}"
        with self.lacking(folder / "config.json") as lacks:
            if lacks:
                self._train(probe, recipe, teacher, folder)
        return ImportanceHead.from_pretrained(folder).to(self.device).eval()

    def _train(
        self,
        probe: ProbeMap,
        recipe: HeadRecipe,
        teacher: tuple[object, Callable[[Tensor], Tensor]] | None,
        folder: Path,
    ) -> None:
        """Train the head of a recipe, and put it into its folder."""
        judged = max(8, recipe.images // 8)
        known = self.targets(
            probe, recipe.data, recipe.images + judged, size=recipe.size, skip=recipe.skip, rank=recipe.rank
        )
        features, prefix = known["features"], probe.backbone.prefix
        target = known[recipe.target] if teacher is None else teacher[1](features)
        target = target.clamp_min(target.amax() * 1e-6)
        train = HeadExamples.kept(features[: recipe.images], target[: recipe.images], prefix)
        judge = HeadExamples.kept(features[recipe.images :], target[recipe.images :], prefix)
        head = new_head(train, recipe.width, recipe.heads, target=recipe.target, seed=recipe.seed)
        config = FitConfig(
            steps=recipe.steps, batch=min(recipe.batch, recipe.images), warmup=recipe.steps // 10,
            validate_every=max(1, recipe.steps // 6), seed=recipe.seed,
        )  # fmt: skip
        self.progress.describe(f"training a head on {recipe.images} pictures")
        fit(head, HeadTask([train], judge, recipe.rank_weight), config)
        with replaced_folder(folder) as temporary:
            head.eval().save_pretrained(temporary)

    def keep(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Write the arrays of a figure of this experiment, see `Figure`."""
        packed = {
            key: value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
            for key, value in arrays.items()
        }
        write_arrays(make_folder(self.folder / "arrays") / f"{name}.npz", packed)

    @cached_property
    def store(self) -> Path:
        """The folder of what experiments share."""
        return make_folder(self._out / "store")

    def _role(self, probe: ProbeMap) -> str:
        return next(key[0] for key, own in self._probes.items() if own is probe)

    def _data(self, data: str) -> str:
        return data if data in DRAWN else str(Path(self.scale.data[data]).expanduser().resolve())


@lru_cache(maxsize=8)
def _resamples(seed: int, count: int) -> np.ndarray:
    """Return the weight [resamples, count] of each of ``count`` values in the means of `bootstrap_mean`, whose draws
    are always the same ones: with them thousands of intervals are products."""
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    places = drawn + count * np.arange(RESAMPLES)[:, None]
    return np.bincount(places.ravel(), minlength=RESAMPLES * count).reshape(RESAMPLES, count) / count


def _hash(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
