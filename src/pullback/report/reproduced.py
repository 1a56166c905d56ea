"""The report of `pullback report`: verdicts first, then every table and figure, as one page and as Markdown.

    write_report(DIR, against=OTHER) → DIR/report.html, self-contained and at most 3 MB, and DIR/report.md

Everything comes from the files of the folder; the same files give the same report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from pullback.errors import PullbackError, counted, naming
from pullback.report import charts
from pullback.report.cells import Table, tables_of
from pullback.report.changes import Comparison, compare
from pullback.report.charts import NARROW, WIDE, Chart, sample, standalone, svg, without_logarithm
from pullback.report.html import write_html, write_markdown
from pullback.report.numbers import Style, said
from pullback.report.panels import PANELS, QUALITIES, Album, panel_of
from pullback.report.plots import chart_of
from pullback.report.results import WORDS, Place, Result, Results, read_results
from pullback.report.wording import short_name
from pullback.runs import documents as files
from pullback.runs.files import make_folder, write_text

MAX_BYTES = 3_000_000
"""How large report.html may be."""
FIGURES = "report-figures"
_SHOWN_CHANGES = 200
_LONG = 240  # letters of a reason that are shown at once


@dataclass(frozen=True)
class Figure:
    """A figure as it is shown. ``failed``: why it is not, where nothing can be drawn. ``file``: of its picture beside
    report.md."""

    name: str
    kind: str
    title: str
    about: str
    chart: Chart | None = None
    panel: Mapping[str, Any] | None = None
    failed: str | None = None
    note: str = ""
    file: str | None = None

    @property
    def wide(self) -> Markup:
        assert self.chart is not None
        return svg(self.chart, WIDE)

    @property
    def narrow(self) -> Markup:
        assert self.chart is not None
        return svg(self.chart, NARROW)

    @property
    def key(self) -> list[tuple[str, Markup]]:
        """The key of a chart: names, and samples of their lines."""
        assert self.chart is not None
        return [(curve.name, sample(curve)) for curve in self.chart.key]


@dataclass(frozen=True)
class Section:
    """An experiment as it is shown. ``document``: None where it is unfinished."""

    name: str
    document: Mapping[str, Any] | None
    command: str
    rows: int
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    words: Mapping[str, int] = field(default_factory=dict)


class Written(NamedTuple):
    """What a report has come to, for the command to say."""

    page: Path
    text: Path
    words: dict[str, int]
    unfinished: list[str]
    changed: int | None
    remark: str | None


def write_report(
    folder: Path, against: Path | None = None, *, order: Sequence[str] = (), pictures: bool = False
) -> Written:
    """Write report.html and report.md into the folder of a run. ``against``: another such folder to compare it with.
    ``order``: of experiments; those that are not in the folder are named as not run. ``pictures``: also write the
    charts as SVG files, which report.md then shows."""
    results = read_results(folder, order)
    comparison = None
    if against is not None:
        with naming("against"):
            comparison = compare(results, read_results(against, order))
    missing = [name for name in order if name not in {own.name for own in results.experiments}]
    remark = None
    for quality in QUALITIES:
        album = Album(quality)
        sections = [_section(own, results, comparison, album) for own in results.experiments]
        content = _content(results, sections, comparison, missing)
        remark = None if quality == QUALITIES[0] and not album.left_out else _remark(album)
        page = write_html(
            folder, "report.html.j2", {**content, "album": album.stored, "remark": remark}, files.REPORT_PAGE
        )
        if page.stat().st_size <= MAX_BYTES:
            break
    if pictures:
        sections = [_with_files(section, folder) for section in sections]
    text = write_markdown(folder, "report.md.j2", {**content, "sections": sections}, files.REPORT_TEXT)
    words = {word: sum(section.words.get(word, 0) for section in sections) for word in WORDS}
    changed = None if comparison is None else len(content["changes"]["cells"]) + len(comparison.claims)
    return Written(page, text, words, [own.name for own in results.unfinished], changed, remark)


def _section(result: Result, results: Results, comparison: Comparison | None, album: Album) -> Section:
    command = str(result.document["command"]) if result.document else results.command(result.name)
    if result.document is None:
        return Section(result.name, None, command, len(result.rows))
    changes = comparison.places.get(result.name) if comparison else None
    words = [claim["word"] for claim in result.document["claims"]]
    return Section(
        result.name,
        result.document,
        command,
        len(result.rows),
        tables_of(result, changes),
        [_figure(result, figure, album) for figure in result.document["figures"] if _measured(result, figure)],
        {word: words.count(word) for word in WORDS if word in words},
    )


def _measured(result: Result, figure: Mapping[str, Any]) -> bool:
    """Whether a figure has something to show: not if its table has no number, whose reason that table says."""
    rows = [row for place, row in result.rows.items() if place.table == figure.get("table")]
    return not rows or any(row["value"] is not None for row in rows)


def _figure(result: Result, figure: Mapping[str, Any], album: Album) -> Figure:
    shown = Figure(figure["name"], figure["kind"], figure["title"], figure.get("about", ""))
    try:
        if figure["kind"] in PANELS:
            arrays = result.arrays(figure["name"])
            withheld = str(arrays.get("withheld", ""))  # why its pictures are grey, where they are not ours to publish
            return replace(shown, panel=panel_of(figure["kind"], arrays, album), note=withheld)
        chart = chart_of(result, figure)
    except PullbackError as error:  # a report with one picture less is better than none
        return replace(shown, failed=str(error).removeprefix("figure: "))
    hidden = without_logarithm(chart)
    verb = "has" if hidden == 1 else "have"
    note = f"{counted(hidden, 'value')} of 0 or less {verb} no place on a logarithmic axis." if hidden else ""
    return replace(shown, chart=chart, note=" ".join(filter(None, (chart.note, note))))


def _with_files(section: Section, folder: Path) -> Section:
    """Write the charts of a section as SVG files, and return it with their names."""
    shown = []
    for figure in section.figures:
        if figure.chart is not None:
            name = f"{FIGURES}/{section.name}-{figure.name}.svg"
            make_folder(folder / FIGURES)
            write_text(folder / name, standalone(figure.chart, figure.title))
            figure = replace(figure, file=name)
        shown.append(figure)
    return replace(section, figures=shown)


def _content(
    results: Results, sections: Sequence[Section], comparison: Comparison | None, missing: Sequence[str]
) -> dict[str, Any]:
    claims = [
        {
            **claim,
            **_in_two(claim["why"]),
            "on": [_played(name, results.settings) for name in claim.get("on", [])],
            "experiment": own.name,
        }
        for own in results.finished
        if own.document
        for claim in own.document["claims"]
    ]
    words = {word: sum(claim["word"] == word for claim in claims) for word in WORDS}
    return {
        "head": _head(results),
        "series": {"light": charts.LIGHT, "dark": charts.DARK},
        "page": files.REPORT_PAGE,
        "sections": sections,
        "claims": claims,
        "stand_ins": sum(claim.get("stand_in", False) for claim in claims),
        "words": words,
        "missing": [{"name": name, "command": results.command(name)} for name in missing],
        "not_judged": [*(own.name for own in results.unfinished), *missing],
        "changes": None if comparison is None else _changes(results, comparison),
    }


def _in_two(why: str) -> dict[str, str]:
    """Cut a long reason behind one of its first sentences: the rest is shown when it is asked for."""
    if len(why) <= _LONG:
        return {"begun": why, "rest": ""}
    ends = [why.find(mark, _LONG // 3, _LONG) + len(mark) for mark in (". ", "; ") if mark in why[_LONG // 3 : _LONG]]
    end = min(ends, default=why.rfind(" ", 0, _LONG) + 1 or _LONG)
    return {"begun": why[:end].rstrip(), "rest": why[end:]}


def _head(results: Results) -> dict[str, Any]:
    """Return what the head of the report says about all experiments together."""
    rows = [row for own in results.finished for row in own.rows.values()]
    documents = [own.document for own in results.finished if own.document]
    data = _distinct(row.get("data") for row in rows if row["value"] is not None)
    return {
        "scale": results.settings["scale"],
        "seed": results.settings["seed"],
        "models": _distinct(
            _model(row, results.settings) for row in rows if row["value"] is not None and row.get("model")
        ),
        "data": [_role(role, results.settings) for role in data],
        "machines": _distinct(row.get("machine") for row in rows),
        "commits": [commit[:12] for commit in _distinct(row.get("commit") for row in rows)],
        "date": max((str(document.get("date", "")) for document in documents), default="")[:10],
        "versions": _distinct(document.get("pullback") for document in documents),
        "substitutes": {key: said for document in documents for key, said in document.get("substitutes", {}).items()},
        "numbers": sum(row["value"] is not None for row in rows),
        "absent": sum(row["value"] is None for row in rows),
        "experiments": len(documents),
    }


def _model(row: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    weights, name = row.get("weights"), _played(str(row["model"]), settings)
    return f"{name} ({weights[:8]})" if weights else name


def _played(model: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a model, or the role that it plays where a folder's name does not tell it: rows name a model
    by its folder, which may be called "backbone"."""
    roles = [role for role, place in settings.items() if isinstance(place, str) and short_name(place) == model != place]
    return model if not roles or any(role in model for role in roles) else roles[0]


