"""How good `tiny-views` is on scenes that it never saw, beside guesses that do not look at the pictures.

    python -m recipes.evaluate_tiny_views --model runs/tiny-views/model --count 500 --out evaluation.json

Poses between all pairs of views: median angle of the rotation and of the direction of the translation, with bootstrap
errors over scenes. Depth (no sky): δ1 and AbsRel with one scale for each scene, and as predicted, in units of the scene
(the mean distance of its points from the first camera). Points: mean distance to the truth in the same units. "The
mean" is fitted on other held-out scenes: the mean relative pose of each pair, the geometric mean depth and the mean
point of each pixel of each view.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.backbones.loading import resolve_device
from pullback.errors import ModelError, PullbackError
from pullback.evaluation import depth_errors
from pullback.evaluation.poses import direction_angle, pose_errors, relative_poses, rotation_angle
from pullback.models import EMBEDDED
from pullback.runs.progress import Lines, Progress
from pullback.scenes.render import render
from pullback.scenes.splits import HELD_OUT, QUERIES
from pullback.vggt.checkpoint import VGGT
from pullback.vggt.network.config import HEADS
from pullback.vggt.network.pose import decode_pose
from recipes.measurement import (
    mean_rotation,
    mean_with_error,
    median_with_error,
    rounded,
    weights_sha256,
    write_result,
)
from recipes.tiny_views import Truth, Views

NETWORK, MEAN = "tiny-views", "the mean"
VIEWS = (2, 4, 6)
TARGETS = {"rotation": 5.0, "translation": 10.0, "delta1": 0.90}
"""Medians in degrees not above, share of pixels not below (with four views)."""
_BATCH = 16
_IMAGES = 64  # that the network sees at once


@dataclass(frozen=True, eq=False)
class MeanScene:
    """The best guesses with closed eyes."""

    poses: Tensor  # [pairs, 3, 4]
    depth: Tensor  # [S, H, W]
    points: Tensor  # [S, H, W, 3]


def load_network(model: str, device: torch.device) -> VGGT:
    """The embedded model, or one of your own from the folder that training wrote."""
    return VGGT.from_pretrained(model, device=device)


def mean_scene(count: int, *, size: int, views: int, device: torch.device) -> MeanScene:
    """Over ``count`` scenes from seed `HELD_OUT` on. Directions have length 1 before they are averaged."""
    logs, points, seen = (torch.zeros(views, size, size, device=device, dtype=torch.float64) for _ in range(3))
    points = points[..., None].repeat(1, 1, 1, 3)
    rotations, directions = [], []
    for _, truth in _drawn(HELD_OUT, count, size, views, device):
        pairs = relative_poses(truth.extrinsics)
        rotations.append(pairs[..., :3])
        directions.append(pairs[..., 3] / pairs[..., 3].norm(dim=-1, keepdim=True))
        logs += torch.where(truth.valid, truth.depth, 1.0).log().sum(0)
        points += torch.where(truth.valid[..., None], truth.points, 0.0).sum(0)
        seen += truth.valid.sum(0)
    known, everywhere = seen.clamp_min(1), seen.sum((1, 2), keepdim=True).clamp_min(1)
    depth = torch.where(seen > 0, logs / known, logs.sum((1, 2), keepdim=True) / everywhere).exp()
    points = torch.where(
        seen[..., None] > 0,
        points / known[..., None],
        points.sum((1, 2), keepdim=True) / everywhere[..., None],
    )
    poses = torch.cat([mean_rotation(torch.cat(rotations)), torch.cat(directions).mean(0)[..., None]], -1)
    return MeanScene(poses, depth.float(), points.float())


@torch.no_grad()
def score(
    model: VGGT, guess: MeanScene, count: int, *, views: int, device: torch.device, progress: Progress | None = None
) -> dict[str, dict[str, Tensor]]:
    """Errors of each way to predict, scene by scene, on ``count`` scenes from seed `QUERIES` on: angles [n, pairs],
    everything else [n]."""
    size, progress = model.config.img_size, progress or Progress()
    progress.work(f"{views} views", count, "scenes")
    found: dict[str, list[dict[str, Tensor]]] = {NETWORK: [], MEAN: []}
    for examples, truth in _drawn(QUERIES, count, size, views, device):
        parts = [model(some) for some in examples.rgb.split(max(1, _IMAGES // views))]
        output = {name: torch.cat([part[name] for part in parts]) for name in ("pose_enc", "depth", "world_points")}
        extrinsics, _ = decode_pose(output["pose_enc"], (size, size))
        poses = pose_errors(extrinsics, truth.extrinsics)
        angles = {"rotation": poses.rotation, "translation": poses.translation}
        found[NETWORK].append(angles | dense_errors(output["depth"][..., 0], output["world_points"], truth))
        pairs = relative_poses(truth.extrinsics)
        angles = {
            "rotation": rotation_angle(guess.poses[..., :3].expand_as(pairs[..., :3]), pairs[..., :3]),
            "translation": direction_angle(guess.poses[..., 3].expand_as(pairs[..., 3]), pairs[..., 3]),
        }
        found[MEAN].append(angles | dense_errors(guess.depth, guess.points, truth))
        progress.advance(len(truth.scale))
    return {name: {key: torch.cat([part[key] for part in parts]) for key in parts[0]} for name, parts in found.items()}


def dense_errors(depth: Tensor, points: Tensor, truth: Truth) -> dict[str, Tensor]:
    """[B] each, of depth [B, S, H, W] and points [B, S, H, W, 3]; all views of a scene share one scale."""
    depth, points = depth.expand_as(truth.depth), points.expand_as(truth.points)
    flat = [values.flatten(1, 2) for values in (depth, truth.depth, truth.valid)]  # [B, S H, W]
    scaled, raw = (depth_errors(flat[0], flat[1], flat[2], median_scaling=scaling) for scaling in (True, False))
    away = torch.where(truth.valid, (points - truth.points).norm(dim=-1), torch.nan)
    return {
        "delta1": scaled.delta1,
        "abs_rel": scaled.abs_rel,
        "raw_delta1": raw.delta1,
        "raw_abs_rel": raw.abs_rel,
        "point_error": away.flatten(1).nanmean(1),
        "point_error_median": away.flatten(1).nanmedian(1).values,
    }


def summary(errors: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Angles as medians over pairs, all else as means over scenes, both with standard errors."""
    result = {}
    for name, values in errors.items():
        one = median_with_error(values) if name in ("rotation", "translation") else mean_with_error(values)
        result[name] = {key: rounded(value) for key, value in one.items()}
    return result


