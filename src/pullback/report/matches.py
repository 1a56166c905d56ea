"""Picture and page of `pullback search`, from its files alone: the query, and what was found in order; by Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from pullback.report.html import jpeg_uri, write_html
from pullback.report.tiles import FAINT, INK, PAPER, fitted, font, png
from pullback.runs import documents as files
from pullback.runs.files import read_json, write_bytes

ACROSS = 5
"""Found pictures in a row."""
_SIDE, _GAP, _ROOM = 208, 14, 34  # pixels, the width of a picture, the space around it, and that behind the query
_VALUE, _KEY = 17, 14  # pixels, the heights of letters
_UNDER = _VALUE + _KEY + 18
_GREY = (208, 212, 218)
REASONS = {
    "gone": "the file is gone",
    "changed": "the file has changed",
    "unreadable": "the file cannot be read",
    "unknown": "no file is known",  # of a picture from memory or from an archive
}
"""Why a picture is not shown, by what `matches.json` says of it. "seen": it is."""


def draw_matches(folder: Path) -> list[str]:
    """Draw the query beside what was found, and the page; return their names."""
    document, pictures = read_json(folder / files.MATCHES), files.read_matches(folder)["pictures"]
    shown = document["matches"][: len(pictures) - 1]
    tiles = [_tile(picture, match) for picture, match in zip(pictures[1:], shown, strict=True)]
    query = Image.fromarray(pictures[0])
    write_bytes(folder / files.MATCHES_FIGURE, png(in_order(query, tiles, document)))
    cards = [
        {**match, "picture": jpeg_uri(tile), "name": name_of(match["key"]), "note": REASONS.get(match["state"], "")}
        for tile, match in zip(tiles, shown, strict=True)
    ]
    content = {"document": document, "query": jpeg_uri(query), "name": name_of(document["query"]), "cards": cards}
    return [files.MATCHES_FIGURE, write_html(folder, "matches.html.j2", content).name]


def name_of(key: str) -> str:
    """Return the last part of a key, which is a path or the place in an archive."""
    return PurePath(key).name or key


def in_order(query: Image.Image, tiles: list[Image.Image], document: Mapping[str, Any]) -> Image.Image:
    """Put the query at the left and the pictures of what was found in rows beside it, each with its distance and key
    beneath."""
    tall = round(_SIDE * query.height / query.width)
    across, down = min(ACROSS, len(tiles)), -(-len(tiles) // ACROSS)
    left = _GAP + _SIDE + _ROOM
    size = (left + across * (_SIDE + _GAP), _GAP + down * (tall + _UNDER + _GAP))
    whole = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(whole)

    def put(picture: Image.Image, x: int, y: int, value: str, key: str) -> None:
        whole.paste(picture.resize((_SIDE, tall), Image.Resampling.LANCZOS), (x, y))
        draw.text((x, y + tall + 6), fitted(value, _VALUE, _SIDE), INK, font(_VALUE))
        draw.text((x, y + tall + 12 + _VALUE), fitted(key, _KEY, _SIDE, keep_end=True), FAINT, font(_KEY))

    put(query, _GAP, _GAP, "query", name_of(document["query"]))
    middle = left - _ROOM // 2 - 1
    draw.line([(middle, _GAP), (middle, size[1] - _GAP)], fill=_GREY, width=2)
    for place, (tile, match) in enumerate(zip(tiles, document["matches"], strict=False)):
        row, column = divmod(place, ACROSS)
        where = (left + column * (_SIDE + _GAP), _GAP + row * (tall + _UNDER + _GAP))
        put(tile, *where, f"{match['rank']}    {match['distance']:.4f}", match["key"])
    return whole


def _tile(picture: np.ndarray, match: Mapping[str, Any]) -> Image.Image:
    """Return a picture, or a grey one that says why there is none."""
    if match["state"] == "seen":
        return Image.fromarray(picture)
    height, width = picture.shape[:2]
    tile = Image.new("RGB", (_SIDE, round(_SIDE * height / width)), _GREY)
    letters, said = font(_VALUE), REASONS[match["state"]]
    place = ((tile.width - letters.getlength(said)) / 2, (tile.height - _VALUE) / 2)
    ImageDraw.Draw(tile).text(place, said, FAINT, letters)
    return tile
