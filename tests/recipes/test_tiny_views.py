"""The recipe of tiny-views at toy size: it learns, resumes exactly, depends on its seed alone; its truth is true."""

import json
import math
from dataclasses import replace

import pytest
import torch

from pullback import VGGT
from pullback.errors import PullbackError
from pullback.scenes.render import render
from pullback.scenes.splits import HELD_OUT
from pullback.vggt.network import VGGTOutput
from pullback.vggt.network.pose import decode_pose
from recipes import evaluate_tiny_views
from recipes.evaluate_tiny_views import MEAN, NETWORK, dense_errors, evaluate, mean_scene, missed, score
from recipes.tiny_views import (
    CONFIDENCE_PRICE,
    Recipe,
    Run,
    Views,
    build,
    camera_loss,
    confident,
    draw_views,
    losses,
)

TOY = Recipe(
    steps=4,
    batch=2,
    views=(2, 3),
    block=4,
    passes=1,
    size=16,
    width=16,
    layers=4,
    heads=2,
    features=8,
    channels=(4, 4, 8, 8),
    warmup=2,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def views():
    return Views.of(render(range(6), size=24, views=3))


def run(recipe: Recipe, out, **limits) -> Run:
    going = Run(recipe, out, CPU)
    going.train(log_every=1, save_every=1, seconds=limits.get("seconds", 1e9))
    return going


def weights(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in [*run.network.parameters(), *run.average.parameters()]])


def test_a_run_that_was_stopped_goes_on_exactly_where_it_was(tmp_path):
    whole = run(TOY, tmp_path / "whole")
    first = Run(TOY, tmp_path / "parts", CPU)
    for _ in range(2):
        first.advance()
    first.save()
    resumed = run(TOY, tmp_path / "parts")
    assert resumed.step == whole.step == 4
    assert torch.equal(weights(resumed), weights(whole))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"loss", "camera", "depth", "points", "seconds", "ms_per_step"} <= set(lines[0])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    short = replace(TOY, steps=2)
    again = [weights(run(short, tmp_path / name)) for name in ("a", "b")]
    assert torch.equal(*again)
    assert not torch.equal(again[0], weights(run(replace(short, seed=1), tmp_path / "c")))


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    Run(TOY, tmp_path, CPU).save()
    with pytest.raises(PullbackError, match=r"other settings \(learning_rate: 0.004 there, 1.0 asked for; views: "):
        Run(replace(TOY, views=(2, 4), learning_rate=1.0), tmp_path, CPU)


def test_the_loss_falls_on_new_scenes(tmp_path):
    longer = replace(TOY, steps=60, batch=4, block=4, warmup=5)
    logged = Run(longer, tmp_path, CPU)
    curves = [logged.advance() for _ in range(60)]
    for name, share in (("loss", 0.95), ("points", 0.8)):
        curve = [float(parts[name]) for parts in curves]
        assert sum(curve[-15:]) < share * sum(curve[:15]), name


def test_the_network_fits_into_eight_megabytes_of_half_precision(tmp_path):
    model = build(Recipe())
    assert model.config.hook_layers == (1, 3, 5, 7)
    folder = model.half().save_pretrained(tmp_path)
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    assert VGGT.from_pretrained(folder).config == Recipe().model()


def test_an_untrained_network_starts_at_the_identity_with_a_field_of_view(tmp_path):
    output = build(TOY).eval()(torch.rand(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    start = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1.03, 1.03])
    torch.testing.assert_close(output.pose_enc, start.expand(2, 3, 9), rtol=0, atol=0.1)


def test_no_recipe_reaches_a_held_out_scene_and_runs_share_none():
    last = Recipe(seed=1023, steps=1 << 19, batch=96, passes=1)
    assert last.scenes(last.steps - 1).stop <= HELD_OUT
    assert Recipe().scenes(Recipe.steps - 1).stop <= Recipe(seed=1).scenes(0).start
    for wrong in ({"seed": 1024}, {"seed": -1}, {"steps": 1 << 24, "passes": 1}):
        with pytest.raises(PullbackError, match="no held-out scene is seen"):
            Recipe(**wrong)
    with pytest.raises(PullbackError, match=r"views=\(1, 3\): expected \(fewest, most\)"):
        Recipe(views=(1, 3))
    with pytest.raises(PullbackError, match="block=10: expected a multiple of batch=4"):
        Recipe(batch=4, block=10)


