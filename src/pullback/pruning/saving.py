"""Pruned models as folders: the plan, the heads, and the model itself.

folder/pruned.json   plan, score of each stage, class of the model
folder/heads/0, ...  whatever the heads' own save_pretrained writes
folder/modes/6, ...  the networks whose metric d_task takes, by stage
folder/model/        the model's own save_pretrained
"""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pullback.backbones import load_backbone
from pullback.backbones.checkpoint import write_network
from pullback.errors import ModelError
from pullback.pruning.apply import PrunedModel
from pullback.pruning.modes import StageModes
from pullback.pruning.plan import PrunePlan
from pullback.pruning.scores import SCORES, HeadScore

DOCUMENT, HEADS, MODES, MODEL = "pruned.json", "heads", "modes", "model"


def save_pruned(pruned: PrunedModel, folder: str | Path) -> Path:
    """Write all of it; the folder is made where it is missing."""
    folder = Path(folder)
    if pruned.modes is not None and not isinstance(pruned.modes, StageModes):
        raise ModelError(
            "pruned: the modes of d_task are a function, which cannot be saved. Take a Spectral Pullback Network, or "
            "save the plan and prune again where it is loaded."
        )
    folder.mkdir(parents=True, exist_ok=True)
    networks: dict[str, Any] = {} if pruned.modes is None else dict(pruned.modes.networks.items())
    for layer, network in networks.items():
        network.save_pretrained(folder / MODES / layer)
    names = [_write_score(score, number, folder) for number, score in enumerate(pruned.scores)]
    _write_model(pruned.model, folder / MODEL)
    document = {
        "plan": asdict(pruned.plan),
        "scores": names,
        "modes": {layer: _address(network) for layer, network in networks.items()},
        "class": _address(pruned.model),
    }
    (folder / DOCUMENT).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return folder


def load_pruned(
    folder: str | Path, *, model: nn.Module | None = None, device: str | torch.device = "cpu"
) -> PrunedModel:
    """What `save_pruned` wrote. ``model``: use this one instead of the saved copy."""
    folder = Path(folder)
    try:
        document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
        plan, names, address = PrunePlan(**document["plan"]), document["scores"], document["class"]
        networks = document["modes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"folder: {folder} holds no pruned model that can be read ({type(error).__name__}: {error}). Expected one "
            "that save_pretrained wrote."
        ) from None
    scores = [_read_score(name, folder) for name in names]
    known = {int(layer): _class(kind).from_pretrained(folder / MODES / layer) for layer, kind in networks.items()}
    own = _read_model(address, folder / MODEL) if model is None else model
    return PrunedModel(own, plan, scores, StageModes(known) if known else None).to(device)


def _write_score(score: Any, number: int, folder: Path) -> dict[str, str]:
    for name, known in SCORES.items():
        if known is score:
            return {"name": name}
    head: Any = score.head if isinstance(score, HeadScore) else None
    if hasattr(head, "save_pretrained"):
        head.save_pretrained(folder / HEADS / str(number))
        return {"head": f"{HEADS}/{number}", "class": _address(head)}
    raise ModelError(f"score: stage {number} uses a function of your own, which cannot be saved. Use a name or a head.")


def _read_score(entry: dict[str, str], folder: Path) -> str | nn.Module:
    if "name" in entry:
        return entry["name"]
    return _class(entry["class"]).from_pretrained(folder / entry["head"])


def _write_model(model: Any, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        write_network(model, folder)


def _read_model(address: str, folder: Path) -> nn.Module:
    if address.startswith("pullback."):
        return load_backbone(folder, device="cpu").model
    return _class(address).from_pretrained(folder).eval()


def _address(thing: Any) -> str:
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def _class(address: str) -> Any:
    """The class at this address, from this package or transformers: a file does not choose what else is imported."""
    module, _, name = address.partition(":")
    if module.partition(".")[0] not in ("pullback", "transformers"):
        raise ModelError(
            f"folder: {DOCUMENT} names the class {address}, which is neither pullback's nor transformers'."
        )
    return getattr(importlib.import_module(module), name)
