"""VGGT on fewer tokens: nothing removed changes nothing, duplicates cost nothing, scenes do not see each other."""

from dataclasses import replace

import pytest
import torch

import pullback as pb
from helpers.vggt_models import scenes, tiny
from pullback.errors import ModelError, PullbackError
from pullback.pruning.forward import decide
from pullback.pruning.matching import cosines as all_cosines
from pullback.pruning.matching import match_by_cosine, rows
from pullback.tokens import TokenLayout
from pullback.vggt import matching as view_matching
from pullback.vggt.matching import Groups, group_tokens, nearest, residuals, strided_grid
from pullback.vggt.network import block
from pullback.vggt.pruning import PrunedVGGT, prune_views, view_plan

OUTPUTS = ("pose_enc", "depth", "depth_conf", "world_points", "world_points_conf")
SCOPES = ("global", "view")


@pytest.fixture(scope="module")
def model():
    return tiny(depth=4, hook_layers=(0, 1, 2, 3)).requires_grad_(False)


@pytest.fixture(scope="module")
def images():
    return scenes(2, 3, 3, 56, 56)  # 2 scenes, 3 views of 4 x 4 patches


def close(got, expected, tolerance=1e-9):
    for name in OUTPUTS:
        torch.testing.assert_close(got[name], expected[name], rtol=tolerance, atol=tolerance)


def differs(got, expected):
    return any((got[name] - expected[name]).abs().max() > 1e-6 for name in OUTPUTS)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("preset", ["best", "strided", "drop"])
def test_with_nothing_removed_the_pruned_route_is_the_model(model, images, scope, preset):
    score = "strided" if preset == "strided" else "norm"
    pruned = prune_views(model, score, ratio=0.0, stages=[0, 1], preset=preset, scope=scope)
    output, run = pruned.with_record(images)
    close(output, model(images))
    assert set(output) == set(model(images)) and run.tokens == (57,) * 4
    assert [record.removed.shape[1] for record in run.records] == [0, 0]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("score", "preset"), [("norm", "best"), ("random", "best"), ("strided", "strided")])
def test_outputs_keep_their_shapes_and_every_scene_is_treated_as_if_alone(model, images, scope, score, preset):
    pruned = prune_views(model, score, ratio=0.5, stages=[0, 1], preset=preset, scope=scope)
    output, full = pruned(images), model(images)
    assert {name: output[name].shape for name in OUTPUTS} == {name: full[name].shape for name in OUTPUTS}
    assert differs(output, full) and all(output[name].isfinite().all() for name in OUTPUTS)
    for scene in range(2):
        alone = pruned(images[scene])
        close({name: output[name][scene : scene + 1] for name in OUTPUTS}, alone)


@pytest.mark.parametrize("scope", SCOPES)
def test_stages_remove_what_the_plan_says_and_never_camera_or_register_tokens(model, images, scope):
    _, run = prune_views(model, "norm", ratio=0.5, stages=[0, 1], scope=scope).with_record(images)
    if scope == "global":  # the second stage decides anew, for its share and the first one's
        assert run.tokens == (57, 45, 33, 33)
        assert [record.removed.shape for record in run.records] == [(2, 12), (2, 24)]
        patch = TokenLayout(3, (4, 4), 3).patch_mask()
        assert all(patch[record.removed].all() and patch[record.partner].all() for record in run.records)
    else:
        assert run.tokens == (57, 45, 33, 33)
        assert [record.removed.shape for record in run.records] == [(6, 4), (6, 4)]
        assert all((record.removed >= 3).all() and (record.partner >= 3).all() for record in run.records)


def test_a_plan_may_bring_all_tokens_of_a_view_back_for_the_last_block(model, images):
    pruned = prune_views(model, "norm", ratio=0.5, stages=[0, 1], scope="view")
    fused = PrunedVGGT(model, replace(pruned.plan, fuse_last=True), ["norm"], "view")
    assert fused.run(images).tokens == (57, 45, 33, 57)
    assert differs(fused(images), pruned(images))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("ratio", "stages", "named"), [("0.5", [1], "ratio"), (0.5, 1, "stages")])
