"""Picture and page of `pullback search` from files made by hand, without matplotlib."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pullback.report.matches import ACROSS, draw_matches
from pullback.runs import documents as files
from pullback.runs.files import write_arrays, write_json

COLOURS = [(200, 30, 30), (30, 160, 30), (30, 30, 200), (190, 190, 20), (20, 170, 170), (150, 20, 150), (90, 60, 30)]


def write(folder: Path, count: int = 6, states: dict[int, str] | None = None, height: int = 48) -> Path:
    pictures = np.stack([np.full((height, 64, 3), COLOURS[number % 7], dtype=np.uint8) for number in range(count + 1)])
    matches = [
        {
            "rank": rank,
            "key": f"a room/picture <{rank}>.png",
            "distance": 0.01234 * rank,
            "place": None,
            "state": (states or {}).get(rank, "seen"),
        }
        for rank in range(1, count + 1)
    ]
    document = {
        "gallery": "my gallery", "query": "else/query & more.png", "searched": 1234, "model": "some/vit", "layer": 8,
        "decoder": "depth", "reference": "relative_l1", "method": "exact", "how": "all compared in 3 ms",
        "matches": matches, "machine": "a machine", "date": "2026-01-01", "versions": {"pullback": "0"},
    }  # fmt: skip
    write_json(folder / files.MATCHES, document)
    write_arrays(folder / files.MATCHES_ARRAYS, {"pictures": pictures})
    return folder


def places(picture: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int] | None:
    """The middle of what has this colour."""
    rows, columns = np.nonzero((np.asarray(picture).astype(int) - colour).__abs__().max(-1) <= 2)
    return (int(np.median(columns)), int(np.median(rows))) if len(rows) > 1000 else None


def test_the_query_is_at_the_left_and_what_was_found_follows_in_rows(tmp_path):
    assert draw_matches(write(tmp_path)) == ["matches.png", "index.html"]
    with Image.open(tmp_path / "matches.png") as picture:
        found = [places(picture, colour) for colour in COLOURS]
    query, *others = found
    assert all(other is not None and query[0] < other[0] for other in others)
    first, second = others[:ACROSS], others[ACROSS:]
    assert [x for x, _ in first] == sorted({x for x, _ in first}) and len({y for _, y in first}) == 1
    assert query[1] == first[0][1] < second[0][1] and second[0][0] == first[0][0]


@pytest.mark.parametrize(
    ("state", "words"), [("gone", "gone"), ("changed", "changed"), ("unreadable", "cannot be read")]
)
def test_a_picture_that_cannot_be_shown_is_a_grey_tile_that_says_so(tmp_path, state, words):
    draw_matches(write(tmp_path, states={2: state}))
    with Image.open(tmp_path / "matches.png") as picture:
        found = [places(picture, colour) for colour in COLOURS]
    assert found[2] is None and all(place is not None for number, place in enumerate(found) if number != 2)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (
        f'alt="picture &lt;2&gt;.png: the file {words.replace("gone", "is gone").replace("changed", "has changed")}"'
        in page
    )


@pytest.mark.parametrize("count", [1, ACROSS, 2 * ACROSS + 1])
@pytest.mark.parametrize("height", [48, 160])
def test_any_number_of_pictures_of_any_shape_is_drawn(tmp_path, count, height):
    draw_matches(write(tmp_path, count, height=height))
    with Image.open(tmp_path / "matches.png") as picture:
        width, tall = picture.size
    assert width > 200 * (1 + min(count, ACROSS)) and tall > 200 * height / 64 * -(-count // ACROSS)


def test_the_page_shows_each_picture_with_rank_distance_and_key(tmp_path):
    draw_matches(write(tmp_path))
    page = " ".join((tmp_path / "index.html").read_text(encoding="utf-8").split())
    assert page.count("data:image/jpeg;base64,") == 7
    for words in (
        "What is nearest to query &amp; more.png", "1 · 0.0123", "6 · 0.0740", "a room/picture &lt;3&gt;.png",
        "6 of 1,234 images", "some/vit", "depth", "layer 8", "mean absolute differences", "my gallery", "a machine",
        "all compared in 3 ms",
    ):  # fmt: skip
        assert words in page, words
    assert "http://" not in page and "https://" not in page and "<script" not in page


def test_drawing_needs_neither_torch_nor_matplotlib(tmp_path):
    write(tmp_path)
    program = f"""
import sys
sys.modules["matplotlib"] = None
from pathlib import Path
from pullback.report.matches import draw_matches
draw_matches(Path({str(tmp_path)!r}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
