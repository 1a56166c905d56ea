"""Diagnosis of VGGT's heads: does it fit, how long does it take, how many products does it spend?

    python benchmarks/vggt.py                                  # a small VGGT on this CPU, a few seconds
    python benchmarks/vggt.py --size full --device cuda        # 1.2 billion parameters, 2 views of 224 px, layer 16

Weights are random (created on the device), so times and memory are those of `facebook/VGGT-1B` and the spectra are not;
what depends on them is how soon the Krylov space of the depth map converges. Per head: seconds of the features, of one
JVP and one VJP in a block, of the whole diagnosis (kappa_cap, effective rank, CV), its products, and the peak memory.
Layers may also be "hooks": the input of the heads (x_vis).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import LAYER_SCALE, machine, milliseconds, random_vggt, save
from torch import Tensor

import pullback as pb

SMALL = dict(
    img_size=56,
    patch_embed="conv",
    embed_dim=32,
    depth=4,
    num_heads=2,
    camera_trunk_depth=2,
    dpt_features=16,
    dpt_out_channels=(8, 8, 16, 16),
    hook_layers=(0, 1, 2, 3),
)
SIZES: dict[str, dict[str, Any]] = {
    "small": {"config": SMALL, "layers": ["1"], "pixels": 56},
    "full": {"config": {}, "layers": ["16"], "pixels": 224},
}
DECODERS = ("camera", "points", "depth")


def probe_at(model: pb.VGGT, decoder: str, layer: str) -> pb.ProbeMap:
    return pb.multi_layer_probe(model, decoder) if layer == "hooks" else pb.load_probe(model, decoder, int(layer))


def seconds(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    _wait(device)
    begun = time.perf_counter()
    result = function()
    _wait(device)
    return time.perf_counter() - begun, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_of_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gigabytes(device: torch.device) -> float:
    """On a GPU since `start_of_peak`, weights included; on a CPU of the process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def product_times(probe: pb.ProbeMap, features: Tensor, count: int, precision: str) -> dict[str, Any]:
    """Milliseconds per product of one scene, in a block of ``count``."""
    operator = pb.JacobianOperator(probe, features[:1], precision=precision)
    generator = torch.Generator(features.device).manual_seed(0)
    v = torch.randn(1, operator.cols, count, generator=generator, device=features.device)
    w = torch.randn(1, operator.rows, count, generator=generator, device=features.device)
    times = milliseconds({"jvp": lambda: operator @ v, "vjp": lambda: operator.T @ w}, features.device, rounds=3)
    return {
        "outputs": operator.rows,
        "inputs": operator.cols,
        "block": count,
        "chunk": operator.chunk_size,
        "bytes planned per tangent": operator.linearization.bytes_per_tangent,
        **{f"{name} ms": value / count for name, value in times.items()},
    }


def measure(model: pb.VGGT, images: Tensor, decoder: str, layer: str, *, rank: int, precision: str, count: int) -> dict:
    """One row: the diagnosis of ``decoder`` at ``layer`` for scenes [B, S, 3, H, W]."""
    device = images.device
    start_of_peak(device)
    probe = probe_at(model, decoder, layer)
    features_seconds, features = seconds(lambda: probe.features(images), device)
    row: dict[str, Any] = {"decoder": decoder, "layer": layer, "features s": features_seconds}
    row |= product_times(probe, features, count, precision)
    del features
    begun = time.perf_counter()
    report = pb.diagnose(probe, images, rank=rank, precision=precision, convergence_samples=0)
    _wait(device)
    sample = report.samples[0]
    return row | {
        "diagnosis s": time.perf_counter() - begun,
        "method": report.method,
        "jvps per scene": sample.products.jvp,
        "vjps per scene": sample.products.vjp,
        "peak GB": peak_gigabytes(device),
        "kappa": report.kappa.mean,
        "kappa se": report.kappa.estimation_se,
        "effective rank": report.r_eff_slq.mean,
        "effective rank se": report.r_eff_slq.estimation_se,
        "cv": report.cv.mean,
        "cv null": report.cv_null,
        "regime": report.regime.label,
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['decoder']:10s} {row['layer']:>5s}  M {row['outputs']:6d}  {row['method']:6s} "
        f"{row['jvps per scene']:5d} JVP {row['vjps per scene']:5d} VJP a scene  {row['diagnosis s']:7.1f} s  "
        f"(jvp {row['jvp ms']:.2f} ms, vjp {row['vjp ms']:.2f} ms in blocks of {row['block']})  "
        f"peak {row['peak GB']:.1f} GB  kappa {row['kappa']:.3f}  r_eff {row['effective rank']:.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", nargs="+", default=None, help="numbers or hooks (default: a middle layer)")
    parser.add_argument("--decoders", nargs="+", default=list(DECODERS))
    parser.add_argument("--scenes", type=int, default=1)
    parser.add_argument("--views", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=None)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--tangents", type=int, default=16, help="of a timed block")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32"])
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    options = parser.parse_args(arguments)
    device, size = torch.device(options.device), SIZES[options.size]
    built, model = seconds(lambda: random_vggt(size["config"], device), device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    pixels = options.pixels or size["pixels"]
    generator = torch.Generator(device).manual_seed(0)
    images = torch.rand(options.scenes, options.views, 3, pixels, pixels, generator=generator, device=device)
    print(f"VGGT, {parameters / 1e6:.1f} M random parameters, made in {built:.1f} s on {device}; {list(images.shape)}")
    rows = []
    for layer in options.layers or size["layers"]:
        for decoder in options.decoders:
            rows.append(
                measure(
                    model,
                    images,
                    decoder,
                    layer,
                    rank=options.rank,
                    precision=options.precision,
                    count=options.tangents,
                )
            )
            print(line(rows[-1]), flush=True)
    path = save(
        f"vggt_{options.size}_{device.type}",
        {
            "machine": machine(device),
            "model": f"VGGT {options.size}, random weights, seed 0, layer scales {LAYER_SCALE}",
            "parameters": parameters,
            "images": list(images.shape),
            "rank": options.rank,
            "precision": options.precision,
            "rows": rows,
        },
        options.out,
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
