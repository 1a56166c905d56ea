"""Pruned models as folders, which `PrunedModel.save_pretrained` writes and `PrunedModel.from_pretrained` reads.

folder/pruned.json   plan, score of each stage, the networks whose metric d_task takes, class of the model
folder/heads/0, ...  what the networks' own save_pretrained writes, each network once, whatever it is used for
folder/model/        the model's own save_pretrained
folder/vectors.safetensors   of a tuned model: the vectors that `tune` has changed, see `tuned`
preprocessor_config.json, here and in model/, for AutoImageProcessor, where an image processor is given or found
"""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pullback import registry
from pullback.backbones import load_backbone
from pullback.backbones.loading import locate, read_config, reader_of
from pullback.errors import ModelError, PullbackError, first_line
from pullback.pruning.plan import BlockPlan, Plan, PrunePlan
from pullback.pruning.scores import Choice, HeadScore, StageModes, metric_score
from pullback.pruning.tuned import VECTORS, write_vectors
from pullback.runs.documents import PRUNED as DOCUMENT
from pullback.runs.files import make_folder, read_json, replaced_folder, write_bytes, write_json, write_network, writing

if TYPE_CHECKING:
    from pullback.pruning.model import PrunedModel

HEADS, MODEL = "heads", "model"
PROCESSOR = ("preprocessor_config.json", "processor_config.json")  # the files that AutoImageProcessor looks for
MODES = "modes"  # where older folders have the networks of d_task, by stage
logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Saved:
    """What a folder holds. ``tuned``: whether vectors lie beside it."""

    model: nn.Module
    plan: Plan
    scores: Sequence[Choice]
    modes: StageModes | None
    tuned: bool


def write_pruned(pruned: PrunedModel, folder: Path, processor: Any | None, weights: bool) -> Path:
    """Write the folder; what cannot be saved is refused before. The arguments are those of `save_pretrained`."""
    published = _published_processor(pruned.model) if processor is None else {}
    scores = [_name_or_network(score, number) for number, score in enumerate(pruned.scores)]
    modes = _networks_of(pruned.modes)
    networks = list(dict.fromkeys(choice for choice in [*scores, *modes.values()] if not isinstance(choice, str)))
    entries = {network: _entry(network, number) for number, network in enumerate(networks)}
    document = {
        "plan": asdict(pruned.plan),
        "scores": [{"name": choice} if isinstance(choice, str) else entries[choice] for choice in scores],
        "modes": {layer: entries[network] for layer, network in modes.items()},
        "class": _address(pruned.model),
        "tuned": pruned.tuned is not None,
    }
    make_folder(folder)
    for network, entry in entries.items():
        network.save_pretrained(folder / entry["head"])
    saved = weights and _write_model(pruned.model, folder / MODEL)
    if not weights:
        shutil.rmtree(folder / MODEL, ignore_errors=True)  # one that was saved here before would be loaded instead
    for place in (folder, folder / MODEL) if saved else (folder,):
        for name, content in published.items():
            write_bytes(place / name, content)
        if processor is not None:
            with writing(place):
                processor.save_pretrained(place)
    if pruned.tuned is not None:
        write_vectors(folder / VECTORS, pruned.tuned, load_backbone(pruned.model), pruned.plan)
    write_json(folder / DOCUMENT, document)
    if pruned.tuned is None:
        (folder / VECTORS).unlink(missing_ok=True)  # of a tuned model that was saved here before
    return folder


def read_pruned(folder: Path, model: nn.Module | None) -> Saved:
    """Read the folder; ``model`` instead of the saved copy."""
    try:
        document = read_json(folder / DOCUMENT)
        kind = BlockPlan if "rule" in document["plan"] else PrunePlan
        plan, address, scores = kind(**document["plan"]), str(document["class"]), document["scores"]
        modes = {int(layer): _mode_entry(layer, entry) for layer, entry in document["modes"].items()}
        used = {entry["head"]: entry for entry in [*scores, *modes.values()] if "name" not in entry}
    except (PullbackError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"folder: {folder} holds no pruned model that can be read ({type(error).__name__}: {error}). Expected "
            "one that save_pretrained wrote."
        ) from None
    networks = {place: _read_network(entry, folder) for place, entry in used.items()}  # one for all its uses
    own = _read_model(address, folder) if model is None else model
    choices = [
        registry.current_score(entry["name"]) if "name" in entry else networks[entry["head"]] for entry in scores
    ]
    known = {layer: metric_score(networks[entry["head"]]) for layer, entry in modes.items()}
    return Saved(own, plan, choices, StageModes(known) if known else None, bool(document.get("tuned")))


