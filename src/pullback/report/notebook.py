"""What notebooks show of spectra, diagnoses and probes: a few numbers and a picture, as HTML without any script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from pullback.errors import PullbackError
from pullback.report.html import data_uri
from pullback.report.wording import NO_FIGURES, counted, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110
_BOX = 16  # pixels, the side of a block


@dataclass(frozen=True, eq=False)
class Overview:
    """One Jacobian per sample, in plain numbers. ``layer``: an entry of `diagnosis.json`, as far as figures read it."""

    name: str
    unit: str  # "image" or "scene"
    layer: Mapping[str, Any]
    energy: Callable[[], np.ndarray]  # [n, rows, columns], of the patches of the first samples; 1 is their mean
    facts: Mapping[str, str]
    advice: str = ""

    def plot(self) -> Figure:
        """Draw the spectrum and the energies of patches; without matplotlib, raise an error that names the extra."""
        try:
            from pullback.report.figures import overview_figure
        except ImportError:
            raise PullbackError("plot: needs matplotlib, which is an extra: pip install 'pullback[plot]'.") from None
        return overview_figure(dict(self.layer), self.energy(), self.name, self.unit)

    def line(self, *more: str) -> str:
        """Write what, how much and how well in a line, with the facts of these names."""
        rank = self.layer["rank_used"]
        samples = counted(len(self.layer["per_image"]), self.unit)
        facts = [f"{name} {self.facts[name]}" for name in more]
        return ", ".join([self.name, samples, f"rank {rank}", f"κ({rank}) = {percent(self.layer['kappa'])}", *facts])

    def html(self) -> str:
        """Write the numbers as a table, and below it the figure."""
        rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>" for key, text in self.facts.items())
        try:
            from pullback.report.canvas import png
        except ImportError:
            picture = f"<p>{escape(NO_FIGURES)}</p>"
        else:
            drawn = data_uri(png(self.plot(), _DPI), "png")
            picture = f'<img src="{drawn}" style="max-width:100%" alt="{escape(self.name)}">'
        advice = f"<p>{escape(self.advice)}</p>" if self.advice else ""
        return f"<div><b>{escape(self.name)}</b><table>{rows}</table>{advice}{picture}</div>"


def probe_html(title: str, depth: int, probed: Sequence[int], read: Sequence[int], facts: Mapping[str, str]) -> str:
    """Draw the blocks of a backbone in a row: those that are probed filled, those that the decoder reads underlined."""
    step = _BOX + 4
    boxes = "".join(
        f'<rect x="{2 + step * block}" y="2" width="{_BOX}" height="{_BOX}" rx="3" '
        f'fill="{"#d55e00" if block in probed else "none"}" stroke="currentColor"><title>block {block}</title></rect>'
        for block in range(depth)
    )
    lines = "".join(
        f'<line x1="{2 + step * block}" x2="{2 + step * block + _BOX}" y1="{_BOX + 7}" y2="{_BOX + 7}" '
        f'stroke="#0072b2" stroke-width="3"/>'
        for block in sorted(set(read))
    )
    size = f'width="{step * depth + 4}" height="{_BOX + 12}"'
    words = " · ".join(f"{escape(key)} {escape(text)}" for key, text in facts.items())
    where = "filled: where the features are taken; underlined: what the decoder reads"
    return f"<div><b>{escape(title)}</b><br><svg {size}>{boxes}{lines}</svg><br><small>{words} · {where}</small></div>"