def test_shares_and_blocks_of_another_kind_are_named(model, scope, ratio, stages, named):
    with pytest.raises(PullbackError, match=f"^{named}: expected"):
        prune_views(model, "norm", ratio=ratio, stages=stages, scope=scope)


def test_a_view_that_is_there_twice_goes_without_a_trace(model):
    """Views 1 and 2 are equal, and so are all their tokens: half of these merge into the others, across views."""
    first, second = scenes(2, 3, 56, 56)
    images = torch.stack([first, second, second])
    pruned = prune_views(model, "norm", ratio=1 / 3, stages=[0])
    output, run = pruned.with_record(images)
    close(output, model(images))
    assert run.tokens == (57, 41, 41, 41)
    gone = run.records[0]
    assert torch.equal((gone.removed - gone.partner).abs(), torch.full_like(gone.removed, 19))
    assert gone.merged.all()
    without_sizes = PrunedVGGT(model, replace(pruned.plan, sizes=False), ["norm"], "global")
    assert differs(without_sizes(images), model(images))  # they count twice


def test_dropped_tokens_keep_the_value_they_had_in_each_global_block(model, images):
    pruned = prune_views(model, "norm", ratio=0.5, stages=[1], preset="drop")
    run = pruned.run(images)
    frame, tokens = run.taps[2].flatten(1, 2).chunk(2, -1)
    record = run.records[0]
    torch.testing.assert_close(rows(tokens, record.removed), rows(frame, record.removed), rtol=0, atol=0)
    assert (rows(tokens, record.kept) - rows(frame, record.kept)).abs().amax(-1).min() > 1e-3


def test_a_function_scores_the_tokens_of_all_views_in_their_own_order(model, images):
    keep = torch.zeros(57)
    keep[torch.tensor([5, 25, 50])] = 1.0  # a patch of each view
    seen = []

    def score(tokens, context):
        seen.append((tokens.shape, context.layer, context.layout))
        return keep.expand(tokens.shape[:2])

    plan = view_plan("drop", 0.9, [0], scope="global", depth=4)
    run = PrunedVGGT(model, plan, [score], "global").run(images)
    assert seen == [((2, 57, 32), 0, TokenLayout(3, (4, 4), 3))]
    kept = set(run.records[0].kept[0].tolist())
    assert {0, 1, 2, 19, 20, 21, 38, 39, 40} | {5, 25, 50} <= kept
    assert len(kept) == 9 + 5


