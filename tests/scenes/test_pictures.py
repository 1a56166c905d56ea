"""Scenes as folders of pictures: what is read back is what was rendered."""

import pytest
import torch
from PIL import Image
from typer import Typer
from typer.testing import CliRunner

from pullback.errors import ImageError, PullbackError
from pullback.scenes import HELD_OUT, render
from pullback.scenes.pictures import main, write_scene_folders
from pullback.vggt.views import read_scenes


def test_the_files_hold_the_rendered_views_in_their_order(tmp_path):
    folders = write_scene_folders(tmp_path, [5, 6], views=3, size=32)
    read = read_scenes(tmp_path, size=32, patch_size=8).scenes
    assert [scene.folder for scene in read] == folders
    for scene, expected in zip(read, render([5, 6], size=32, views=3).rgb, strict=True):
        torch.testing.assert_close(scene.views, expected, rtol=0, atol=0.51 / 255)


def test_the_command_draws_scenes_that_no_embedded_model_has_seen(tmp_path):
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--count", "1", "--views", "2", "--size", "16"])
    assert result.exit_code == 0 and "1 scenes of 2 views" in result.output
    assert sorted(file.name for file in (tmp_path / f"scene-{HELD_OUT}").iterdir()) == ["view-00.png", "view-01.png"]


def test_the_same_call_may_be_repeated(tmp_path):
    first, second = (write_scene_folders(tmp_path, [5], views=2, size=16) for _ in range(2))
    assert first == second and len(list(first[0].iterdir())) == 2


@pytest.mark.parametrize("stale", ["view-02.png", "holiday.JPG"])
def test_pictures_of_another_call_are_never_mixed_with_those_of_this_one(stale, tmp_path):
    folder = tmp_path / "scene-6"
    folder.mkdir()
    Image.new("RGB", (4, 4)).save(folder / stale)
    with pytest.raises(
        PullbackError, match=rf"out: {folder} already holds {stale}, .* another --out, or delete the folder"
    ):
        write_scene_folders(tmp_path, [5, 6], views=2, size=16)
    assert list(tmp_path.iterdir()) == [folder], "nothing was drawn"
    (folder / stale).rename(folder / "notes.txt")
    assert len(write_scene_folders(tmp_path, [5, 6], views=2, size=16)) == 2


def test_views_that_no_memory_holds_are_refused(tmp_path):
    with pytest.raises(ImageError, match=r"size=100000: expected at most 4729 with views=4"):
        write_scene_folders(tmp_path / "out", [5], views=4, size=100_000)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [("--size", "0"), ("--size", "100000"), ("--first", str(1 << 70))])
def test_errors_are_one_line(wrong, tmp_path):
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path), *wrong])
    assert result.exit_code == 2 and "Traceback" not in result.output
