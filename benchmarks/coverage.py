"""Do the printed error bars hold? Numbers of a Jacobian in float32, TF32 and bf16 against float64, in standard errors.

    python benchmarks/coverage.py --device cuda                    # DINOv2 ViT-S/14 CLS, 3 layers, 8 random images
    python benchmarks/coverage.py --device cuda --model MODEL --images FOLDER --layers 2 6 10
    python benchmarks/coverage.py                                  # a CPU: one layer, 2 images of 70 px

J is taken at the same features by the same code, so only the arithmetic of the products differs. "within 2 se" is the
share of numbers whose truth lies in value ± 2 se (95 % are promised, 90 % demanded), "error / se" the median of
|error| / se: far below 0.7 the bars are wider than they need to be. With the method "exact" the error is round-off
alone, and "needed" is the smallest floor (`operators.execution.ROUND_OFF`) that would have covered 90 %.

On a CPU, bf16 is real and TF32 is emulated: wherever TF32 is allowed, the factors of matrix products and convolutions
are rounded to its 10 bits of mantissa.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import machine, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pullback as pb
from pullback.probes import ProbeMap
from pullback.targets.recipe import targets_of

SHARED = Path(__file__).resolve().parents[2] / "shared"
PRECISIONS = ("float32", "tf32", "bf16")
Estimates = dict[str, tuple[Tensor, Tensor]]  # quantity -> values and standard errors

_aten = torch.ops.aten
_FACTORS = {  # the places of their factors
    _aten.mm: (0, 1),
    _aten.bmm: (0, 1),
    _aten.addmm: (1, 2),
    _aten.baddbmm: (1, 2),
    _aten.convolution: (0, 1),
    _aten.convolution_backward: (0, 1, 2),
}


class EmulatedTF32(TorchDispatchMode):
    """Round as TF32 does, inside of ``with EmulatedTF32():`` and there wherever PyTorch is allowed to use TF32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.get_float32_matmul_precision() != "highest":
            places = _FACTORS.get(func.overloadpacket, ())
            args = tuple(_to_tf32(value) if place in places else value for place, value in enumerate(args))
        return func(*args, **(kwargs or {}))


def _to_tf32(value: Tensor) -> Tensor:
    """Nearest number with 10 bits of mantissa, ties to even; other types than float32 as they are."""
    if value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class AtFeatures:
    """A probe whose "images" are features already, so that every precision starts from the same ones."""

    def __init__(self, probe: ProbeMap) -> None:
        self._probe = probe

    def features(self, images: Tensor) -> Tensor:
        return images

    def __call__(self, features: Tensor) -> Tensor:
        return self._probe(features)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._probe, name)


def estimates(probe: ProbeMap, features: Tensor, rank: int, method: str, precision: str) -> Estimates:
    """Everything with an error bar that targets and diagnosis say of J at these features."""
    targets = targets_of(probe, features, rank, method, precision=precision)
    report = pb.diagnose(AtFeatures(probe), features, rank, method, precision=precision, convergence_samples=0)
    pairs = {
        "kappa, diagnosis": [sample.kappa[rank] for sample in report.samples],
        "effective rank": [sample.r_eff_slq for sample in report.samples],
        "effective rank, first r": [sample.r_eff_trunc for sample in report.samples],
        "CV": [sample.cv for sample in report.samples],
        "CV over patches": [sample.cv_patches for sample in report.samples],
    }
    columns = {name: torch.tensor(values, dtype=torch.float64).unbind(1) for name, values in pairs.items()}
    return {
        "block norms": (targets.block_energy.value.cpu(), targets.block_energy.se.cpu()),
        "total": (targets.total.value.cpu(), targets.total.se.cpu()),
        "kappa, targets": (targets.kappa.value.cpu(), targets.kappa.se.cpu()),
    } | {name: (values, errors) for name, (values, errors) in columns.items()}


