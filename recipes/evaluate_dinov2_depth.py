"""How good depth heads of DINOv2-S are on held-out photographs, beside guesses that do not look at the picture.

    python -m recipes.evaluate_dinov2_depth --model DINOV2 --rgbd RGBD --head runs/dinov2-depth/model \
        --scenes-head runs/dinov2-depth-scenes/model --out evaluation.json

Photographs are read as the package reads them (224 pixels, the middle 7/8 of the shorter side), depth at the same
pixels by the nearest neighbour; pixels without a measurement do not count. δ1 and AbsRel are given in metres as
predicted, and after median scaling. The guesses are geometric means over the training pairs: one depth for all pixels,
and one for each pixel.

Means and standard errors are over images. Images of one sequence show one room, so their errors are too small, and the
longest sequence decides the mean over all images: "mean of sources" counts every source once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.backbones import Backbone, load_backbone
from pullback.decoders.dense import load_depth_head
from pullback.errors import PullbackError
from pullback.evaluation import depth_errors
from pullback.models.dpt import DPTDepth
from pullback.runs.files import WEIGHTS
from pullback.runs.provenance import file_hash
from pullback.runs.rows import Rows
from recipes.measurement import mean_with_error, rounded, write_result
from recipes.rgbd import Pairs, read_pairs

TRAINED, SCENES = "head trained on scenes and photographs", "head trained on scenes alone"
CONSTANT, PIXEL = "mean depth", "mean depth of the pixel"
ALL, SOURCES, OWN = "all images", "mean of sources", "training pairs"
SCORES = ("delta1", "abs_rel", "raw_delta1", "raw_abs_rel", "log_scale")
_BATCH = 16


@torch.no_grad()
def predicted(backbone: Backbone, head: DPTDepth, images: Tensor) -> Tensor:
    """Run DINOv2 and a head on normalised images [B, 3, H, W]: depth [B, H, W]."""
    maps = []
    for some in images.to(backbone.device).split(_BATCH):
        layout = backbone.token_layout(some)
        kept = backbone.features(some, head.config.hooks)
        maps.append(head([backbone.norm(kept[layer]) for layer in head.config.hooks], *layout.grid))
    return torch.cat(maps)


def guesses(depth: Tensor) -> dict[str, Tensor]:
    """Return the geometric means of depths [n, H, W] over all pixels and over each pixel, as maps [H, W]."""
    known = depth > 0
    logs = torch.where(known, depth, 1.0).double().log()
    constant = (logs.sum() / known.sum()).exp().float().expand(depth.shape[1:])
    seen = known.sum(0)
    pixel = torch.where(seen > 0, (logs.sum(0) / seen.clamp_min(1)).exp().float(), constant)
    return {CONSTANT: constant, PIXEL: pixel}


def errors(guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """[B] each, of depths [B, H, W], or of one map [H, W] for all images. "log_scale" is log(median guess / median
    truth): below 0 where a scene is taken for smaller than it is."""
    known = truth > 0
    guess = guess.expand_as(truth)
    scaled, raw = (depth_errors(guess, truth, known, median_scaling=scaling) for scaling in (True, False))
    guessed, true = (torch.where(known, depth, torch.nan).flatten(1).nanmedian(1).values for depth in (guess, truth))
    return {
        "delta1": scaled.delta1,
        "abs_rel": scaled.abs_rel,
        "raw_delta1": raw.delta1,
        "raw_abs_rel": raw.abs_rel,
        "log_scale": (guessed / true).log(),
    }


def summarised(found: dict[str, Tensor], sequence: tuple[str, ...]) -> dict[str, Any]:
    """Means with errors by source and over all images, and the plain means of the sources' means."""
    groups = {name: torch.tensor([own == name for own in sequence]) for name in dict.fromkeys(sequence)}
    groups[ALL] = torch.ones(len(sequence), dtype=torch.bool)
    rows: dict[str, Any] = {
        name: {score: mean_with_error(values.cpu()[own]) for score, values in found.items()}
        for name, own in groups.items()
    }
    sources = [name for name in groups if name != ALL]
    rows[SOURCES] = {
        score: rounded(sum(rows[name][score]["mean"] for name in sources) / len(sources)) for score in found
    }
    return rows


