"""Pictures and page of `pullback look` from files made by hand, without matplotlib."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pullback.report.look import draw_look
from pullback.runs import documents as files
from pullback.runs.files import write_arrays, write_json


def document(images: list[str]) -> dict:
    return {
        "model": "some/vit", "images": images, "found": 12, "size": [48, 64], "num_probes": 32, "distance": None,
        "skipped": [{"file": "broken.png", "reason": "empty <file>"}], "seed": 0, "machine": "a machine",
        "date": "2026-01-01", "versions": {"pullback": "0"},
        "maps": [
            {"decoder": "cls", "layer": 4, "exact": False, "relative_error": 0.12},
            {"decoder": "depth-2x2", "layer": "hooks", "exact": True, "relative_error": 0.0},
        ],
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    random = np.random.default_rng(0)
    arrays = {
        "pictures": random.integers(0, 256, (3, 48, 64, 3), dtype=np.uint8),
        "energy": random.random((2, 3, 13), dtype=np.float32),
        "grid": np.array([3, 4]),
        "prefix": np.array(1),
    }
    write_json(tmp_path / files.LOOK, document(["a/cat.jpg", "b/cat.jpg", "b/dog <x>.jpg"]))
    write_arrays(tmp_path / files.LOOK_ARRAYS, arrays)
    return tmp_path


def test_every_image_has_one_picture_and_all_are_on_the_page(folder):
    drawn = draw_look(folder)
    assert drawn == ["cat.png", "cat-2.png", "dog <x>.png", "index.html"]
    sizes = {Image.open(folder / name).size for name in drawn[:3]}
    assert len(sizes) == 1
    width, height = sizes.pop()
    assert width > 3 * height * 64 / 48 * 0.7, "the crop and two maps side by side"
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") == 3 * 3
    for words in ("cls", "L04", "hooks", "3 of 12", "dog &lt;x&gt;.jpg", "empty &lt;file&gt;", "some/vit", "a machine"):
        assert words in page, words
    assert "http://" not in page and "https://" not in page and "<script" not in page


def test_the_page_says_which_quantity_is_shown_and_how_sure_it_is(folder):
    draw_look(folder)
    page = " ".join((folder / "index.html").read_text(encoding="utf-8").split())
    assert "32 random directions" in page and "12 %" in page and "exact" in page


def test_pictures_of_an_earlier_look_are_replaced_and_strangers_left_alone(folder):
    draw_look(folder)
    (folder / "mine.png").write_bytes(b"not ours")
    found = document(["b/dog.jpg"])
    write_json(folder / files.LOOK, {**found, "found": 1})
    arrays = files.read_look(folder)
    write_arrays(
        folder / files.LOOK_ARRAYS, {**arrays, "pictures": arrays["pictures"][:1], "energy": arrays["energy"][:, :1]}
    )
    assert draw_look(folder) == ["dog.png", "index.html"]
    assert (folder / "mine.png").read_bytes() == b"not ours"


def test_it_needs_neither_matplotlib_nor_torch(folder):
    code = (
        "import sys\nfor name in ('torch', 'matplotlib', 'scipy'): sys.modules[name] = None\n"
        "from pathlib import Path\nfrom pullback.report.look import draw_look\nprint(draw_look(Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "index.html" in done.stdout
