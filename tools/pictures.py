"""Make the pictures of the guides again, with the commands that their captions state.

    python tools/pictures.py                 # all of them, minutes on two cores
    python tools/pictures.py pruning vggt    # some of them

Everything runs on the embedded models and drawn scenes; nothing is downloaded.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
BENCHMARKS = IMAGES.parents[1] / "benchmarks"
DEMO = "pullback demo --out demo-out"
COMMANDS: dict[str, tuple[list[str], str]] = {
    "scenes": ([DEMO], "demo-out/scenes/scenes.png"),
    "diagnose": (
        [
            DEMO,
            "pullback diagnose tiny-scenes --decoder depth-6x6 --layer 8 --rank 10 --images demo-out/images "
            "--out found",
        ],
        "found/tokens_L08.png",
    ),
    "geodesic": ([f"{BENCHMARKS}/plot_geodesic.py --out geodesic.png"], "geodesic.png"),
    "look": (
        [
            DEMO,
            "pullback look tiny-scenes demo-out/images/scene-02.png --decoder cls --decoder depth-6x6 --layer 6 "
            "--layer 10 --out found",
        ],
        "found/scene-02.png",
    ),
    "search": (
        [
            "-m pullback.scenes.pictures --count 240 --views 1 --size 224 --out drawn",
            "-m pullback.scenes.pictures --count 40 --views 1 --size 224 --first 1000 --out others",
            "pullback train drm tiny-scenes --decoder depth-8x8 --layer 8 --size 112 --images drawn --held-out others "
            "--target-images 40 --steps 300 --out drm",
            "pullback index add gallery drawn --drm drm",
            "pullback search gallery others/scene-1007/view-00.png --k 5 --out found",
        ],
        "found/matches.png",
    ),
    "pruning": (
        [
            DEMO,
            "pullback prune tiny-scenes --decoder depth --stages 4 --scores norm --preset best,paper,bipartite "
            "--ratios 0.1,0.5 --time none --images demo-out/images --out found",
        ],
        "found/tokens.png",
    ),
    "vggt": (
        [
            "-m pullback.scenes.pictures --count 2 --views 2 --out drawn",
            "pullback diagnose tiny-views --decoder camera --layer 4 --images drawn --out found",
        ],
        "found/tokens_L04.png",
    ),
}
"""Name of the picture: commands, and the file that they write."""


def make(name: str) -> None:
    commands, result = COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            print(f"[pictures] {name}: {command.removeprefix('-m ')}", flush=True)
            words = shlex.split(command)
            start = ["-m", "pullback"] if words[0] == "pullback" else words[:2]
            rest = words[1:] if words[0] == "pullback" else words[2:]
            subprocess.run([sys.executable, *start, *rest], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        shutil.copyfile(Path(folder) / result, IMAGES / f"{name}.png")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or COMMANDS:
        make(chosen)
