"""Curves, points and spectra as SVG, drawn from plain numbers, without matplotlib.

    Chart(curves, labels, log) → svg(chart, WIDE)     part of a page, whose style sheet has the colours of two themes
                               → standalone(chart)    a file of its own, with its key and its colours

Curves differ by colour (those of Okabe and Ito, who chose them so that colour-blind people can tell them apart), by
marker and by dashes. What the paper has is dotted, with hollow markers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from markupsafe import Markup, escape

from pullback.report.numbers import Style, number

LIGHT = ("#0072b2", "#d55e00", "#00835f", "#b0508a", "#a86f00", "#1f2328", "#2b8cc4")
DARK = ("#56b4e9", "#ff7f3f", "#22b894", "#dd8fbc", "#f0c53a", "#e6edf3", "#8fa8ff")
"""The colours of curves on light and on dark paper; each stands out from its paper by 3 to 1 at least."""
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_MARKERS = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",  # circle
    "M-3.3 -3.3h6.6v6.6h-6.6z",  # square
    "M0 -4.3L4 3.2H-4z",  # triangle
    "M0 -4.6L4.2 0L0 4.6L-4.2 0z",  # diamond
    "M0 4.3L4 -3.2H-4z",  # triangle upside down
    "M-1.5 -4.2h3v2.7h2.7v3h-2.7v2.7h-3v-2.7h-2.7v-3h2.7z",  # plus
)
_LETTER = 6.4  # pixels, the width of a digit of an axis


class Point(NamedTuple):
    """A point of a curve with its interval, and what is said about it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Curve:
    """Points with a name. ``style`` numbers colour, marker and dashes; ``paper``: the paper's values."""

    name: str
    points: tuple[Point, ...]
    style: int
    joined: bool = True
    paper: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes. ``alt``: what is seen, in words. ``ticks``: places on the horizontal axis that are
    labelled, chosen where there are none. ``note``: what else is to be said about it."""

    curves: tuple[Curve, ...]
    alt: str
    x_label: str = ""
    y_label: str = ""
    log: bool = False
    ticks: tuple[float, ...] = ()
    note: str = ""

    @property
    def key(self) -> list[Curve]:
        """A curve for each entry of the key: all but the paper's, of which there is one for all of them."""
        own = [curve for curve in self.curves if not curve.paper]
        paper = [replace(curve, name="in the paper") for curve in self.curves if curve.paper]
        return own + paper[:1]


@dataclass(frozen=True)
class Size:
    """Of a chart, in pixels."""

    width: int
    height: int


WIDE, NARROW = Size(760, 340), Size(330, 270)


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        if self.log:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low))
        else:
            low, high = self.low, self.high
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def without_logarithm(chart: Chart) -> int:
    """Return how many points a logarithmic axis has no place for."""
    return sum(point.y <= 0 for curve in chart.curves for point in curve.points) if chart.log else 0


def svg(chart: Chart, size: Size) -> Markup:
    """Draw a chart; its classes are those of report.css.j2."""
    return Markup(
        f'<svg viewBox="0 0 {size.width} {size.height}" width="{size.width}" height="{size.height}" role="img" '
        f'aria-label="{escape(chart.alt)}">{_inside(chart, size)}</svg>'
    )


def sample(curve: Curve) -> Markup:
    """Draw a short piece of a curve for the key."""
    return Markup(
        f'<svg viewBox="0 0 36 14" width="36" height="14" aria-hidden="true"><g class="{_classes(curve)}">'
        f"{_line('M2 7H34', curve) if curve.joined or curve.paper else ''}{_marker(curve, 18, 7)}</g></svg>"
    )


