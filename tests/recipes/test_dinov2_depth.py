"""The recipe of the depth head of DINOv2 at toy size: it learns, resumes exactly, and knows what it was made of."""

import json
import math
import sys
from dataclasses import asdict, replace

import pytest
import torch

from helpers.rgbd import write_pairs
from pullback.backbones import load_backbone
from pullback.errors import PullbackError
from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.scenes.render import render
from recipes import dinov2_depth
from recipes.dinov2_depth import FOCAL, SHOWN, Examples, Recipe, Run, build, features, losses, photographs, recipe_for
from recipes.rgbd import read_pairs
from recipes.scene_run import draw_weights

CPU = torch.device("cpu")
SMALL = {"steps": 4, "batch": 2, "photographs": 2, "block": 4, "passes": 1, "size": 28, "channels": 8, "warmup": 2}


@pytest.fixture(scope="module")
def backbone():
    model = Dinov2(Dinov2Config(hidden_size=24, num_hidden_layers=4, num_attention_heads=2, image_size=28))
    draw_weights(model, 0)
    return load_backbone(model.eval().requires_grad_(False))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return read_pairs(write_pairs(tmp_path_factory.mktemp("rgbd")), "train")


def weights(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in [*run.network.parameters(), *run.average.parameters()]])


def test_a_run_that_was_stopped_goes_on_exactly_where_it_was(tmp_path, backbone, pairs):
    recipe = recipe_for(backbone, pairs, **SMALL)
    assert recipe.hooks == (0, 1, 2, 3) and (recipe.dim, recipe.patch_size) == (24, 14)
    whole = Run(recipe, tmp_path / "whole", CPU, backbone, pairs)
    whole.train(log_every=1, save_every=1, seconds=1e9)
    Run(recipe, tmp_path / "parts", CPU, backbone, pairs).train(log_every=1, save_every=1, seconds=0)
    first = Run(recipe, tmp_path / "parts", CPU, backbone, pairs)
    for _ in range(2):
        first.advance()
    first.save()
    resumed = Run(recipe, tmp_path / "parts", CPU, backbone, pairs)
    resumed.train(log_every=1, save_every=1, seconds=1e9)
    assert resumed.step == whole.step == 4
    assert torch.equal(weights(resumed), weights(whole))
    assert not torch.equal(weights(whole), weights(Run(recipe, tmp_path / "new", CPU, backbone, pairs)))


