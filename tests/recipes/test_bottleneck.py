"""The recipe of a bottleneck: which scenes it draws, that it goes on exactly, and what it writes."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import bottleneck_training
import pullback as pb
from helpers.pictures import write_pictures
from pullback.errors import PullbackError
from pullback.learning.fit import Share
from pullback.learning.s2vae import S2VAE
from pullback.learning.train_bottleneck import BottleneckOptions, bottleneck_config
from pullback.scenes.splits import HELD_OUT
from recipes import bottleneck
from recipes.bottleneck import Drawing, drawn_scenes, drawn_views, main, train_on_scenes
from recipes.scene_run import SEEDS_PER_RUN

SMALL = BottleneckOptions(registers=2, latent=4, width=16, heads=2, blocks=1)
DRAWING = Drawing(block=4, passes=1, views=2, size=56, held_out=3)
CONFIG = bottleneck_config(steps=4, batch=2, warmup=1, validate_every=2, ema=0.9)
SIZES = {"registers": 2, "latent": 4, "width": 16, "heads": 2, "blocks": 1, "size": 56}
SCENES = {"block": 4, "passes": 1, "held-out-scenes": 3}
LOOP = {"steps": 4, "batch": 2, "warmup": 1, "validate-every": 2, "ema": 0.9, "log-every": 2, "device": "cpu"}
TYPED = [text for name, value in (SIZES | SCENES | LOOP).items() for text in (f"--{name}", str(value))]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def typed(monkeypatch):
    def run(*options: object) -> None:
        monkeypatch.setattr(sys, "argv", ["bottleneck", *map(str, options)])
        main()

    return run


def test_blocks_are_drawn_beside_those_of_the_models_own_training_and_before_held_out_ones():
    first, second = DRAWING.seeds(0), DRAWING.seeds(1)
    assert first.start == SEEDS_PER_RUN and second.start == first.stop
    assert replace(DRAWING, seed=1).seeds(0).start == 2 * SEEDS_PER_RUN < HELD_OUT
    with pytest.raises(PullbackError, match="seed=1023: expected one from 0 to 1022, so that no held-out scene"):
        replace(DRAWING, seed=1023)


def test_a_block_is_used_for_its_steps_and_each_step_varies_it(toy_model, monkeypatch):
    probe = pb.multi_layer_probe(toy_model, "depth", device="cpu")
    drawn, render = [], bottleneck.render

    def counted(seeds, **options):
        drawn.append(seeds)
        return render(seeds, **options)

    monkeypatch.setattr(bottleneck, "render", counted)
    train, held_out = drawn_scenes(probe, DRAWING, batch=2)
    one, again, other = (train(step, Share(2), generator(seed)) for step, seed in ((0, 0), (1, 0), (1, 1)))
    assert drawn == [range(HELD_OUT, HELD_OUT + 3), DRAWING.seeds(0)] and len(held_out) == 3
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert not torch.equal(train(2, Share(2), generator()), one) and drawn[-1] == DRAWING.seeds(1)
    assert one.shape == (2, 17, 4 * 24) == (2, *held_out.features(torch.arange(1)).shape[1:])


def test_views_keep_their_layout_and_processes_share_a_batch():
    probe = pb.multi_layer_probe("tiny-views", "depth", device="cpu")
    train, held_out = drawn_views(probe, DRAWING, batch=2)
    whole = train(0, Share(2), generator())
    parts = [train(0, Share(2, rank, 2), generator()) for rank in range(2)]
    assert probe.token_layout(whole).views == 2 and len(held_out) == 3
    torch.testing.assert_close(
        torch.cat([part.as_subclass(torch.Tensor) for part in parts]), whole.as_subclass(torch.Tensor)
    )


def test_a_stopped_run_goes_on_to_the_same_weights(toy_model, tmp_path, typed, capsys):
    typed("--model", toy_model, *TYPED, "--out", tmp_path / "run", "--seconds", 0)
    assert "stopped after 0 of 4 steps" in capsys.readouterr().out and not (tmp_path / "run" / "model").exists()
    typed("--model", toy_model, *TYPED, "--out", tmp_path / "run", "--half")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:2]]
    assert [line["step"] for line in lines] == [2, 4] and all(0 <= line["delta1"] <= 1 for line in lines)
    probe = pb.multi_layer_probe(toy_model, "depth", device="cpu", distance="log")
    whole = train_on_scenes(probe, SMALL, replace(DRAWING, views=4), CONFIG)
    stored = S2VAE.from_pretrained(tmp_path / "run")
    for one, other in zip(whole.state_dict().values(), stored.state_dict().values(), strict=True):
        assert torch.equal(one.half().float(), other)
    stored.check(probe)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["scores"]["delta1"] == whole.config.scores["delta1"] == stored.config.scores["delta1"]
    assert "--half" in result["command"] and result["settings"]["batch"] == CONFIG.batch and result["machine"]
    assert [row["step"] for row in result["validations"]] == [2, 4]
    bottleneck_training.main(["--runs", str(tmp_path), "--ships", "run", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("bottleneck_training_*.json")
    collected = json.loads(path.read_text())
    assert collected["machine"]["device"] == result["machine"] and set(collected["runs"]) == {"run"}
    assert collected["runs"]["run"]["ships"] and collected["runs"]["run"]["scores"] == result["scores"]


def test_other_scenes_do_not_go_on(toy_model, tmp_path):
    probe = pb.multi_layer_probe(toy_model, "depth", device="cpu")
    train_on_scenes(probe, SMALL, DRAWING, CONFIG, out=tmp_path, seconds=0.0)
    with pytest.raises(PullbackError, match=r"holds a training run with other settings .*drawing\.block"):
        train_on_scenes(probe, SMALL, replace(DRAWING, block=6), CONFIG, out=tmp_path)


def test_photographs_train_too(toy_model, tmp_path, typed):
    photos, judges = write_pictures(tmp_path / "photos", 4), write_pictures(tmp_path / "judges", 6, broken=False)
    for number in range(4):
        (judges / f"{number:02d}.png").unlink()
    typed("--model", toy_model, *TYPED, "--images", photos, "--held-out", judges, "--out", tmp_path / "run")
    assert S2VAE.from_pretrained(tmp_path / "run").config.scores["steps"] == 4
    with pytest.raises(PullbackError, match="images, held_out: expected both for photographs"):
        typed("--model", toy_model, *TYPED, "--images", photos, "--out", tmp_path / "run")
