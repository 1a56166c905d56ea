"""VGGT with its files: `facebook/VGGT-1B` and others from the hub, a safetensors file, a folder that we wrote, or the
embedded `tiny-views`.

Names and shapes are compared before any weight is read, and only what the network needs is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.backbones.loading import check_dtype, fetched_file, known_file, resolve_device
from pullback.errors import ModelError, first_line
from pullback.models import EMBEDDED
from pullback.runs.files import CONFIG, WEIGHTS, write_network
from pullback.vggt.network import VGGTConfig, VGGTNetwork

MODEL_TYPE = VGGTConfig.model_type
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_NAMED_IN_MESSAGES = 3


class VGGT(VGGTNetwork):
    """VGGT as a user sees it: a network of any `VGGTConfig`, or one that was trained.

        model = VGGT.from_pretrained("facebook/VGGT-1B")
        output = model(images)  # [S, 3, H, W] or [B, S, 3, H, W] in [0, 1]; output.pose_enc, .depth, .world_points

    The weights of facebook/VGGT-1B are for non-commercial use; facebook/VGGT-1B-Commercial is the other release.
    """

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        config: VGGTConfig | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> VGGT:
        """A hub id, a .safetensors file, a folder or `tiny-views`; in evaluation mode. ``device``: "auto" is the GPU
        where there is one.

        Without ``config``, sizes come from a config.json beside the weights; fields that it lacks, or all of them where
        there is none, are those of VGGT-1B. Weights of a head that the config leaves out, and of VGGT's track head,
        which is no part of this package, are ignored; any other difference in names or shapes is an error.
        """
        check_dtype(dtype)
        where, target = _place(name), resolve_device(device)
        if config is not None and not isinstance(config, VGGTConfig):
            raise ModelError(
                f"config: expected a VGGTConfig, got a {type(config).__name__}. Of a dictionary, pass "
                "VGGTConfig.from_dict(config)."
            )
        weights = _weights_file(where)
        config = config or _read_config(where, weights)
        with torch.device("meta"):
            model = cls(config)
        state = _read_weights(model, weights, where)
        model.load_state_dict(state, assign=True)
        return model.to(device=target, dtype=dtype).eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write config.json and model.safetensors, in the dtype of the weights; the folder is made where missing."""
        return write_network(folder, self, {"model_type": MODEL_TYPE, **asdict(self.config)})


def load_vggt(name: str, device: torch.device, dtype: torch.dtype) -> VGGT:
    """Load a VGGT; the loader that `pullback.registry` names."""
    return VGGT.from_pretrained(name, device=device, dtype=dtype)


def _place(name: str | os.PathLike[str]) -> str:
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ModelError(
            "name: expected a hub id, a .safetensors file, a folder ('.' for the current one) or 'tiny-views', got "
            f"{name!r}."
        )
    return os.fspath(EMBEDDED.get(os.fspath(name), name))


def _weights_file(where: str) -> Path:
    path = Path(where)
    if path.suffix in _PICKLED and not path.is_dir():
        raise _refused(path.name)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ModelError(f"name: expected a .safetensors file, a folder or a hub id, got the file {where}.")
        return path
    if path.suffix == ".safetensors":
        raise ModelError(f"name: no such file: {where} (current folder: {Path.cwd()}).")
    if path.is_dir():
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
        if pickled and not (path / WEIGHTS).is_file():
            raise _refused(f"{where}, which holds only {pickled[0]}")
    found = _fetched(where, WEIGHTS)
    if found is None:
        raise ModelError(f"name: {where!r} has no {WEIGHTS}. Expected the weights of a VGGT in one safetensors file.")
    return found


def _refused(what: str) -> ModelError:
    return ModelError(
        f"name: {what} is a pickled checkpoint, which can run code when it is loaded, so it is refused. Convert it "
        "once where you trust it (safetensors.torch.save_file), or use the safetensors of the hub."
    )


