"""Letters and files of pictures that Pillow alone draws, so that they need no extra."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image, ImageFont

INK, FAINT, PAPER = (31, 35, 40), (89, 99, 110), (255, 255, 255)


def font(size: int) -> Any:
    return ImageFont.load_default(size=size)


def fitted(text: str, size: int, width: int) -> str:
    """Shorten a text from its end to so many pixels, of letters of this size."""
    letters = font(size)
    if letters.getlength(text) <= width:
        return text
    while text and letters.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