def test_other_photographs_or_another_backbone_do_not_continue_a_run(tmp_path, backbone, pairs):
    recipe = recipe_for(backbone, pairs, **SMALL)
    run = Run(recipe, tmp_path, CPU, backbone, pairs)
    run.advance()
    run.save()
    darker = replace(pairs, rgb=pairs.rgb // 2)
    with pytest.raises(PullbackError, match=r"other settings \(pairs: "):
        Run(recipe_for(backbone, darker, **SMALL), tmp_path, CPU, backbone, darker)
    with pytest.raises(PullbackError, match=r"other settings \(.*photographs: 2 there, 0 asked for"):
        Run(recipe_for(backbone, None, **SMALL), tmp_path, CPU, backbone, None)
    with pytest.raises(PullbackError, match="the recipe takes 2 photographs a step, and 0 were given"):
        Run(recipe, tmp_path, CPU, backbone, None)


def test_without_photographs_a_step_has_as_many_more_scenes(tmp_path, backbone):
    recipe = recipe_for(backbone, None, **SMALL)
    assert (recipe.batch, recipe.photographs) == (4, 0)
    numbers = Run(recipe, tmp_path, CPU, backbone, None).advance()
    assert "photographs" not in numbers and numbers["loss"] > 0


def test_the_loss_falls_and_dinov2_stays_as_it_was(tmp_path, backbone, pairs):
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    again = {"steps": 60, "batch": 4, "passes": 60, "learning_rate": 3e-3}  # the same four scenes at every step
    run = Run(recipe_for(backbone, pairs, **SMALL | again), tmp_path, CPU, backbone, pairs)
    curve = [float(run.advance()["scenes"]) for _ in range(60)]
    assert sum(curve[-10:]) < 0.7 * sum(curve[:10])
    assert all(torch.equal(value, before[name]) for name, value in backbone.model.state_dict().items())


def test_the_head_reads_the_hooked_layers_after_the_final_norm(backbone):
    rgb = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    taps = features(backbone, rgb, (1, 3))
    last = backbone.model((rgb - torch.tensor(backbone.preprocessing.mean)[:, None, None])
                          / torch.tensor(backbone.preprocessing.std)[:, None, None]).last_hidden_state  # fmt: skip
    torch.testing.assert_close(taps[1], last)
    assert len(taps) == 2 and taps[0].shape == (2, 5, 24)


def test_depth_of_scenes_is_that_of_a_camera_of_one_focal_length():
    scenes = render(range(4), size=28)
    examples = Examples.of_scenes(scenes)
    seen = ~scenes.sky[:, 0]
    for index in range(4):
        fov = 2 * math.atan(14 / float(scenes.intrinsics[index, 0, 0, 0]))
        wanted = scenes.depth[index, 0] * FOCAL * 2 * math.tan(fov / 2)
        torch.testing.assert_close(examples.depth[index], wanted)
    assert torch.equal(examples.weight > 0, seen)


def whole_crops(pairs, **changes) -> tuple[Examples, Recipe]:
    settings = {"photographs": 12, "size": 30, "crop": (1.0, 1.0), "roll_degrees": 0.0, "light": 0.0} | changes
    recipe = Recipe(**settings)
    return photographs(pairs, recipe, recipe.generator(0)), recipe


def test_photographs_keep_picture_and_depth_together(pairs):
    """A ramp in colour and depth: both are moved, scaled and mirrored alike, and depth follows the focal length."""
    columns = torch.arange(40) + 0.5
    ramp = replace(
        pairs,
        rgb=(5 * columns).to(torch.uint8).expand(3, 3, 30, 40).contiguous(),
        depth=(columns / 10).expand(3, 30, 40).contiguous(),
    )
    for crop in (0.6, 1.0):
        examples, _ = whole_crops(ramp, crop=(crop, crop))
        shown = (examples.rgb[:, 0] * 255 + 0.5) / 5 / 10  # metres, by the colour
        torch.testing.assert_close(examples.depth * SHOWN / crop, shown, atol=0.11, rtol=0)  # one pixel
        rising = examples.depth.diff(dim=-1).mean((1, 2)) > 0
        assert 0 < rising.sum() < 12  # some are mirrored


def test_pixels_outside_a_turned_photograph_and_unmeasured_ones_do_not_count(pairs):
    examples, _ = whole_crops(pairs)
    assert (examples.weight > 0).all()
    assert set(examples.weight.unique().tolist()) == {0.5, 1.0}  # in-filled depth counts half
    turned, _ = whole_crops(pairs, roll_degrees=20.0)
    assert 0 < (turned.weight == 0).float().mean() < 0.2
    holes = replace(pairs, depth=torch.where(torch.arange(40) < 20, pairs.depth, 0.0))
    half, _ = whole_crops(holes)
    assert torch.equal(half.weight > 0, half.depth > 0) and 0.2 < (half.depth > 0).float().mean() < 0.8


def test_every_scene_of_photographs_is_as_likely_as_the_others(pairs):
    many = replace(
        pairs,
        scene=("office", "office", "shop"),
        depth=torch.tensor([1.0, 1.0, 2.0])[:, None, None].expand_as(pairs.depth),
    )
    examples, _ = whole_crops(many, photographs=400)
    shop = (examples.depth.amax((1, 2)) * SHOWN > 1.5).float().mean()
    assert 0.4 < shop < 0.6


def test_losses_count_known_pixels_alone_and_shape_ignores_a_factor():
    recipe = Recipe(batch=1, photographs=1, block=4)
    truth = torch.rand(2, 20, 20, generator=torch.Generator().manual_seed(0)) + 1
    weight = torch.ones_like(truth)
    weight[:, :, 10:] = 0
    guess = truth * torch.tensor([1.0, math.e])[:, None, None]
    guess = torch.where(weight > 0, guess, 7.0)
    found = losses(guess, Examples(torch.empty(2, 3, 20, 20), truth, weight), recipe)
    assert found["scenes"] == pytest.approx(0, abs=1e-6) and found["photographs"] == pytest.approx(1, abs=1e-5)
    assert found["depth"] == pytest.approx(0.5, abs=1e-5)
    assert found["shape"] == pytest.approx(0, abs=1e-5) and found["edges"] == pytest.approx(0, abs=1e-5)


def test_the_finished_head_reads_features_as_they_are(backbone):
    rgb = torch.rand(3, 3, 28, 42, generator=torch.Generator().manual_seed(0))
    taps = [7 * tap + 3 for tap in features(backbone, rgb, (0, 1, 2, 3))]
    trainee = build(Recipe(dim=24, channels=8))
    trainee.start_from(taps, patches=6)
    assert trainee.spread.min() > 1 and trainee.mean.shape == (4, 24)
    before = [value.clone() for value in trainee.head.parameters()]
    torch.testing.assert_close(trainee.finished()(taps, 2, 3), trainee(taps, 2, 3))
    assert all(torch.equal(old, new) for old, new in zip(before, trainee.head.parameters(), strict=True))


def test_the_shipped_size_is_at_most_6_megabytes():
    head = build(Recipe()).finished()
    stored = 2 * sum(value.numel() for value in head.state_dict().values())
    assert 3.5e6 < stored < 3.7e6  # 1.79 million numbers as float16, 3.6 MB


def test_the_command_trains_and_writes_a_head(tmp_path, monkeypatch, backbone):
    from pullback.runs.files import write_network

    write_network(tmp_path / "dinov2", backbone.model, asdict(backbone.model.config))
    write_pairs(tmp_path / "rgbd")
    monkeypatch.setattr(dinov2_depth, "Recipe", TinyRecipe)
    for more in (["--rgbd", str(tmp_path / "rgbd"), "--photographs", "2"], ["--scenes-only", "--photographs", "2"]):
        out = tmp_path / more[0]
        command = ["dinov2_depth", "--model", str(tmp_path / "dinov2"), "--out", str(out), "--device", "cpu", *more]
        monkeypatch.setattr(sys, "argv", [*command, "--steps", "2", "--batch", "2", "--passes", "1"])
        dinov2_depth.main()
        config = json.loads((out / "model/config.json").read_text())
        assert config["kind"] == "dpt-depth" and (config["dim"], config["hooks"]) == (24, [0, 1, 2, 3])
        assert (out / "model/model.safetensors").is_file()


class TinyRecipe(Recipe):
    def __init__(self, **chosen):
        super().__init__(**{"block": 4, "size": 28, "channels": 8} | chosen)
