"""Scores see one image at a time, and mean what their papers say."""

import copy
import re

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of, random_normal, seeded_vit
from pullback.backbones import load_backbone
from pullback.errors import ModelError, PullbackError, ShapeError
from pullback.operators import LowRankMetric
from pullback.pruning import ScoreContext, as_score, preset, run_pruned
from pullback.pruning.plan import PrunePlan
from pullback.pruning.scores import NEVER, HeadScore, MetricScore, alternate, score_names, strided, token_norm
from pullback.registry import SCORES, ScoreEntry, register_score, resolve
from pullback.tokens import TokenLayout


def context_of(backbone, images, layer=1, **changes):
    layout = backbone.token_layout(images)
    entered = backbone.run(backbone.embed(images), 0, layer, layout=layout)
    tokens = backbone.run(entered, layer, layer + 1, layout=layout)
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    sizes = torch.ones(tokens.shape[:2], dtype=tokens.dtype)
    return tokens, ScoreContext(backbone, layer, layout, positions, sizes, entered, **changes)


@pytest.mark.parametrize("name", score_names())
def test_an_image_is_scored_alone_as_in_a_batch(name):
    backbone, images = load_backbone(seeded_vit()), random_normal(3, 3, 70, 84)
    tokens, context = context_of(backbone, images)
    together = as_score(name)(tokens, context)
    assert together.shape == tokens.shape[:2]
    assert (together >= 0).all()
    for number in range(3):
        alone = as_score(name)(*context_of(backbone, images[number : number + 1]))
        torch.testing.assert_close(together[number : number + 1], alone)


@pytest.mark.parametrize("name", ["dinov2", "dinov2-registers", "dinov3", "clip"])
def test_class_attention_is_that_of_the_model(name):
    model, images = model_of(name), images_for(name, (3, 3))
    backbone = load_backbone(model)
    _, context = context_of(backbone, images, layer=2)
    model.set_attn_implementation("eager")
    try:
        own = model(images, output_attentions=True).attentions[2]
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(context.class_attention(), own.mean(1)[:, 0])


def test_class_attention_counts_merged_tokens_by_their_size():
    backbone, images = load_backbone(seeded_vit()), random_normal(2, 3, 70, 84)
    _, context = context_of(backbone, images, log_sizes=random_normal(2, 31, seed=1))
    block = backbone.blocks[1]
    q, k, _ = block.attention_inputs(block.norm1(context.block_input), None, 1)
    logits = (q @ k.mT) * block.head_dim**-0.5 + context.log_sizes[:, None, None]
    expected = logits.softmax(-1).mean((1, 2))
    torch.testing.assert_close(context.class_attention(), expected)


def test_without_a_class_token_there_is_no_class_attention():
    tokens, context = context_of(load_backbone(model_of("siglip")), images_for("siglip", (3, 3)))
    for name in ("class-attention", "cls-similarity"):
        with pytest.raises(ModelError, match="has no class token"):
            as_score(name)(tokens, context)


def test_redundancy_removes_what_has_a_twin_in_the_set_that_stays():
    backbone, images = load_backbone(seeded_vit()), random_normal(1, 3, 70, 84)
    tokens, context = context_of(backbone, images)
    tokens[0, 5] = 2 * tokens[0, 8]  # patch 4 goes, its twin, patch 7, is in the second set
    score = as_score("bipartite")(tokens, context)
    assert score.argmin() == 5
    assert score[0, 5] == pytest.approx(0, abs=1e-6)
    stays = alternate(context)[0]
    assert (score[0, stays] == NEVER).all() and score[0, 0] == NEVER
    assert stays.sum() == 15 and not stays[0]


def test_the_strided_set_is_a_corner_of_every_cell():
    layout = TokenLayout(2, (4, 5))
    positions = torch.tensor([[0, 1, 2, 3, 4, 6, 7, 12, 13]])
    backbone = load_backbone(model_of("dinov2-registers"))
    context = ScoreContext(backbone, 0, layout, positions, positions, positions)
    # places 2, 4 and 6 are columns 0, 2 and 4 of row 0; 12 and 14 would be columns 0 and 2 of row 2
    assert positions[0, strided(context)[0]].tolist() == [2, 4, 6, 12]


