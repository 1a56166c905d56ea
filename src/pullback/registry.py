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

    ``needs``: what it takes besides the tokens. Scores that need nothing work by name everywhere. Of a score that needs
    a "head", an "spn" or a "probe", ``score`` is a function that makes the score of such a network, or of a `ProbeMap`.
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


# Scores per token, and the named pruning plans.


@dataclass(frozen=True)
class PresetEntry:
    """A named pruning plan (`pullback.pruning.plan.preset`). ``score``: the one that it is defined with, if any."""

    name: str
    help: str
    score: str = ""


SCORES.update(
    (entry.name, entry)
    for entry in (
        ScoreEntry("importance", "pullback.pruning.scores:as_score", "of a trained importance head", "head"),
        ScoreEntry("exact", "pullback.geometry.scores:exact_importance", "importance by Jacobian products", "probe"),
        ScoreEntry("block-norm", "pullback.geometry.scores:exact_block_norms", "|J_t| by Jacobian products", "probe"),
        ScoreEntry("spn", "pullback.pruning.scores:as_score", "importance of a predicted metric", "spn"),
        ScoreEntry("random", "pullback.pruning.scores:random", "uniform"),
        ScoreEntry("tome", "pullback.pruning.scores:bipartite_redundancy", "ToMe: how unlike every other patch"),
        ScoreEntry("strided", "pullback.pruning.scores:strided_redundancy", "how unlike a patch of every 2 x 2"),
        ScoreEntry("evit", "pullback.pruning.scores:class_attention", "EViT: attention of the class token"),
        ScoreEntry("norm", "pullback.pruning.scores:token_norm", "length of the token"),
        ScoreEntry("cls-similarity", "pullback.pruning.scores:class_similarity", "cosine to the class token"),
    )
)
PRESETS: dict[str, PresetEntry] = {
    entry.name: entry
    for entry in (
        PresetEntry("best", "what won on our measurements"),
        PresetEntry("paper", "section 7 of the paper literally"),
        PresetEntry("drop", "the lowest scores go, nothing else"),
        PresetEntry("tome", "ToMe's bipartite merging", "tome"),
        PresetEntry("evit", "EViT's dropping by class attention", "evit"),
        PresetEntry("strided", "merging into one patch of every 2 x 2", "strided"),
    )
}
