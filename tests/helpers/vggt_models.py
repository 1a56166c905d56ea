"""Small VGGTs with weights that are a function of the parameters' names, as in shared/specs/fixture_recipe.md.

Fresh weights would hide mistakes: layer scales of 0.01 and special tokens of 1e-6 make every block nearly the identity.
"""

import math
import re
import zlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback import VGGT, VGGTConfig
from pullback.vggt.decoders import point_pixels
from pullback.vggt.network import VGGTOutput

TINY = dict(
    img_size=56,
    patch_embed="conv",
    embed_dim=32,
    depth=4,
    num_heads=2,
    num_register_tokens=2,
    vit_depth=2,
    camera_trunk_depth=2,
    dpt_features=16,
    dpt_out_channels=(8, 8, 16, 16),
    hook_layers=(0, 1, 2, 3),
)


def _points(output: VGGTOutput, count: int) -> Tensor:
    found = output.world_points
    return found.flatten(1, 3)[:, point_pixels(count, *found.shape[1:4])]


REFERENCES = {
    "camera": lambda output: output.pose_enc,
    "camera-1": lambda output: output.pose_enc[:, 1],
    "points": lambda output: _points(output, 64),
    "points-5": lambda output: _points(output, 5),
    "depth": lambda output: output.depth[..., 0],
    "depth-2x3": lambda output: F.adaptive_avg_pool2d(output.depth[..., 0], (2, 3)),
    "depth-3x4": lambda output: F.adaptive_avg_pool2d(output.depth[..., 0], (3, 4)),
}
"""For each decoder, its output from what the network's own forward returns."""


def tiny(dtype: torch.dtype = torch.float64, **changes) -> VGGT:
    """A VGGT of a few thousand numbers in evaluation mode."""
    return with_recipe(VGGT(VGGTConfig(**{**TINY, **changes}))).to(dtype).eval()


def scenes(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Images in [0, 1], [S, 3, H, W] or [B, S, 3, H, W]."""
    return torch.rand(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def with_recipe(model: nn.Module, factors: Mapping[str, float] | None = None) -> nn.Module:
    """The model with the recipe's weights; of ``factors``, the first whose pattern is the name multiplies it."""
    state = {name: _factor(name, factors or {}) * _value(name, old.shape) for name, old in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape, f"{list(got.shape)} instead of {list(expected.shape)}"
    return ((got - expected).abs().max() / expected.abs().max()).item()


def _value(name: str, shape: torch.Size) -> Tensor:
    z = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(zlib.crc32(name.encode("utf-8"))))
    leaf = name.rpartition(".")[2]
    if leaf == "gamma":
        return 0.5 + 0.1 * z
    if leaf == "bias":
        return 0.1 * z
    if leaf == "weight":
        return 1 + 0.1 * z if len(shape) == 1 else z / math.sqrt(math.prod(shape[1:]))
    return z


def _factor(name: str, factors: Mapping[str, float]) -> float:
    return next((factor for pattern, factor in factors.items() if re.fullmatch(pattern, name)), 1.0)
