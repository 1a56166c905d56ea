"""Methods at their operating points, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pullback.report.prune_console import skipped_files
from pullback.report.wording import UNKNOWN, counted, p_value, plain, short_name, times
from pullback.runs.documents import MEASURES

Entry = dict[str, Any]
TESTED = "removing tokens in stages against the best rival"
BANKS = {"same": "bank made by the same model", "unpruned": "bank of the unpruned model"}
"""Which embeddings the neighbours of an image are looked for in."""


def pareto_summary(document: dict[str, Any]) -> RenderableType:
    """Degradation at each budget, tests, neighbours, and what had to be left out."""
    parts: list[RenderableType] = [_heading(document), Text()]
    if document["points"]:
        title = f"{MEASURES[document['measure']]}: mean"
        parts += [*_by_budget(document, title, degradation_cell), Text(legend(document), style="dim"), Text()]
    if document["tests"]:
        parts += [Text(TESTED, style="bold"), *(Text(sentence(test)) for test in document["tests"]), Text()]
    for k, (unpruned, cell) in neighbour_cells(document).items():
        title = f"k-NN top-1 in %, k = {k}, every image asks the others (unpruned {100 * unpruned['accuracy']:.1f})"
        parts += _by_budget(document, title, cell)
    if any(entry["neighbours"] for entry in document["points"]):
        parts += [Text(f"{BANKS['same']} / {BANKS['unpruned']}, and p against the unpruned model", style="dim"), Text()]
    parts += [Text(document["selection"], style="yellow")]
    parts += [Text(note, style="yellow") for note in notes(document)]
    return Group(*parts)


def by_method(document: dict[str, Any]) -> list[tuple[dict[str, Any], list[Entry | None]]]:
    """Return every method with the points that count at each budget; None where it has none."""
    known = {(point["method"], point["tuned"], point["point"]): point for point in document["points"]}
    return [
        (method, [known.get((method["method"], method["tuned"], point)) for point in method["budgets"]])
        for method in document["frontiers"]
    ]


def method_name(entry: dict[str, Any]) -> str:
    """Write a method, frozen or tuned."""
    return f"{entry['method']}, tuned" if entry["tuned"] else str(entry["method"])


def _heading(document: dict[str, Any]) -> Text:
    size = "x".join(map(str, document["size"]))
    what = f"{short_name(document['model'])}, {document['decoder']}: {counted(len(document['points']), 'point')}"
    return Text.assemble((what, "bold"), f", {counted(document['images_compared'], 'image')} of {size} pixels")


def degradation_cell(point: Entry) -> tuple[str, str]:
    """Write the mean of a point, and under it which point that is and how much faster."""
    return plain(point["mean"]), "\n".join([point["point"], *speed(point)])


def speed(point: Entry) -> list[str]:
    """Write how much faster a point is than the unpruned model, at the largest batch that was timed."""
    timed = point["milliseconds"]
    largest = max(timed, key=int, default=None)
    return [] if largest is None else [f"{times(timed[largest]['speedup'])}, batch {largest}"]


def neighbour_cells(document: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Callable[[Entry], tuple[str, str]]]]:
    """Return, for each number of neighbours, the unpruned accuracy and what writes that of a point."""

    def writer(k: str) -> Callable[[Entry], tuple[str, str]]:
        def cell(point: Entry) -> tuple[str, str]:
            found = [point["neighbours"][k][bank] for bank in BANKS]
            shares = " / ".join(f"{100 * one['accuracy']:.1f}" for one in found)
            return shares, f"{point['point']}\np {' / '.join(p_value(one['p_value']) for one in found)}"

        return cell

    return {k: (unpruned, writer(k)) for k, unpruned in (document["unpruned"]["neighbours"] or {}).items()}


def _by_budget(document: dict[str, Any], title: str, cell: Callable[[Entry], tuple[str, str]]) -> list[RenderableType]:
    """Make a table whose rows are methods and whose columns are budgets, below its title, which may be wider."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("method", style="cyan", no_wrap=True)
    for budget in document["budgets"]:
        table.add_column(f"≤ {100 * budget:g} %", justify="right", no_wrap=True)
    for method, points in by_method(document):
        texts = [("", "") if point is None else cell(point) for point in points]
        cells = [Text.assemble(first, ("\n" + beside, "dim")) if first else Text(UNKNOWN) for first, beside in texts]
        name = (method_name(method), "bold" if method["ours"] else "")
        table.add_row(Text.assemble(name, (f"\n{counted(method['points'], 'point')}", "dim")), *cells)
    return [Text(title, style="italic"), table]


def legend(document: dict[str, Any]) -> str:
    """Say what columns and operations mean."""
    row = ", whose last block computes all tokens, while that of a point computes the class token alone"
    return (
        "Columns are budgets: shares of the operations of the unpruned model's blocks"
        f"{row if document['class_row'] else ''}. Under each mean: the best point within the budget. Intervals are in "
        "pareto.json."
    )


def sentence(test: dict[str, Any]) -> str:
    """Write a test in words."""
    ours, rival = (f"{test[side]['method']} ({test[side]['point']})" for side in ("ours", "rival"))
    return (
        f"≤ {100 * test['budget']:g} %{', tuned' if test['tuned'] else ''}: {ours} has {times(test['factor'])} the "
        f"error of {rival}, p {p_value(test['p_value'])}, less on {100 * test['better_on']:.0f} % of the images"
    )


def notes(document: dict[str, Any]) -> list[str]:
    """Write what was noticed, and what had to be left out."""
    left_out = document["images"] - document["images_compared"]
    without = [f"{counted(left_out, 'image')} left out: no degradation exists (an output that is nowhere positive)."]
    return [*document["notes"], *(without if left_out else []), *skipped_files(document)]
