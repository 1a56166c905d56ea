"""Checks of arguments that many functions share: each error names the argument, what was expected and what came."""

from __future__ import annotations

import math
import operator
from typing import Any

from pullback.errors import PullbackError


def whole_number(
    name: str,
    value: Any,
    *,
    least: int | None = 1,
    expected: str | None = None,
    error: type[PullbackError] = PullbackError,
) -> int:
    """Return ``value`` as an int; refuse bools, floats, text and numbers below ``least`` (None: any number will do).

    ``expected``: what the message says instead of "a whole number of at least ...".
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        plain = "a whole number" if least is None else f"a whole number of at least {least}"
        raise error(f"{name}: expected {expected or plain}, got {shown(value)}.")
    return number


def finite_number(name: str, value: Any, *, least: float = -math.inf, most: float = math.inf, expected: str) -> float:
    """Return ``value`` as a float; refuse bools, text, NaN, infinity and numbers below ``least`` or above ``most``."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        number = math.nan
    if not math.isfinite(number) or not least <= number <= most:
        raise PullbackError(f"{name}: expected {expected}, got {shown(value)}.")
    return number


def of_kind(
    name: str, value: Any, kind: type | tuple[type, ...], expected: str, error: type[PullbackError] = PullbackError
) -> None:
    """Refuse a value that is no instance of these classes."""
    if not isinstance(value, kind):
        raise error(f"{name}: expected {expected}, got {shown(value)}.")


def callable_or_none(name: str, value: Any) -> None:
    """Refuse a value that is neither None nor a function."""
    if value is not None and not callable(value):
        raise PullbackError(f"{name}: expected a function or None, got {shown(value)}.")


def shown(value: Any) -> str:
    """Describe a value in a message: tensors and arrays by their shape, other things by a short repr."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{type(value).__name__} of shape {list(shape)}"
    text, kind = repr(value), type(value).__name__
    if len(text) <= 80 and "\n" not in text:
        return text
    if text.startswith("<"):  # functions, classes
        return f"{text[:60].splitlines()[0]}…"
    return f"{kind} {text[:60].splitlines()[0]}…" if isinstance(value, str | list | tuple | dict) else f"a {kind}"
