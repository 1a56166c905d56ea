"""The recipe of the heads that ship: it goes on where it was stopped, and what it packs is found by the weights."""

import sys

import pytest
import torch

import pullback as pb
from pullback import models
from pullback.learning.head import ImportanceHead
from pullback.learning.shipped_heads import shipped_heads
from pullback.models import WEIGHTS
from pullback.scenes.splits import HELD_OUT
from recipes.importance_heads import CASES, FIRST_JUDGE, FIRST_SCENE, card, main

SMALL = ("--layers", 1, "--scenes", 4, "--judges", 2, "--size", 56, "--width", 16, "--batch", 2, "--block", 4)
LOOP = ("--steps", 4, "--steps-per-block", 2, "--validate-every", 2, "--device", "cpu")


@pytest.fixture
def typed(monkeypatch):
    def run(*options: object) -> None:
        monkeypatch.setattr(sys, "argv", ["importance_heads", *map(str, options)])
        main()

    return run


def test_a_run_is_stopped_and_goes_on_and_its_heads_are_found(typed, toy_model, tmp_path, monkeypatch, capsys):
    folders = ("--work", tmp_path / "work", "--pack", tmp_path / "w")
    options = ("tiny-scenes", "--model", toy_model, *SMALL, *LOOP, *folders)
    typed(*options, "--seconds", 0)
    assert "stopped after 0 of 4 steps; the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "w").exists()
    typed(*options)
    monkeypatch.setattr(models, "WEIGHTS", tmp_path / "w")
    backbone = pb.load_backbone(toy_model, device="cpu")
    for decoder in ("cls", "depth"):
        (folder,) = shipped_heads(backbone, decoder).values()
        assert folder == tmp_path / "w" / "tiny-scenes-heads" / f"{decoder}-L01"
        head = ImportanceHead.from_pretrained(folder)
        assert all(torch.equal(value, value.half().float()) for value in head.state_dict().values())
        assert head.config.scores["steps"] == 4 and not head.config.origin.blocks
    folder = tmp_path / "w" / "tiny-scenes-heads"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text == card("tiny-scenes", folder) and "| depth | L01 |" in text and "No photographs" in text
    pruned = pb.prune(backbone.model, "importance", ratio=0.5, stages=[1])
    assert pruned.scores[0].head.config.origin.decoder == "depth"


def test_scenes_are_neither_those_of_other_recipes_nor_held_out():
    most = max(case.scenes for case in CASES.values())
    assert 0 < FIRST_SCENE < FIRST_SCENE + most < HELD_OUT < FIRST_JUDGE


@pytest.mark.parametrize("name", [name for name in CASES if (WEIGHTS / f"{name}-heads").is_dir()])
def test_the_card_of_what_ships_follows_from_the_configurations(name):
    folder = WEIGHTS / f"{name}-heads"
    assert (folder / "README.md").read_text(encoding="utf-8") == card(name, folder)
    layers = {task.decoder: set(task.layers) for task in CASES[name].tasks}
    found = {(path.name.rpartition("-L")[0], int(path.name[-2:])) for path in folder.iterdir() if path.is_dir()}
    assert found == {(decoder, layer) for decoder, own in layers.items() for layer in own}


def test_all_heads_together_are_small():
    assert sum(file.stat().st_size for file in WEIGHTS.glob("*-heads/**/*") if file.is_file()) < 14e6
