"""Settings that decide the numbers of a run: written once, and the same again whenever the run goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pullback.errors import PullbackError
from pullback.runs.files import read_json, write_json

ELSEWHERE = "…/"
"""How a place begins of which only the last name is kept, as in folders that were published from another machine."""
IDENTITY = "_identity"
"""How the names of settings end without which nothing can be added: older versions of the package have none of them."""


def keep_settings(
    path: Path,
    settings: Mapping[str, Any],
    *,
    may_be_added: Collection[str] = (),
    **rules: Any,
) -> dict[str, Any]:
    """Write the settings to ``path``, or compare them with what is there; return the ones in force.

    ``may_be_added`` and the other ``rules`` are those of `check_settings`; of the former the value that is known is
    kept.
    """
    stored = read_json(path, "out") if path.is_file() else None
    if stored is None:
        in_force = dict(settings)
    else:
        check_settings(stored, settings, path.parent, may_be_added=may_be_added, **rules)
        known = {name: stored[name] for name in may_be_added if settings.get(name) is None and name in stored}
        in_force = {**settings, **known}
    if stored != in_force:
        write_json(path, in_force)
    return in_force


def check_settings(
    stored: Mapping[str, Any],
    asked: Mapping[str, Any],
    where: object,
    *,
    holds: str,
    ignore: Collection[str] = (),
    may_be_added: Collection[str] = (),
    places: Collection[str] = (),
) -> None:
    """Raise an error that names every setting in which ``stored`` and ``asked`` differ.

    ``holds`` says in the message what is stored, such as "targets" or "a comparison". ``ignore``: names that may
    differ. ``may_be_added``: names that may be None on one side. ``places``: names of files and folders, which may be
    spelled in another way. Where ``stored`` lacks an identity, such as decoder_identity, it is of an older version:
    nobody can tell whether more of it would fit.
    """
    unknown = [name for name in asked if name.endswith(IDENTITY) and name not in stored and asked[name] is not None]
    different = [
        name
        for name in {**stored, **asked}
        if name not in (*ignore, *unknown)
        and stored.get(name) != asked.get(name)
        and not (name in may_be_added and None in (stored.get(name), asked.get(name)))
        and not (name in places and _same_place(stored.get(name), asked.get(name)))
    ]
    if different:
        listing = "; ".join(f"{name}: {stored.get(name)!r} there, {asked.get(name)!r} asked for" for name in different)
        raise PullbackError(
            f"out: {where} holds {holds} with other settings ({listing}). Ask for the same settings to go on with it, "
            "or choose another folder."
        )
    if unknown:
        raise PullbackError(
            f"out: {where} holds {holds} of an older version of pullback, which did not record {', '.join(unknown)}. "
            "It can be read, but nothing is added to it, since nobody can tell whether that would belong there. Choose "
            "another folder."
        )


def _same_place(one: Any, other: Any) -> bool:
    """Whether two paths lead to the same place: relative or absolute, by a link or straight. Of a place on another
    machine the name is all that can be compared."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    if ELSEWHERE in (one[: len(ELSEWHERE)], other[: len(ELSEWHERE)]):
        return Path(one).name == Path(other).name
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
