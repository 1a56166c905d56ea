"""How many images a device turns into targets in a second, what that costs in products and bytes, and how exact it is.

    python benchmarks/targets.py                                    # this CPU: DINOv2-S, with the naive loop
    python benchmarks/targets.py --device cuda --precision tf32 float32
    python benchmarks/targets.py --cases /path/to/dinov2-small:10 --pictures /path/to/images

A case is a size (random weights, seed 0) or a model's folder, and a layer; the decoder is cls, 224 px, rank 20. A
Krylov run grows until it is accurate, so its products depend on the spectrum: only real weights tell what real weights
cost. "targets" is from pixels in memory to targets, "end to end" from JPEG files to a store on disk. The naive loop, on
a CPU, is one `torch.func.vjp` and a pullback per row of J, then a dense SVD. Errors are against float32 exact targets.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, random_dinov2, save
from PIL import Image
from torch import Tensor

import pullback as pb
from pullback.data import open_source, read_crop
from pullback.operators.linearization import differentiable_attention
from pullback.probes import ProbeMap
from pullback.targets.recipe import Targets, targets_of
from pullback.targets.store import StoreWriter
from pullback.targets.table import Shard

RANK = 20
CASES = {"cpu": ["small:10"], "cuda": ["base:10", "base:2", "small:10", "small:6", "small:3"]}
SIZES = ("small", "base", "large")


def load(case: str, device: torch.device) -> ProbeMap:
    model, _, layer = case.rpartition(":")
    if model in SIZES:
        return pb.load_probe(random_dinov2(model).to(device), "cls", int(layer))
    return pb.load_probe(model, "cls", int(layer), device=device)


def pixels_for(probe: ProbeMap, count: int, pictures: str | None) -> Tensor:
    if pictures is not None:
        return probe.load_images(pictures, 224, limit=count).to(probe.device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 224, 224, generator=generator).to(probe.device)


def seconds(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun, result


def naive(probe: ProbeMap, features: Tensor) -> Tensor:
    """imp* [N] of one image as one would write it first: J row by row, then its SVD."""
    psi = probe.bind(features)
    with differentiable_attention():
        output, pullback = torch.func.vjp(psi, features.as_subclass(Tensor))
        rows = [pullback(row[None])[0].flatten() for row in torch.eye(output.shape[1], device=features.device)]
    _, values, right = torch.linalg.svd(torch.stack(rows), full_matrices=False)
    leading = values[:RANK, None] * right[:RANK]
    return leading.unflatten(1, features.shape[1:]).square().sum((0, 2)).sqrt()


def errors(found: Targets, exact: Targets) -> dict[str, float]:
    """Of imp*: in norm, and of the median and the worst token; of the block norms in their own standard errors."""
    count = len(exact)
    difference = (found.importance[:count] - exact.importance).double()
    relative = difference.abs() / exact.importance
    energy, truth = found.block_energy, exact.block_energy.value
    within = (energy.value[:count] - truth).abs() <= 2 * energy.se[:count]
    return {
        "imp, relative, in norm": float((difference.norm(dim=1) / exact.importance.double().norm(dim=1)).mean()),
        "imp, relative, median token": float(relative.median(1).values.mean()),
        "imp, relative, worst token": float(relative.amax(1).mean()),
        "block norms, relative se": float((energy.se / energy.value).mean()),
        "block norms within 2 se": float(within.double().mean()),
        "kappa": float((found.kappa.value[:count] - exact.kappa.value).abs().mean()),
    }


def measure(probe: ProbeMap, pixels: Tensor, method: str, precision: str, exact: Targets, rounds: int) -> dict:
    def run() -> Targets:
        return targets_of(probe, probe.features(pixels), RANK, method, precision=precision)

    if probe.device.type == "cuda":
        run()  # warms up
    times, found = [], None
    for _ in range(rounds):
        spent, found = seconds(run, probe.device)
        times.append(spent)
    assert found is not None
    best = sorted(times)[len(times) // 2]
    forward = seconds(lambda: probe.features(pixels), probe.device)[0]
    case = {
        "method": method,
        "precision": precision,
        "images": len(pixels),
        "images_per_second": len(pixels) / best,
        "seconds_per_image": best / len(pixels),
        "of which forward": forward / len(pixels),
        "products_per_image": {"jvp": found.products.jvp, "vjp": found.products.vjp},
        "kappa": float(found.kappa.value.mean()),
        "errors": errors(found, exact),
    }
    if probe.device.type == "cuda":
        case["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return case


def end_to_end(probe: ProbeMap, count: int, method: str, precision: str, pictures: str | None) -> dict:
    """Files to store; without pyarrow the store is left out and its rows are kept in memory."""
    options: dict[str, Any] = {"rank": RANK, "size": 224, "method": method, "precision": precision, "limit": count}
    with tempfile.TemporaryDirectory() as folder:
        photos = pictures or str(draw(Path(folder) / "photos", count))
        if find_spec("pyarrow") is None:
            spent, (table, _) = seconds(lambda: pb.compute_table(probe, photos, **options), probe.device)
            return {"store": False, "images_per_second": len(table) / spent}
        out = Path(folder) / "store"
        spent, store = seconds(lambda: pb.compute_targets(probe, photos, out=out, **options), probe.device)
        return {"store": True, "images_per_second": len(store) / spent, "bytes_per_row": bytes_per_row(store)}


def bytes_per_row(store: pb.TargetStore, rows: int = 256) -> float:
    """Of a full shard of this store, its numbers drawn anew so that none of them can be compressed by its twin."""
    table = store.read().select([0] * rows)
    columns = {
        field.name: torch.rand_like(value)
        for field in fields(table)
        if isinstance(value := getattr(table, field.name), Tensor)
    }
    names = [f"n{number % 1000:08d}/n{number:08d}_{number:06d}.JPEG" for number in range(rows)]
    hashes = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    table = replace(table, keys=tuple(names), image_sha256=tuple(hashes), **columns)
    with tempfile.TemporaryDirectory() as folder:
        writer = StoreWriter.claim(Path(folder), store.config)
        return writer.write(Shard(0, table, (), 1.0)).stat().st_size / rows


def reading_milliseconds(probe: ProbeMap) -> float:
    """Of one core, to turn a 500 x 375 JPEG into pixels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        items = list(open_source(draw(Path(folder) / "photos", 20)))
        begun = time.process_time()
        for item in items:
            read_crop(item.read(), None, probe.pixel_format(224))
        spent = time.process_time() - begun
    torch.set_num_threads(threads)
    return 1e3 * spent / len(items)


