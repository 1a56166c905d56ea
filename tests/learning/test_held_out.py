"""Held-out images that are also training images: noticed by their bytes, whatever they are called."""

import logging
from pathlib import Path

import pytest

from helpers.pictures import SIZE, SMALL, encoded, small_probe
from pullback.errors import ImageError
from pullback.learning.fit import FitConfig
from pullback.learning.head import ImportanceHead
from pullback.learning.train_spn import train_spn
from pullback.targets.compute import compute_targets

SHORT = FitConfig(steps=2, batch=2, warmup=1, validate_every=1)


def pictures(folder: Path, **numbers: int) -> Path:
    folder.mkdir()
    for name, number in numbers.items():
        (folder / f"{name}.png").write_bytes(encoded(number))
    return folder


@pytest.fixture
def train(tmp_path) -> Path:
    return pictures(tmp_path / "train", a=0, b=1, c=2)


def head(train: Path, held_out: Path) -> ImportanceHead:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
    probe = small_probe()
    stores = [compute_targets(probe, folder, out=folder.with_suffix(".store"), **SMALL) for folder in (train, held_out)]
    return ImportanceHead.fit(stores[0], probe, held_out=stores[1], config=SHORT, width=16, heads=2)


def spn(train: Path, held_out: Path):
    return train_spn(small_probe(), train, held_out, rank=3, width=16, heads=2, size=SIZE, config=SHORT)


@pytest.mark.parametrize("kind", [head, spn])
def test_some_of_them_are_named_and_recorded_in_the_card(kind, train, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        network = kind(train, pictures(tmp_path / "others", other=1, fresh=7))
    assert "held_out: 1 of 2 images are also training images, such as 'other.png' (the same bytes)" in caplog.text
    assert network.config.scores["held_out_images_trained_on"] == 1
    assert "| held_out_images_trained_on | 1 |" in network.card()


@pytest.mark.parametrize("kind", [head, spn])
def test_all_of_them_are_refused_before_anything_is_computed(kind, train, tmp_path, monkeypatch):
    again = pictures(tmp_path / "again", x=2, y=0)
    monkeypatch.setattr("pullback.learning.train_spn.held_out_modes", None)
    with pytest.raises(ImageError, match=r"held_out: .*all 2 are also training images, such as 'x.png'.*Give others"):
        kind(train, again)


@pytest.mark.parametrize("kind", [head, spn])
def test_other_images_pass_without_a_word(kind, train, tmp_path, caplog):
    network = kind(train, pictures(tmp_path / "others", a=8, b=9))  # the same names, other pictures
    assert not caplog.records and "held_out_images_trained_on" not in network.config.scores
