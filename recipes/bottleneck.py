"""The recipe of an S2-VAE bottleneck for an embedded model, or for a model of photographs.

    python -m recipes.bottleneck --model tiny-scenes --decoder depth --width 192 --device cuda --out runs/s2vae
    python -m recipes.bottleneck --model tiny-views --decoder depth --batch 24 --device cuda --out runs/s2vae-views
    python -m recipes.bottleneck --model FOLDER --decoder saliency --images DIR --held-out DIR --out runs/s2vae-saliency

The embedded models learn from scenes that are drawn as they are needed (see `scene_run`), mirrored and relit at random,
and are judged by scenes from `HELD_OUT` on; `tiny-views` sees ``--views`` of each. Other models learn from photographs,
varied at random (`train_bottleneck`). A run that was stopped (``--seconds``, or a crash) goes on exactly where its last
checkpoint was written: call the same command again. `metrics.jsonl` holds a line for every validation; the averaged
weights that did best end up in `model/`, with ``--half`` as float16.

The one of `tiny-scenes` that comes with the package:

    python -m recipes.bottleneck --model tiny-scenes --width 192 --steps 300 --batch 16 --block 1024 --passes 5 \\
        --warmup 20 --ema 0.98 --validate-every 100 --precision bf16 --half --device cpu --out runs/tiny-scenes

To ship one, give it the fingerprint of the weights that it is for and save it beside the embedded models, where
`depth@s2vae` finds it (`pullback.backbones.shipped`; its model card is then written by hand):

    origin = replace(vae.config.origin, fingerprint=fingerprint(probe.backbone))
    vae.describe(origin=origin).save_pretrained("src/pullback/models/weights/NAME")
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pullback.data.crops import CROPS
from pullback.errors import PullbackError
from pullback.learning.fit import CurrentBlock, FitConfig, Share
from pullback.learning.s2vae import POSTERIORS, S2VAE
from pullback.learning.train_bottleneck import (
    BottleneckOptions,
    FeatureSet,
    bottleneck_config,
    default_distance,
    fit_bottleneck,
    train_bottleneck,
)
from pullback.probes import ProbeMap, multi_layer_probe
from pullback.runs.files import write_json
from pullback.runs.progress import Lines
from pullback.runs.provenance import provenance
from pullback.scenes.render import normalised, render
from pullback.scenes.splits import HELD_OUT
from recipes.scene_run import SEEDS_PER_RUN
from recipes.tiny_scenes import Examples
from recipes.tiny_views import Views, draw_views

B = TypeVar("B", Examples, Views)


@dataclass(frozen=True)
class Drawing:
    """Which scenes are drawn. Those of the embedded models' own training are left to them (their seed is 0)."""

    block: int = 2048  # scenes drawn at a time
    passes: int = 4  # over each block
    views: int = 4  # of each scene, for a model of several
    size: int | None = None  # pixels; None: the model's own
    seed: int = 0
    held_out: int = 128

    def __post_init__(self) -> None:
        most = HELD_OUT // SEEDS_PER_RUN - 2
        if not 0 <= self.seed <= most:
            raise PullbackError(f"seed={self.seed}: expected one from 0 to {most}, so that no held-out scene is seen.")

    def seeds(self, number: int) -> range:
        """The seeds of block ``number``."""
        first = (1 + self.seed) * SEEDS_PER_RUN + number * self.block
        return range(first, first + self.block)

    def steps_per_block(self, batch: int) -> int:
        return max(1, self.block * self.passes // batch)


@dataclass(eq=False)
class DrawnScenes(Generic[B]):
    """`Batches` of freshly drawn scenes: block by block, each step with other scenes of its block, varied."""

    probe: ProbeMap
    drawing: Drawing
    batch: int
    draw: Callable[[range], B]
    vary: Callable[[B, Tensor, torch.Generator], Tensor]  # (block, rows [b], generator) -> the model's input
    _blocks: CurrentBlock[B] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._blocks = CurrentBlock(
            lambda number: self.draw(self.drawing.seeds(number)), self.drawing.steps_per_block(self.batch)
        )

    def __call__(self, step: int, share: Share, generator: torch.Generator) -> Tensor:
        rows = torch.randint(self.drawing.block, (share.batch,), generator=generator).to(self.probe.device)
        images = self.vary(self._blocks.at(step), rows, generator)[share.rank :: share.world]
        return self.probe.features(images, normalized=True)


def drawn_scenes(probe: ProbeMap, drawing: Drawing, batch: int) -> tuple[DrawnScenes[Examples], FeatureSet]:
    """Training batches and held-out features of single pictures."""
    size = drawing.size or probe.backbone.preprocessing.size

    def draw(seeds: range) -> Examples:
        return Examples.of(render(seeds, size=size, device=probe.device))

    def vary(block: Examples, rows: Tensor, generator: torch.Generator) -> Tensor:
        return normalised(block.rows(rows).varied(generator).rgb)

    judges = draw(range(HELD_OUT, HELD_OUT + drawing.held_out))
    features = probe.features(normalised(judges.rgb), normalized=True)
    return DrawnScenes(probe, drawing, batch, draw, vary), FeatureSet.of(features)


def drawn_views(probe: ProbeMap, drawing: Drawing, batch: int) -> tuple[DrawnScenes[Views], FeatureSet]:
    """Training batches and held-out features of scenes of several views, whose order is another every time."""
    size, views = drawing.size or probe.backbone.preprocessing.size, drawing.views

    def draw(seeds: range) -> Views:
        return Views.of(render(seeds, size=size, views=views, device=probe.device))

    def vary(block: Views, rows: Tensor, generator: torch.Generator) -> Tensor:
        order = draw_views(len(rows), views, views, generator).to(rows.device)
        mirrored = (torch.rand(len(rows), generator=generator) < 0.5).to(rows.device)
        return block.chosen(rows, order).mirrored(mirrored).relit(generator).rgb

    judges = draw(range(HELD_OUT, HELD_OUT + drawing.held_out))
    return DrawnScenes(probe, drawing, batch, draw, vary), FeatureSet.of(probe.features(judges.rgb))


def train_on_scenes(
    probe: ProbeMap,
    options: BottleneckOptions,
    drawing: Drawing,
    config: FitConfig,
    *,
    out: Path | None = None,
    seconds: float = math.inf,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> S2VAE:
    """Train a bottleneck of an embedded model on drawn scenes."""
    draw = drawn_views if probe.backbone.views else drawn_scenes
    train, held_out = draw(probe, drawing, config.batch)
    settings = {f"drawing.{own.name}": getattr(drawing, own.name) for own in fields(drawing)}
    return fit_bottleneck(
        probe, train, held_out, options, config=config, out=out, settings=settings, seconds=seconds, on_step=on_step
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="tiny-scenes", help="tiny-scenes, tiny-views, or one for photographs")
    found.add_argument("--decoder", default="depth")
    found.add_argument("--distance", default=None, help="task distance of the task loss; default: log for depth")
    found.add_argument("--images", help="photographs; without them scenes are drawn")
    found.add_argument("--held-out", dest="judges", help="photographs that judge")
    found.add_argument("--limit", type=int, help="of photographs")
    found.add_argument("--no-vary", action="store_true", help="photographs as they are, features computed once")
    for own in (*fields(BottleneckOptions), *fields(Drawing)):
        if own.name == "cells":
            found.add_argument("--cells", action=argparse.BooleanOptionalAction, default=own.default)
        elif own.name == "posterior":
            found.add_argument("--posterior", choices=POSTERIORS, default=own.default)
        elif own.name == "held_out":
            found.add_argument("--held-out-scenes", type=int, default=own.default)
        else:
            kind = float if isinstance(own.default, float) else int
            found.add_argument(f"--{own.name.replace('_', '-')}", type=kind, default=own.default)
    defaults = bottleneck_config()
    for name in ("steps", "batch", "learning_rate", "warmup", "ema", "weight_decay", "clip", "validate_every"):
        default = getattr(defaults, name)
        found.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    found.add_argument("--precision", default=None, help="float32 or bf16; default: bf16 on a GPU")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--out", type=Path, required=True)
    found.add_argument("--half", action="store_true", help="write the weights as float16")
    found.add_argument("--seconds", type=float, default=math.inf, help="stop after about so long; call again to go on")
    found.add_argument("--log-every", type=int, default=100)
    return found


def main() -> None:
    given = parser().parse_args()
    if (given.images is None) != (given.judges is None):
        raise PullbackError("images, held_out: expected both for photographs, or none of them for drawn scenes.")
    begun, device = time.perf_counter(), torch.device(given.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    distance = given.distance or default_distance(given.decoder)
    probe = multi_layer_probe(given.model, given.decoder, device=device, distance=distance)
    # the same numbers; convolutions on a GPU are faster so
    probe.backbone.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = BottleneckOptions(**{own.name: getattr(given, own.name) for own in fields(BottleneckOptions)})
    precision = given.precision or ("bf16" if device.type == "cuda" else "float32")
    shared = [own.name for own in fields(FitConfig) if hasattr(given, own.name) and own.name != "precision"]
    config = bottleneck_config(precision=precision, **{name: getattr(given, name) for name in shared})

    def told(step: int, numbers: Mapping[str, float]) -> None:
        if step % given.log_every == 0 or "score" in numbers:
            line = {"step": step, **{name: float(f"{value:.4g}") for name, value in numbers.items()}}
            print(json.dumps(line | {"seconds": round(time.perf_counter() - begun, 1)}), flush=True)

    if given.images is not None:
        sizes = {own.name: getattr(options, own.name) for own in fields(options)}
        vae = train_bottleneck(
            probe,
            given.images,
            given.judges,
            **sizes,
            size=given.size,
            limit=given.limit,
            variation=None if given.no_vary else CROPS,
            config=config,
            out=given.out,
            seconds=given.seconds,
            progress=Lines(),
            on_step=told,
        )
    else:
        drawing = Drawing(given.block, given.passes, given.views, given.size, given.seed, given.held_out_scenes)
        vae = train_on_scenes(probe, options, drawing, config, out=given.out, seconds=given.seconds, on_step=told)
    steps = int(vae.config.scores["steps"])
    if steps < config.steps:
        print(f"stopped after {steps} of {config.steps} steps; the same command goes on", flush=True)
        return
    folder = (vae.half() if given.half else vae).save_pretrained(given.out / "model")
    lines = (given.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    result = {
        "command": f"python -m recipes.bottleneck {' '.join(sys.argv[1:])}",
        "settings": {name: value for name, value in vars(given).items() if name not in ("out", "seconds", "log_every")}
        | {"precision": precision, "layers": list(vae.config.layers), "pixels": vae.config.origin.resolutions[0][0]},
        "scores": dict(vae.config.scores),
        "validations": [json.loads(line) for line in lines],
        "seconds": round(time.perf_counter() - begun, 1),
        "bytes": (folder / "model.safetensors").stat().st_size,
        **provenance(device),
    }
    write_json(given.out / "result.json", result)
    print(json.dumps(result["scores"]), f"written to {folder}/ after {result['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
