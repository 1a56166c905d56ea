"""What every figure shares: the look in two themes, pictures side by side, the colours of task energy."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

DPI = 150
MAX_BYTES = 1_000_000
_TITLE_SIZE = 10
_FINE = 1200  # dots an inch, at which rounding to pixels does not matter


@dataclass(frozen=True)
class Theme:
    """The colours of a figure on light or on dark paper."""

    ink: str
    faint: str
    paper: str
    layers: tuple[float, float]  # the part of viridis that stands out from the paper


LIGHT = Theme(ink="#1f2328", faint="#8b949e", paper="#ffffff", layers=(0.05, 0.82))
DARK = Theme(ink="#e6edf3", faint="#7d8590", paper="#161b22", layers=(0.38, 0.98))


@contextmanager
def style(theme: Theme) -> Iterator[None]:
    """Set matplotlib's fonts and colours for a theme; restored on exit."""
    with mpl.rc_context(
        {
            "font.size": 9,
            "figure.facecolor": theme.paper,
            "axes.facecolor": theme.paper,
            "text.color": theme.ink,
            "axes.labelcolor": theme.ink,
            "axes.edgecolor": theme.faint,
            "xtick.color": theme.faint,
            "ytick.color": theme.faint,
            "xtick.labelcolor": theme.ink,
            "ytick.labelcolor": theme.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.8,
        }
    ):
        yield


class PictureGrid:
    """Rows of pictures side by side, placed in inches, because matplotlib's layouts leave holes between pictures.

    ``margins`` (left, right, top, bottom) are for words and colour bars.
    """

    GAP = 0.06

    def __init__(
        self, rows: int, columns: int, side: float, aspect: float, margins: tuple[float, float, float, float]
    ) -> None:
        self.side, self.tall, self._rows = side, side * aspect, rows
        self._left, right, top, self._bottom = margins
        self.width = self._left + columns * (side + self.GAP) + self.GAP + right
        self.height = self._bottom + rows * (self.tall + self.GAP) + self.GAP + top
        self.figure = Figure(figsize=(self.width, self.height))
        self.cells = [[self._cell(row, column) for column in range(columns)] for row in range(rows)]

    def place(self, x: float, y: float, width: float, height: float) -> Axes:
        """Add axes at a place in inches from the lower left corner."""
        box = (x / self.width, y / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)

    def corner(self, row: int, column: int) -> tuple[float, float]:
        """Return the lower left corner of a cell in inches; row 0 is the upper one."""
        x = self._left + self.GAP + column * (self.side + self.GAP)
        return x, self._bottom + self.GAP + (self._rows - 1 - row) * (self.tall + self.GAP)

    def _cell(self, row: int, column: int) -> Axes:
        axes = self.place(*self.corner(row, column), self.side, self.tall)
        axes.set_axis_off()
        return axes


def energy_colours(scale: tuple[float, float]) -> ScalarMappable:
    """Return the colours in which `heat` shows energies between the two limits of a scale."""
    return ScalarMappable(LogNorm(*scale), "inferno")


def energy_bar(figure: Figure | SubFigure, scale: tuple[float, float], token: str = "patch", **where: Any) -> None:
    """Draw the bar that says what the colours of patches, or of registers, mean."""
    bar = figure.colorbar(energy_colours(scale), extend="both", **where)
    plain_log_ticks(bar.ax)
    bar.outline.set_visible(False)
    bar.set_label(f"energy of a {token}\n(1 = their mean)", fontsize=8)


def corner_note(axes: Axes, text: str) -> None:
    """Write light on dark into the lower left corner of a picture."""
    box = {"facecolor": "black", "alpha": 0.55, "pad": 1.5, "lw": 0}
    axes.text(0.03, 0.04, text, color="white", fontsize=7, transform=axes.transAxes, bbox=box)


def plain_log_ticks(axes: Axes, along: str = "y") -> None:
    """Label a logarithmic axis with 0.5, 1, 2, 5 rather than powers of ten, with fewer labels the more decades."""
    low, high = sorted(axes.get_ylim() if along == "y" else axes.get_xlim())
    span = high / low
    subs = (1.0, 2.0, 3.0, 5.0, 7.0) if span < 8 else (1.0, 2.0, 5.0) if span < 200 else (1.0,)
    axis = axes.yaxis if along == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def title(figure: Figure, text: str, **where: Any) -> None:
    """Write a title at the left edge, broken into lines where the figure is too narrow for it."""
    broken = "\n".join(lines_of(text, figure.get_figwidth()))
    figure.suptitle(broken, x=0.06 / figure.get_figwidth(), ha="left", fontsize=_TITLE_SIZE, **where)


def title_at_the_top(figure: Figure, text: str) -> None:
    """Write a title into the top margin of a `PictureGrid`, which `title_room` measures."""
    title(figure, text, y=1 - 0.07 / figure.get_figheight(), va="top")


def lines_of(text: str, width: float) -> list[str]:
    """Break a title into lines that fit a figure of this width in inches; a word alone may be longer."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _inches(longer) <= width - 0.12:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def title_room(text: str, width: float) -> float:
    """Return the height in inches that the title of a figure of this width takes beyond its first line."""
    return 0.17 * (len(lines_of(text, width)) - 1)


def _inches(text: str) -> float:
    """Return the width of a title. (The outlines of its letters would tell as well, but take half a second a title.)"""
    font = get_font(findfont(FontProperties()))
    font.set_size(_TITLE_SIZE, _FINE)
    font.set_text(text)
    return float(font.get_width_height()[0]) / 64 / _FINE  # which counts in parts of a pixel


def beside(axes: Axes, text: str, y: float = 0.5) -> None:
    """Write upright along the left edge of a picture, at the height ``y``."""
    axes.text(-0.03, y, text, rotation=90, ha="right", va="center", fontsize=8, transform=axes.transAxes)


def png(figure: Figure, dpi: float) -> bytes:
    """Return a figure as a PNG file of less than a megabyte: with 256 colours, and then smaller, where it must be."""
    canvas = FigureCanvasAgg(figure)
    while True:
        figure.set_dpi(dpi)
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        content = _encoded(picture)
        if len(content) >= MAX_BYTES:
            content = _encoded(picture.quantize(256))
        if len(content) < MAX_BYTES:
            return content
        dpi *= 0.85


def _encoded(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=4)  # half the time, 5 % larger
    return buffer.getvalue()