def evaluate(model: VGGT, *, count: int, views: int, device: torch.device) -> dict[str, Any]:
    """The network's own scores and the guesses', for one number of views: what a training run prints at its end."""
    model.eval()
    guess = mean_scene(count, size=model.config.img_size, views=views, device=device)
    errors = score(model, guess, count, views=views, device=device)
    return {name: summary(parts) for name, parts in errors.items()}


def missed(scores: dict[str, dict[str, float]]) -> list[str]:
    """Which of `TARGETS` the network's scores do not reach."""
    reached = {
        "rotation": scores["rotation"]["median"] <= TARGETS["rotation"],
        "translation": scores["translation"]["median"] <= TARGETS["translation"],
        "delta1": scores["delta1"]["mean"] >= TARGETS["delta1"],
    }
    return [name for name, good in reached.items() if not good]


def measure(model: str, count: int, views: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Everything that the result file holds but its origin."""
    if not views or min(views) < 2:
        raise PullbackError(f"views: expected numbers of views from 2, such as 2 4 6, got {list(views)}.")
    if count < 2:
        raise PullbackError(f"count: expected at least 2 scenes, got {count}. Errors are taken over scenes.")
    if model not in EMBEDDED and not Path(model).is_dir():
        raise ModelError(f"model: expected tiny-views or a folder that training wrote, got {model!r}.")
    network = load_network(model, device)
    if set(network.config.heads) != set(HEADS):
        raise ModelError(
            f"model: expected one with the heads {', '.join(HEADS)}, got {', '.join(network.config.heads) or 'none'}."
        )
    scores, progress = {}, Lines()
    for number in views:
        guess = mean_scene(count, size=network.config.img_size, views=number, device=device)
        errors = score(network, guess, count, views=number, device=device, progress=progress)
        scores[str(number)] = {name: summary(parts) for name, parts in errors.items()}
    return {
        "what": "cameras, depth and points of held-out scenes, the first view being the reference; angles in degrees: "
        "median over pairs and bootstrap error over scenes; else mean and standard error over scenes",
        "model": model,
        "weights_sha256": weights_sha256(os.fspath(model)),
        "precision": "float32 arithmetic on the stored weights",
        "size": network.config.img_size,
        "scenes": count,
        "first_seeds": {"mean": HELD_OUT, "queries": QUERIES},
        "targets": TARGETS,
        "views": scores,
    }


def table(result: dict[str, Any]) -> str:
    """As Markdown, errors in brackets."""
    lines = [
        "| views | from | rotation ° ↓ | translation ° ↓ | depth δ1 ↑ | AbsRel ↓ | δ1, no scaling ↑ | point error ↓ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for views, scores in result["views"].items():
        for name, parts in scores.items():
            angles = [f"{parts[key]['median']:.2f} ± {parts[key]['se']:.2f}" for key in ("rotation", "translation")]
            means = [
                f"{parts[key]['mean']:.3f} ± {parts[key]['se']:.3f}"
                for key in ("delta1", "abs_rel", "raw_delta1", "point_error")
            ]
            lines.append(f"| {views if name == NETWORK else ''} | {name} | {' | '.join([*angles, *means])} |")
    return "\n".join(lines)


def _drawn(first: int, count: int, size: int, views: int, device: torch.device) -> Iterator[tuple[Views, Truth]]:
    for start in range(first, first + count, _BATCH):
        seeds = range(start, min(start + _BATCH, first + count))
        examples = Views.of(render(seeds, size=size, views=views, device=device))
        yield examples, examples.truth()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-views", help="the embedded one, or a folder that training wrote")
    parser.add_argument("--count", type=int, default=500, help="scenes to score, and as many for the mean")
    parser.add_argument("--views", type=int, nargs="+", default=list(VIEWS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        device = resolve_device(options.device)
        result = measure(options.model, options.count, options.views, device)
        write_result(options.out, result, device)
    except (PullbackError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(table(result))
    for views, scores in result["views"].items():
        short = missed(scores[NETWORK])
        print(f"{views} views: {'all targets reached' if not short else 'short of ' + ', '.join(short)}")


if __name__ == "__main__":
    main()