def measure(
    backbone: Backbone, heads: dict[str, Path], training: Pairs, held_out: Pairs, size: int | None = None
) -> dict[str, Any]:
    """Everything that the result file holds but its origin."""
    wanted = backbone.pixel_format(size)
    device = backbone.device
    truth, own_truth = (pairs.centred_depth(wanted).to(device) for pairs in (held_out, training))
    images, own_images = (_read(backbone, pairs, size) for pairs in (held_out, training))
    rows: dict[str, Any] = {}
    per_image: dict[str, dict[str, Tensor]] = {}
    for name, folder in heads.items():
        head = load_depth_head(folder, device)
        per_image[name] = errors(predicted(backbone, head, images), truth)
        rows[name] = summarised(per_image[name], held_out.sequence)
        own = errors(predicted(backbone, head, own_images), own_truth)
        rows[name][OWN] = {score: mean_with_error(values.cpu()) for score, values in own.items()}
    for name, guess in guesses(own_truth).items():
        per_image[name] = errors(guess, truth)
        rows[name] = summarised(per_image[name], held_out.sequence)
    first = next(iter(heads))
    ahead = {
        name: summarised({score: per_image[first][score] - found[score] for score in SCORES[:4]}, held_out.sequence)
        for name, found in per_image.items()
        if name != first
    }
    return {
        "what": "depth of held-out photographs; mean and standard error over images",
        "weights_sha256": {name: file_hash(folder / WEIGHTS) for name, folder in heads.items()},
        "precision": "float32 arithmetic on the stored weights",
        "size": list(wanted.size),
        "images": {name: held_out.sequence.count(name) for name in dict.fromkeys(held_out.sequence)},
        "training_pairs": len(training),
        "training": {name: _last_line(folder.parent / "log.jsonl") for name, folder in heads.items()},
        "depth": rows,
        "ahead_of": ahead,
    }


def _read(backbone: Backbone, pairs: Pairs, size: int | None) -> Tensor:
    batch = backbone.read_images([str(path) for path in pairs.paths], size)
    if batch.skipped:
        raise PullbackError(f"rgbd: {batch.skipped[0]} cannot be used. Is the folder complete?")
    return batch.pixels


def _last_line(log: Path) -> dict[str, Any] | None:
    """Return how a training run ended, by its log beside the head; None where there is none."""
    return Rows(log).read()[-1] if log.is_file() else None


def table(result: dict[str, Any]) -> str:
    """As Markdown: δ1 and AbsRel after median scaling, then in metres."""
    lines = [
        "| depth from | images | δ1 ↑ | AbsRel ↓ | δ1 in metres ↑ | AbsRel in metres ↓ |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in result["depth"].items():
        for place, scores in rows.items():
            cells = [_cell(scores[score]) for score in SCORES[:4]]
            lines.append(f"| {name} | {place} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: dict[str, float] | float) -> str:
    return f"{value['mean']:.3f} ± {value['se']:.3f}" if isinstance(value, dict) else f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of DINOv2-S")
    parser.add_argument("--rgbd", type=Path, required=True, help="folder of RGB-D pairs")
    parser.add_argument("--head", type=Path, required=True, help="folder of the head trained on scenes and photographs")
    parser.add_argument("--scenes-head", type=Path, help="folder of the head trained on scenes alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    backbone = load_backbone(options.model, device=device)
    heads = {TRAINED: options.head} | ({SCENES: options.scenes_head} if options.scenes_head else {})
    training, held_out = (read_pairs(options.rgbd, split) for split in ("train", "heldout"))
    result = {"model": Path(options.model).name, "backbone_sha256": file_hash(Path(options.model) / WEIGHTS)}
    result |= measure(backbone, heads, training, held_out)
    write_result(options.out, result, device)
    print(table(result))


if __name__ == "__main__":
    main()
