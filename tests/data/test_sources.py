"""Streams of images: the same keys and bytes whatever they are packed in."""

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pullback.data.sources import BrokenItem, open_source
from pullback.errors import ImageError

NAMES = ["a.png", "b.png", "deep/c.png"]


def encoded(seed: int, height: int = 20, width: int = 30) -> bytes:
    array = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


PICTURES = {name: encoded(seed) for seed, name in enumerate(NAMES)}


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "photos"
    for name, data in PICTURES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "notes.md").write_text("not an image")
    return root


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def shards(tmp_path) -> Path:
    """Webdataset: the members of a sample share their name up to the ending."""
    for number, (name, data) in enumerate(PICTURES.items()):
        members = {name: data, name.replace(".png", ".cls"): b"7", ".hidden.png": b"x"}
        write_tar(tmp_path / "shards" / f"train-{number:03d}.tar", members)
    return tmp_path / "shards"


def contents(source) -> dict[str, bytes]:
    return {item.key: item.read() for item in open_source(source)}


def in_tars(*numbers: int) -> dict[str, bytes]:
    return {f"train-{n:03d}.tar/{NAMES[n]}": PICTURES[NAMES[n]] for n in numbers}


def test_a_folder_gives_paths_relative_to_it(folder):
    assert contents(folder) == PICTURES
    assert open_source(folder).count == 3 and open_source(folder).name == str(folder)


def test_keys_do_not_depend_on_how_the_folder_is_named(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert list(contents("photos")) == list(contents(f"{folder}/")) == NAMES
    assert open_source("photos").name == open_source("./photos/").name == "photos"


def test_a_single_image_and_a_glob_give_names(folder):
    assert list(contents(folder / "a.png")) == ["a.png"]
    assert list(contents(f"{folder}/*.png")) == ["a.png", "b.png"]
    assert list(contents(f"{folder}/**/*.png")) == NAMES


def test_a_list_of_paths_keeps_its_order_and_drops_repetitions(folder):
    files = [folder / "b.png", folder / "a.png", folder / "b.png"]
    assert list(contents(files)) == [str(folder / "b.png"), str(folder / "a.png")]


def test_a_text_file_lists_paths_relative_to_itself(folder):
    (folder / "some.txt").write_text("# chosen by hand\ndeep/c.png\n\na.png\nmissing.png\na.png\n")
    source = open_source(folder / "some.txt")
    items = list(source)
    assert [item.key for item in items] == ["deep/c.png", "a.png", "missing.png"] and source.count == 3
    assert items[0].read() == PICTURES["deep/c.png"]
    with pytest.raises(OSError, match="missing"):
        items[2].read()


def test_webdataset_tars_give_their_images_by_folder_glob_braces_or_name(shards):
    assert contents(shards) == in_tars(0, 1, 2)
    assert contents(f"{shards}/train-*.tar") == in_tars(0, 1, 2)
    assert contents(f"{shards}/train-{{001..002}}.tar") == in_tars(1, 2)
    assert contents(f"{shards}/train-{{000,002}}.tar") == in_tars(0, 2)
    assert contents(shards / "train-001.tar") == in_tars(1)
    listed = contents([shards / "train-000.tar", shards / "train-002.tar"])
    assert list(listed.values()) == list(in_tars(0, 2).values())
    assert open_source(shards).count is None, "archives are not read through to be counted"


def test_tars_of_one_name_in_two_folders_keep_their_keys_apart(tmp_path):
    for part in "xy":
        write_tar(tmp_path / part / "0.tar", {"a.png": PICTURES["a.png"]})
    assert list(contents(f"{tmp_path}/{{x,y}}/0.tar")) == ["x/0.tar/a.png", "y/0.tar/a.png"]


def test_a_damaged_archive_is_an_item_that_says_so_and_the_others_go_on(shards):
    (shards / "train-000.tar").write_bytes(b"not an archive at all")
    items = list(open_source(shards))
    assert isinstance(items[0], BrokenItem) and items[0].key == "train-000.tar"
    with pytest.raises(Exception, match="the archive cannot be read any further"):
        items[0].read()
    assert [item.key for item in items[1:]] == list(in_tars(1, 2))


def test_a_truncated_archive_gives_what_is_whole(tmp_path):
    tar = write_tar(tmp_path / "0.tar", PICTURES)
    os.truncate(tar, 512 + len(PICTURES["a.png"]) // 2)
    first, *_rest = open_source(tar)
    with pytest.raises(Exception, match=r"the archive ends after|cannot be read"):
        first.read()


def test_items_travel_to_other_processes(folder, shards):
    for source in (folder, shards):
        items = list(open_source(source))
        again = pickle.loads(pickle.dumps(items))
        assert again == items and [i.read() for i in again] == list(PICTURES.values())


def hugging_face(folder: Path, *, splits: bool = False) -> Path:
    datasets = pytest.importorskip("datasets", reason="the Hugging Face package datasets is not installed")
    features = datasets.Features({"label": datasets.Value("int64"), "picture": datasets.Image()})
    rows = [{"label": i, "picture": {"bytes": data, "path": None}} for i, data in enumerate(PICTURES.values())]
    data = datasets.Dataset.from_list(rows, features=features)
    data = datasets.DatasetDict({"train": data, "test": data.select([0])}) if splits else data
    data.save_to_disk(folder)
    return folder


def test_a_saved_hugging_face_dataset_gives_its_rows(tmp_path):
    saved = hugging_face(tmp_path / "saved")
    assert contents(saved) == {str(i): data for i, data in enumerate(PICTURES.values())}
    assert contents(f"hf://{saved}") == contents(saved)
    items = list(open_source(saved))
    assert pickle.loads(pickle.dumps(items)) == items and open_source(saved).count == 3


def test_a_split_is_chosen_after_a_colon(tmp_path):
    saved = hugging_face(tmp_path / "saved", splits=True)
    assert list(contents(f"hf://{saved}:test")) == ["0"]
    with pytest.raises(ImageError, match=r"expected one of the splits train, test, got None\. Write hf://.*:train"):
        open_source(saved)


def test_a_dataset_without_images_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the Hugging Face package datasets is not installed")
    datasets.Dataset.from_list([{"text": "no"}]).save_to_disk(tmp_path / "words")
    with pytest.raises(ImageError, match=r"expected a column of images, got .*text"):
        open_source(tmp_path / "words")


def test_a_missing_package_is_named_with_the_fix(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImageError, match="needs the package datasets, which is not installed: pip install datasets"):
        open_source("hf://nobody/nothing-of-that-name")


def test_what_cannot_be_a_source_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(ImageError, match="expected one path per line, got a file without any"):
        open_source(tmp_path / "empty.txt")
    with pytest.raises(ImageError, match="no image found"):
        open_source(tmp_path)
    with pytest.raises(ImageError, match=r"compressed archives cannot be read from the middle.*gunzip"):
        open_source(tmp_path / "shard.tar.gz")
    with pytest.raises(ImageError, match=r"no such archive: .*-2\.tar\. Check the spelling"):
        open_source(f"{tmp_path}/none-{{2..3}}.tar")
    with pytest.raises(ImageError, match="no such file or folder"):
        open_source(tmp_path / "nowhere")
