"""The charts of an experiment, from its rows and arrays: which rows become curves, and what the axes are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pullback.errors import PullbackError, counted
from pullback.report.charts import Chart, Curve, Point
from pullback.report.numbers import Style, number, said
from pullback.report.results import Place, Result

JOINED = " · "
"""What stands between the name of a line and that of its point."""


def chart_of(result: Result, figure: Mapping[str, Any]) -> Chart:
    """Return the chart of a figure, or raise an error that says why there is nothing to draw."""
    made = {"curves": _curves, "scatter": _scatter, "spectrum": _spectrum}[figure["kind"]](result, figure)
    if not any(curve.points for curve in made.curves if not curve.paper):
        raise PullbackError("figure: none of its rows has a number at this scale.")
    return made


def _curves(result: Result, figure: Mapping[str, Any]) -> Chart:
    columns = _columns(result)
    places = [
        place for place in result.places if place.table == figure["table"] and _as_number(place.column) is not None
    ]
    curves: list[Curve] = []
    papers: list[Curve] = []
    for row in dict.fromkeys(place.row for place in places):
        own = [place for place in places if place.row == row]
        points = [_point(result, place, columns) for place in own]
        measured = tuple(sorted(point for point in points if point is not None))
        if not measured:
            continue
        style = len(curves)
        curves.append(Curve(row, measured, style))
        told = tuple(sorted(point for place in own if (point := _paper_point(result, place, columns)) is not None))
        if told:
            papers.append(Curve(row, told, style, paper=True))
    units = {columns.get(place.column, {}).get("unit", "") for place in places}
    ticks = tuple(sorted({float(place.column) for place in places}))
    return Chart(
        tuple(curves + papers),
        _alt(figure, len(curves), "curve", figure["table"]),
        x_label=figure.get("x", ""),
        y_label=figure.get("y", "") or (units.pop() if len(units) == 1 else ""),
        log=bool(figure.get("log")),
        ticks=ticks if len(ticks) <= 12 else (),
    )


def _scatter(result: Result, figure: Mapping[str, Any]) -> Chart:
    columns, (x, y) = _columns(result), (figure["x"], figure["y"])
    lines: dict[str, list[Point]] = {}
    for row in dict.fromkeys(place.row for place in result.places if place.table == figure["table"]):
        along, up = (result.rows.get(Place(figure["table"], row, column)) for column in (x, y))
        if along is None or up is None or along["value"] is None or up["value"] is None:
            continue
        across, upward = (Style.of(columns.get(column, {})) for column in (x, y))
        label = f"{row}: {number(along['value'], across)} {_unit(columns, x)}, {said(up, upward)}"
        point = Point(across.factor * along["value"], upward.factor * up["value"], *_ends(up, upward.factor), label)
        lines.setdefault(row.partition(JOINED)[0], []).append(point)
    curves = [Curve(name, tuple(points), style) for style, (name, points) in enumerate(lines.items())]
    return Chart(
        tuple(Curve(own.name, own.points, own.style, joined=len(own.points) > 1) for own in curves),
        _alt(figure, len(curves), "line", figure["table"]),
        x_label=_axis_title(columns, x),
        y_label=_axis_title(columns, y),
        log=bool(figure.get("log")),
    )


def _spectrum(result: Result, figure: Mapping[str, Any]) -> Chart:
    arrays = result.arrays(figure["name"])
    curves = []
    for style, (name, values) in enumerate(arrays.items()):
        images = np.atleast_2d(np.asarray(values, dtype=float))  # [images, r]
        if images.ndim != 2 or not images.size:
            raise PullbackError(f"figure: {name} in arrays/{figure['name']}.npz is no list of singular values.")
        relative = images / np.maximum(images[:, :1], 1e-300)
        mean, (low, high) = relative.mean(0), np.percentile(relative, [10, 90], axis=0)
        several = len(images) > 1
        points = tuple(
            Point(
                place + 1.0, float(mean[place]), float(low[place]) if several else None,
                float(high[place]) if several else None, f"{name}, σ{place + 1}/σ1 = {number(float(mean[place]))}",
            )
            for place in range(len(mean))
        )  # fmt: skip
        curves.append(Curve(name, points, style))
    most = max((len(np.atleast_2d(values)) for values in arrays.values()), default=1)
    bands = f"Bands hold eight of ten of up to {most} images." if most > 1 else ""
    return Chart(
        tuple(curves),
        f"{figure['title']}: singular values relative to the largest, of {', '.join(arrays)}.",
        x_label="number of the direction",
        y_label="singular value / the largest one",
        note=bands,
        log=bool(figure.get("log", True)),
        ticks=_counts(max((len(curve.points) for curve in curves), default=1)),
    )


def _point(result: Result, place: Place, columns: Mapping[str, Any]) -> Point | None:
    row = result.rows.get(place)
    if row is None or row["value"] is None:
        return None
    style = Style.of(columns.get(place.column, {}))
    label = f"{place.row}, {place.column}: {said(row, style)}"
    return Point(float(place.column), style.factor * row["value"], *_ends(row, style.factor), label)


def _paper_point(result: Result, place: Place, columns: Mapping[str, Any]) -> Point | None:
    paper = result.rows[place]["paper"] if place in result.rows else None
    if not isinstance(paper, (int, float)):
        return None
    style = Style.of(columns.get(place.column, {}))
    label = f"{place.row}, {place.column}, in the paper: {number(paper, style)}"
    return Point(float(place.column), style.factor * paper, label=label)


def _ends(row: Mapping[str, Any], factor: float) -> tuple[float | None, float | None]:
    if row["low"] is None or row["high"] is None:
        return None, None
    return factor * row["low"], factor * row["high"]


def _columns(result: Result) -> dict[str, Mapping[str, Any]]:
    assert result.document is not None
    return {column["name"]: column for column in result.document["columns"]}


def _unit(columns: Mapping[str, Any], name: str) -> str:
    return str(columns.get(name, {}).get("unit", ""))


def _axis_title(columns: Mapping[str, Any], name: str) -> str:
    unit = "%" if columns.get(name, {}).get("percent") else _unit(columns, name)
    return f"{name} ({unit})" if unit else name


def _alt(figure: Mapping[str, Any], count: int, unit: str, table: str) -> str:
    return f"{figure['title']}: {counted(count, unit)}. The numbers are in the table “{table}”."


def _counts(last: int) -> tuple[float, ...]:
    """Choose about six whole numbers from 1 to ``last``."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, last) if step * 6 >= last)
    return (1.0, *(float(number) for number in range(step, last + 1, step) if number > 1))


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
