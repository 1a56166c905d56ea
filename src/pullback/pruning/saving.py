"""Pruned models as folders: the plan, the heads, and the model itself.

folder/pruned.json   plan, score of each stage, the networks whose metric d_task takes, class of the model
folder/heads/0, ...  whatever the networks' own save_pretrained writes, each network once, whatever it is used for
folder/model/        the model's own save_pretrained
"""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pullback.backbones.checkpoint import first_line, locate, read_config, reader_of, write_network
from pullback.errors import ModelError, PullbackError
from pullback.pruning.apply import PrunedModel
from pullback.pruning.modes import StageModes
from pullback.pruning.plan import PrunePlan
from pullback.pruning.scores import SCORES, HeadScore

DOCUMENT, HEADS, MODEL = "pruned.json", "heads", "model"
MODES = "modes"  # where older folders have the networks of d_task, by stage


def save_pruned(pruned: PrunedModel, folder: str | Path) -> Path:
    """Write all of it; the folder is made where it is missing. What cannot be saved is refused before that."""
    folder = Path(folder)
    if pruned.modes is not None and not isinstance(pruned.modes, StageModes):
        raise ModelError(
            "pruned: the modes of d_task are a function, which cannot be saved. Take a Spectral Pullback Network, or "
            "save the plan and prune again where it is loaded."
        )
    modes: dict[str, Any] = {} if pruned.modes is None else dict(pruned.modes.networks.items())
    scores = [_name_or_network(score, number) for number, score in enumerate(pruned.scores)]
    networks = list(dict.fromkeys(choice for choice in [*scores, *modes.values()] if not isinstance(choice, str)))
    entries = {network: _entry(network, number) for number, network in enumerate(networks)}
    document = {
        "plan": asdict(pruned.plan),
        "scores": [{"name": choice} if isinstance(choice, str) else entries[choice] for choice in scores],
        "modes": {layer: entries[network] for layer, network in modes.items()},
        "class": _address(pruned.model),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for network, entry in entries.items():
        network.save_pretrained(folder / entry["head"])
    _write_model(pruned.model, folder / MODEL)
    (folder / DOCUMENT).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return folder


def load_pruned(
    folder: str | Path, *, model: nn.Module | None = None, device: str | torch.device = "cpu"
) -> PrunedModel:
    """What `save_pruned` wrote. ``model``: use this one instead of the saved copy."""
    folder = Path(folder)
    try:
        document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
        plan, address = PrunePlan(**document["plan"]), str(document["class"])
        scores = [_Use.of(entry) for entry in document["scores"]]
        modes = {int(layer): _Use.of_modes(layer, entry) for layer, entry in document["modes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"folder: {folder} holds no pruned model that can be read ({type(error).__name__}: {error}). Expected one "
            "that save_pretrained wrote."
        ) from None
    # one network for all its uses, as it was
    networks = {use: _read_network(use, folder) for use in dict.fromkeys([*scores, *modes.values()]) if use.address}
    own = _read_model(address, folder) if model is None else model
    choices = [networks.get(use, use.place) for use in scores]
    known = {layer: networks[use] for layer, use in modes.items()}
    return PrunedModel(own, plan, choices, StageModes(known) if known else None).to(device)


@dataclass(frozen=True)
class _Use:
    """One entry of the document: a network by folder and class, or, without a class, a score by name."""

    place: str
    address: str = ""
    dtype: str = ""

    @classmethod
    def of(cls, entry: dict[str, str]) -> _Use:
        if "name" in entry:
            return cls(entry["name"])
        return cls(entry["head"], entry["class"], entry.get("dtype", ""))

    @classmethod
    def of_modes(cls, layer: str, entry: dict[str, str] | str) -> _Use:
        return cls(f"{MODES}/{layer}", entry) if isinstance(entry, str) else cls.of(entry)


def _name_or_network(score: Any, number: int) -> Any:
    for name, known in SCORES.items():
        if known is score:
            return name
    if isinstance(score, HeadScore) and hasattr(score.head, "save_pretrained"):
        return score.head
    raise ModelError(f"score: stage {number} uses a function of your own, which cannot be saved. Use a name or a head.")


def _entry(network: nn.Module, number: int) -> dict[str, str]:
    if not hasattr(network, "save_pretrained"):
        raise ModelError(f"modes: {type(network).__name__} has no save_pretrained. Use a SpectralPullbackNetwork.")
    entry = {"head": f"{HEADS}/{number}", "class": _address(network)}
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in network.parameters()}
    return entry | {"dtype": dtypes.pop()} if len(dtypes) == 1 else entry


def _read_network(use: _Use, folder: Path) -> nn.Module:
    """The network in its own dtype, which from_pretrained does not keep."""
    kind, place = _class(use.address), folder / use.place
    if not place.is_dir():
        raise ModelError(f"folder: {folder} has no {use.place}/, which {DOCUMENT} names. Save the pruned model again.")
    dtype = getattr(torch, use.dtype, None)
    network: nn.Module = kind.from_pretrained(place)
    return network.to(dtype) if isinstance(dtype, torch.dtype) else network


def _write_model(model: Any, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        write_network(model, folder)


def _read_model(address: str, folder: Path) -> nn.Module:
    place = folder / MODEL
    if not place.is_dir():
        raise ModelError(
            f"folder: {folder} has no {MODEL}/. Save the pruned model again, or pass the model that it was made of: "
            "from_pretrained(folder, model=model)."
        )
    if address.startswith("pullback."):
        return _read_own(place)
    try:
        return _class(address).from_pretrained(place).eval()
    except PullbackError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others of safetensors here
        raise ModelError(f"folder: the model in {place} could not be loaded: {first_line(error)}") from None


def _read_own(place: Path) -> nn.Module:
    """A network of ours in the dtype of its file; `load_backbone` would make it float32."""
    locate(str(place))  # says what is missing
    config = read_config(str(place), "")
    reader = reader_of(config)
    if reader is None:
        raise ModelError(f"folder: {place} holds {config['model_type']}, which is no network of this package.")
    return reader(str(place), config).eval().requires_grad_(False)


def _address(thing: Any) -> str:
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def _class(address: str) -> Any:
    """The class at this address, from this package or transformers: a file does not choose what else is imported."""
    module, _, name = address.partition(":")
    if module.partition(".")[0] not in ("pullback", "transformers"):
        raise ModelError(
            f"folder: {DOCUMENT} names the class {address}, which is neither pullback's nor transformers'."
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if not hasattr(found, "from_pretrained"):
        raise ModelError(
            f"folder: {DOCUMENT} names the class {address}, which this release has not, or which cannot be loaded from "
            "a folder. Is it one of a newer release?"
        )
    return found
