"""The sizes of a VGGT, checked when they are put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pullback.errors import ModelError

CONVOLUTION, VIT = "conv", "dinov2_vitl14_reg"
HEADS = ("camera", "point", "depth")
LEVELS = 4  # of a DPT head


@dataclass(frozen=True)
class VGGTConfig:
    """The defaults are those of `facebook/VGGT-1B`.

    ``patch_embed``: "dinov2_vitl14_reg", a ViT of ``vit_depth`` blocks with positions for ``img_size``, or "conv", one
    convolution. ``hook_layers``: the four aggregator layers that the DPT heads read, coarse level last; without such a
    head they do not matter. A head left out of ``heads`` is None.
    """

    model_type: ClassVar[str] = "vggt"  # as in config.json

    img_size: int = 518
    patch_size: int = 14
    patch_embed: str = VIT
    embed_dim: int = 1024
    depth: int = 24
    num_heads: int = 16
    num_register_tokens: int = 4
    mlp_ratio: float = 4.0
    rope_base: float = 100.0
    layer_scale: float = 0.01  # where training starts; a checkpoint overrides it
    vit_depth: int = 24
    camera_trunk_depth: int = 4
    camera_iterations: int = 4
    dpt_features: int = 256
    dpt_out_channels: tuple[int, ...] = (256, 512, 1024, 1024)
    hook_layers: tuple[int, ...] = (4, 11, 17, 23)
    heads: tuple[str, ...] = HEADS

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> VGGTConfig:
        """Make a config of what a config.json holds; names that are not fields are left alone."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in stored.items() if name in known})

    def __post_init__(self) -> None:
        for name in ("dpt_out_channels", "hook_layers", "heads"):  # lists, when they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_counts()
        self._check_widths()
        self._check_choices()

    @property
    def prefix(self) -> int:
        """Tokens of a view before its patches: the camera token and the registers."""
        return 1 + self.num_register_tokens

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The layers that any head reads: the hooks, and the last one for the camera."""
        return tuple(sorted({*self.dense_layers, self.depth - 1}))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The hooks, where there is a DPT head to read them."""
        return self.hook_layers if {"point", "depth"} & set(self.heads) else ()

    def _check_counts(self) -> None:
        for field in fields(self):
            value, lowest = getattr(self, field.name), int(field.name != "num_register_tokens")
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < lowest):
                raise ModelError(f"{field.name}: expected a whole number of at least {lowest}, got {value!r}.")
        if len(self.dpt_out_channels) != LEVELS or len(self.hook_layers) != LEVELS:
            raise ModelError(
                f"dpt_out_channels={self.dpt_out_channels}, hook_layers={self.hook_layers}: expected {LEVELS} of each, "
                "one per level of the DPT heads."
            )
        outside = [layer for layer in self.dense_layers if not (isinstance(layer, int) and 0 <= layer < self.depth)]
        if outside:
            raise ModelError(
                f"hook_layers={self.hook_layers}: expected layers from 0 to {self.depth - 1} (depth={self.depth}), got "
                f"{outside[0]!r}. With fewer than 24 blocks, name the four layers that the DPT heads shall read."
            )

    def _check_widths(self) -> None:
        """Two axes of rotations, sines and cosines need widths divisible by four, and the position maps of DPT too."""
        if self.embed_dim % (4 * self.num_heads):
            raise ModelError(
                f"embed_dim={self.embed_dim}, num_heads={self.num_heads}: expected heads of equal width, a multiple of "
                "4 (two axes of rotary positions)."
            )
        if self.dpt_features % 8 or any(channels < 4 or channels % 4 for channels in self.dpt_out_channels):
            raise ModelError(
                f"dpt_features={self.dpt_features}, dpt_out_channels={self.dpt_out_channels}: expected a multiple of 8 "
                "and multiples of 4 (sines and cosines of two axes are added to these maps)."
            )

    def _check_choices(self) -> None:
        if self.patch_embed not in (CONVOLUTION, VIT):
            raise ModelError(f"patch_embed: expected {VIT!r} or {CONVOLUTION!r}, got {self.patch_embed!r}.")
        if self.patch_embed == VIT and self.img_size % self.patch_size:
            raise ModelError(
                f"img_size={self.img_size}: expected a multiple of patch_size={self.patch_size}, because the positions "
                "of the ViT are stored for that grid."
            )
        unknown = [head for head in self.heads if head not in HEADS]
        if unknown:
            raise ModelError(f"heads: expected a choice of {HEADS}, got {unknown[0]!r}.")
        if self.mlp_ratio <= 0 or self.rope_base <= 1:
            raise ModelError(
                f"mlp_ratio={self.mlp_ratio}, rope_base={self.rope_base}: expected positive, and greater than 1."
            )
