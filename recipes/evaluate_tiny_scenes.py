"""How good `tiny-scenes` is on scenes that it never saw, beside guesses that do not look at the picture.

    python -m recipes.evaluate_tiny_scenes --count 500 --bank 1500 --out evaluation.json

Depth (no sky): δ1 and AbsRel after median scaling, AbsRel in metres as predicted. Class: top-1 of the nearest
neighbours of the class token in a bank of scenes from the training ranges. The two guesses are fitted on that bank: the
mean depth of each pixel and of each image row. All of it on the training ranges and outside them, shift by shift.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.backbones import load_backbone
from pullback.errors import PullbackError
from pullback.evaluation import depth_errors, neighbour_accuracy
from pullback.models.tiny_scenes import TinyScenes
from pullback.runs.progress import Lines, Progress
from pullback.scenes.render import CLASSES, SHIFTED, TRAINING, SceneBatch, SceneRange, normalised, render
from pullback.scenes.splits import HELD_OUT, QUERIES
from recipes.measurement import mean_with_error, rounded, weights_sha256, write_result

RANGES: dict[str, SceneRange] = {
    "training ranges": TRAINING,
    "camera heights shifted": replace(TRAINING, camera_height=SHIFTED.camera_height),
    "textures shifted": replace(TRAINING, textures=SHIFTED.textures, texture_scale=SHIFTED.texture_scale),
    "both shifted": SHIFTED,
}
NETWORK, PIXEL, ROW = "tiny-scenes", "mean depth of the pixel", "mean depth of the row"
SCORES = ("delta1", "abs_rel", "raw_abs_rel")
_BATCH = 32


@dataclass(frozen=True)
class Bank:
    """What is known from scenes of the training ranges: neighbours, and the depth to expect with closed eyes."""

    embeddings: Tensor  # [n, D]
    labels: Tensor  # [n]
    pixel_depth: Tensor  # [H, W], geometric mean over scenes
    row_depth: Tensor  # [H, W], geometric mean over scenes and columns


def load_network(model: str, device: torch.device) -> TinyScenes:
    """The embedded model, or one of your own from the folder that training wrote."""
    network = load_backbone(model, device=device).model
    if not isinstance(network, TinyScenes):
        raise PullbackError(f"model={model!r}: expected tiny-scenes or a folder that its recipe wrote.")
    return network


@torch.no_grad()
def build_bank(
    model: TinyScenes, count: int, *, size: int, device: torch.device, progress: Progress | None = None
) -> Bank:
    """``count`` scenes from seed `HELD_OUT` on; sky has no depth and is left out of the means."""
    progress = progress or Progress()
    logs, seen = torch.zeros(2, size, size, dtype=torch.float64, device=device)
    embeddings, labels = [], []
    for scenes in _drawn(HELD_OUT, count, TRAINING, size, device):
        embeddings.append(model(normalised(scenes.rgb[:, 0])).embedding)
        labels.append(scenes.label)
        valid = ~scenes.sky[:, 0]
        logs += torch.where(valid, scenes.depth[:, 0], 1.0).log().sum(0)
        seen += valid.sum(0)
        progress.advance(len(scenes))
    rows = (logs.sum(1) / seen.sum(1).clamp_min(1))[:, None].expand(size, size)
    pixels = torch.where(seen > 0, logs / seen.clamp_min(1), rows)
    return Bank(torch.cat(embeddings), torch.cat(labels), pixels.exp().float(), rows.exp().float())


@torch.no_grad()
def score(
    model: TinyScenes,
    bank: Bank,
    ranges: SceneRange,
    count: int,
    *,
    size: int,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Means with standard errors over ``count`` scenes from seed `QUERIES` on: of each way to guess depth, and of the
    class."""
    progress = progress or Progress()
    errors: dict[str, list[dict[str, Tensor]]] = {NETWORK: [], PIXEL: [], ROW: []}
    embeddings, labels = [], []
    for scenes in _drawn(QUERIES, count, ranges, size, device):
        output = model(normalised(scenes.rgb[:, 0]))
        embeddings.append(output.embedding)
        labels.append(scenes.label)
        guesses = {NETWORK: output.predicted_depth, PIXEL: bank.pixel_depth, ROW: bank.row_depth}
        for name, guess in guesses.items():
            errors[name].append(_errors(guess, scenes))
        progress.advance(len(scenes))
    accuracy = neighbour_accuracy(bank.embeddings, bank.labels, torch.cat(embeddings), torch.cat(labels))
    return {
        "depth": {name: _means(parts) for name, parts in errors.items()},
        "knn_top1": {
            "mean": rounded(accuracy),
            "se": rounded(math.sqrt(accuracy * (1 - accuracy) / max(1, count - 1))),
        },
    }