def test_each_pass_sees_every_scene_of_its_block_once_and_steps_differ_in_views(tmp_path):
    recipe = Recipe(steps=12, batch=4, block=8, passes=3)
    passes = [torch.cat([recipe.rows(step) for step in (first, first + 1)]) for first in range(0, 12, 2)]
    assert all(sorted(rows.tolist()) == list(range(8)) for rows in passes)
    assert [recipe.scenes(step).start for step in range(12)] == [0] * 6 + [8] * 6
    logged = Run(replace(TOY, steps=8), tmp_path, CPU)
    counts = []
    for logged.step in range(8):
        counts.append(logged.examples(logged.block())[0].shape[:2])
    assert {tuple(shape) for shape in counts} == {(2, 2), (2, 3)}


def test_views_are_chosen_without_repetition_in_random_order():
    drawn = draw_views(200, 5, 3, torch.Generator().manual_seed(0))
    assert drawn.shape == (200, 3) and all(len(set(row)) == 3 for row in drawn.tolist())
    assert torch.bincount(drawn[:, 0], minlength=5).min() > 20  # any may be the reference


def project(truth, views, reference, pixel):
    """Where a point seen at a pixel of view 0 lies in picture ``reference``, by the encoded cameras."""
    size = views.depth.shape[-1]
    extrinsics, intrinsics = decode_pose(truth.poses, (size, size))
    point = truth.points[:, 0, pixel[0], pixel[1]]  # [B, 3]
    local = (extrinsics[:, reference, :, :3] @ point[..., None])[..., 0] + extrinsics[:, reference, :, 3]
    image = (intrinsics[:, reference] @ local[..., None])[..., 0]
    return image[:, :2] / image[:, 2:], local[:, 2]


@pytest.mark.parametrize("mirror", [False, True])
def test_truth_is_in_the_first_cameras_frame_and_agrees_with_itself(views, mirror):
    seen = views.mirrored(torch.full((6,), mirror))
    truth = seen.truth()
    torch.testing.assert_close(truth.extrinsics[:, 0, :, :3], torch.eye(3).expand(6, 3, 3), rtol=0, atol=1e-6)
    assert truth.poses[:, 0, :3].abs().max() < 1e-5 and (truth.poses[..., 6] > 0).all()
    distances = torch.where(truth.valid, truth.points.norm(dim=-1), 0.0).sum((1, 2, 3)) / truth.valid.sum((1, 2, 3))
    torch.testing.assert_close(distances, torch.ones(6))
    place, depth = project(truth, seen, 0, (20, 7))  # the first camera sees its own points where they are
    torch.testing.assert_close(place, torch.tensor([7.5, 20.5]).expand(6, 2), rtol=0, atol=1e-3)
    torch.testing.assert_close(depth, truth.depth[:, 0, 20, 7], rtol=1e-4, atol=1e-4)
    metres = truth.depth * truth.scale[:, None, None, None]
    torch.testing.assert_close(metres, seen.depth, rtol=1e-5, atol=1e-5)


def test_world_points_are_those_of_the_renderer(views):
    scenes = render(range(6), size=24, views=3)
    world = scenes.points()
    first = scenes.pose[:, :1, None, None]
    local = (first[..., :3, :3] @ world[..., None])[..., 0] + first[..., :3, 3]
    truth = views.truth()
    expected = local / truth.scale[:, None, None, None, None]
    torch.testing.assert_close(truth.points[truth.valid], expected[truth.valid], rtol=1e-4, atol=1e-4)


def test_two_mirrors_are_none_and_a_mirrored_reference_turns_the_other_way(views):
    some = torch.tensor([True, False, True, False, True, False])
    twice = views.mirrored(some).mirrored(some)
    for name in ("rgb", "depth", "valid", "pose"):
        assert torch.equal(getattr(twice, name), getattr(views, name))
    poses, mirrored = views.truth().poses, views.mirrored(some).truth().poses
    signs = torch.tensor([-1.0, 1, 1, 1, -1, -1, 1, 1, 1])  # of T, (x, y, z, w) and the fields of view
    torch.testing.assert_close(mirrored[some], poses[some] * signs, rtol=0, atol=1e-5)
    torch.testing.assert_close(mirrored[~some], poses[~some])


def test_light_changes_pictures_alone_and_most_of_it_is_shared_by_the_views(views):
    lit = views.relit(torch.Generator().manual_seed(0))
    assert torch.equal(lit.depth, views.depth) and torch.equal(lit.pose, views.pose)
    ratio = (lit.rgb.mean((2, 3, 4)) / views.rgb.mean((2, 3, 4))).log()
    assert ratio.std(0).mean() > 2 * ratio.std(1).mean() > 0
    assert lit.rgb.min() >= 0 and lit.rgb.max() <= 1


def as_output(truth, confidence=2.0) -> VGGTOutput:
    full = torch.full_like(truth.depth, confidence)
    return VGGTOutput(
        pose_enc_list=[truth.poses] * 4,
        pose_enc=truth.poses,
        depth=truth.depth.clamp_min(1e-4)[..., None],
        depth_conf=full,
        world_points=truth.points,
        world_points_conf=full,
    )


