"""What lies behind two spectra of tiny-views: the weakest direction of a camera, and the few directions of points.

    python benchmarks/vggt_spectra.py --scenes 8 --device cpu

Camera of the second view: how much of its last left singular vector lies along the length of the quaternion, and how
much along the difference of the two fields of view, which are equal in square pictures; and the rank correlation of the
Euclidean importance with that under parts of `CameraMetric`. Points: the effective rank as measured, and what is left
of the effect when sky is left out, when the head's activation is undone, and when every point counts alike.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from measure import machine, save
from torch import Tensor

import pullback as pb
from pullback.decoders import build_decoder
from pullback.evaluation import spearman
from pullback.operators import JacobianOperator
from pullback.randnla import effective_rank_from_spectrum
from pullback.scenes.render import SceneBatch, render
from pullback.scenes.splits import HELD_OUT

PLASTIC = 1.32471795724474602596
QUATERNION, FOV = slice(3, 7), slice(7, 9)


def camera(jacobian: Tensor, pose: Tensor, tokens: int) -> dict[str, float]:
    """Of J [9, N C] and the pose encoding [9]."""
    left, values, _ = torch.linalg.svd(jacobian, full_matrices=False)
    length, fovs = torch.zeros(2, 9, dtype=jacobian.dtype)
    length[QUATERNION] = pose[QUATERNION] / pose[QUATERNION].norm()
    fovs[FOV] = torch.tensor([1.0, -1.0]).to(fovs) / math.sqrt(2)
    changed = {
        "length of the quaternion removed": jacobian - length[:, None] * (length @ jacobian),
        "rotations doubled": torch.cat([jacobian[:3], 2 * jacobian[QUATERNION], jacobian[FOV]]),
    }
    blocks = {name: own.unflatten(1, (tokens, -1)).square().sum((0, 2)).sqrt() for name, own in changed.items()}
    plain = jacobian.unflatten(1, (tokens, -1)).square().sum((0, 2)).sqrt()
    total = jacobian.square().sum()
    return {
        "last over first singular value": float(values[-1] / values[0]),
        "last mode along the length": float((left[:, -1] @ length) ** 2),
        "last mode along the difference of fields of view": float((left[:, -1] @ fovs) ** 2),
        "energy of the length": float((length @ jacobian).square().sum() / total),
        "energy of the difference of fields of view": float((fovs @ jacobian).square().sum() / total),
        "quaternion length": float(pose[QUATERNION].norm()),
        **{f"Spearman, {name}": float(spearman(plain[None], own[None])) for name, own in blocks.items()},
    }


def points(jacobian: Tensor, output: Tensor, sky: Tensor) -> dict[str, float]:
    """Of J [3 P, N C], points [P, 3], and which of them show the sky [P]."""
    by_point = jacobian.unflatten(0, (-1, 3))
    energy = by_point.square().sum((1, 2))
    shares = energy / energy.sum()
    undone = by_point / (1 + output.abs())[..., None]  # the derivative of sign(x) (e^|x| - 1) is 1 + |p|
    variants = {
        "as measured": by_point,
        "without sky": by_point[~sky],
        "activation undone": undone,
        "activation undone, without sky": undone[~sky],
        "every point alike": by_point / energy.sqrt()[:, None, None],
    }
    found = {f"r_eff, {name}": effective_rank(own.flatten(0, 1)) for name, own in variants.items()}
    distance = output.norm(dim=1)
    return {
        **found,
        "share of sky points": float(sky.double().mean()),
        "energy of sky points": float(shares[sky].sum()),
        "energy of the strongest 5": float(shares.sort(descending=True).values[:5].sum()),
        "Spearman of energy and distance, no sky": float(spearman(energy[~sky][None], distance[~sky][None])),
    }


def effective_rank(matrix: Tensor) -> float:
    return float(effective_rank_from_spectrum(torch.linalg.eigvalsh(matrix @ matrix.mT).clamp_min(0).sqrt()[None]))


def sky_of_points(scenes: SceneBatch, count: int = 64) -> Tensor:
    """Return whether each of the `points` lies in the sky, [B, P]; docs/guide/vggt.md says where they are."""
    views, height, width = scenes.sky.shape[1:]
    number = torch.arange(count, dtype=torch.float64)
    rows, columns = (((0.5 + number / PLASTIC**k) % 1 * side).long() for k, side in ((1, height), (2, width)))
    return scenes.sky[:, torch.arange(count) % views, rows, columns]


def summary(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in rows[0]:
        values = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        error = values.std() / math.sqrt(len(values)) if len(values) > 1 else torch.tensor(math.nan)
        found[name] = {"mean": float(values.mean()), "se": float(error)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-views")
    parser.add_argument("--scenes", type=int, default=8)
    parser.add_argument("--layer", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    options = parser.parse_args()
    probe = pb.load_probe(options.model, "camera-1", options.layer, device=options.device)
    backbone = probe.backbone
    size = backbone.preprocessing.size
    seeds = range(HELD_OUT, HELD_OUT + options.scenes)
    scenes = render(seeds, size=size, views=2, device=options.device)
    decoder, sky = build_decoder("points", backbone), sky_of_points(scenes)
    content: dict[str, Any] = {
        "machine": machine(torch.device(options.device)),
        "model": options.model,
        "scenes": options.scenes,
        "first_seed": HELD_OUT,
        "layer": options.layer,
    }
    rows: dict[str, list[dict[str, float]]] = {}
    for index in range(options.scenes):
        images = scenes.rgb[index : index + 1]
        features = probe.features(images)
        dense, pose = JacobianOperator(probe, features).dense()[0].double(), probe(features).flatten().double()
        rows.setdefault("camera-1", []).append(camera(dense, pose, features.shape[1]))
        places = {
            f"points L{options.layer:02d}": pb.ProbeMap(backbone, decoder, options.layer),
            "points x_vis": pb.ProbeMap(backbone, decoder, "inputs"),
        }
        for name, own in places.items():
            features = own.features(images)
            dense, output = JacobianOperator(own, features).dense()[0].double(), own(features).reshape(-1, 3).double()
            rows.setdefault(name, []).append(points(dense, output, sky[index]))
        print(f"scene {index + 1} of {options.scenes}", flush=True)
        means = {name: summary(own) for name, own in rows.items()}
        save("vggt_spectra_cpu", {**content, "means": means, "rows": rows}, options.out)
    for name, own in means.items():
        for key, value in own.items():
            print(f"{name:14s} {key:50s} {value['mean']:9.4f} ± {value['se']:.4f}")


if __name__ == "__main__":
    main()
