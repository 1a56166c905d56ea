"""Pictures of a report that a reader works with: maps to fade, outputs to wipe, patches to click on.

Each picture of a page is stored once and shown from there as often as it is wanted. A `Quality` says how large and how
many they are; a page that is too heavy is made again with the next.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from pullback.errors import PullbackError
from pullback.report.heat import colours
from pullback.report.html import data_uri

OUTLINED = 0.25
"""The share of the patches that are outlined: the most important ones."""
# matplotlib's viridis at every eighth of its range
_VIRIDIS = np.array(
    [(68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99),
     (170, 220, 50), (253, 231, 37)], dtype=float,
)  # fmt: skip
_LARGER = 8
"""How many pixels a patch of a map has, so that browsers do not blur it."""


class Quality(NamedTuple):
    """Of the pictures of a page: their longer side in pixels, at most, how well they are kept, from 0 to 100, and how
    many of a figure are shown."""

    side: int
    kept: int
    pictures: int


QUALITIES = (
    Quality(448, 82, 12),
    Quality(336, 78, 8),
    Quality(256, 74, 6),
    Quality(192, 70, 4),
    Quality(144, 60, 2),
    Quality(112, 50, 1),
    Quality(0, 0, 0),
)
"""From the best to none at all."""


@dataclass
class Album:
    """The pictures of a page, each once, by a name that follows from its content."""

    quality: Quality
    stored: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: int = 0

    def add(self, picture: np.ndarray) -> str:
        """Keep a picture, uint8 [H, W, 3]; return its name."""
        name = "picture-" + hashlib.sha256(repr(picture.shape).encode() + picture.tobytes()).hexdigest()[:10]
        if name not in self.stored:
            image = Image.fromarray(np.ascontiguousarray(picture))
            image.thumbnail((self.quality.side, self.quality.side), Image.Resampling.LANCZOS)
            height, width = picture.shape[:2]
            self.stored[name] = {"uri": webp_uri(image, self.quality.kept), "width": width, "height": height}
        return name

    def shown(self, count: int) -> range:
        """Return which of so many pictures of a figure are shown."""
        self.left_out += max(0, count - self.quality.pictures)
        return range(min(count, self.quality.pictures))


def webp_uri(picture: Image.Image, quality: int) -> str:
    """Put a picture into an address, as WebP."""
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=quality)
    return data_uri(buffer.getvalue(), "webp")


def maps_panel(arrays: Mapping[str, np.ndarray], album: Album) -> dict[str, Any]:
    """Return what the figure of importance maps shows: for each picture its maps, with outlines and correlations."""
    pictures, maps = _pictures(arrays), np.asarray(arrays["maps"], dtype=float)  # [n, H, W, 3], [m, n, h, w]
    names, rho = [str(name) for name in arrays["names"]], np.asarray(arrays["rho"], dtype=float)  # [m], [m, n]
    _check(maps.ndim == 4 and maps.shape[:2] == (len(names), len(pictures)), "maps", maps)
    _check(rho.shape == maps.shape[:2], "rho", rho)
    rows, columns = maps.shape[2:]
    shown = [
        {
            "picture": album.add(pictures[place]),
            "maps": [
                {
                    "name": name,
                    "layer": _png_uri(colours(ranks(maps[number, place]))),
                    "outline": outline(maps[number, place]),
                    "rho": None if np.isnan(rho[number, place]) else f"{rho[number, place]:.2f}".replace("-", "−"),
                }
                for number, name in enumerate(names)
            ],
        }
        for place in album.shown(len(pictures))
    ]
    return {"pictures": shown, "names": names, "rows": rows, "columns": columns}


def wipe_panel(arrays: Mapping[str, np.ndarray], album: Album) -> dict[str, Any]:
    """Return what the figure of dense outputs shows: for each picture the output before and after, in one scale."""
    pictures = _pictures(arrays)
    before, after = (np.asarray(arrays[name], dtype=float) for name in ("before", "after"))  # [n, h, w]
    _check(before.ndim == 3 and len(before) == len(pictures), "before", before)
    _check(after.shape == before.shape, "after", after)
    captions = [str(caption) for caption in arrays["captions"]]
    shown = []
    for place in album.shown(len(pictures)):
        low, high = np.percentile(before[place], [1, 99])
        scale = (float(low), float(max(high, low + 1e-12)))
        shown.append(
            {
                "picture": album.add(pictures[place]),
                "before": album.add(_coloured(before[place], scale)),
                "after": album.add(_coloured(after[place], scale)),
                "caption": captions[place],
                "low": f"{scale[0]:.3g}".replace("-", "−"),
                "high": f"{scale[1]:.3g}".replace("-", "−"),
            }
        )
    return {"pictures": shown, "stops": ", ".join(f"rgb{tuple(map(int, stop))}" for stop in _VIRIDIS)}


def neighbours_panel(arrays: Mapping[str, np.ndarray], album: Album) -> dict[str, Any]:
    """Return what the figure of neighbours shows: for each picture the patches nearest to each patch, and the one that
    is shown first, in the middle."""
    pictures, nearest = _pictures(arrays), np.asarray(arrays["nearest"], dtype=int)  # [m, n, patches, k]
    names = [str(name) for name in arrays["names"]]
    rows, columns = (int(side) for side in arrays["grid"])
    _check(nearest.ndim == 4 and nearest.shape[:3] == (len(names), len(pictures), rows * columns), "nearest", nearest)
    _check(bool(((nearest >= 0) & (nearest < rows * columns)).all()), "nearest", nearest)
    first = rows // 2 * columns + columns // 2
    shown = [
        {
            "picture": album.add(pictures[place]),
            "nearest": nearest[:, place].tolist(),  # [m, patches, k]
            "sides": [
                {"name": name, "near": nearest[number, place, first].tolist()} for number, name in enumerate(names)
            ],
        }
        for place in album.shown(len(pictures))
    ]
    return {
        "pictures": shown, "names": names, "rows": rows, "columns": columns, "first": first, "k": nearest.shape[3],
    }  # fmt: skip


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the place of each value [h, w] among all of them, from 0, the lowest, to 1; equal ones share theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts + 1) / 2
    places: np.ndarray = middle[inverse.reshape(values.shape)] / max(values.size - 1, 1)
    return places


def outline(values: np.ndarray) -> str:
    """Return an SVG path, in patches, around the highest quarter of the values [h, w]."""
    rows, columns = values.shape
    highest = np.argsort(-values, axis=None, kind="stable")[: max(1, round(OUTLINED * values.size))]
    marked = np.zeros(rows * columns, dtype=bool)
    marked[highest] = True
    inside = np.pad(marked.reshape(rows, columns), 1)
    across = inside[1:, 1:-1] != inside[:-1, 1:-1]  # [rows + 1, columns], an edge above each patch
    along = inside[1:-1, 1:] != inside[1:-1, :-1]  # [rows, columns + 1], an edge left of each patch
    path = [f"M{start} {row}H{end}" for row, line in enumerate(across) for start, end in _runs(line)]
    path += [f"M{column} {start}V{end}" for column, line in enumerate(along.T) for start, end in _runs(line)]
    return "".join(path)


def _runs(line: np.ndarray) -> list[tuple[int, int]]:
    """Return where a line of truth values is true, as pairs of start and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]]).astype(int)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _coloured(values: np.ndarray, scale: tuple[float, float]) -> np.ndarray:
    """Colour values [h, w] in viridis: uint8 [h, w, 3]."""
    low, high = scale
    shares, places = np.clip((values - low) / (high - low), 0, 1), np.linspace(0, 1, len(_VIRIDIS))
    return np.rint(np.stack([np.interp(shares, places, stops) for stops in _VIRIDIS.T], -1)).astype(np.uint8)


def _png_uri(picture: np.ndarray) -> str:
    large = picture.repeat(_LARGER, 0).repeat(_LARGER, 1)
    buffer = io.BytesIO()
    Image.fromarray(large).quantize(256).save(buffer, "PNG", optimize=True)
    return data_uri(buffer.getvalue(), "png")


def _pictures(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    pictures = np.asarray(arrays["pictures"])
    _check(pictures.ndim == 4 and pictures.shape[-1] == 3 and pictures.dtype == np.uint8, "pictures", pictures)
    return pictures


def _check(right: bool, name: str, array: np.ndarray) -> None:
    if not right:
        raise PullbackError(f"figure: its array {name} {array.dtype}{list(array.shape)} is not as a figure needs it.")


PANELS = {"maps": maps_panel, "wipe": wipe_panel, "neighbours": neighbours_panel}


def panel_of(kind: str, arrays: Mapping[str, np.ndarray], album: Album) -> dict[str, Any]:
    """Return what a figure of a kind shows, or raise an error that says which array is missing or wrong."""
    try:
        return PANELS[kind](arrays, album)
    except KeyError as error:
        raise PullbackError(f"figure: its file has no array {error}.") from None
