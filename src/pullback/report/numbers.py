"""Measured numbers in words: as many digits as a column wants, and an interval to the same place.

number(0.0601, Style(digits=2)) → "0.060"      1234.5 → "1,235"      3.2e-7 → "3.2·10⁻⁷"
interval of 0.055 to 0.066      → "0.055–0.066"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_EXPONENTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SMALL, _LARGE = -4, 8  # the powers of ten between which numbers are written out


class Style(NamedTuple):
    """How the numbers of a column are written: with so many significant digits, as per cent, without decimals."""

    digits: int = 3
    percent: bool = False
    whole: bool = False

    @classmethod
    def of(cls, column: Mapping[str, Any], *, whole: bool = False) -> Style:
        """Return the style of a column of experiment.json."""
        return cls(int(column.get("digits", 3)), bool(column.get("percent", False)), whole)

    @property
    def factor(self) -> float:
        return 100.0 if self.percent else 1.0


def number(value: float, style: Style = Style()) -> str:  # noqa: B008
    """Write a number; its integer part is whole, however few digits are wanted."""
    scaled = style.factor * value
    return _written(scaled, _places(scaled, style)) + (" %" if style.percent else "")


def interval(row: Mapping[str, Any], style: Style) -> str:
    """Write the 95 % interval of a row to the places of its value; nothing where it has none."""
    if row.get("low") is None or row.get("high") is None:
        return ""
    low, high, value = (style.factor * row[key] for key in ("low", "high", "value"))
    places = _places(value or max(abs(low), abs(high)), style._replace(whole=style.whole and low == high))
    return f"{_written(low, places)}{'–' if low >= 0 else ' to '}{_written(high, places)}"


def said(row: Mapping[str, Any] | None, style: Style) -> str:
    """Write the number of a row with its interval, "2.09 (1.92–2.25)"; nothing where there is no number."""
    if row is None or row["value"] is None:
        return ""
    between = interval(row, style)
    return number(row["value"], style) + (f" ({between})" if between else "")


def paper_said(value: float | str, style: Style) -> str:
    """Write what the paper has: its own words, or a number in the style of ours."""
    return value if isinstance(value, str) else number(value, style)


def all_whole(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all numbers of some rows are integers, so that none needs decimals."""
    values = [row["value"] for row in rows if row["value"] is not None]
    values += [row["paper"] for row in rows if isinstance(row["paper"], (int, float))]
    return bool(values) and all(float(value).is_integer() and abs(value) < 1e9 for value in values)


def _places(value: float, style: Style) -> int | None:
    """Return how many decimals a number is written with; None: as a power of ten."""
    if value == 0 or style.whole:
        return 0
    magnitude = math.floor(math.log10(abs(value)))
    return None if not _SMALL <= magnitude <= _LARGE else max(0, style.digits - 1 - magnitude)


def _written(value: float, places: int | None) -> str:
    if value == 0:
        return "0"
    if places is None:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa}·10{str(int(exponent)).translate(_EXPONENTS)}"
    else:
        text = f"{value:,.{places}f}"
    return text.replace("-", "−")
