"""From a hub id, a folder, an embedded name or a module to a backbone, by the families in `pullback.registry`.

First the family is found (`entry_of`): by the model type in config.json, by the name where a family claims it, or by a
module's own configuration. Then the weights are read: by the family's own loader, by ours where transformers is not
needed (DINOv2, tiny-scenes: `reader_of`), else by transformers. Last, the family's adapter makes a backbone of it.
Files lie in a local folder or are fetched from the hub (`fetched_file`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pullback.backbones.backbone import AnyBackbone, Backbone, Classifier, Preprocessing
from pullback.backbones.block import Affine
from pullback.backbones.outputs import CLASSIFIERS, classifier
from pullback.checks import shown
from pullback.errors import DamagedModelError, ModelError, counted, first_line
from pullback.models import EMBEDDED
from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.models.tiny_scenes import TinyScenes, TinyScenesConfig
from pullback.registry import BackboneEntry, backbones, resolve

Model = str | os.PathLike[str] | nn.Module
_BLOCK_NUMBER = re.compile(r"\.\d+\.")


def load_any_backbone(
    model: Model, *, device: str | torch.device = "auto", dtype: torch.dtype | None = None
) -> AnyBackbone:
    """A frozen backbone of any family, in evaluation mode, in float32 unless another ``dtype`` is asked for.

    A module that is passed in is used as it is: it must be in evaluation mode, and stays on its device in its dtype.
    Another device or dtype is refused.
    """
    return _load(model, *_identified(model), device, dtype)


def load_backbone(model: Model, *, device: str | torch.device = "auto", dtype: torch.dtype | None = None) -> Backbone:
    """A frozen ViT as `load_any_backbone` loads it. Models of several views, and other networks, are refused."""
    _check_kind(model)
    if not isinstance(model, nn.Module) and Path(model).is_file():
        raise ModelError(f"model: expected a folder or a hub id, got the file {os.fspath(model)}.")
    entry, config = _identified(model)
    if entry.views:
        raise ModelError(
            f"model: a {entry.name} takes scenes of several views, not single images: use load_probe, or prune_views "
            "of a VGGT."
        )
    backbone = _load(model, entry, config, device, dtype)
    if not isinstance(backbone, Backbone):
        raise ModelError(
            f"model: expected a ViT, whose blocks are known, got {backbone.name}, a {type(backbone).__name__}."
        )
    return backbone


def entry_of(model: Model) -> BackboneEntry:
    """The family that a model belongs to. Of a hub id config.json is fetched, unless a family claims the name."""
    return _identified(model)[0]


def family_of(model_type: str) -> BackboneEntry:
    """The family of a model type in config.json."""
    for entry in backbones():
        if model_type in entry.model_types:
            return entry
    known = ", ".join(sorted(name for entry in backbones() for name in entry.model_types))
    raise ModelError(
        f"model: no adapter for transformers' model type {model_type!r}; known are {known}. A family of your own is "
        "added by pullback.register_backbone."
    )


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of this name; "auto" is the GPU where there is one."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ModelError(
            f"device: {device!r} cannot be used here ({first_line(error)}). Try 'auto' or 'cpu'."
        ) from None
    return resolved


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype in which weights cannot be."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"dtype: expected a floating-point one such as torch.float32, got {dtype!r}.")


def check_evaluation_mode(module: nn.Module, argument: str) -> None:
    """Refuse a module of which any part is in train mode."""
    training = [name or type(module).__name__ for name, part in module.named_modules() if part.training]
    if training:
        more = len(training) - 1
        which = f"{training[0]} and {counted(more, 'more submodule')} are" if more else f"{training[0]} is"
        raise ModelError(
            f"{argument}: expected evaluation mode, but {which} in train mode, where dropout and batch norm make the "
            f"output random. Call {argument}.eval() first."
        )


def _check_kind(model: object) -> None:
    if not isinstance(model, str | os.PathLike | nn.Module) or model == "":
        raise ModelError(
            f"model: expected a hub id, a folder, an embedded name ({', '.join(EMBEDDED)}) or a module, got "
            f"{shown(model)}. Of a probe it is probe.backbone.model."
        )


def _identified(model: Model) -> tuple[BackboneEntry, dict[str, Any]]:
    """The family of a model, and config.json where that had to be read for it."""
    _check_kind(model)
    if isinstance(model, nn.Module):
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        return (_recognised(model) if model_type is None else family_of(model_type)), {}
    claimed = _claimed(os.fspath(model))
    if claimed is not None:
        return claimed, {}
    config = read_config(_place(os.fspath(model)), ", ".join(EMBEDDED))
    return family_of(config["model_type"]), config


def _recognised(model: nn.Module) -> BackboneEntry:
    """Return the family that knows a module without a model type by its parts."""
    for entry in backbones():
        if entry.recognise is not None and resolve(entry.recognise)(getattr(model, "_orig_mod", model)):
            return entry
    raise ModelError(
        f"model: expected a transformers vision model, got {type(model).__name__}, which has no config with a model "
        "type, nor the parts of a ViT of timm. Give a network of your own the attribute config.model_type and add its "
        "family by pullback.register_backbone (docs/guide/own-vit.md)."
    )


def _load(
    model: Model, entry: BackboneEntry, config: dict[str, Any], device: str | torch.device, dtype: torch.dtype | None
) -> AnyBackbone:
    def adapt(module: nn.Module, name: str) -> AnyBackbone:
        backbone = resolve(entry.adapt)(module, name)
        if not isinstance(backbone, AnyBackbone):
            raise ModelError(
                f"model: the adapter of {entry.name!r} in the registry returned a {type(backbone).__name__}, expected "
                "a pullback.Backbone."
            )
        return backbone

    if isinstance(model, nn.Module):
        check_evaluation_mode(model, "model")
        backbone = adapt(model, type(model).__name__)
        _check_place(backbone, device, dtype)
        return backbone
    dtype = torch.float32 if dtype is None else dtype
    check_dtype(dtype)
    name, target = os.fspath(model), resolve_device(device)
    if entry.load is not None:
        module = resolve(entry.load)(name, target, dtype)
        return adapt(module.to(device=target, dtype=dtype).eval().requires_grad_(False), name)
    where, reader = _place(name), reader_of(config)
    module = _read_with_transformers(where, entry) if reader is None else reader(where, config)
    module = module.to(device=target, dtype=dtype).eval().requires_grad_(False)
    backbone = adapt(module, name if name in EMBEDDED else where)
    return replace(backbone, preprocessing=published_preprocessing(where, backbone.preprocessing))


def _check_place(backbone: AnyBackbone, device: str | torch.device, dtype: torch.dtype | None) -> None:
    """Refuse a device or dtype that a module which was passed in is not in: it is the user's, and stays as it is."""
    wanted = backbone.device if str(device) == "auto" else resolve_device(device)
    if wanted.type != backbone.device.type or wanted.index not in (None, backbone.device.index):
        raise ModelError(
            f"device: a module is used where it is, which is {str(backbone.device)!r}, got {str(device)!r}. Move it "
            f"first: model.to({str(device)!r})."
        )
    if dtype not in (None, backbone.dtype):
        raise ModelError(
            f"dtype: a module is used as it is, in {backbone.dtype}, got {dtype}. Cast it first: model.to({dtype})."
        )