def draw(folder: Path, count: int) -> Path:
    """Smooth colours with some grain, at the usual size of a photograph on the web."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(count):
        small = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        photo = np.asarray(Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC))
        photo = (photo + generator.normal(0, 8, photo.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(photo).save(folder / f"{number:05d}.jpg", quality=90)
    return folder


def against_naive(probe: ProbeMap, pixels: Tensor) -> dict:
    """One image each, in turns, by the method that "auto" takes."""
    features = probe.features(pixels[:1])
    ours, theirs = [], []
    for _ in range(2):
        spent, found = seconds(lambda: targets_of(probe, features, RANK), probe.device)
        ours.append(spent)
        spent, importance = seconds(lambda: naive(probe, features), probe.device)
        theirs.append(spent)
    error = float((found.importance[0] - importance).norm() / importance.norm())
    times = {"seconds": min(ours), "naive_seconds": min(theirs), "ratio": min(theirs) / min(ours)}
    return times | {"method": found.method, "difference": error}


def report(case: str, row: dict) -> str:
    products, error = sum(row["products_per_image"].values()), row["errors"]["imp, relative, median token"]
    line = f"{case:12s} {row['method']:7s} {row['precision']:8s} {row['images_per_second']:8.2f} images/s, "
    return line + f"{products} products, imp* of the median token off by {error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", default=None, help="size:layer or folder:layer")
    parser.add_argument("--methods", nargs="+", default=["exact", "krylov"])
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=["float32", "tf32", "bf16"])
    parser.add_argument("--images", type=int, default=None, help="per case (256 on a GPU, 2 on a CPU)")
    parser.add_argument("--pictures", default=None, help="a folder of real images")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    parser.add_argument("--name", default=None, help="of the JSON (default targets_<device>)")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    count, rounds = options.images or (256 if on_gpu else 2), options.rounds or (3 if on_gpu else 1)
    results: dict[str, Any] = {}
    for asked in options.cases or CASES.get(device.type, CASES["cpu"]):
        probe, case = load(asked, device), Path(asked).name
        pixels = pixels_for(probe, count, options.pictures)
        exact = targets_of(probe, probe.features(pixels[: 8 if on_gpu else 1]), RANK, "exact")
        rows = []
        for method in options.methods:
            for precision in options.precision:
                rows.append(measure(probe, pixels, method, precision, exact, rounds))
                print(report(case, rows[-1]), flush=True)
        fastest = max(rows, key=lambda row: row["images_per_second"])
        whole = end_to_end(probe, count, fastest["method"], fastest["precision"], options.pictures)
        print(f"{case:12s} end to end {whole}", flush=True)
        results[case] = {"targets": rows, "end to end": whole, "reading_ms": reading_milliseconds(probe)}
        if not on_gpu:
            results[case]["naive"] = against_naive(probe, pixels)
            print(f"{case:12s} naive loop {results[case]['naive']['ratio']:.1f}x slower", flush=True)
    content = {"machine": machine(device), "rank": RANK, "size": 224, "decoder": "cls", "cases": results}
    content["weights"] = "real" if options.cases and "/" in options.cases[0] else "random, seed 0"
    print(f"written to {save(options.name or f'targets_{device.type}', content, options.out)}")


if __name__ == "__main__":
    main()
