"""The curve of tractability against fidelity over sizes of a bottleneck: docs/images/bottleneck.png.

    python benchmarks/plot_bottleneck.py
    python benchmarks/plot_bottleneck.py --results mine/bottleneck_cpu.json --out mine.png

From what benchmarks/bottleneck.py measured of the cases size-256 to size-8192, `tiny-scenes` depth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
INK, SECOND, THIRD, FAINT = "#31688e", "#35b779", "#b5651d", "#59636e"
Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/bottleneck_cpu.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/bottleneck.png")
    options = parser.parse_args()
    cases = json.loads(options.results.read_text(encoding="utf-8"))["cases"]
    sizes = [case for name, case in cases.items() if name.startswith("size-")]
    draw(sorted(sizes, key=lambda case: case["case"]["bound"])).savefig(
        options.out, dpi=120, metadata={"Software": None}
    )
    print(f"written: {options.out}, {options.out.stat().st_size / 1000:.0f} kB")


def draw(cases: list[Case]) -> Figure:
    """Three panels over M': how rich the spectrum is, what the task keeps, and how alike the two pullbacks are."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    rich, kept, alike = figure.subplots(1, 3)
    sizes = [case["case"]["bound"] for case in cases]
    curve(rich, sizes, [case["after"]["r_eff"] for case in cases], INK, "with the bottleneck")
    rich.axhline(cases[0]["before"]["r_eff"]["mean"], color=FAINT, linestyle="--", linewidth=1, label="without")
    curve(kept, sizes, [case["quality"]["delta1"] for case in cases], INK, "δ1 of depth")
    lost = [1 - sum(case["quality"]["unexplained"].values()) / len(case["quality"]["unexplained"]) for case in cases]
    kept.plot(sizes, lost, color=SECOND, marker="o", markersize=3, linewidth=1.4, label="variance of the features")
    for rank, colour in (("20", INK), ("50", SECOND)):
        curve(alike, sizes, [case["agreement"][rank]["share"] for case in cases], colour, f"share of κ({rank})")
    curve(alike, sizes, [case["agreement"]["20"]["spearman_patches"] for case in cases], THIRD, "ρ of importances")
    for panel, title in ((rich, "effective rank"), (kept, "what comes back"), (alike, "agreement of the pullbacks")):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.set_title(title, loc="left", fontsize=9, color=FAINT)
        panel.set_xlabel("M', numbers in the bottleneck", color=FAINT, fontsize=9)
        panel.tick_params(which="both", labelsize=7, colors=FAINT)
        panel.set_ylim(bottom=0, top=None if panel is rich else 1.02)
        panel.grid(alpha=0.2)
        panel.legend(fontsize=7, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def curve(panel: Axes, sizes: list[int], values: list[dict[str, float]], colour: str, label: str) -> None:
    means, errors = ([value[key] for value in values] for key in ("mean", "se"))
    panel.errorbar(sizes, means, errors, color=colour, marker="o", markersize=3, linewidth=1.4, label=label)


if __name__ == "__main__":
    main()
