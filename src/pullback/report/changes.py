"""Two folders of experiments compared: which numbers and verdicts are others than before.

A number is another one if the 95 % intervals of the two do not overlap; where neither has one, if they differ by more
than rounding. Times are compared in the same way and told apart, since no two runs agree on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pullback.report.results import Place, Result, Results

Mark = Literal["same", "changed", "new", "gone"]
ROUNDING = 1e-6
"""By how much, relative to the larger of them, two numbers without intervals may differ and be called the same."""


@dataclass(frozen=True)
class Change:
    """What became of a place. ``then``: the row before, None where it had no value."""

    mark: Mark
    then: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ChangedClaim:
    """A claim whose verdict is another one; None on the side where it is not there."""

    experiment: str
    sentence: str
    where: str
    then: str | None
    now: str | None


@dataclass(frozen=True)
class Comparison:
    """What is different from another folder. ``places``: of every experiment the changes of its places; ``gone``:
    places that only the other folder has, with their rows. ``settings``: names of roles, scale and seed that differ,
    with (then, now). ``only_here``, ``only_there``: experiments."""

    other: Results
    places: Mapping[str, Mapping[Place, Change]]
    gone: Mapping[str, Mapping[Place, Mapping[str, Any]]]
    claims: tuple[ChangedClaim, ...]
    settings: Mapping[str, tuple[Any, Any]]
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]


def compare(now: Results, then: Results) -> Comparison:
    """Compare the finished experiments of two folders."""
    here = {own.name: own for own in now.finished}
    there = {own.name: own for own in then.finished}
    both = [name for name in here if name in there]
    claims = [claim for name in both for claim in _changed_claims(here[name], there[name])]
    keys = dict.fromkeys([*now.settings, *then.settings])
    settings = {key: (then.settings.get(key), now.settings.get(key)) for key in keys}
    return Comparison(
        then,
        {name: _changes(here[name], there[name]) for name in both},
        {name: _gone(here[name], there[name]) for name in both},
        tuple(claims),
        {key: pair for key, pair in settings.items() if pair[0] != pair[1]},
        tuple(name for name in here if name not in there),
        tuple(name for name in there if name not in here),
    )


def is_changed(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Whether two rows with values differ: by their intervals, or without any by more than rounding. A number without
    an interval beside one that has one is taken for a point."""
    if _has_interval(now) or _has_interval(then):
        (low, high), (other_low, other_high) = _range(now), _range(then)
        return bool(low > other_high or other_low > high)
    one, other = float(now["value"]), float(then["value"])
    return abs(one - other) > ROUNDING * max(abs(one), abs(other))


def _changes(now: Result, then: Result) -> dict[Place, Change]:
    found: dict[Place, Change] = {}
    for place in now.places:
        row, before = now.rows.get(place), then.rows.get(place)
        has = row is not None and row["value"] is not None
        had = before is not None and before["value"] is not None
        if has and had:
            assert row is not None and before is not None
            found[place] = Change("changed" if is_changed(row, before) else "same", before)
        elif has or had:
            found[place] = Change("new") if has else Change("gone", before)
    return found


def _gone(now: Result, then: Result) -> dict[Place, Mapping[str, Any]]:
    kept = set(now.places)
    return {place: row for place, row in then.rows.items() if place not in kept and row["value"] is not None}


def _changed_claims(now: Result, then: Result) -> list[ChangedClaim]:
    here, there = _claims(now), _claims(then)
    return [
        ChangedClaim(now.name, sentence, where, there.get((sentence, where)), here.get((sentence, where)))
        for sentence, where in dict.fromkeys([*here, *there])
        if here.get((sentence, where)) != there.get((sentence, where))
    ]


def _claims(result: Result) -> dict[tuple[str, str], str]:
    assert result.document is not None
    return {(claim["sentence"], claim["where"]): claim["word"] for claim in result.document["claims"]}


def _has_interval(row: Mapping[str, Any]) -> bool:
    return row.get("low") is not None and row.get("high") is not None


def _range(row: Mapping[str, Any]) -> tuple[float, float]:
    return (row["low"], row["high"]) if _has_interval(row) else (row["value"], row["value"])
