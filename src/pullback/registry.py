"""Everything that can be chosen by name: backbones, decoders, scores. Plain data, so that listing it needs no torch.

An entry says where its code is as "package.module:name"; the code is imported when the entry is used. Command-line
help, `pullback ls`, the tests and the documentation are generated from these tables. Packages of others add to them
through the entry-point group `pullback`: a function without arguments that calls `register_backbone`,
`register_decoder` or `register_score`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pullback.errors import PullbackError

Code = str | Callable[..., Any]
"""Code, or where it is: "package.module:name"."""
GROUP = "pullback"


@dataclass(frozen=True)
class BackboneEntry:
    """A family of models.

    ``model_types``: names in config.json. ``adapt``: (module, name) -> `Backbone`. ``loader``: transformers' class for
    checkpoints that we do not read ourselves. ``load``: (name, device, dtype) -> module, for families that transformers
    does not have. ``may_lack``: parameters that published checkpoints leave out and that no decoder reads unless they
    are there. ``views``: samples are several views of a scene, not single images.
    """

    name: str
    model_types: tuple[str, ...]
    adapt: Code
    decoders: tuple[str, ...]
    example: str
    loader: str = "AutoModel"
    load: Code | None = None
    may_lack: tuple[str, ...] = ()
    views: bool = False


@dataclass(frozen=True)
class DecoderEntry:
    """A decoder. ``build``: (backbone, *groups of ``pattern``) -> `Decoder`.

    ``pattern``: a regular expression for names with numbers in them, such as depth-8x8; by default the name itself.
    ``family``: the one backbone family that it belongs to, before the decoders of the same name for all.
    """

    name: str
    build: Code
    help: str
    pattern: str = ""
    family: str | None = None

    def match(self, choice: str) -> re.Match[str] | None:
        return re.fullmatch(self.pattern or re.escape(self.name), choice)


@dataclass(frozen=True)
class ScoreEntry:
    """A score per token. ``score``: (tokens [B, N, D], context) -> [B, N], not negative, the lowest are removed first.

    ``needs``: what it takes besides the model, such as "a head"; scores that need nothing work by name everywhere.
    """

    name: str
    score: Code
    help: str
    needs: str = ""


BACKBONES: dict[str, BackboneEntry] = {}
DECODERS: list[DecoderEntry] = []
SCORES: dict[str, ScoreEntry] = {}


def register_backbone(entry: BackboneEntry) -> BackboneEntry:
    """Add a family of models, or replace the one of the same name."""
    BACKBONES[entry.name] = entry
    return entry


def register_decoder(entry: DecoderEntry) -> DecoderEntry:
    """Add a decoder, or replace the one of the same name and family."""
    same = [known for known in DECODERS if (known.name, known.family) == (entry.name, entry.family)]
    for known in same:
        DECODERS.remove(known)
    DECODERS.append(entry)
    return entry


def register_score(entry: ScoreEntry) -> ScoreEntry:
    """Add a score per token, or replace the one of the same name."""
    SCORES[entry.name] = entry
    return entry


def resolve(code: Code) -> Any:
    """Return the object that an entry names: imported if it is given as "package.module:name", else as it is."""
    if not isinstance(code, str):
        return code
    module, _, name = code.partition(":")
    if not name:
        raise PullbackError(f"registry: expected 'package.module:name', got {code!r}.")
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise PullbackError(f"registry: {code!r} does not exist: {module} has no {name!r}. Correct the entry.")
    return found


@cache
def load_plugins() -> tuple[str, ...]:
    """Call every function in the entry-point group `pullback`, once per process; return their names."""
    from importlib.metadata import entry_points  # slow to import, and `--help` does without

    found = []
    for point in entry_points(group=GROUP):
        try:
            point.load()()
        except Exception as error:
            raise PullbackError(
                f"plugin {point.name!r} ({point.value}) could not be loaded: {error!r}. Repair or remove its package."
            ) from error
        found.append(point.name)
    return tuple(found)
