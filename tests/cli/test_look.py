"""`pullback look` on the embedded model: what it writes, what it says, and what it refuses."""

import sys

import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from pullback.cli import app
from pullback.experiments.demo import write_pictures
from pullback.scenes.render import render


def pullback(*arguments: object) -> Result:
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    write_pictures(render(range(2), size=64), folder)
    return folder


def test_one_command_writes_a_picture_of_each_image_and_a_page(photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # it is an extra
    out = tmp_path / "new" / "look"
    result = pullback(
        "look", "tiny-scenes", photos / "scene-00.png", photos / "scene-01.png", "--decoder", "cls", "--decoder",
        "depth-2x2", "--layer", 8, "--layer", 10, "--size", 56, "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert (out / "index.html").as_uri() in result.output and "scene-00.png, scene-01.png" in result.output
    with Image.open(out / "scene-00.png") as picture:
        assert picture.width > 4.5 * picture.height * 0.8, "the crop and four maps"
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg") == 2 * 5
    assert "http://" not in page and "https://" not in page


def test_images_beyond_the_limit_are_counted(photos, tmp_path):
    result = pullback("look", "tiny-scenes", photos, "--layer", 10, "--size", 56, "--limit", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "1 of 2 images" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-scenes", "nowhere.png"), "nowhere.png"),
        (("tiny-scenes", "{photos}", "--layer", "last"), "layer: expected a block index such as 10, or 'hooks'"),
        (("tiny-scenes", "{photos}", "--layer", "12"), "layer: expected a block index from 0 to 11"),
        (("tiny-scenes", "{photos}", "--decoder", "clss"), "decoder: expected one of cls"),
        (("tiny-scenes", "{photos}", "--size", "big"), "size: expected pixels such as 224"),
        (("tiny-scenes", "{photos}", "--out", "{photos}/scene-00.png/below"), "out: cannot make the folder"),
        (("tiny-views", "{photos}"), "several views"),
        (("tiny-scenes",), "Missing argument"),
    ],
)
def test_bad_input_gives_one_line_and_no_traceback(arguments, message, photos, tmp_path):
    out = () if "--out" in arguments else ("--out", tmp_path / "out")
    result = pullback("look", *(part.replace("{photos}", str(photos)) for part in arguments), *out)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output and not (tmp_path / "out" / "index.html").exists()