def standalone(chart: Chart, title: str) -> str:
    """Draw a chart with its title and key as a file of its own, which follows the reader's choice of light or dark."""
    entries, x, y = [], 14.0, 0
    for curve in chart.key:
        wide = 52 + 6.6 * len(curve.name)
        if x > 14 and x + wide > WIDE.width:
            x, y = 14.0, y + 22
        entries.append(f'<g transform="translate({x:g} {y})">{_key_sample(curve)}')
        entries.append(f'<text class="key" x="42" y="11">{escape(curve.name)}</text></g>')
        x += wide
    height = WIDE.height + 62 + y
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE.width} {height}" width="{WIDE.width}" '
        f'height="{height}" role="img" aria-label="{escape(chart.alt)}">\n<style>{_STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/><text class="title" x="14" y="24">{escape(title)}</text>\n'
        f'<g transform="translate(0 34)">{_inside(chart, WIDE)}</g>\n'
        f'<g transform="translate(0 {WIDE.height + 40})">{"".join(entries)}</g>\n</svg>\n'
    )


def _key_sample(curve: Curve) -> str:
    line = _line("M2 7H34", curve) if curve.joined or curve.paper else ""
    return f'<g class="{_classes(curve)}">{line}{_marker(curve, 18, 7)}</g>'


