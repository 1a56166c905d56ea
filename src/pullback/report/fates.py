"""What became of the patches of a picture that was pruned: kept, merged into another, dropped. By Pillow alone."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from pullback.runs.documents import DROPPED, MERGED

MERGED_TINT, DROPPED_TINT = (0, 114, 178), (255, 255, 255)
_SIDE = 360  # pixels, the longer side


def lay_fates_over(picture: np.ndarray, fates: np.ndarray, partners: np.ndarray) -> Image.Image:
    """Tint merged patches of a picture, uint8 [H, W, 3], and join them to their partners; whiten dropped ones.

    ``fates`` [rows, columns], and ``partners`` of the same shape: the patch that a removed one was matched to, -1
    where that is none.
    """
    scale = _SIDE / max(picture.shape[:2])
    width, height = round(picture.shape[1] * scale), round(picture.shape[0] * scale)
    seen = Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS)
    rows, columns = fates.shape
    tint = np.zeros((rows, columns, 4), dtype=np.uint8)
    tint[fates == MERGED] = (*MERGED_TINT, 115)
    tint[fates == DROPPED] = (*DROPPED_TINT, 225)
    laid = Image.alpha_composite(
        seen.convert("RGBA"), Image.fromarray(tint).resize((width, height), Image.Resampling.NEAREST)
    )
    lines = Image.new("RGBA", laid.size, (255, 255, 255, 0))
    draw = ImageDraw.Draw(lines)
    for row, column in np.argwhere(fates == MERGED):
        partner = int(partners[row, column])
        if partner >= 0:  # a partner that is no patch has no place in the picture
            ends = ((row, column), divmod(partner, columns))
            draw.line([((c + 0.5) * width / columns, (r + 0.5) * height / rows) for r, c in ends], (255, 255, 255, 190))
    return Image.alpha_composite(laid, lines).convert("RGB")