def _claimed(name: str) -> BackboneEntry | None:
    """A family with its own loader that a folder's config.json, or else the name itself, speaks for."""
    folder = EMBEDDED.get(name, Path(name))
    kind = _stored_type(folder / "config.json") if folder.is_dir() else None
    for entry in backbones():
        claimed = (
            kind in entry.model_types if folder.is_dir() else bool(entry.names and re.fullmatch(entry.names, name))
        )
        if entry.load is not None and claimed:
            return entry
    return None


def _stored_type(config: Path) -> str | None:
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None


def _place(name: str) -> str:
    return str(EMBEDDED[name]) if name in EMBEDDED else locate(name)


def _read_with_transformers(name: str, entry: BackboneEntry) -> nn.Module:
    import transformers

    loader = getattr(transformers, entry.loader)
    transformers.utils.logging.disable_progress_bar()
    try:
        module, report = loader.from_pretrained(name, use_safetensors=True, output_loading_info=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and hub errors here
        check_safetensors(Path(name))
        raise ModelError(f"model: the weights of {name!r} could not be loaded: {first_line(error)}.") from None
    _check_report(name, entry, report)
    _check_blocks(name, module, report["unexpected_keys"])
    return _without_random_parts(module, entry, report)


def _check_report(name: str, entry: BackboneEntry, report: dict) -> None:
    """transformers fills missing weights with random numbers and only logs it; here that is an error."""
    missing = [key for key in report["missing_keys"] if not any(part in key for part in entry.may_lack)]
    if missing or report["mismatched_keys"]:
        wrong = missing or [str(key) for key in report["mismatched_keys"]]
        raise ModelError(
            f"model: {name!r} lacks {counted(len(wrong), 'weight')} that {entry.name} needs, such as "
            f"{sorted(wrong)[0]}; they would be random. Is it a complete checkpoint of this family?"
        )


def _check_blocks(name: str, module: nn.Module, unused: Iterable[str]) -> None:
    """Refuse weights of more blocks than the configuration has: the network would end in the middle, and say nothing.

    Other weights that are not used belong to parts that this package does not read, such as a text tower.
    """
    known = {_BLOCK_NUMBER.sub(".*.", key) for key in module.state_dict()}
    beyond = sorted(key for key in unused if _BLOCK_NUMBER.sub(".*.", key) in known)
    if beyond:
        raise ModelError(
            f"model: {name!r} holds weights of more blocks than its config.json asks for, {len(beyond)} of them, such "
            f"as {beyond[0]}: the network would be cut off. Correct num_hidden_layers, or save a model of fewer blocks."
        )


def _without_random_parts(module: nn.Module, entry: BackboneEntry, report: dict) -> nn.Module:
    """Parts that the checkpoint may lack, such as a pooling head, are absent then, not random."""
    for name in entry.may_lack:
        if any(key.startswith(f"{name}.") for key in report["missing_keys"]):
            setattr(module, name, None)
    return module


def locate(name: str) -> str:
    """Return where the model is: backbone/ of a folder that holds it beside decoder.safetensors, else the name."""
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
        inner = " A pruned model is read by pb.PrunedModel.from_pretrained; the model in it is in model/."
        raise ModelError(
            f"model: {folder} has no config.json (it holds {files[:6]}). Expected a transformers folder."
            f"{inner if 'pruned.json' in files else ''}"
        )
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
    except ValueError as error:
        raise DamagedModelError(
            f"model: {path} is not a transformers configuration (JSON with a model_type): {first_line(error)}."
        ) from None
    try:
        config["model_type"]
    except (KeyError, TypeError):
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
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedModelError(f"model: {path} is no JSON ({first_line(error)}). Fetch it again.") from None
    mean, std = published.get("image_mean"), published.get("image_std")
    if not (isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == 3):
        return default
    red, green, blue = zip(map(float, mean), map(float, std), strict=True)
    return replace(default, mean=(red[0], green[0], blue[0]), std=(red[1], green[1], blue[1]))


def reader_of(config: dict[str, Any]) -> Callable[[str, dict[str, Any]], nn.Module] | None:
    """The function that reads such a checkpoint without transformers, None where transformers is needed."""
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
    """A model that `recipes/tiny_scenes.py` made: the embedded one, or one of your own."""
    return _filled(TinyScenes(TinyScenesConfig.from_dict(config)), _tensors(name), name, config["model_type"])


def _filled(model: nn.Module, state: dict[str, Tensor], name: str, kind: str) -> nn.Module:
    """The network with these weights; all that it needs must be there, in its shape. Others are ignored."""
    expected = model.state_dict()
    wrong = [key for key in expected if key not in state or state[key].shape != expected[key].shape]
    wrong = [key for key in wrong if not key.endswith("mask_token")]
    if wrong:
        raise ModelError(
            f"model: {name!r} lacks {counted(len(wrong), 'weight')} that {kind} needs, or has another "
            f"shape there, such as {sorted(wrong)[0]}. Is it a complete checkpoint of this family?"
        )
    _check_blocks(name, model, state.keys() - expected.keys())
    model.load_state_dict({key: state[key] for key in expected if key in state}, strict=False, assign=True)
    vars(model)["name_or_path"] = name  # as models of transformers have it: what lies beside the weights is found again
    return model


def stored_classifier(backbone: Backbone) -> Classifier | None:
    """Return the classifier in the folder or hub repository that the model's weights are from; None: it has none."""
    source = str(getattr(backbone.model, "name_or_path", ""))
    if not source or known_file(source, "config.json") is None:  # or a folder that is no longer there
        return None
    keys = {f"{name}.{part}" for names in CLASSIFIERS for name in names for part in ("weight", "bias")}
    state = {key: value.to(backbone.norm.weight) for key, value in _tensors(source, keys).items()}
    for names in CLASSIFIERS:
        if all(f"{name}.weight" in state for name in names):
            heads = [Affine(state[f"{name}.weight"], state.get(f"{name}.bias")) for name in names]
            return classifier(backbone.family, *heads)
    return None


def _tensors(name: str, wanted: set[str] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, or those of the ``wanted`` names that it has."""
    from safetensors import safe_open

    index = known_file(name, "model.safetensors.index.json")
    shards = ["model.safetensors"]
    if index is not None:
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedModelError(f"model: {index} is no index of safetensors files. Fetch it again.") from None
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        path = known_file(name, shard)
        if path is None:
            raise ModelError(f"model: {name!r} has no {shard}. Expected weights in safetensors files.")
        try:
            with safe_open(path, "pt") as file:
                keys = file.keys() if wanted is None else wanted.intersection(file.keys())
                tensors.update({key: file.get_tensor(key) for key in keys})
        except Exception as error:
            raise _damaged(path, error) from None
    return tensors


def check_safetensors(folder: Path) -> None:
    """Raise an error that names the first safetensors file in a folder that cannot be read; others are left alone."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        try:
            with safe_open(path, framework="pt"):
                pass
        except Exception as error:
            raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DamagedModelError:
    return DamagedModelError(f"model: the weights of {str(path)!r} could not be loaded: {first_line(error)}.")


def fetched_file(name: str, filename: str) -> Path | None:
    """The path of a file of the checkpoint, None where it has no such file."""
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
    """Return what `fetched_file` does, and None also where the hub would have to be asked but cannot be reached, or
    where the name cannot be one of the hub's."""
    try:
        return fetched_file(name, filename)
    except ValueError:  # `ModelError` and the hub's HFValidationError
        return None