def evaluate(model: TinyScenes, *, count: int, bank: int, size: int, device: torch.device) -> dict[str, float]:
    """The network's own scores within the training ranges, without errors: what a training run prints at its end."""
    model.eval()
    known = build_bank(model, bank, size=size, device=device)
    scores = score(model, known, TRAINING, count, size=size, device=device)
    depth = {name: scores["depth"][NETWORK][name]["mean"] for name in SCORES}
    return depth | {"knn_top1": scores["knn_top1"]["mean"]}


def _drawn(first: int, count: int, ranges: SceneRange, size: int, device: torch.device) -> Iterator[SceneBatch]:
    for start in range(first, first + count, _BATCH):
        seeds = range(start, min(start + _BATCH, first + count))
        yield render(seeds, size=size, ranges=ranges, device=device)


def _errors(guess: Tensor, scenes: SceneBatch) -> dict[str, Tensor]:
    """[B] each; a single map [H, W] is the guess for every scene. "log_scale" is log(median guess / median truth):
    below 0 where a scene is taken for smaller than it is."""
    truth, valid = scenes.depth[:, 0], ~scenes.sky[:, 0]
    guess = guess.expand_as(truth)
    scaled, raw = (depth_errors(guess, truth, valid, median_scaling=scaling) for scaling in (True, False))
    guessed, true = (torch.where(valid, depth, torch.nan).flatten(1).nanmedian(1).values for depth in (guess, truth))
    return {
        "delta1": scaled.delta1,
        "abs_rel": scaled.abs_rel,
        "raw_abs_rel": raw.abs_rel,
        "log_scale": (guessed / true).log(),
    }


def _means(parts: list[dict[str, Tensor]]) -> dict[str, dict[str, float]]:
    return {name: mean_with_error(torch.cat([part[name] for part in parts])) for name in parts[0]}


def measure(model: str, count: int, bank: int, device: torch.device) -> dict[str, Any]:
    """Everything that the result file holds but its origin."""
    network = load_network(model, device)
    size = network.config.image_size
    progress = Lines()
    progress.work("bank", bank, "scenes")
    known = build_bank(network, bank, size=size, device=device, progress=progress)
    scores = {}
    for name, ranges in RANGES.items():
        progress.work(name, count, "scenes")
        scores[name] = score(network, known, ranges, count, size=size, device=device, progress=progress)
    return {
        "what": "depth without sky and class of held-out scenes; mean and standard error over scenes",
        "model": model,
        "weights_sha256": weights_sha256(model),
        "precision": "float32 arithmetic on the stored weights",
        "size": size,
        "scenes": {"bank": bank, "queries": count},
        "first_seeds": {"bank": HELD_OUT, "queries": QUERIES},
        "chance_top1": rounded(1 / len(CLASSES)),
        "ranges": scores,
    }


def table(result: dict[str, Any]) -> str:
    """As Markdown, three digits and the error in brackets."""
    lines = [
        "| held-out scenes | depth from | δ1 ↑ | AbsRel ↓ | AbsRel in metres ↓ | k-NN top-1 ↑ |",
        "|---|---|---|---|---|---|",
    ]
    for ranges, scores in result["ranges"].items():
        for name, depth in scores["depth"].items():
            cells = [_cell(depth[column]) for column in SCORES]
            neighbours = _cell(scores["knn_top1"]) if name == NETWORK else ""
            lines.append(f"| {ranges if name == NETWORK else ''} | {name} | {' | '.join(cells)} | {neighbours} |")
    return "\n".join(lines)


def _cell(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['se']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-scenes", help="the embedded one, or a folder that training wrote")
    parser.add_argument("--count", type=int, default=500, help="scenes to score in each of the ranges")
    parser.add_argument("--bank", type=int, default=1500, help="scenes of the training ranges to know")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    result = measure(options.model, options.count, options.bank, device)
    write_result(options.out, result, device)
    print(table(result))


if __name__ == "__main__":
    main()
