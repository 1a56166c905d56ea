"""Tuned vectors: other values for the biases, norms and layer scales of a model, and a copy of the model that has them.

The copy shares every other parameter with the original, which is never written to: matrices are there once. On disk
tuned vectors are one small file, `vectors.safetensors`, that says in its metadata

    blocks   hashes of the blocks of the original, so that vectors of another model are refused (`backbones.weights`)
    plan     the plan of the pruned model that they were tuned for
    record   how they were tuned, and the error on held-out images before and after
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from pullback.backbones import Backbone
from pullback.backbones.weights import block_hashes, same_weights, tensors_within
from pullback.errors import DamagedModelError, ModelError
from pullback.pruning.plan import Plan
from pullback.runs.files import replaced

VECTORS = "vectors.safetensors"
_POSITIONS = re.compile(r"(^|\.)(position_embeddings?|pos_embed)(\.weight)?$")
_Model = TypeVar("_Model", bound=nn.Module)


class TunedVectors(nn.Module):
    """Parameters of a model with other values. ``record``: how they were tuned, as plain JSON."""

    def __init__(self, values: Mapping[str, Tensor], record: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, value in values.items():  # a module allows no dots in names
            self.register_parameter(name.replace(".", "/"), nn.Parameter(value.detach().clone(), requires_grad=False))
        self.record = dict(record or {})

    def by_name(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the model."""
        return {key.replace("/", "."): value for key, value in self.named_parameters()}

    def extra_repr(self) -> str:
        return f"{sum(value.numel() for value in self.parameters()):,} numbers"


def vector_names(model: nn.Module, backbone: Backbone, *, positions: bool = False) -> list[str]:
    """Return the names, in ``model``, of every vector of its blocks and of the final norm, ``backbone`` being the model
    taken apart; with ``positions`` also of its position embeddings."""
    named = dict(model.named_parameters())
    vectors = {name: value for name, value in named.items() if value.ndim == 1}
    used = [value for value in tensors_within((backbone.blocks, backbone.norm)) if value.ndim == 1]
    found = list(dict.fromkeys(name for value in used for name in _owners(value, vectors)))
    if not positions:
        return found
    embeddings = [name for name in named if _POSITIONS.search(name)]
    if not embeddings:
        raise ModelError(f"positions: {backbone.name} has no position embeddings that could be tuned. Leave it out.")
    return found + embeddings


def holds_views(model: nn.Module, backbone: Backbone) -> bool:
    """Whether blocks refer to parts of a parameter, such as a third of one bias for queries, keys and values."""
    own = {id(value) for value in model.parameters()}
    return any(id(value) not in own for value in tensors_within((backbone.blocks, backbone.norm)))


def _owners(tensor: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the parameter that a tensor is, or is a part of; nothing where it is neither."""
    start = tensor.data_ptr()
    return [
        name
        for name, value in parameters.items()
        if value is tensor
        or (value.device == tensor.device and 0 <= start - value.data_ptr() < value.numel() * value.element_size())
    ]


def shared_copy(model: _Model, values: Mapping[str, nn.Parameter], *, frozen: bool = False) -> _Model:
    """Return a copy of a model in which these parameters take the place of its own; all others are shared with it.

    ``frozen``: share their memory alone, so that no gradient can reach the original.
    """
    named = dict(model.named_parameters())
    unknown = [name for name in values if name not in named]
    wrong = [name for name in values if name in named and values[name].shape != named[name].shape]
    if unknown or wrong:
        first = (unknown or wrong)[0]
        reason = "which is not in it" if unknown else f"which has the shape {list(named[first].shape)} in it"
        raise ModelError(
            f"vectors: {len(unknown) + len(wrong)} of {len(values)} do not fit {type(model).__name__}, such as {first} "
            f"{list(values[first].shape)}, {reason}. Use the model that they were tuned for, in the same class."
        )
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for name, value in named.items():
        shared = nn.Parameter(value.detach(), requires_grad=False) if frozen else value
        memo[id(value)] = values.get(name, shared)
    return deepcopy(model, memo)


# Files


def write_vectors(path: Path, vectors: TunedVectors, original: Backbone, plan: Plan) -> None:
    """Write the file of tuned vectors; ``original``: the model without them."""
    from safetensors.torch import save_file

    metadata = {
        "format": "pt",
        "blocks": json.dumps(block_hashes(original)),
        "plan": json.dumps(asdict(plan)),
        "record": json.dumps(vectors.record),
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in vectors.by_name().items()}
    with replaced(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def read_vectors(path: Path, original: Backbone) -> TunedVectors:
    """Read tuned vectors for a model, or raise an error where they were tuned for another one."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ModelError(f"folder: {path.parent} has no {path.name}, which a tuned model needs. Save it again.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
        blocks, record = json.loads(metadata["blocks"]), json.loads(metadata["record"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise DamagedModelError(f"folder: {path} cannot be read ({error}). Save the tuned model again.") from None
    if same_weights(blocks, original) is False:
        raise ModelError(
            f"vectors: those in {path} were tuned for other weights than those of {original.name}. Use the model that "
            "they belong to, or tune this one (pb.tune)."
        )
    own = dict(original.model.named_parameters())
    return TunedVectors({name: value.to(own[name]) if name in own else value for name, value in values.items()}, record)
