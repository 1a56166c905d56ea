"""What was trained for published weights and comes with the package: found by a fingerprint of those weights.

A head that was trained on one set of weights is worthless on another. A file name says little about weights, and a hash
of them changes with every cast. A fingerprint is a few fixed entries of every block and of the final norm, compared
within the rounding of float16, or of bfloat16 where either side was stored in it. So a float16 copy of a model is the
same model, a fine-tuned one is not. The embedding is left out: its positions are interpolated for other image sizes,
and its mask token is drawn anew where a checkpoint lacks one.

Everything of this kind lies in a folder of its own beside the embedded models, ``models/weights/<name>/``, or, where
there are several for one model, ``models/weights/<names>/<name>/``, with model.safetensors, a model card and a
config.json that holds ``kind`` and ``fingerprint``, at the top or in ``origin``.
To ship something:

    write_network(folder, head, {"kind": "dpt-depth", "fingerprint": fingerprint(backbone), **asdict(head.config)})
    vae.describe(origin=replace(vae.config.origin, fingerprint=fingerprint(backbone))).save_pretrained(folder)

To find it (the layers are compared with those in config.json):

    folder = shipped("s2vae", backbone, layers=(2, 5, 8, 11), fix="Train one: pullback train bottleneck.")
    vae = S2VAE.from_pretrained(folder)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback import models
from pullback.backbones.backbone import AnyBackbone
from pullback.backbones.weights import tensors_within
from pullback.errors import ModelError, PullbackError, counted

ENTRIES = 2
"""Numbers that are kept of every tensor."""
_SIZES = ("family", "depth", "width", "heads", "patch_size", "prefix")
_NOT_COMPARED = re.compile(r"mask_token|pos_embed|position")
_HALF, _BFLOAT = 2.0**-11, 2.0**-8  # largest relative error of rounding to float16 and to bfloat16
_SUBNORMAL = 2.0**-24  # float16 knows no smaller number


def fingerprint(backbone: AnyBackbone) -> dict[str, Any]:
    """Return family, sizes and a few entries of the weights of every block, as config.json can hold them.

    ``weights``: {part: the entries as text, one after the other}; the parts are blocks and the final norm, or of
    networks without such blocks the modules that hold parameters.
    """
    heads = backbone.blocks[0].heads if backbone.blocks else None
    sizes = (backbone.family, backbone.depth, backbone.dim, heads, backbone.patch_size, backbone.prefix)
    entries = {name: _entries(tensors, backbone) for name, tensors in _parts(backbone).items()}
    weights = {name: " ".join(f"{value:.9g}" for value in values.tolist()) for name, values in entries.items()}
    return {**dict(zip(_SIZES, sizes, strict=True)), "weights": weights}


def has_fingerprint(known: Mapping[str, Any], backbone: AnyBackbone) -> bool:
    """Whether a backbone has the weights of which ``known`` is the `fingerprint`, up to rounding."""
    return difference(known, fingerprint(backbone)) is None


def difference(known: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Say in what one fingerprint differs from another, None where they are those of the same weights."""
    for name in _SIZES:
        if known.get(name) != found[name]:
            return f"made for {name.replace('_', ' ')} {known.get(name)}, this model has {found[name]}"
    mine, theirs = ({name: _numbers(text) for name, text in side["weights"].items()} for side in (found, known))
    if mine.keys() != theirs.keys() or any(len(mine[name]) != len(theirs[name]) for name in mine):
        return "made for a network of other parts"
    tolerance = max(_HALF, _rounding(mine) + _rounding(theirs))
    others = [name for name in mine if not _alike(mine[name], theirs[name], tolerance)]
    if not others:
        return None
    where = others[0] + (f" and {counted(len(others) - 1, 'other part')}" if others[1:] else "")
    return f"of this family and these shapes, but for other weights, as before fine-tuning: they differ in {where}"


