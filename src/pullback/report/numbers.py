"""Measured numbers in words: as many digits as a column wants, and an interval to the same place.

number(0.0601, Style(digits=2)) → "0.060"      1234.5 → "1,235"      3.2e-7 → "3.2·10⁻⁷"
interval of 0.055 to 0.066      → "0.055–0.066"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_EXPONENTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SMALL, _LARGE = -3, 8  # the powers of ten between which numbers are written out


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
    magnitude = _magnitude(scaled)
    power = magnitude if _as_power(magnitude) else 0
    scaled /= 10.0**power
    return _decimal(scaled, _places(scaled, style)) + _power(power) + (" %" if style.percent else "")


def interval(row: Mapping[str, Any], style: Style) -> str:
    """Write the 95 % interval of a row, to the places of its value or fewer where it is wide; nothing where it has
    none."""
    if row.get("low") is None or row.get("high") is None:
        return ""
    low, high, value = (style.factor * row[key] for key in ("low", "high", "value"))
    magnitude = _magnitude(value or max(abs(low), abs(high)))
    if _as_power(magnitude):
        low, high, value, power = (low / 10.0**magnitude, high / 10.0**magnitude, value / 10.0**magnitude, magnitude)
    else:
        power = 0
    places = _places(value or max(abs(low), abs(high)), style)
    if high > low:  # two digits of half its width say enough
        needed = 1 - _magnitude((high - low) / 2)
        places = max(0, min(needed, _places(value, style._replace(whole=False)) if value else needed))
    between = "–" if low >= 0 else " to "
    return f"{_decimal(low, places)}{between}{_decimal(high, places)}{_power(power)}"


def said(row: Mapping[str, Any] | None, style: Style) -> str:
    """Write the number of a row with its interval, "2.09 (1.92–2.25)"; nothing where there is no number."""
    if row is None or row["value"] is None:
        return ""
    between = interval(row, style)
    return number(row["value"], style) + (f" ({between})" if between else "")


def paper_said(value: float | str, style: Style) -> str:
    """Write what the paper has: its own words, or a number with the digits that it has there."""
    if isinstance(value, str):
        return value
    text = f"{round(style.factor * value, 10):.10g}"
    if "e" in text:
        return number(value, style)
    return f"{float(text):,}".removesuffix(".0").replace("-", "−") + (" %" if style.percent else "")


def all_whole(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all numbers of some rows are integers, so that none needs decimals."""
    values = [row["value"] for row in rows if row["value"] is not None]
    values += [row["paper"] for row in rows if isinstance(row["paper"], (int, float))]
    return bool(values) and all(float(value).is_integer() and abs(value) < 1e9 for value in values)


def _places(value: float, style: Style) -> int:
    """Return how many decimals a number has."""
    return 0 if value == 0 or style.whole else max(0, style.digits - 1 - _magnitude(value))


def _magnitude(value: float) -> int:
    """Return the power of ten of the first digit of a number."""
    return 0 if value == 0 else math.floor(math.log10(abs(value)))


def _as_power(magnitude: int) -> bool:
    return not _SMALL <= magnitude <= _LARGE


def _power(exponent: int) -> str:
    return f"·10{str(exponent).translate(_EXPONENTS)}" if exponent else ""


def _decimal(value: float, places: int) -> str:
    text = f"{value:,.{places}f}"
    return "0" if value == 0 else text.replace("-", "−")