def _role(role: str, settings: Mapping[str, Any]) -> str:
    place = settings.get(role)
    return f"{role} (drawn)" if place == "drawn" else f"{role} ({short_name(place)})" if place else role


def _changes(results: Results, comparison: Comparison) -> dict[str, Any]:
    """Return the summary of a comparison: the numbers that are others, times apart, and what came and went."""
    counts = dict.fromkeys(("same", "changed", "new", "gone"), 0)
    cells: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    for own in results.finished:
        assert own.document is not None
        columns = {column["name"]: column for column in own.document["columns"]}
        for place, change in comparison.places.get(own.name, {}).items():
            counts[change.mark] += 1
            if change.mark != "same":
                told = _told(own, place, columns, own.rows.get(place), change.then, change.mark)
                (times if place in own.timed else cells).append(told)
        for place, row in comparison.gone.get(own.name, {}).items():
            counts["gone"] += 1
            cells.append(_told(own, place, columns, None, row, "gone"))
    other = comparison.other.settings
    differing = {key: pair for key, pair in comparison.settings.items() if key in ("scale", "seed")}
    return {
        "counts": counts,
        "cells": cells[:_SHOWN_CHANGES],
        "more": max(0, len(cells) - _SHOWN_CHANGES),
        "times": times[:_SHOWN_CHANGES],
        "claims": comparison.claims,
        "other": {"scale": other["scale"], "seed": other["seed"], "name": comparison.other.folder.resolve().name},
        "differing": differing,
        "roles": {key: pair for key, pair in comparison.settings.items() if key not in differing},
        "only_here": comparison.only_here,
        "only_there": comparison.only_there,
    }


def _told(
    own: Result, place: Place, columns: Mapping[str, Any], now: Mapping[str, Any] | None,
    then: Mapping[str, Any] | None, mark: str,
) -> dict[str, Any]:  # fmt: skip
    style = Style.of(columns.get(place.column, {}))
    return {
        "experiment": own.name,
        **place._asdict(),
        "mark": mark,
        "now": said(now, style),
        "then": said(then, style),
    }


def _remark(album: Album) -> str:
    """Say what a page that would be too heavy goes without."""
    limit = f"{MAX_BYTES / 1e6:.0f} MB"
    if not album.quality.pictures:
        return (
            f"To keep this page below {limit}, it shows no pictures. They are in the arrays folders of the experiments."
        )
    left = f", {counted(album.left_out, 'picture')} left out" if album.left_out else ""
    return f"To keep this page below {limit}, pictures are at most {album.quality.side} pixels wide{left}."


def _distinct(values: Iterable[Any]) -> list[str]:
    return [str(value) for value in dict.fromkeys(values) if value]
