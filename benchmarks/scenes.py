"""How many procedural scenes a device draws in a second, everything included: pictures, depth, normals, instances.

python benchmarks/scenes.py                              # this CPU, all its cores
python benchmarks/scenes.py --device cuda --batch 1024
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from measure import machine, save

from pullback.scenes.render import render


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="scenes per call")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)

    seconds = [_seconds(arguments, device, turn) for turn in range(arguments.rounds + 1)][1:]  # the first warms up
    images = arguments.batch * arguments.views
    content = {
        "what": "pullback.scenes.render.render",
        "batch": arguments.batch,
        "views": arguments.views,
        "size": arguments.size,
        "rounds": arguments.rounds,
        "images_per_second": round(images / statistics.median(seconds), 1),
        "slowest": round(images / max(seconds), 1),
        "fastest": round(images / min(seconds), 1),
        "machine": machine(device),
    }
    if device.type == "cuda":
        content["peak_gpu_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    print(
        f"{content['images_per_second']} images/s of {arguments.size}×{arguments.size} "
        f"({content['slowest']} to {content['fastest']}), {content['machine']['device']}"
    )
    print(f"written: {save(f'scenes_{device.type}', content, arguments.out)}")


def _seconds(arguments: argparse.Namespace, device: torch.device, turn: int) -> float:
    """One call with seeds of its own, until the pictures are there."""
    seeds = torch.arange(arguments.batch) + turn * arguments.batch
    begun = time.perf_counter()
    render(seeds, size=arguments.size, views=arguments.views, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
