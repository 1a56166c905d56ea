"""Experiments as tables in the terminal: the list of them, what a run would take, and the verdicts of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pullback.report.wording import UNKNOWN, counted

_STYLES = {"holds": "green", "holds partly": "yellow", "does not hold": "red"}


def experiments_table(listed: Iterable[tuple[str, str, str]]) -> Table:
    """Build the list of experiments from (name, what it is, its label in the paper)."""
    table = _table("Experiments", "name", "what", "in the paper")
    for row in listed:
        table.add_row(*row)
    return table


def plan_table(document: Mapping[str, Any]) -> RenderableType:
    """Build what `--dry-run` prints from `pullback.experiments.estimate.estimates`."""
    table = _table(
        f"scale {document['scale']} on {document['device']}", "name", "cells", "numbers", "absent", "time", "memory"
    )
    for own in document["experiments"]:
        time = UNKNOWN if own["seconds"] is None else duration(own["seconds"])
        memory = f"{own['bytes'] / 2**30:.1f} GiB"
        table.add_row(own["name"], str(own["cells"]), str(own["numbers"]), str(own["absent"]), time, memory)
    seconds = [own["seconds"] for own in document["experiments"]]
    total = UNKNOWN if None in seconds else duration(sum(seconds))
    models = Text("models: " + ", ".join(f"{role} = {name}" for role, name in document["models"].items()))
    why = dict.fromkeys(reason for own in document["experiments"] for reason in own["why"])
    return Group(
        table,
        Text(f"together about {total}; a rough guess from counts of operations; what several share counts in each"),
        models,
        *map(Text, why),
    )


def verdicts_table(documents: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Build the table of claims and what came of them."""
    table = _table("Claims of the paper", "experiment", "claim", "verdict", "why")
    for document in documents:
        for claim in document["claims"]:
            word = Text(claim["word"], style=_STYLES.get(claim["word"], "dim"))
            if claim["on"]:
                word.append(f" on {', '.join(claim['on'])}", style="dim")
            table.add_row(document["name"], claim["sentence"], word, claim["why"])
    done = Text(f"{counted(len(documents), 'experiment')} done.")
    return Group(table, done) if table.row_count else done


def duration(seconds: float) -> str:
    """Write 90 as "1.5 min", in the unit that fits."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
