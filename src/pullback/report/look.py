"""Pictures and page of `pullback look`, from its files alone; by Pillow, so that they need no extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from pullback.report.heat import colours, lay_over, limits, split_energy
from pullback.report.html import colour_bar, jpeg_uri, write_html
from pullback.report.tiles import FAINT, INK, PAPER, fitted, font, png
from pullback.report.wording import outside_patches
from pullback.runs import documents as files
from pullback.runs.files import read_json, write_bytes

_SIDE, _GAP = 288, 14  # pixels, the width of a picture and the space around it
_TITLE, _NOTE = 19, 15  # pixels, the heights of letters
_HEAD = _TITLE + _NOTE + 22
_BAR = 124  # the width of the colour bar with its labels


def draw_look(folder: Path) -> list[str]:
    """Draw a picture for each image, the crop and its maps side by side, and the page; return their names."""
    document, arrays = read_json(folder / files.LOOK), files.read_look(folder)
    prefix, pictures = int(arrays["prefix"]), arrays["pictures"]
    relative, outside = split_energy(arrays["energy"].astype(float), prefix, arrays["grid"])  # [maps, b, ...]
    scale = limits(relative)  # one for all, so that pictures can be compared
    titles = [f"{shown['decoder']} at {files.layer_name(shown['layer'])}" for shown in document["maps"]]
    names = picture_names(document["images"])
    cards = []
    for place, (name, picture) in enumerate(zip(names, pictures, strict=True)):
        maps = [lay_over(picture, own[place], scale) for own in relative]
        notes = [outside_patches(prefix, part[place]) for part in outside]
        whole = side_by_side([Image.fromarray(picture), *maps], ["what the model saw", *titles], ["", *notes], scale)
        write_bytes(folder / name, png(whole))
        shown = [
            {"title": title, "note": note, "picture": jpeg_uri(each), "number": number}
            for number, (title, note, each) in enumerate(zip(titles, notes, maps, strict=True))
        ]
        cards.append(
            {"file": Path(document["images"][place]), "seen": jpeg_uri(Image.fromarray(picture)), "maps": shown}
        )
    content = {
        "document": document,
        "cards": cards,
        "bar": colour_bar(scale),
        "error": max(shown["relative_error"] for shown in document["maps"]),
        "exact": [title for title, shown in zip(titles, document["maps"], strict=True) if shown["exact"]],
    }
    return [*names, write_html(folder, "look.html.j2", content).name]


def picture_names(images: Sequence[str]) -> list[str]:
    """Name the picture of each image after its file, with a number where two are called the same."""
    names: list[str] = []
    for image in images:
        stem, number = Path(image).stem, 1
        while (name := f"{stem}.png" if number == 1 else f"{stem}-{number}.png") in names:
            number += 1
        names.append(name)
    return names


def side_by_side(
    pictures: Sequence[Image.Image], titles: Sequence[str], notes: Sequence[str], scale: tuple[float, float]
) -> Image.Image:
    """Put pictures of one size side by side, with titles and notes above them and a bar of the colours at the right."""
    tall = round(_SIDE * pictures[0].height / pictures[0].width)
    whole = Image.new("RGB", (len(pictures) * (_SIDE + _GAP) + _GAP + _BAR, _HEAD + tall + _GAP), PAPER)
    draw = ImageDraw.Draw(whole)
    for place, (picture, title, note) in enumerate(zip(pictures, titles, notes, strict=True)):
        x = _GAP + place * (_SIDE + _GAP)
        whole.paste(picture.resize((_SIDE, tall), Image.Resampling.LANCZOS), (x, _HEAD))
        draw.text((x, 8), fitted(title, _TITLE, _SIDE), INK, font(_TITLE))
        draw.text((x, 14 + _TITLE), fitted(note, _NOTE, _SIDE), FAINT, font(_NOTE))
    x = _GAP + len(pictures) * (_SIDE + _GAP)
    bar = colours(np.linspace(1, 0, tall)[:, None].repeat(16, 1))
    whole.paste(Image.fromarray(bar), (x, _HEAD))
    low, high = scale
    for value, y in ((high, _HEAD), (low, _HEAD + tall - _NOTE - 4)):
        draw.text((x + 22, y), f"{value:.2g}x mean", FAINT, font(_NOTE - 2))
    return whole
