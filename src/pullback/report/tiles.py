"""Letters and files of pictures that Pillow alone draws, so that they need no extra."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image, ImageFont

INK, FAINT, PAPER = (31, 35, 40), (89, 99, 110), (255, 255, 255)


def font(size: int) -> Any:
    return ImageFont.load_default(size=size)


def fitted(text: str, size: int, width: int, *, keep_end: bool = False) -> str:
    """Shorten a text to so many pixels, of letters of this size: from its end, or as names of files from the front."""
    letters = font(size)
    if letters.getlength(text) <= width:
        return text
    cut = (lambda rest: f"...{rest}") if keep_end else (lambda rest: f"{rest}...")
    while text and letters.getlength(cut(text)) > width:
        text = text[1:] if keep_end else text[:-1]
    return cut(text)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
