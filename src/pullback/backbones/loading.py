"""From a hub id, a folder, an embedded name or a transformers module to a `Backbone`.

The files of a checkpoint: in a local folder, or fetched from the hub.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pullback.backbones.backbone import Backbone, Preprocessing
from pullback.backbones.registry import FAMILIES, Family, family_of
from pullback.errors import ModelError
from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.models.embedded import EMBEDDED
from pullback.models.tiny_scenes import TinyScenes, TinyScenesConfig


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"device: {device!r} cannot be used here ({first_line(error)}). Try 'auto' or 'cpu'."
        ) from None
    return resolved


def load_backbone(
    model: str | os.PathLike[str] | nn.Module,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.float32,
) -> Backbone:
    """A frozen backbone in evaluation mode.

    A module that is passed in is used as it is: it must be in evaluation mode, and stays on its device in its dtype.
    """
    if isinstance(model, nn.Module):
        return _adapt(model, type(model).__name__)
    name = os.fspath(model)
    target = resolve_device(device)
    where = str(EMBEDDED[name]) if name in EMBEDDED else locate(name)
    module = _load(where).to(device=target, dtype=dtype).eval().requires_grad_(False)
    backbone = _adapt(module, name if name in EMBEDDED else where)
    return replace(backbone, preprocessing=published_preprocessing(where, backbone.preprocessing))


def _adapt(module: nn.Module, name: str) -> Backbone:
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    if model_type is None:
        raise ModelError(
            f"model: expected a transformers vision model, got {name}, which has no config with a model type. (A VGGT "
            "takes scenes: use load_probe or prune_views.)"
        )
    check_evaluation_mode(module, "model")
    return family_of(model_type).adapt(module, name)


def check_evaluation_mode(module: nn.Module, argument: str) -> None:
    training = [name or type(module).__name__ for name, part in module.named_modules() if part.training]
    if training:
        raise ModelError(
            f"{argument}: expected evaluation mode, but {training[0]} and {len(training) - 1} more submodules are in "
            f"train mode, where dropout and batch norm make the output random. Call {argument}.eval() first."
        )


def _load(name: str) -> nn.Module:
    config = read_config(name, ", ".join(EMBEDDED))
    family = family_of(config["model_type"])
    reader = reader_of(config)
    return _load_with_transformers(name, family) if reader is None else reader(name, config)


def _load_with_transformers(name: str, family: Family) -> nn.Module:
    import transformers

    loader = getattr(transformers, family.loader)
    transformers.utils.logging.disable_progress_bar()
    try:
        module, report = loader.from_pretrained(name, use_safetensors=True, output_loading_info=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and hub errors here
        raise ModelError(f"model: the weights of {name!r} could not be loaded: {first_line(error)}.") from None
    _check_report(name, family, report)
    return _without_random_parts(module, family, report)


def _check_report(name: str, family: Family, report: dict) -> None:
    """transformers fills missing weights with random numbers and only logs it; here that is an error."""
    missing = [key for key in report["missing_keys"] if not any(part in key for part in family.may_lack)]
    if missing or report["mismatched_keys"]:
        wrong = missing or [str(key) for key in report["mismatched_keys"]]
        raise ModelError(
            f"model: {name!r} lacks {len(wrong)} weights that {family.name} needs, such as {sorted(wrong)[0]}; they "
            "would be random. Is it a complete checkpoint of this family?"
        )


def _without_random_parts(module: nn.Module, family: Family, report: dict) -> nn.Module:
    """Parts that the checkpoint may lack, such as a pooling head, are absent then, not random."""
    for name in family.may_lack:
        if any(key.startswith(f"{name}.") for key in report["missing_keys"]):
            setattr(module, name, None)
    return module


def list_models() -> list[tuple[str, str, str, str]]:
    """(family, transformers model types, decoders, example) of everything that can be loaded."""
    return [(f.name, ", ".join(f.model_types), ", ".join(f.decoders), f.example) for f in FAMILIES]


def locate(name: str) -> str:
    """A folder that holds a backbone beside its decoder (backbone/ and decoder.safetensors) stands for the former."""
    folder = Path(name)
    if folder.is_file():
        raise ModelError(f"model: expected a folder or a hub id, got the file {name}.")
    inner = folder / "backbone"
    if (inner / "config.json").is_file() and not (folder / "config.json").exists():
        folder = inner
    if folder.is_dir():
        _check_folder(folder)
        return str(folder)
    return name


def _check_folder(folder: Path) -> None:
    files = sorted(path.name for path in folder.iterdir())
    if "config.json" not in files:
        raise ModelError(f"model: {folder} has no config.json (it holds {files[:6]}). Expected a transformers folder.")
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in files):
        return
    pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        raise ModelError(
            f"model: {folder} holds only a pickled checkpoint ({pickled[0]}), which can run code when it is loaded, so "
            "it is refused. Convert it once where you trust it: model.save_pretrained(folder) writes safetensors."
        )
    raise ModelError(f"model: {folder} has no weights (expected model.safetensors, found {files[:6]}).")


def read_config(name: str, embedded: str) -> dict[str, Any]:
    """config.json as a dictionary; ``embedded`` lists the other names there are, for the message."""
    reason = "config.json is not there"
    try:
        path = fetched_file(name, "config.json")
    except Exception as error:  # the hub client raises validation, network and not-found errors of many classes
        path, reason = None, first_line(error)
    if path is None:
        raise ModelError(
            f"model: {name!r} is neither a folder with config.json, a reachable hub id, nor an embedded model "
            f"({embedded}): {reason}. `pullback ls` lists what can be loaded."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config["model_type"]
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"model: {path} is not a transformers configuration (JSON with a model_type).") from None
    return config


def published_preprocessing(name: str, default: Preprocessing) -> Preprocessing:
    """Mean and standard deviation as the checkpoint publishes them beside its weights, where it does."""
    try:
        path = fetched_file(name, "preprocessor_config.json")
    except Exception:  # not published, or not reachable although the weights are in the cache: the family's own
        path = None
    if path is None:
        return default
    published = json.loads(path.read_text(encoding="utf-8"))
    mean, std = published.get("image_mean"), published.get("image_std")
    if not (isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == 3):
        return default
    red, green, blue = zip(map(float, mean), map(float, std), strict=True)
    return replace(default, mean=(red[0], green[0], blue[0]), std=(red[1], green[1], blue[1]))


def reader_of(config: dict[str, Any]) -> Callable[[str, dict[str, Any]], nn.Module] | None:
    """Who reads a checkpoint without transformers, None where nobody does."""
    if config["model_type"] == "tiny_scenes":
        return read_tiny_scenes
    if config["model_type"] in ("dinov2", "dinov2_with_registers") and config.get("hidden_act", "gelu") == "gelu":
        return read_dinov2
    return None


def read_dinov2(name: str, config: dict[str, Any]) -> nn.Module:
    """DINOv2, with or without registers, straight from its safetensors (see `models/dinov2.py` for why)."""
    state = {key.removeprefix("dinov2.").removeprefix("dinov2_with_registers."): t for key, t in _tensors(name).items()}
    return _filled(Dinov2(Dinov2Config.from_dict(config)), state, name, config["model_type"])


def read_tiny_scenes(name: str, config: dict[str, Any]) -> nn.Module:
    """A model that `training/tiny_scenes.py` made: the embedded one, or one of your own."""
    return _filled(TinyScenes(TinyScenesConfig.from_dict(config)), _tensors(name), name, config["model_type"])


def write_network(model: Dinov2 | TinyScenes, folder: Path) -> None:
    """A network of ours: config.json and model.safetensors, in the dtype of the weights."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(model.config), indent=1) + "\n", encoding="utf-8")
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _filled(model: nn.Module, state: dict[str, Tensor], name: str, kind: str) -> nn.Module:
    """The network with these weights; all that it needs must be there, in its shape. Others are ignored."""
    expected = model.state_dict()
    wrong = [key for key in expected if key not in state or state[key].shape != expected[key].shape]
    wrong = [key for key in wrong if not key.endswith("mask_token")]
    if wrong:
        raise ModelError(
            f"model: {name!r} lacks {len(wrong)} weights that {kind} needs, or has them in another "
            f"shape, such as {sorted(wrong)[0]}. Is it a complete checkpoint of this family?"
        )
    model.load_state_dict({key: state[key] for key in expected if key in state}, strict=False, assign=True)
    return model


def _tensors(name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    index = known_file(name, "model.safetensors.index.json")
    shards = ["model.safetensors"]
    if index is not None:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        path = known_file(name, shard)
        if path is None:
            raise ModelError(f"model: {name!r} has no {shard}. Expected weights in safetensors files.")
        try:
            tensors.update(load_file(path))
        except Exception as error:
            raise ModelError(f"model: the weights of {name!r} could not be loaded: {first_line(error)}.") from None
    return tensors


def fetched_file(name: str, filename: str) -> Path | None:
    """A file of the checkpoint, None where it has no such file."""
    if Path(name).is_dir():
        path = Path(name) / filename
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, filename))
    except LocalEntryNotFoundError as error:  # before the next: it is one of those, too
        raise ModelError(f"the hub cannot be reached, and the cache has no {filename} of it") from error
    except EntryNotFoundError:
        return None


def known_file(name: str, filename: str) -> Path | None:
    """The same, None also where only the hub, which cannot be reached, would know."""
    try:
        return fetched_file(name, filename)
    except ModelError:
        return None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
