"""Figures drawn by a second process, which imports matplotlib while the main one still imports torch.

The two share nothing but the files of a run. As a module (`python -m pullback.report.drawing`) this reads folders from
standard input, one a line, and answers each with a line of JSON: the names of what was drawn, or what went wrong.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from pullback.errors import FileError


class Drawing:
    """The second process, as a context manager. Without matplotlib, which is an extra, there is none."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        if importlib.util.find_spec("matplotlib") is not None:
            command = [sys.executable, "-m", "pullback.report.drawing"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Drawing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def draw(self, folder: Path, *, page: bool = True) -> list[str]:
        """Draw the figures of a folder, and its page, and return their names; none without matplotlib.

        ``page`` is False for the parts of a run that has one page for all of them.
        """
        if self._process is None:
            return []
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps([str(folder.resolve()), page]), file=self._process.stdin, flush=True)
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        answer = json.loads(reply) if reply else {"error": "the drawing process ended early"}
        if isinstance(answer, dict):
            raise FileError(f"{folder}: the figures could not be drawn: {answer['error']}. The numbers are there.")
        return answer


def main() -> None:
    """Answer the folders on standard input until it ends."""
    from pullback.report.figures import draw_all
    from pullback.report.page import write_page_of

    for line in sys.stdin:
        folder, page = json.loads(line)
        try:
            drawn = draw_all(Path(folder))
            written = write_page_of(Path(folder)) if page else None
            answer: object = drawn if written is None else [*drawn, written.name]
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