def measure(
    probe: ProbeMap, features: Tensor, *, rank: int, method: str = "exact", precisions: Sequence[str] = PRECISIONS
) -> list[dict[str, Any]]:
    """One row for each precision and quantity, against the exact numbers in float64."""
    model = copy.deepcopy(probe.backbone.model).double()
    in_double = pb.load_probe(model, probe.decoder.name, probe.layer)
    truth = estimates(in_double, features.double(), rank, "exact", "float32")
    rows = []
    for precision in precisions:
        emulated = EmulatedTF32() if features.device.type == "cpu" else contextlib.nullcontext()
        with emulated:
            found = estimates(probe, features, rank, method, precision)
        rows += [
            {"layer": probe.layer, "precision": precision, "quantity": name, **_compared(*found[name], right)}
            for name, (right, _) in truth.items()
        ]
    return rows


def _compared(value: Tensor, se: Tensor, truth: Tensor) -> dict[str, Any]:
    error = value - truth
    relative = error / truth.abs().clamp_min(torch.finfo(truth.dtype).tiny)
    in_errors = error.abs() / se.clamp_min(torch.finfo(se.dtype).tiny)
    return {
        "count": error.numel(),
        "within_2_se": float((error.abs() <= 2 * se).double().mean()),
        "median_error_over_se": float(in_errors.median()),
        "median_relative_se": float((se / value.abs().clamp_min(torch.finfo(se.dtype).tiny)).median()),
        "median_relative_error": float(relative.abs().median()),
        "mean_relative_error": float(relative.mean()),
        "floor_needed": float(relative.abs().flatten().quantile(0.9)) / 2,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    titles = ("within 2 se", "error / se", "relative se", "error", "bias", "needed")
    print(f"\n{'layer':<6}{'precision':<10}{'quantity':<25}{'count':>6}" + "".join(f"{title:>13}" for title in titles))
    for row in rows:
        cells = f"{row['within_2_se']:>13.3f}{row['median_error_over_se']:>13.2f}{row['median_relative_se']:>13.1e}"
        cells += f"{row['median_relative_error']:>13.1e}{row['mean_relative_error']:>+13.1e}"
        print(
            f"L{row['layer']:02d}   {row['precision']:<10}{row['quantity']:<25}{row['count']:>6}{cells}"
            f"{row['floor_needed']:>13.1e}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default=str(SHARED / "models" / "dinov2-small"), help="name or folder")
    parser.add_argument("--decoder", default="cls")
    parser.add_argument("--images", default=None, help="file, folder or glob (default: pixels drawn at random)")
    parser.add_argument("--limit", type=int, default=None, help="images (default: 8, on a CPU 2)")
    parser.add_argument("--size", type=int, default=None, help="pixels (default: 224, on a CPU 70)")
    parser.add_argument("--layers", type=int, nargs="+", default=None, help="(default: 2 6 10, on a CPU 10)")
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--method", choices=("exact", "krylov"), default="exact")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=list(PRECISIONS))
    parser.add_argument("--commit", default=None, help="to be stored where the checkout has no history")
    parser.add_argument("--out", type=Path, default=None, help="folder of coverage_DEVICE.json (default: results/)")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    limit, size, layers = (2, 70, [10]) if device.type == "cpu" else (8, 224, [2, 6, 10])
    limit, size, layers = args.limit or limit, args.size or size, args.layers or layers
    rows = []
    for layer in layers:
        probe = pb.load_probe(args.model, decoder=args.decoder, layer=layer, device=args.device)
        if args.images is None:
            generator = torch.Generator().manual_seed(0)
            images = torch.randn(limit, 3, size, size, generator=generator).to(device)
        else:
            images = probe.load_images(args.images, limit=limit, size=size).to(device)
        features = probe.features(images)
        rows += measure(probe, features, rank=args.rank, method=args.method, precisions=args.precisions)
    print_table(rows)
    settings = {
        **({"commit": args.commit} if args.commit else {}),
        "model": Path(args.model).name,
        "decoder": args.decoder,
        "images": "random pixels" if args.images is None else Path(args.images).name,
        "count": len(images),
        "size": size,
        "rank": args.rank,
        "method": args.method,
        "tf32": "emulated" if device.type == "cpu" else "of the device",
    }
    print("written:", save(f"coverage_{device.type}", machine(device) | settings | {"rows": rows}, args.out))


if __name__ == "__main__":
    main()