def _name_or_network(score: Any, number: int) -> Any:
    for name, entry in registry.SCORES.items():
        if not entry.needs and registry.resolve(entry.score) is score:
            return name
    if isinstance(score, HeadScore) and hasattr(score.head, "save_pretrained"):
        return score.head
    raise ModelError(f"score: stage {number} uses a function of your own, which cannot be saved. Use a name or a head.")


def _networks_of(modes: Any) -> dict[str, nn.Module]:
    """Return the networks whose metric d_task takes, by stage; none where it is not used."""
    if modes is None:
        return {}
    if not isinstance(modes, StageModes) or len(modes.networks) < len(modes.scores):
        raise ModelError(
            "pruned: the modes of d_task are a function, which cannot be saved. Take a Spectral Pullback Network, or "
            "save the plan and prune again where it is loaded."
        )
    return dict(modes.networks.items())


def _entry(network: nn.Module, number: int) -> dict[str, str]:
    if not hasattr(network, "save_pretrained"):
        raise ModelError(f"modes: {type(network).__name__} has no save_pretrained. Use a SpectralPullbackNetwork.")
    entry = {"head": f"{HEADS}/{number}", "class": _address(network)}
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in network.parameters()}
    return entry | {"dtype": dtypes.pop()} if len(dtypes) == 1 else entry


def _mode_entry(layer: str, entry: dict[str, str] | str) -> dict[str, str]:
    """Return the entry of a network of d_task, which in older folders is its class alone."""
    return {"head": f"{MODES}/{layer}", "class": entry} if isinstance(entry, str) else entry


def _read_network(entry: dict[str, str], folder: Path) -> nn.Module:
    """Read the network in its own dtype, which from_pretrained does not keep."""
    kind, place = _class(entry["class"]), folder / entry["head"]
    if not place.is_dir():
        raise ModelError(
            f"folder: {folder} has no {entry['head']}/, which {DOCUMENT} names. Save the pruned model again."
        )
    dtype = getattr(torch, entry.get("dtype", ""), None)
    network: nn.Module = kind.from_pretrained(place)
    return network.to(dtype) if isinstance(dtype, torch.dtype) else network


def _write_model(model: Any, folder: Path) -> bool:
    """Write the model, and return whether that was possible."""
    own = type(model).__module__.startswith("pullback.")
    if not own and not hasattr(model, "save_pretrained"):
        logger.warning(
            f"{type(model).__name__} has no save_pretrained, so the folder holds the plan and the heads alone. Save "
            "the model yourself, and pass it: PrunedModel.from_pretrained(folder, model=model)."
        )
        shutil.rmtree(folder, ignore_errors=True)  # a model that was saved here before would be loaded instead
        return False
    with replaced_folder(folder) as temporary:
        if own:
            write_network(temporary, model, asdict(model.config))
        else:
            model.save_pretrained(temporary)
    return True


def _published_processor(model: nn.Module) -> dict[str, bytes]:
    """Return the files of the image processor beside the weights that a model was loaded from, by name; of a hub id
    those in the cache."""
    source = str(getattr(model, "name_or_path", ""))
    if not source:
        return {}
    if Path(source).is_dir():
        found = {name: Path(source) / name for name in PROCESSOR}
    else:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = {name: try_to_load_from_cache(source, name) for name in PROCESSOR}
        except HFValidationError:  # a folder that is no longer there
            return {}
        found = {name: Path(path) for name, path in cached.items() if isinstance(path, str)}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}


def _read_model(address: str, folder: Path) -> nn.Module:
    place = folder / MODEL
    if not place.is_dir():
        raise ModelError(
            f"folder: {folder} has no {MODEL}/. Save the pruned model again, or pass the model that it was made of: "
            "from_pretrained(folder, model=model)."
        )
    if address.startswith("pullback."):
        return _read_own(place)
    kind = _class(address)
    if address.startswith("transformers."):
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
    try:
        return kind.from_pretrained(place).eval()
    except PullbackError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others of safetensors here
        raise ModelError(f"folder: the model in {place} could not be loaded: {first_line(error)}") from None


def _read_own(place: Path) -> nn.Module:
    """Read a network of this package in the dtype of its file; `load_backbone` would make it float32."""
    locate(str(place))  # says what is missing
    config = read_config(str(place), "")
    reader = reader_of(config)
    if reader is None:
        raise ModelError(f"folder: {place} holds {config['model_type']}, which is no network of this package.")
    return reader(str(place), config).eval().requires_grad_(False)


def _address(thing: Any) -> str:
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def _class(address: str) -> Any:
    """Import the class at this address, from this package or transformers alone: a file must not choose what runs."""
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
