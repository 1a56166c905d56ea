"""From a hub id, a folder, an embedded name or a transformers module to a `Backbone`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pullback.backbones.backbone import Backbone, Preprocessing
from pullback.backbones.embedded import EMBEDDED, build_embedded
from pullback.backbones.registry import FAMILIES, Family, family_of
from pullback.errors import ModelError


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"device: {device!r} cannot be used here ({_first_line(error)}). Try 'auto' or 'cpu'."
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
    if name in EMBEDDED:
        module = build_embedded(name)
    else:
        name = _locate(name)
        module = _load(name)
    module = module.to(device=target, dtype=dtype).eval().requires_grad_(False)
    backbone = _adapt(module, name)
    return replace(backbone, preprocessing=_published_preprocessing(name, backbone.preprocessing))


def _locate(name: str) -> str:
    """A folder that holds a backbone beside its decoder (backbone/ and decoder.safetensors) stands for the former."""
    inner = Path(name) / "backbone"
    return str(inner) if (inner / "config.json").is_file() and not (Path(name) / "config.json").exists() else name


def _published_preprocessing(name: str, default: Preprocessing) -> Preprocessing:
    """Mean and standard deviation as the checkpoint publishes them beside its weights, where it does."""
    path: str | None = os.path.join(name, "preprocessor_config.json")
    if not Path(name).is_dir():
        from transformers.utils import cached_file

        path = (
            None
            if name in EMBEDDED
            else cached_file(
                name,
                "preprocessor_config.json",
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        )
    if path is None or not os.path.isfile(path):
        return default
    with open(path, encoding="utf-8") as file:
        published = json.load(file)
    mean, std = published.get("image_mean"), published.get("image_std")
    if not (isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == 3):
        return default
    return replace(default, mean=tuple(map(float, mean)), std=tuple(map(float, std)))


def _adapt(module: nn.Module, name: str) -> Backbone:
    config = getattr(module, "config", None)
    if config is None:
        raise ModelError(f"model: expected a transformers vision model, got {name}, which has no config.")
    check_evaluation_mode(module, "model")
    return family_of(config.model_type).adapt(module, name)


def check_evaluation_mode(module: nn.Module, argument: str) -> None:
    training = [name or type(module).__name__ for name, part in module.named_modules() if part.training]
    if training:
        raise ModelError(
            f"{argument}: expected evaluation mode, but {training[0]} and {len(training) - 1} more submodules are in "
            f"train mode, where dropout and batch norm make the output random. Call {argument}.eval() first."
        )


def _load(name: str) -> nn.Module:
    import transformers

    folder = Path(name)
    if folder.is_dir():
        _check_folder(folder)
    elif folder.exists():
        raise ModelError(f"model: expected a folder or a hub id, got the file {name}.")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and hub errors here
        raise ModelError(
            f"model: {name!r} is neither a folder with config.json, a reachable hub id, nor an embedded model "
            f"({', '.join(EMBEDDED)}): {_first_line(error)}. `pullback ls` lists what can be loaded."
        ) from None
    family = family_of(config.model_type)
    loader = getattr(transformers, family.loader)
    transformers.utils.logging.disable_progress_bar()
    try:
        module, report = loader.from_pretrained(name, use_safetensors=True, output_loading_info=True)
    except Exception as error:
        raise ModelError(f"model: the weights of {name!r} could not be loaded: {_first_line(error)}.") from None
    _check_report(name, family, report)
    return module


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


def _check_report(name: str, family: Family, report: dict) -> None:
    """transformers fills missing weights with random numbers and only logs it; here that is an error."""
    missing = [key for key in report["missing_keys"] if not any(part in key for part in family.may_lack)]
    if missing or report["mismatched_keys"]:
        wrong = missing or [str(key) for key in report["mismatched_keys"]]
        raise ModelError(
            f"model: {name!r} lacks {len(wrong)} weights that {family.name} needs, such as {sorted(wrong)[0]}; they "
            "would be random. Is it a complete checkpoint of this family?"
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def list_models() -> list[tuple[str, str, str, str]]:
    """(family, transformers model types, decoders, example) of everything that can be loaded."""
    rows = [(f.name, ", ".join(f.model_types), ", ".join(f.decoders), f.example) for f in FAMILIES]
    rows += [("embedded", entry.model_type, ", ".join(entry.decoders), name) for name, entry in EMBEDDED.items()]
    return rows
