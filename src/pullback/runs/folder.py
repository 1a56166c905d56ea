"""A folder belongs to one kind of run: the results of two commands are never mixed in one.

A kind is known by the files that its command writes first, so that folders of earlier versions are known as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pullback.errors import PullbackError
from pullback.runs import documents
from pullback.runs.files import WEIGHTS, make_folder


class _Kind(NamedTuple):
    holds: str  # what the error message calls the results
    files: tuple[str, ...]  # a folder with one of these holds them
    unless: tuple[str, ...] = ()  # but not beside one of these, of another kind that has a file of the same name


KINDS = {
    "diagnose": _Kind("a diagnosis", (documents.DIAGNOSIS,)),
    "prune": _Kind(
        "a comparison of pruning rules",
        (documents.SETTINGS, documents.ROWS, documents.SUMMARY),
        unless=(documents.PARETO_SETTINGS,),
    ),
    "pareto": _Kind("a comparison of methods at their operating points", (documents.PARETO_SETTINGS, documents.PARETO)),
    "targets": _Kind("targets", (documents.TARGETS,)),
    "train": _Kind("a training run", (documents.CHECKPOINT, documents.METRICS)),
    "plan": _Kind("a pruned model", (documents.PRUNED,)),
    "reproduce": _Kind("experiments", (documents.REPRODUCE,)),
    "demo": _Kind("a demo", (f"scenes/{documents.SCENES}", documents.SCENES)),
    "look": _Kind("pictures", (documents.LOOK,)),
    "index": _Kind("a gallery", (documents.GALLERY,)),
    "search": _Kind("what a search has found", (documents.MATCHES,)),
    "model": _Kind("the weights of a model", (WEIGHTS,)),
}
"""What a folder may hold, by the command that writes it there."""


def claim_folder(out: str | os.PathLike[str], kind: str) -> Path:
    """Make the folder, or raise an error where it cannot be used or holds another kind of run; return it."""
    check_kind(out, kind)
    return make_folder(out)


def check_kind(out: str | os.PathLike[str], kind: str) -> None:
    """Raise an error if the folder holds results of another kind than ``kind``, one of `KINDS`, and none of its own.

    Nothing is made or written, so it may come first of all. Files that no command writes do not matter.
    """
    path = Path(out)
    if _found(path, kind):
        return
    for other, (holds, *_) in KINDS.items():
        found = _found(path, other)
        if found:
            command = "" if other == "model" else f" of `pullback {other}`"
            raise PullbackError(
                f"out: {path} holds {holds} ({found[0]}{command}), and a folder belongs to one kind of run. Choose "
                "another --out."
            )


def _found(path: Path, kind: str) -> list[str]:
    """Return which files of this kind of run are in the folder."""
    if any((path / name).is_file() for name in KINDS[kind].unless):
        return []
    return [name for name in KINDS[kind].files if (path / name).is_file()]