def _inside(chart: Chart, size: Size) -> str:
    curves = [replace(curve, points=_shown(chart, curve)) for curve in chart.curves]
    points = [point for curve in curves for point in curve.points]
    ys = [end for point in points for end in (point.y, point.low, point.high) if end is not None]
    low, high = _limits([y for y in ys if y > 0] if chart.log else ys, log=chart.log)
    up = log_ticks(low, high) if chart.log else nice_ticks(low, high, size.height // 55)
    left = 16 + _LETTER * max(len(label) for _, label in up)
    x_axis = _Axis(*_span([point.x for point in points]), left + 8, size.width - 22, log=False)
    y_axis = _Axis(low, high, size.height - 44, 28 if chart.y_label else 12, chart.log)
    parts = [_up(up, y_axis, left, size.width), *_along(chart, x_axis, size)]
    if chart.y_label:
        parts.append(f'<text class="label" x="{left:g}" y="14">{_cut(chart.y_label, size.width - left)}</text>')
    if chart.x_label:
        place = f'x="{(x_axis.start + x_axis.end) / 2:g}" y="{size.height - 6}"'
        parts.append(f'<text class="label middle" {place}>{_cut(chart.x_label, size.width - left)}</text>')
    numbers = {name: place for place, name in enumerate(curve.name for curve in chart.key)}
    for curve in sorted(curves, key=lambda own: not own.paper):  # ours above the paper's
        parts.append(_drawn(curve, x_axis, y_axis, numbers["in the paper" if curve.paper else curve.name]))
    return "".join(parts)


def _cut(text: str, width: float) -> Markup:
    """Shorten a text to so many pixels."""
    letters = int(width / (1.05 * _LETTER))
    return escape(text if len(text) <= letters else f"{text[: letters - 1]}…")


def _shown(chart: Chart, curve: Curve) -> tuple[Point, ...]:
    return tuple(point for point in curve.points if not chart.log or point.y > 0)


def _up(ticks: Sequence[tuple[float, str]], axis: _Axis, left: float, width: int) -> str:
    drawn = []
    for value, label in ticks:
        y = f"{axis(value):.1f}"
        drawn.append(f'<path class="grid" d="M{left:.1f} {y}H{width - 14}"/>')
        drawn.append(f'<text class="tick end" x="{left - 6:.1f}" y="{y}" dy="0.35em">{label}</text>')
    return "".join(drawn)


def _along(chart: Chart, axis: _Axis, size: Size) -> Iterable[str]:
    ticks = (
        [(value, f"{value:g}") for value in chart.ticks]
        if chart.ticks
        else nice_ticks(axis.low, axis.high, size.width // 90)
    )
    free = -math.inf
    for value, label in ticks:
        x, half = axis(value), _LETTER * len(label) / 2
        yield f'<path class="grid" d="M{x:.1f} {size.height - 44}v4"/>'
        if x - half > free:  # else the labels would run into each other
            yield f'<text class="tick middle" x="{x:.1f}" y="{size.height - 26}">{label}</text>'
            free = x + half + 5


def _drawn(curve: Curve, x_axis: _Axis, y_axis: _Axis, number_in_key: int) -> str:
    places = [(point, x_axis(point.x), y_axis(point.y)) for point in curve.points]
    parts = []
    band = [(x, point.low, point.high) for point, x, _ in places if point.low is not None and point.high is not None]
    if curve.joined and len(band) > 1:
        upper = "L".join(f"{x:.1f} {y_axis(high):.1f}" for x, _, high in band)
        lower = "L".join(f"{x:.1f} {y_axis(low):.1f}" for x, low, _ in reversed(band))
        parts.append(f'<path class="band" d="M{upper}L{lower}Z"/>')
    elif band:
        parts += [f'<path class="bar" d="M{x:.1f} {y_axis(low):.1f}V{y_axis(high):.1f}"/>' for x, low, high in band]
    if curve.joined and len(places) > 1:
        parts.append(_line("M" + "L".join(f"{x:.1f} {y:.1f}" for _, x, y in places), curve))
    every = 1 + len(places) // 25 if curve.joined else 1  # as many markers as tell curves apart
    parts += [_marker(curve, x, y, point.label) for point, x, y in places[::every]]
    return f'<g class="{_classes(curve)} k{number_in_key}">{"".join(parts)}</g>'


def _classes(curve: Curve) -> str:
    return f"c{curve.style % len(LIGHT)}{' of-paper' if curve.paper else ''}"


def _line(path: str, curve: Curve) -> str:
    dashes = "1 4" if curve.paper else _DASHES[curve.style % len(_DASHES)]
    return f'<path class="line" d="{path}"' + (f' stroke-dasharray="{dashes}"/>' if dashes else "/>")


def _marker(curve: Curve, x: float, y: float, label: str = "") -> str:
    shape = _MARKERS[curve.style % len(_MARKERS)]
    drawn = f'<path class="dot" transform="translate({x:.1f} {y:.1f})" d="{shape}"'
    return f"{drawn}><title>{escape(label)}</title></path>" if label else f"{drawn}/>"


# Axes


def nice_ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """Choose about ``count`` round values between two others, with their labels."""
    rough = (high - low) / max(count, 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= rough * 0.999)
    values = [step * place for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [(value, _tick(round(value, 12))) for value in values]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Choose powers of ten between two values, and 2 and 5 times those where there are few."""
    decades = math.log10(high / low)
    parts = (1, 2, 5) if decades < 3 else (1,)
    every = max(1, math.ceil(decades / 7))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [part * 10.0**power for power in powers if power % every == 0 for part in parts]
    shown = [value for value in values if low * 0.999 <= value <= high * 1.001]
    return [(value, _tick(value)) for value in shown] or [(low, _tick(low)), (high, _tick(high))]


def _tick(value: float) -> str:
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:.10f}".rstrip("0").rstrip(".").replace("-", "−")
    return number(value, Style(digits=1)).removeprefix("1·")


def _limits(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    """Choose the ends of the vertical axis: a little beyond the values, and from 0 where that is not far."""
    if not values:
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = min(values), max(values)
    if log:
        return (low / 1.15, high * 1.15) if high / low > 1.3 else (low / 2, high * 2)
    if 0 <= low < 0.6 * high:
        return 0.0, 1.05 * high
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _variables(colours: Sequence[str]) -> str:
    return "".join(f".c{place}{{--c:{colour}}}" for place, colour in enumerate(colours))


_STYLE = (
    "svg{--ink:#1f2328;--faint:#59636e;--line:#d8dee4;--card:#fff;font:12px system-ui,sans-serif}"
    f"{_variables(LIGHT)}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--faint:#9198a1;--line:#30363d;--card:#161b22}"
    f"{_variables(DARK)}}}"
    ".paper{fill:var(--card)}text{fill:var(--faint)}.title{fill:var(--ink);font-size:15px;font-weight:600}"
    ".key{fill:var(--ink)}.end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:var(--line)}"
    ".line{fill:none;stroke:var(--c);stroke-width:2}.bar{stroke:var(--c)}.band{fill:var(--c);opacity:.14}"
    ".dot{fill:var(--c);stroke:var(--card)}.of-paper .dot{fill:var(--card);stroke:var(--c);stroke-width:1.5}"
)
