"""From a hub id, a folder, an embedded name or a transformers module to a `Backbone`."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

from pullback.backbones.backbone import Backbone
from pullback.backbones.checkpoint import first_line, locate, published_preprocessing, read_config, reader_of
from pullback.backbones.embedded import EMBEDDED
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
