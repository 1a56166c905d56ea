"""How long a diagnosis takes from nothing: a new process, imports, loading, images, DINOv2-B CLS at one layer.

    python benchmarks/cold_start.py --images photos/ --limit 50 --device cuda

Random weights (the time does not depend on them). "python" is load_probe + load_images + diagnose; "command" is
`pullback diagnose`, which also prints its table and draws the figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import machine, random_dinov2, save

SCRIPT = """
import sys
import pullback as pb
model, images, layer, limit, device = sys.argv[1:]
probe = pb.load_probe(model, "cls", int(layer), device=device)
print(pb.diagnose(probe, pb.load_images(images, limit=int(limit)), rank=20).kappa)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", choices=["small", "base"])
    parser.add_argument("--images", required=True)
    parser.add_argument("--limit", default="50")
    parser.add_argument("--layer", default="10")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        random_dinov2(options.size).save_pretrained(f"{folder}/model")
        python = [f"{folder}/model", options.images, options.layer, options.limit, options.device]
        command = [f"{folder}/model", "--images", options.images, "--layer", options.layer, "--limit", options.limit]
        runs = {
            "python": [sys.executable, "-c", SCRIPT, *python],
            "command": [sys.executable, "-m", "pullback", "diagnose", *command]
            + ["--device", options.device, "--out", f"{folder}/out"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repeats):
            for name, arguments in runs.items():
                begun = time.perf_counter()
                subprocess.run(arguments, check=True, capture_output=True)
                seconds[name].append(round(time.perf_counter() - begun, 2))
    print(seconds)
    settings = {"model": f"DINOv2 {options.size}", "layer": options.layer, "images": options.limit}
    device = torch.device(options.device)
    print(save(f"cold_start_{device.type}", machine(device) | settings | {"seconds": seconds}, options.out))


if __name__ == "__main__":
    main()