def _fetched(where: str, filename: str) -> Path | None:
    try:
        return fetched_file(where, filename)
    except Exception as error:  # the hub client raises validation, network and not-found errors of many classes
        raise ModelError(
            f"name: {where!r} is neither a .safetensors file, a folder nor a hub id that can be reached: "
            f"{first_line(error)}."
        ) from None


def _read_config(where: str, weights: Path) -> VGGTConfig:
    """The config.json beside the weights, where there is one."""
    if Path(where).is_file():
        beside = weights.with_name(CONFIG)
        path = beside if beside.is_file() else None
    else:
        path = known_file(where, CONFIG)
    if path is None:
        return VGGTConfig()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kind = stored.get("model_type", MODEL_TYPE)
        if kind == MODEL_TYPE:
            _check_kinds(stored)
        config = VGGTConfig.from_dict(stored) if kind == MODEL_TYPE else None
    except ModelError as error:
        raise ModelError(f"name: {path}: {error}") from None
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise ModelError(f"name: {path} is not a VGGT configuration: {first_line(error)}.") from None
    if config is None:
        raise ModelError(
            f"name: {path} is the configuration of {kind!r}, expected {MODEL_TYPE!r}. For a {kind!r} give the folder, "
            f"{path.parent}; for a VGGT pass config=."
        )
    return config


def _check_kinds(stored: Mapping[str, Any]) -> None:
    """JSON may hold anything; the values of whole numbers and choices are checked by the configuration itself."""
    for field in fields(VGGTConfig):
        value = stored.get(field.name, field.default)
        members = value if isinstance(value, list | tuple) else [None]
        if field.type == "float" and not _is_number(value):
            raise ModelError(f"{field.name}: expected a number, got {value!r}.")
        if field.type == "tuple[int, ...]" and not all(type(one) is int for one in members):
            raise ModelError(f"{field.name}: expected a list of whole numbers, got {value!r}.")
        if field.type == "tuple[str, ...]" and not all(isinstance(one, str) for one in members):
            raise ModelError(f"{field.name}: expected a list of names, got {value!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_weights(model: VGGTNetwork, weights: Path, where: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    absent = tuple(f"{name}." for name in ("track_head", *_absent_heads(model)))
    try:
        with safe_open(weights, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys() if not name.startswith(absent)}  # noqa: SIM118
            check_names_and_shapes(expected, {name: tuple(part.get_shape()) for name, part in slices.items()}, where)
            _check_dtypes({name: part.get_dtype() for name, part in slices.items()}, where)
            return {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"name: the weights of {where!r} could not be read: {first_line(error)}.") from None


def _absent_heads(model: VGGTNetwork) -> list[str]:
    return [name for name in ("camera_head", "point_head", "depth_head") if getattr(model, name) is None]


def check_names_and_shapes(
    expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise a ModelError that names what differs, unless there is every parameter once, in its shape, and no other."""
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    wrong = [
        f"{name} {list(stored[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    found = {"missing": missing, "unexpected": unexpected, "in another shape": wrong}
    if any(found.values()):
        listed = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in found.items() if names)
        raise ModelError(
            f"name: the weights in {where!r} are not those of this VGGT ({len(expected)} parameters): {listed}. "
            "Pass the config= that they were made with, or another checkpoint."
        )


def _check_dtypes(stored: Mapping[str, str], where: str) -> None:
    """Refuse weights of unexpected dtypes, by the names of safetensors: F32, BF16, I64, BOOL and so on."""
    wrong = [f"{name} ({dtype})" for name, dtype in stored.items() if not dtype.startswith(("F", "BF"))]
    if wrong:
        raise ModelError(
            f"name: the weights in {where!r} are not those of a VGGT: {len(wrong)} not in floating point: "
            f"{_some(wrong)}. Expected float32, float16 or bfloat16; convert quantised weights back first."
        )


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_MESSAGES
    return ", ".join(names[:_NAMED_IN_MESSAGES]) + (f", and {more} more" if more > 0 else "")