def test_random_scores_follow_the_generator():
    backbone, images = load_backbone(seeded_vit()), random_normal(2, 3, 70, 84)
    draws = [
        as_score("random")(*context_of(backbone, images, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("former", "now", "published"), [("tome", "bipartite", "ToMe"), ("evit", "class-attention", "EViT")]
)
def test_a_former_name_is_refused_with_the_one_of_today(former, now, published):
    words = f"score: the single-stage score '{former}' is now called '{now}'. {published} as its authors run it is"
    with pytest.raises(PullbackError, match=re.escape(f'{words} preset="{former}"')):
        pb.prune(seeded_vit(), former, ratio=0.5, stages=[1])


def test_choices():
    assert as_score("norm") is token_norm
    head = HeadScore(torch.nn.Identity())
    assert as_score(head) is head
    with pytest.raises(PullbackError, match=r"score: expected one of random, bipartite, .* got 'magic'"):
        as_score("magic")
    with pytest.raises(PullbackError, match=r"expected one of random, .* got 'exact' \('exact' is made of a probe"):
        as_score("exact")
    with pytest.raises(PullbackError, match="score: expected a name, a head or a function, got int"):
        as_score(3)


def test_every_name_of_the_registry_has_its_code():
    assert all(callable(resolve(entry.score)) for entry in SCORES.values())


def test_a_registered_score_works_by_name(monkeypatch):
    monkeypatch.setattr("pullback.registry.SCORES", dict(SCORES))  # restored after the test
    register_score(ScoreEntry("first-channel", lambda tokens, context: tokens[..., 0].abs(), "size of channel 0"))
    assert "first-channel" in score_names()
    backbone, images = load_backbone(seeded_vit()), random_normal(1, 3, 70, 70)
    own = run_pruned(backbone, images, preset("drop", 0.5, [2]), ["first-channel"], layers=[5])
    by_hand = run_pruned(backbone, images, preset("drop", 0.5, [2]), [lambda t, c: t[..., 0].abs()], layers=[5])
    assert torch.equal(own.records[0].kept, by_hand.records[0].kept)


class Own:
    """A score that is no network: it says what it was made for, and has modes."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, tokens, context):
        return self.modes(tokens, context).norm(dim=(1, 3))

    def modes(self, tokens, context):
        return torch.stack([tokens.sin(), tokens.cos()], 1)

    def check(self, family, dim, layer):
        if layer != self.layer:
            raise ModelError(f"own: made for {self.layer}, used at {layer} of {family} with width {dim}")


def test_a_score_may_refuse_a_stage_and_bring_its_modes():
    backbone, images, plan = load_backbone(seeded_vit()), random_normal(2, 3, 70, 70), preset("paper", 0.4, [2])
    with pytest.raises(ModelError, match="own: made for 1, used at 2 of depth-anything with width 64"):
        run_pruned(backbone, images, plan, [Own(1)], layers=[5])
    own = run_pruned(backbone, images, plan, [Own(2)], layers=[5])
    given = run_pruned(backbone, images, plan, [Own(2)], layers=[5], modes=Own(2).modes)
    assert torch.equal(own.records[0].partner, given.records[0].partner)
    with pytest.raises(PullbackError, match="modes: matching by d_task"):
        run_pruned(backbone, images, plan, ["norm"], layers=[5])


class Predicts(torch.nn.Module):
    """A network whose metric is known."""

    predicts_metric = True

    def __init__(self, modes, energies):
        super().__init__()
        self.metric = LowRankMetric(modes, energies, 1e-3)

    def forward(self, tokens):
        return self.metric


def test_a_network_that_predicts_the_metric_scores_by_it():
    modes = torch.linalg.qr(random_normal(2, 4 * 6, 3)).Q.mT.unflatten(-1, (4, 6))
    energies = random_normal(2, 3).square()
    tokens, score = random_normal(2, 4, 6, seed=1), as_score(Predicts(modes, energies))
    truth = (energies[..., None, None] * modes.square()).sum((1, 3)).sqrt()
    assert isinstance(score, MetricScore)
    torch.testing.assert_close(score(tokens, None), truth, rtol=1e-13, atol=1e-13)
    found = score.modes(tokens, None)
    torch.testing.assert_close(found.square().sum((1, 3)).sqrt(), truth, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found / found.norm(dim=(2, 3), keepdim=True), modes, rtol=1e-12, atol=1e-12)


def test_a_metric_of_a_latent_space_is_refused():
    score = as_score(Predicts(random_normal(2, 3, 8, 5), torch.ones(2, 3)))
    for function in (score, score.modes):
        with pytest.raises(ShapeError, match=r"spn: expected modes on the tokens themselves, \[B, r, 4, 6\], got"):
            function(random_normal(2, 4, 6), None)


def test_a_score_of_the_wrong_shape_is_refused():
    backbone = load_backbone(seeded_vit())
    with pytest.raises(PullbackError, match=r"score: expected one number per token, \[1, 26\], got \[1, 26, 64\]"):
        run_pruned(backbone, random_normal(1, 3, 70, 70), PrunePlan((2,), (0.5,)), [lambda t, c: t], layers=[5])


@pytest.mark.parametrize("name", ["norm", "cls-similarity", "class-attention"])
def test_half_precision_still_tells_tokens_apart(name):
    backbone = load_backbone(copy.deepcopy(seeded_vit()).to(torch.bfloat16))  # a copy: other tests share the model
    images = random_normal(1, 3, 280, 280).to(torch.bfloat16)
    scores = as_score(name)(*context_of(backbone, images))
    assert scores.dtype == torch.float32
    assert len(scores.unique()) > 0.9 * scores.numel()
