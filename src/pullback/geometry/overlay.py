"""An importance map over the picture that it was computed for: `overlay`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pullback.backbones.backbone import Size
from pullback.checks import finite_number, of_kind
from pullback.data.images import to_pictures
from pullback.data.pictures import Picture, as_pixels
from pullback.errors import ImageError, PullbackError, ShapeError, naming
from pullback.probes import ProbeMap
from pullback.tokens import TokenLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Importance = Tensor | NDArray[np.floating]


def no_single_images(argument: str, name: str) -> PullbackError:
    """Return the error for models whose samples are scenes of several views."""
    return PullbackError(
        f"{argument}: expected a model of single images, got {name}, whose samples are scenes of several views. "
        "`pullback diagnose` draws every view of a scene with its patches (tokens_*.png)."
    )


def overlay(
    image: str | os.PathLike[str] | Picture,
    importance: Importance,
    probe: ProbeMap,
    *,
    size: Size = None,
    alpha: float | None = None,
) -> Image.Image:
    """Lay the importance of tokens over the crop of an image that the probe saw, as a PIL image of its size.

        importance = pb.token_importance(pb.spectrum(probe, probe.load_images("cat.jpg"), rank=10))
        pb.overlay("cat.jpg", importance, probe).save("importance.png")

    ``image``: a path, or one picture in any form that `ProbeMap.features` takes.
    ``importance``: a number from 0 up for each token, [N] or [1, N], as `token_importance` or a head returns it; the
    class token and registers are dropped, since they have no place in the picture. Colours are logarithmic, from black
    through red to light yellow, and stand for the square of a patch's importance over its mean. ``size``: that of the
    crop where `load_images` was given one; without it the number of tokens tells, if the crop is square. ``alpha``:
    how far the map covers the picture, from 0 to 1.
    """
    from pullback.report import heat

    of_kind("probe", probe, ProbeMap, "a ProbeMap (pb.load_probe)")
    if probe.backbone.views:
        raise no_single_images("probe", probe.name)
    opacity = heat.ALPHA if alpha is None else alpha
    finite_number("alpha", opacity, least=0, most=1, expected="a number from 0 to 1")
    energy = _energy(importance)
    picture, layout = _seen(image, len(energy), probe, size)
    if not layout.in_picture:
        raise PullbackError(
            f"probe: expected one at the features, whose patches have a place in the picture, got {probe.name}, whose "
            "tokens are registers."
        )
    if len(energy) != layout.tokens:
        raise ShapeError(
            f"importance: expected {layout.tokens} tokens for this image ({layout.prefix} before "
            f"{layout.grid[0]}x{layout.grid[1]} patches), got {len(energy)}. Pass the image that the importance was "
            "computed for, at the same size."
        )
    patches = layout.patch_map(energy[None])[0].numpy()  # [1, rows, columns]
    relative = heat.relative_energy(patches)[0]
    return heat.lay_over(picture, relative, heat.limits(relative), opacity)


def _energy(importance: object) -> Tensor:
    """Check the importance and return its square, [N] in float64 on the CPU."""
    if not isinstance(importance, Tensor | np.ndarray):
        found = type(importance).__name__
        raise PullbackError(
            f"importance: expected a tensor [N] with a number for each token, got {found}. Of a spectrum, "
            "pb.token_importance(spectrum) computes it; of a diagnosis, it is report.importance[0]."
        )
    values = torch.as_tensor(importance).detach().cpu().double()
    if values.ndim == 2 and len(values) == 1:
        values = values[0]
    if values.ndim != 1:
        tokens = values.shape[-1] if values.ndim else "N"
        raise ShapeError(
            f"importance: expected [{tokens}] or [1, {tokens}] of one image, got {list(values.shape)}. Pass one image "
            "at a time: importance[0] with images[0]."
        )
    if not torch.isfinite(values).all():
        raise PullbackError("importance: expected finite numbers, got NaN or infinity.")
    if (values < 0).any():
        raise PullbackError(f"importance: expected numbers from 0 up, got {values.min():.4g}.")
    return values.square()


def _seen(
    image: str | os.PathLike[str] | Picture, tokens: int, probe: ProbeMap, size: Size
) -> tuple[np.ndarray, TokenLayout]:
    """Return the crop that the probe saw, uint8 [H, W, 3], and where its tokens sit."""
    if not isinstance(image, Tensor):
        probe.backbone.check_size(size)
        size = _side(tokens, probe) if size is None else size
    if isinstance(image, str | os.PathLike):
        pixels = probe.load_images(image, size)
    else:
        with naming("image"):
            pixels = as_pixels(image, probe.pixel_format(size), normalized=True).detach().cpu().float()
    if len(pixels) != 1:
        raise ImageError(
            f"image: expected one image, got {len(pixels)}. Pass one at a time: images[0] with importance[0]."
        )
    return to_pictures(probe.pixel_format().rgb(pixels[0])), probe.backbone.token_layout(pixels)


def _side(tokens: int, probe: ProbeMap) -> Size:
    """Return the side of the square crop with so many tokens; None, the network's own, where that has as many."""
    own = probe.pixel_format().size
    if probe.backbone.token_layout(torch.empty(0, 3, *own)).tokens == tokens:
        return None
    try:
        rows, _ = TokenLayout.square(tokens, probe.backbone.prefix).grid
    except ShapeError:
        raise ShapeError(
            f"size: {tokens} tokens with {probe.backbone.prefix} before the patches do not make a square picture. "
            "Pass size=(height, width) as to load_images, or the tensor that the probe saw."
        ) from None
    return rows * probe.backbone.patch_size
