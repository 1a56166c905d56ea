"""Accuracy per product on real Jacobians: how far kappa(20) and the trace are from the truth, method by method.

    python benchmarks/accuracy.py                          # DINOv2 ViT-S/14 CLS, layers 2 and 10, 8 images, this CPU
    python benchmarks/accuracy.py --layers 10 --limit 2

For each image J is formed once (M VJPs) and every method then multiplies with the same explicit matrix, so only the
method differs. Errors of kappa use the exact trace: they are truncation alone. "literal" takes the leading columns
of the last QR, as the paper's Algorithm 2 does; "Ritz" rotates them first. A pair is one JVP and one VJP.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measure import machine, save
from torch import Tensor

import pullback as pb
from pullback.operators import DenseOperator
from pullback.randnla import (
    Estimate,
    Streams,
    Svd,
    block_krylov,
    deflated_hutchinson,
    exact_svd,
    hutchinson,
    power_iteration,
)

RANK = 20
TRACE_PROBES = 100
SHARED = Path(__file__).resolve().parents[2] / "shared"

METHODS: dict[str, Callable[..., Svd]] = {
    "power, r0 = 20, q = 2, literal (paper default)": partial(power_iteration, power_iters=2, sketch_width=20),
    "power, r0 = 30, q = 3, literal": partial(power_iteration, power_iters=3, sketch_width=30),
    "power, r0 = 30, q = 3, Ritz": partial(power_iteration, power_iters=3, sketch_width=30, rayleigh_ritz=True),
    "block Krylov, b = 10, depth 5": partial(block_krylov, block=10, depth=5),
    "block Krylov, b = 10, depth 9": partial(block_krylov, block=10, depth=9),
    "block Krylov, b = 15, depth 7": partial(block_krylov, block=15, depth=7),
    "block Krylov, b = 10, depth 12": partial(block_krylov, block=10, depth=12),
    "block Krylov, b = 20, depth 6": partial(block_krylov, block=20, depth=6),
}

# notes/findings.md, section 3: {layer: mean error}. Its block Krylov multiplied the basis by J once more at
# the end, so its 90 pairs reach depth 6 and its 120 pairs depth 4; here the images of the basis are kept.
FINDINGS: dict[str, dict[int, float]] = {
    "power, r0 = 20, q = 2, literal (paper default)": {2: 2.4e-2, 10: 2.6e-2},
    "power, r0 = 30, q = 3, Ritz": {2: 1.5e-3, 10: 3.5e-3},
    "block Krylov, b = 10, depth 9": {2: 1.0e-4, 10: 5.1e-4},
    "block Krylov, b = 20, depth 6": {2: 2.7e-5, 10: 2.0e-4},
    "trace: Hutchinson": {2: 1.9e-2, 10: 0.9e-2},
    "trace: deflated by power": {2: 0.65e-2, 10: 0.37e-2},
}


def measure_matrix(matrix: Tensor, image: int, seeds: range) -> dict[str, list[tuple[float, float]]]:
    """For one J [M, N*D]: method -> (signed error, pairs) per seed; errors of the trace are relative."""
    op = DenseOperator(matrix)
    exact = exact_svd(op, RANK)
    total = exact.spectrum.double().square().sum()
    kappa = exact.singular_values.double().square().sum() / total
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in seeds:
        found = {}
        for name, method in METHODS.items():
            found[name] = svd = method(op, RANK, streams=Streams.from_seed(seed, 1, op.device, first=image))
            error = svd.singular_values.double().square().sum() / total - kappa
            errors[name].append((error.item(), svd.products.pairs))
        streams = Streams.from_seed(seed + 1000, 1, op.device, first=image)
        for name, estimate in {
            "trace: Hutchinson": hutchinson(op, num_probes=TRACE_PROBES, streams=streams),
            "trace: deflated by power": _deflated(op, found["power, r0 = 20, q = 2, literal (paper default)"], streams),
            "trace: deflated by Krylov": _deflated(op, found["block Krylov, b = 10, depth 9"], streams),
        }.items():
            errors[name].append(((estimate.value.item() - total.item()) / total.item(), TRACE_PROBES / 2))
    return errors


def _deflated(op: DenseOperator, svd: Svd, streams: Streams) -> Estimate:
    return deflated_hutchinson(op, svd.basis, svd.image, num_probes=TRACE_PROBES, streams=streams)


def measure_layer(model: str, layer: int, images_at: str, limit: int, seeds: range, device: str) -> list[dict]:
    """One row per method: mean absolute error and bias over images and seeds."""
    probe = pb.load_probe(model, decoder="cls", layer=layer, device=device)
    features = probe.features(probe.load_images(images_at, limit=limit))
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for image in range(len(features)):
        begun = time.perf_counter()
        matrix = pb.JacobianOperator(probe, features[image : image + 1]).dense()[0]
        for name, found in measure_matrix(matrix, image, seeds).items():
            errors[name] += found
        print(f"L{layer:02d} image {image + 1}/{len(features)}: {time.perf_counter() - begun:.0f} s", flush=True)
    return [
        {
            "method": name,
            "layer": layer,
            "pairs": found[0][1],
            "mean_abs_error": statistics.fmean(abs(error) for error, _ in found),
            "range_over_images": [min(abs(error) for error, _ in found), max(abs(error) for error, _ in found)],
            "bias": statistics.fmean(error for error, _ in found),
            "findings": FINDINGS.get(name, {}).get(layer),
        }
        for name, found in errors.items()
    ]


def print_table(rows: list[dict]) -> None:
    layers = sorted({row["layer"] for row in rows})
    head = "".join(f"{f'L{layer:02d}':>10}{'bias':>10}{'findings':>10}" for layer in layers)
    print(f"\n{'method':<48}{'pairs':>6}{head}")
    for name in dict.fromkeys(row["method"] for row in rows):
        own = {row["layer"]: row for row in rows if row["method"] == name}
        cells = "".join(
            f"{own[layer]['mean_abs_error']:>10.1e}{own[layer]['bias']:>+10.1e}{_or_dash(own[layer]['findings']):>10}"
            for layer in layers
        )
        print(f"{name:<48}{next(iter(own.values()))['pairs']:>6.0f}{cells}")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHARED / "models" / "dinov2-small"))
    parser.add_argument("--images", default=str(SHARED / "data" / "imagenet_val" / "diag"))
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--limit", type=int, default=8, help="images per layer")
    parser.add_argument("--seeds", type=int, default=1, help="repetitions per image, seeds 0, 1, ...")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder of accuracy_DEVICE.json (default: results/)")
    args = parser.parse_args()
    rows = []
    for layer in args.layers:
        rows += measure_layer(args.model, layer, args.images, args.limit, range(args.seeds), args.device)
    print_table(rows)
    settings = {"model": Path(args.model).name, "rank": RANK, "images": args.limit, "seeds": list(range(args.seeds))}
    device = torch.device(args.device)
    print("written:", save(f"accuracy_{device.type}", machine(device) | settings | {"rows": rows}, args.out))


if __name__ == "__main__":
    main()