def targets(truth) -> tuple[torch.Tensor, ...]:
    return truth.poses, truth.depth, truth.points, truth.valid


def test_the_truth_has_no_loss_but_the_price_of_confidence(views):
    truth = views.truth()
    parts = losses(as_output(truth), *targets(truth), camera_weight=5.0, edge_weight=0.5)
    for name in ("camera", "depth", "points", "depth edges", "points edges"):
        assert parts[name].abs() < 1e-5, name
    torch.testing.assert_close(parts["loss"], torch.tensor(-2 * CONFIDENCE_PRICE * math.log(2)), rtol=0, atol=1e-4)
    sky = truth.valid.clone()
    sky[:, :, :4] = False
    hidden = replace(truth, valid=sky, depth=torch.where(sky, truth.depth, 99.0))
    torch.testing.assert_close(
        losses(as_output(truth), *targets(hidden), camera_weight=5.0, edge_weight=0.5)["loss"], parts["loss"]
    )


def test_confidence_is_best_at_its_price_over_the_error_and_later_rounds_count_more():
    error, valid = torch.full((1, 1, 2, 2), 0.05), torch.ones(1, 1, 2, 2, dtype=torch.bool)
    best = CONFIDENCE_PRICE / 0.05
    values = [confident(error, torch.full_like(error, c), valid) for c in (0.9 * best, best, 1.1 * best)]
    assert values[1] < values[0] and values[1] < values[2]
    truth, wrong = torch.zeros(1, 2, 9), torch.zeros(1, 2, 9)
    wrong[..., 0] = 3.0
    first, last = camera_loss([wrong, truth], truth), camera_loss([truth, wrong], truth)
    torch.testing.assert_close(torch.stack([first, last]), torch.tensor([0.6, 1.0]))


def test_the_truth_scores_perfectly_and_a_scale_is_forgiven_once_per_scene(views):
    truth = views.truth()
    perfect = dense_errors(truth.depth, truth.points, truth)
    assert perfect["delta1"].min() == perfect["raw_delta1"].min() == 1 and perfect["point_error"].max() == 0
    scaled = dense_errors(2 * truth.depth, truth.points + 0.1, truth)
    assert scaled["delta1"].min() == 1 and scaled["raw_delta1"].max() == 0
    torch.testing.assert_close(scaled["point_error"], torch.full((6,), 0.1 * 3**0.5), rtol=1e-4, atol=1e-4)
    each = 1 + torch.arange(3.0)[:, None, None]
    assert dense_errors(each * truth.depth, truth.points, truth)["delta1"].max() < 1


def test_an_evaluation_names_scores_errors_and_what_is_missed(monkeypatch):
    monkeypatch.setattr(evaluate_tiny_views, "median_with_error", lambda values: {"median": 1.0, "se": 0.1})
    model = build(TOY).eval()
    result = evaluate(model, count=5, views=3, device=CPU)
    assert set(result) == {NETWORK, MEAN} and set(result[MEAN]["delta1"]) == {"mean", "se"}
    assert missed(result[NETWORK]) == ["delta1"]
    errors = score(model, mean_scene(5, size=16, views=3, device=CPU), 5, views=3, device=CPU)
    assert errors[NETWORK]["rotation"].shape == errors[MEAN]["translation"].shape == (5, 3)
    document = {"views": {"3": result}}
    assert evaluate_tiny_views.table(document).count("\n") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--count", "0"], "count: expected at least 2 scenes, got 0"),
        (["--views", "1"], "views: expected numbers of views from 2, such as 2 4 6, got [1]"),
        (
            ["--model", "no-such-model"],
            "model: expected tiny-views or a folder that training wrote, got 'no-such-model'",
        ),
        (["--model", "tiny-scenes"], "is the configuration of 'tiny_scenes', expected 'vggt'"),
        (["--model", "{empty}"], "has no model.safetensors"),
        (["--model", "{headless}"], "model: expected one with the heads camera, point, depth, got camera"),
        (["--device", "toaster"], "device: 'toaster' cannot be used here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_what_cannot_be_measured_in_one_line(options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    VGGT(replace(TOY.model(), heads=("camera",))).save_pretrained(tmp_path / "headless")
    options = [option.format(empty=tmp_path / "empty", headless=tmp_path / "headless") for option in options]
    monkeypatch.setattr("sys.argv", ["evaluate", "--device", "cpu", "--out", str(tmp_path / "out.json"), *options])
    with pytest.raises(SystemExit) as left:
        evaluate_tiny_views.main()
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("error: ") and message in said.err
    assert not (tmp_path / "out.json").exists()
