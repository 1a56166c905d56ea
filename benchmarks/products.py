"""Speed of Jacobian products against a batched forward and against what one would write first.

    python benchmarks/products.py                        # ViT-S, this CPU
    python benchmarks/products.py --size base --device cuda --precision tf32

Rivals, all in the same run, on the same probe map (CLS embedding after the final norm, 224 px):
  loop        one `torch.func.jvp` per tangent; one `torch.func.vjp`, then one pullback per cotangent
  vmap        `vmap` over the same two functions
  linearize   `vmap` over `torch.func.linearize` (forward mode only)
Times are per product in milliseconds; "x fwd" divides by a batched forward of psi_l that does the same work (as many
feature maps as tangents; CLS row only in the last block), "x full" by one that computes every row of the last block.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from measure import machine, milliseconds, random_dinov2, save
from torch import Tensor

import pullback as pb
from pullback.operators.execution import CapturedFunction, matmul_precision
from pullback.operators.linearization import differentiable_attention
from pullback.probes import ProbeMap


def rivals(probe: ProbeMap, features: Tensor, tangents: Tensor, cotangents: Tensor) -> dict[str, Callable[[], object]]:
    """What one would write first; tangents [B, K, N, D], cotangents [B, K, M], every row of every block."""
    blocks = probe.backbone.blocks[probe.layer + 1 :]

    def psi(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return probe.backbone.norm(x)[:, 0]

    pullback = torch.func.vjp(psi, features)[1]
    with warnings.catch_warnings():  # torch warns about its own constant folding
        warnings.simplefilter("ignore")
        linear = torch.func.linearize(psi, features)[1]  # traced once, outside the clock

    def jvp(v: Tensor) -> Tensor:
        return torch.func.jvp(psi, (features,), (v,))[1]

    return {
        "jvp loop": lambda: [jvp(v) for v in tangents.unbind(1)],
        "jvp vmap": lambda: torch.func.vmap(jvp, 1)(tangents),
        "jvp linearize": lambda: torch.func.vmap(linear, 1)(tangents),
        "vjp loop": lambda: [pullback(w)[0] for w in cotangents.unbind(1)],
        "vjp vmap": lambda: torch.func.vmap(pullback, 1)(cotangents)[0],
    }


def full_rows(probe: ProbeMap) -> ProbeMap:
    """The same probe map without the knowledge that only the class token is read."""
    return replace(probe, decoder=replace(probe.decoder, rows=None))


def measure_case(probe: ProbeMap, count: int, images: int, precision: str, with_rivals: bool) -> dict:
    device = probe.device
    generator = torch.Generator(device).manual_seed(0)
    features = probe.features(torch.randn(images, 3, 224, 224, generator=generator, device=device))
    operator = pb.JacobianOperator(probe, features, precision=precision, capture=False)
    columns = torch.randn(images, operator.cols, count, generator=generator, device=device)
    rows = torch.randn(images, operator.rows, count, generator=generator, device=device)
    many = features.repeat(count, 1, 1)
    many += 0.01 * torch.randn(many.shape, generator=generator, device=device)
    full = full_rows(probe)
    functions: dict[str, Callable[[], object]] = {
        "forward": lambda: probe(many),
        "full forward": lambda: full(many),
        "jvp": lambda: operator @ columns,
        "vjp": lambda: operator.T @ rows,
    }
    case: dict = {"layer": probe.layer, "tangents": count, "images": images, "precision": precision}
    with torch.no_grad(), matmul_precision(precision):
        if device.type == "cuda":
            captured = pb.JacobianOperator(probe, features, precision=precision, capture=True)
            begun = time.perf_counter()
            _ = captured @ columns, captured.T @ rows
            torch.cuda.synchronize()
            case["capture seconds (both products)"] = time.perf_counter() - begun
            forward = CapturedFunction(probe, many)
            functions["captured forward"] = lambda: forward(many)
            functions["captured jvp"] = lambda: captured @ columns
            functions["captured vjp"] = lambda: captured.T @ rows
        if with_rivals:
            stack = columns.mT.unflatten(-1, features.shape[1:]).contiguous()
            with differentiable_attention():
                for name, function in rivals(probe, features, stack, rows.mT.contiguous()).items():
                    functions[name] = with_math_attention(function)
        times = milliseconds(functions, device, rounds=5)
    return case | {f"{name} ms": value / (count * images) for name, value in times.items()}


def with_math_attention(function: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with differentiable_attention():
            return function()

    return run


def precision_errors(probe: ProbeMap, precisions: list[str], count: int = 8) -> dict[str, dict[str, float]]:
    """Relative error of the products against float64, on one image."""
    device = probe.device
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator(device).manual_seed(0), device=device)
    features = probe.features(images)
    model = probe.backbone.model.double()
    exact_probe = pb.load_probe(model, "cls", probe.layer)
    exact = pb.JacobianOperator(exact_probe, features.double())
    generator = torch.Generator(device).manual_seed(1)
    v = torch.randn(1, exact.cols, count, generator=generator, device=device)
    w = torch.randn(1, exact.rows, count, generator=generator, device=device)
    truth = exact @ v.double(), exact.T @ w.double()
    model.float()
    errors = {}
    for precision in precisions:
        operator = pb.JacobianOperator(probe, features, precision=precision)
        got = operator @ v, operator.T @ w
        errors[precision] = {
            name: float((a.double() - b).norm() / b.norm())
            for name, a, b in zip(("jvp", "vjp"), got, truth, strict=True)
        }
    return errors


def report(case: dict) -> str:
    forward, full = case["forward ms"], case["full forward ms"]
    line = f"L{case['layer']:02d} {case['precision']:7s} {case['images']} img x {case['tangents']:3d} tangents: "
    line += f"fwd {forward:.3f} ms  jvp {case['jvp ms'] / forward:.2f}x fwd ({case['jvp ms'] / full:.2f}x full)  "
    line += f"vjp {case['vjp ms'] / forward:.2f}x fwd ({case['vjp ms'] / full:.2f}x full)"
    if "captured jvp ms" in case:
        base = case["captured forward ms"]
        line += f"  | captured: jvp {case['captured jvp ms'] / base:.2f}x vjp {case['captured vjp ms'] / base:.2f}x"
        line += f" (capture {case['capture seconds (both products)']:.2f} s)"
    best = {kind: min(case[f"{kind} ms"], case.get(f"captured {kind} ms", float("inf"))) for kind in ("jvp", "vjp")}
    for name in ("jvp loop", "jvp vmap", "jvp linearize", "vjp loop", "vjp vmap"):
        if f"{name} ms" in case:
            line += f"\n      {name}: {case[f'{name} ms'] / best[name[:3]]:.1f}x slower than ours"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=["small", "base", "large"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--tangents", type=int, default=20)
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=["float32", "tf32", "bf16"])
    parser.add_argument("--quick", action="store_true", help="without the scaling table")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    options = parser.parse_args()
    device = torch.device(options.device)
    model = random_dinov2(options.size).to(device)
    cases = []
    for layer in options.layers:
        probe = pb.load_probe(model, "cls", layer)
        for precision in options.precision:
            cases.append(measure_case(probe, options.tangents, 1, precision, with_rivals=True))
            print(report(cases[-1]), flush=True)
        if not options.quick:
            for images, factor in ((1, 2), (1, 4), (2, 1), (4, 1)):
                count = options.tangents * factor
                cases.append(measure_case(probe, count, images, options.precision[-1], with_rivals=False))
                print(report(cases[-1]), flush=True)
    errors = {}
    for layer in options.layers:
        errors[f"L{layer:02d}"] = precision_errors(pb.load_probe(model, "cls", layer), options.precision)
        print(f"L{layer:02d} relative error against float64: {errors[f'L{layer:02d}']}")
    path = save(
        f"products_{options.size}_{device.type}",
        {
            "machine": machine(device),
            "model": f"DINOv2 {options.size}, random weights, seed 0",
            "decoder": "cls",
            "cases": cases,
            "relative_errors": errors,
        },
        options.out,
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
