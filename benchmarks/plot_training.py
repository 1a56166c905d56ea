"""The losses of the run that made `tiny-scenes` or `tiny-views`, from its log: docs/images/tiny_scenes_training.png.

python benchmarks/plot_training.py
python benchmarks/plot_training.py --model tiny-views
python benchmarks/plot_training.py --log runs/mine/log.jsonl --out mine.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
CURVES = {
    "tiny-scenes": {
        "depth": "|log depth error|",
        "edges": "its differences between pixels",
        "class": "cross entropy of the class\n(smoothed labels: 0.34 at best)",
    },
    "tiny-views": {
        "camera": "error of the pose encodings,\nrounds weighted",
        "depth": "|log depth error|",
        "points": "error of the points",
    },
}
INK, FAINT = "#31688e", "#59636e"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CURVES, default="tiny-scenes")
    parser.add_argument("--log", type=Path, help="default: that of the shipped weights")
    parser.add_argument("--out", type=Path, help="default: the picture of the docs")
    options = parser.parse_args()
    name = f"{options.model.replace('-', '_')}_training"
    log = options.log or ROOT / f"benchmarks/results/{name}.jsonl"
    out = options.out or ROOT / f"docs/images/{name}.png"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    draw(lines, CURVES[options.model]).savefig(out, dpi=120, metadata={"Software": None})
    print(f"written: {out}, {out.stat().st_size / 1000:.0f} kB")


def draw(lines: list[dict[str, float]], curves: dict[str, str]) -> Figure:
    """One panel per loss on a logarithmic axis; each point is the loss of one batch, not an average."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    steps = [line["step"] for line in lines]
    for panel, (name, words) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        panel.semilogy(steps, [line[name] for line in lines], color=INK, linewidth=1.4)
        panel.set_title(words, loc="left", fontsize=9, color=FAINT)
        panel.set_xlabel("step", color=FAINT, fontsize=9)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
        panel.tick_params(which="both", labelsize=8, colors=FAINT)
        panel.grid(which="both", alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
