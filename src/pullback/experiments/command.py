"""What the commands of the experiments share: options, errors in one line, and rows that a second call goes on with.

While a command runs it says on standard error how far it is (`runs.progress.Lines`); its table goes to standard output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pullback.errors import PullbackError
from pullback.runs.files import make_folder
from pullback.runs.rows import Rows

Row = dict[str, Any]

Device = Annotated[str, typer.Option(help="auto: the GPU where there is one.")]
RowsOut = Annotated[Path | None, typer.Option(help="File of JSON lines; rows that it holds are not made again.")]
NewRowsOut = Annotated[Path | None, typer.Option(help="File of JSON lines, written anew.")]
Vggt = Annotated[str, typer.Option(help="A VGGT: hub id, folder or .safetensors file.")]


@contextmanager
def explained() -> Iterator[None]:
    """End the command with one line on standard error where the user can mend what is wrong."""
    try:
        yield
    except (PullbackError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


class RowFile:
    """Rows of a file of JSON lines, or of memory alone where ``out`` is None.

    Rows that agree in the columns ``identity`` are the same measurement. ``anew``: the first new row replaces what the
    file held.
    """

    def __init__(self, out: Path | None, identity: Sequence[str] = (), *, anew: bool = False) -> None:
        self._identity, self._anew = tuple(identity), anew
        self._file = None if out is None else Rows(make_folder(out.parent) / out.name)
        self.rows: list[Row] = [] if self._file is None or anew else self._file.read()

    def find(self, begun: Row) -> Row | None:
        """The row of the same measurement, if it is known."""
        return next((row for row in self.rows if self._key(row) == self._key(begun)), None)

    def add(self, row: Row) -> Row:
        """Append a row, and return it."""
        self.rows.append(row)
        if self._file is not None:
            if self._anew:
                self._file.keep(lambda old: False)
                self._anew = False
            self._file.add([row])
        return row

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self._identity)