def test_removed_tokens_follow_the_most_similar_kept_one_in_any_chunks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 30, 8, dtype=torch.float64, generator=generator)
    scores = torch.rand(2, 30, generator=generator)
    plan = view_plan("drop", 0.5, [0], scope="global", depth=4)
    plan = replace(plan, match="cosine", reinsert="drift")
    order, grid = torch.arange(30), torch.zeros(30, dtype=torch.bool)
    whole = group_tokens(tokens, scores, plan, 12, order, 4, grid)
    monkeypatch.setattr(view_matching, "CHUNK_NUMBERS", 100)
    parts = group_tokens(tokens, scores, plan, 12, order, 4, grid)
    for name in ("kept", "removed", "group", "merged", "lengths"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    allowed = (torch.arange(30) >= 4).expand(2, -1)
    partner, merged = match_by_cosine(all_cosines(tokens), whole.kept, whole.removed, allowed, -1.0)
    assert torch.equal(whole.group, partner) and merged.all()
    assert torch.equal(whole.lengths.sum(1), torch.full((2,), 12))


def test_means_of_groups_are_weighted_and_spread_back():
    groups = Groups(
        kept=torch.tensor([[0, 3]]),
        removed=torch.tensor([[2, 1, 4]]),
        group=torch.tensor([[0, 1, 1]]),
        merged=torch.tensor([[True, True, False]]),
        lengths=torch.tensor([[1, 2]]),
    )
    x = torch.tensor([[[1.0], [2.0], [5.0], [4.0], [9.0]]])
    weights = torch.tensor([[1.0, 1.0, 3.0, 1.0, 7.0]])
    mean = groups.mean(x, weights)
    assert mean.flatten().tolist() == [4.0, 3.0]  # (1 + 3*5)/4, (4 + 2)/2: the last one is not merged
    torch.testing.assert_close(groups.log_sizes().exp(), torch.tensor([[2.0, 2.0]]))
    assert groups.spread(mean, follow=True).flatten().tolist() == [4.0, 3.0, 4.0, 3.0, 3.0]
    assert groups.spread(mean, follow=False).flatten().tolist() == [4.0, 0.0, 0.0, 3.0, 0.0]


def test_of_equal_tokens_the_first_is_the_one_that_others_can_follow():
    tokens = torch.ones(1, 3, 2)
    away = residuals(tokens, torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(away, torch.tensor([[2**0.5, 0.0, 0.0]]))
    best, _ = nearest(tokens, torch.tensor([[0]]), torch.zeros(1, 3, dtype=torch.bool))
    assert best.item() == -2.0


def test_the_strided_rule_keeps_one_patch_of_each_cell_and_widens_with_the_ratio(model, images):
    assert strided_grid(4, 4, 0.5).nonzero().tolist() == [[0, 0], [0, 2], [2, 0], [2, 2]]
    assert strided_grid(5, 3, 0.5).sum() == 6
    assert [int(strided_grid(4, 4, ratio).sum()) for ratio in (0.0, 0.75, 0.8, 0.9)] == [4, 4, 1, 1]
    assert strided_grid(6, 6, 0.8).nonzero().tolist() == [[0, 0], [0, 3], [3, 0], [3, 3]]
    assert strided_grid(1, 1, 0.5).tolist() == [[True]]
    _, run = prune_views(model, "strided", ratio=0.7, stages=[0], preset="strided").with_record(images)
    on_grid = torch.cat([torch.zeros(3, dtype=torch.bool), strided_grid(4, 4, 0.7).flatten()]).repeat(3)
    record = run.records[0]
    assert not on_grid[record.removed].any() and on_grid[record.partner].all()


def test_within_views_the_strided_grid_widens_with_the_ratio_too(model):
    images = scenes(2, 2, 3, 84, 84)  # 6 x 6 patches
    for ratio, stride in ((0.5, 2), (0.75, 2), (0.8, 3), (0.88, 3), (0.9, 6)):
        pruned = prune_views(model, "strided", ratio=ratio, stages=[0, 1], preset="strided", scope="view")
        _, run = pruned.with_record(images)
        grid = torch.zeros(6, 6, dtype=torch.bool)
        grid[::stride, ::stride] = True
        on_grid = torch.cat([torch.zeros(3, dtype=torch.bool), grid.flatten()])
        for record in run.records:
            assert not on_grid[record.removed].any() and on_grid[record.partner].all() and record.merged.all()
        assert run.tokens[-1] == 2 * (3 + 36 - round(36 * ratio))


def test_rules_are_compared_at_equal_token_counts(model, images):
    runs = [
        prune_views(model, score, ratio=0.6, stages=[1], preset=preset).run(images).tokens
        for score, preset in (("norm", "best"), ("random", "best"), ("strided", "strided"))
    ]
    assert runs[0] == runs[1] == runs[2] == (57, 57, 28, 28)


def test_what_cannot_be_done_is_refused(model, images):
    for name in ("class-attention", "cls-similarity"):
        with pytest.raises(PullbackError, match=f"no class token, which '{name}' is about"):
            prune_views(model, name, ratio=0.5, stages=[0])
    for name in ("bipartite", "importance"):
        with pytest.raises(PullbackError, match=f"one of random, norm, strided, an importance head .* got '{name}'"):
            prune_views(model, name, ratio=0.5, stages=[0])
    with pytest.raises(PullbackError, match="scope: expected one of global, view"):
        prune_views(model, "norm", ratio=0.5, stages=[0], scope="frame")
    with pytest.raises(PullbackError, match="preset: expected one of best, strided, drop"):
        prune_views(model, "norm", ratio=0.5, stages=[0], preset="bipartite")
    with pytest.raises(PullbackError, match="expected one, or one for each of the 2 stages"):
        prune_views(model, ["norm"] * 3, ratio=0.5, stages=[0, 1])
    with pytest.raises(PullbackError, match="expected blocks from 0 to 2"):
        prune_views(model, "norm", ratio=0.5, stages=[3])
    with pytest.raises(ModelError, match="expected a VGGT, got Linear"):
        PrunedVGGT(torch.nn.Linear(2, 2), view_plan("best", 0.5, [0], scope="global", depth=4), ["norm"], "global")
    with pytest.raises(PullbackError, match="expected one number per token"):
        prune_views(model, lambda tokens, context: tokens, ratio=0.5, stages=[0])(images)
    with pytest.raises(ModelError, match=r"got the name 'tiny-views'.*VGGT\.from_pretrained\('tiny-views'\)"):
        prune_views("tiny-views", "norm", ratio=0.5, stages=[0])
    with pytest.raises(ModelError, match="expected a VGGT, got Linear"):
        prune_views(torch.nn.Linear(2, 2), "norm", ratio=0.5, stages=[0])


def test_a_model_in_training_mode_is_refused_and_left_as_it_is(images):
    training = tiny().train()
    for build in (
        lambda: prune_views(training, "norm", ratio=0.5, stages=[0]),
        lambda: PrunedVGGT(training, view_plan("best", 0.5, [0], scope="global", depth=4), ["norm"], "global"),
    ):
        with pytest.raises(ModelError, match=r"model: expected evaluation mode.*Call model\.eval\(\) first"):
            build()
    assert all(part.training for part in training.modules())


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused(model, images, scope, wrong):
    def score(tokens, context):
        found = tokens.norm(dim=-1)
        found[0, 3] = wrong if context.layer == 1 else 1.0
        return found

    pruned = prune_views(model, score, ratio=0.5, stages=[0, 1], scope=scope)
    with pytest.raises(PullbackError, match=r"finite numbers, got NaN or infinity for 1 of .* after global block 1"):
        pruned(images)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("score", ["norm", "strided"])
def test_parts_of_any_size_change_no_value(model, scope, score, monkeypatch):
    """Tokens of a block, and cosines of a stage: 3 scenes of 3 views of 19 tokens, fewer after each stage."""
    images, preset = scenes(3, 3, 3, 56, 56), "strided" if score == "strided" else "best"
    pruned = prune_views(model, score, ratio=0.5, stages=[0, 1], preset=preset, scope=scope)
    with torch.no_grad():
        whole = pruned(images)
        for tokens in (7, 40):
            monkeypatch.setattr(block, "CHUNK_TOKENS", tokens)
            monkeypatch.setattr(view_matching, "CHUNK_NUMBERS", 1000)  # two views at a time
            close(pruned(images), whole, 1e-12)


def test_a_stage_compares_the_tokens_of_some_views_at_a_time(model, images, monkeypatch):
    seen = []

    def spied(tokens, *arguments):
        seen.append(tuple(tokens.shape[:2]))
        return decide(tokens, *arguments)

    monkeypatch.setattr(view_matching, "decide", spied)
    monkeypatch.setattr(view_matching, "CHUNK_NUMBERS", 4 * 19**2 + 1)
    prune_views(model, "norm", ratio=0.5, stages=[0], scope="view")(images)
    assert seen == [(4, 19), (2, 19)]


def test_a_vggt_is_sent_on_by_the_pruning_of_images_and_restored_like_other_models(model):
    with pytest.raises(ModelError, match=r"a vggt takes scenes of several views, .* use load_probe, or prune_views"):
        pb.prune(model, "norm", ratio=0.5, stages=[1])
    assert pb.restore(pb.prune_views(model, "norm", ratio=0.5, stages=[1])) is model