def shipped(
    kind: str,
    backbone: AnyBackbone,
    *,
    fix: str,
    error: type[PullbackError] = ModelError,
    **must_match: Any,
) -> Path:
    """Return the folder of what ships of this ``kind`` for the weights of a backbone.

    ``must_match``: fields of config.json, or of the origin in it, that must have these values. If nothing fits, raise
    ``error`` with what was compared and the ``fix``, a sentence that says how to train one.
    """
    found, reasons = fingerprint(backbone), []
    for folder, config in _of_kind(kind):
        reason = difference(config["fingerprint"], found) or _mismatch(config, must_match)
        if reason is None:
            return folder
        reasons.append(f"{folder.name} is {reason}")
    compared = f" {'; '.join(reasons)}." if reasons else " None of this kind comes with it."
    raise error(
        f"model: no {kind} that comes with the package fits {backbone.name}, family {backbone.family}, "
        f"{backbone.depth} blocks of width {backbone.dim}.{compared} {fix}"
    )


def fitting(kind: str, backbone: AnyBackbone) -> list[tuple[Path, dict[str, Any]]]:
    """Return folders and configurations of all that ships of this ``kind`` for the weights of a backbone.

    Fields of ``origin`` stand beside the others. Each fingerprint is compared once, however many share it."""
    everything = _of_kind(kind)
    if not everything:
        return []
    found, fits = fingerprint(backbone), dict[str, bool]()
    chosen = []
    for folder, config in everything:
        known = json.dumps(config["fingerprint"], sort_keys=True)
        if known not in fits:
            fits[known] = difference(config["fingerprint"], found) is None
        chosen += [(folder, config)] if fits[known] else []
    return chosen


def _of_kind(kind: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return folders and configurations of what ships of this kind. Embedded models have no kind."""
    found = []
    for folder, config in models.configurations().items():
        config = {**config.get("origin", {}), **config}
        if config.get("kind") == kind and config.get("fingerprint"):
            found.append((folder, config))
    return found


def _mismatch(config: Mapping[str, Any], must_match: Mapping[str, Any]) -> str | None:
    for name, wanted in must_match.items():
        stored = json.loads(json.dumps(config.get(name)))
        if stored != json.loads(json.dumps(wanted)):  # a tuple is a list there
            return f"made for {name} {stored}, not {wanted}"
    return None


def _parts(backbone: AnyBackbone) -> dict[str, list[Tensor]]:
    """Return the weights that are compared, by the part of the network that they belong to."""
    if backbone.blocks:
        parts = {f"block {index}": list(tensors_within(block)) for index, block in enumerate(backbone.blocks)}
        return {**parts, "norm": list(tensors_within(backbone.norm))}
    parts = {}
    for name, value in sorted(backbone.model.named_parameters()):
        if not _NOT_COMPARED.search(name):
            parts.setdefault(name.rpartition(".")[0], []).append(value)
    return parts


def _entries(tensors: list[Tensor], backbone: AnyBackbone) -> Tensor:
    """Return fixed entries of each tensor, spread over it."""
    picked = []
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ModelError(
                f"model: the weights of {backbone.name} are quantised ({tensor.dtype}), which cannot be compared. "
                "Load them in float32, float16 or bfloat16."
            )
        flat = tensor.detach().reshape(-1)
        places = [(2 * number + 1) * len(flat) // (2 * ENTRIES) for number in range(ENTRIES)]
        picked.append(flat[places].to("cpu", torch.float32))
    return torch.cat(picked) if picked else torch.empty(0)


def _numbers(text: str) -> Tensor:
    return torch.tensor([float(number) for number in text.split()], dtype=torch.float32)


def _rounding(entries: Mapping[str, Tensor]) -> float:
    """Return how far the entries were rounded, told from themselves: a bfloat16 file may have been read as float32."""
    values = torch.cat(list(entries.values()))
    for dtype, rounding in ((torch.bfloat16, _BFLOAT), (torch.float16, _HALF)):
        if torch.equal(values.to(dtype).float(), values):
            return rounding
    return 0.0


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    allowed = tolerance * torch.maximum(one.abs(), other.abs()) + _SUBNORMAL
    return bool(((one - other).abs() <= allowed).all())
