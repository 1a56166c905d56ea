"""The pruned forward against the same steps written out by hand."""

from dataclasses import replace

import pytest
import torch

from helpers.families import images_for, model_of, random_normal, seeded_vit
from pullback.backbones import load_backbone
from pullback.errors import ModelError, PullbackError
from pullback.learning.head import HeadConfig, ImportanceHead
from pullback.learning.pretrained import Origin
from pullback.pruning import PrunePlan, preset, run_pruned
from pullback.pruning.matching import cosines, removal_costs, residuals, rows

LAST = 5


@pytest.fixture(scope="module")
def backbone():
    return load_backbone(seeded_vit())


@pytest.fixture(scope="module")
def images():
    return random_normal(3, 3, 70, 84)


def by_norm(tokens, context):
    return tokens.norm(dim=-1)


def modes(tokens, context):
    """Any fixed function of one image's tokens."""
    return torch.stack([tokens.sin(), tokens.cos(), tokens.roll(1, -1)], 1)


PLANS = {
    "drop": preset("drop", 0.4, [2]),
    "paper": preset("paper", 0.4, [2]),
    "best": preset("best", 0.4, [1, 3]),
    "cost": PrunePlan((2,), (0.4,), select="cost", sizes=True, safe=True),
    "bipartite": preset("bipartite", 0.4, [2]),
    "strided": preset("strided", 0.4, [2]),
    "dense-paper": preset("paper", 0.4, [2], dense=True),
    "dense-best": preset("best", 0.4, [1, 3], dense=True),
    "dense-bipartite": preset("bipartite", 0.4, [1, 3], dense=True),
    "dense-drop": preset("drop", 0.4, [2], dense=True),
}


def run(backbone, images, plan, **options):
    return run_pruned(backbone, images, plan, [by_norm], layers=options.pop("layers", [LAST]), modes=modes, **options)


def test_dropping_is_running_the_blocks_on_what_is_left(backbone, images):
    result = run(backbone, images, PLANS["drop"])
    (record,) = result.records
    features = backbone.features(images, [2])[2]
    assert record.kept.shape == (3, 31 - 12)
    expected = backbone.run(rows(features, record.kept), 3, 6)
    torch.testing.assert_close(result.taps[0], expected)
    lowest = features[:, 1:].norm(dim=-1).argsort(1)[:, :12] + 1
    assert all(set(a.tolist()) == set(b.tolist()) for a, b in zip(lowest, record.removed, strict=True))


def test_the_papers_merge_written_out(backbone, images):
    """eq:dtask, importance-weighted averaging, no sizes: token by token."""
    result = run(backbone, images, PLANS["paper"])
    (record,) = result.records
    features = backbone.features(images, [2])[2]
    scores, scaled = features.norm(dim=-1), modes(features, None)
    merged = []
    for image in range(3):
        kept = record.kept[image].tolist()
        total, sums = scores[image].clone(), features[image] * scores[image, :, None]
        for a in record.removed[image].tolist():
            gap = features[image, a] - features[image, kept]
            b = kept[int((scaled[image, :, a] @ gap.mT).square().sum(0).argmin())]
            assert b == record.partner[image][record.removed[image] == a]
            if b != 0:  # the class token's importance is infinite
                sums[b] += scores[image, a] * features[image, a]
                total[b] += scores[image, a]
        merged.append((sums / total[:, None])[kept])
    torch.testing.assert_close(result.taps[0], backbone.run(torch.stack(merged), 3, 6))


def test_last_layer_fusion_written_out(backbone, images):
    """Frozen features at every hook, and before the last block, which runs on all tokens."""
    result = run(backbone, images, PLANS["dense-paper"], layers=[1, 2, 4, 5])
    (record,) = result.records
    features = backbone.features(images, [1, 2])
    torch.testing.assert_close(result.taps[0], features[1])
    torch.testing.assert_close(result.taps[1], features[2])
    left = backbone.run(rows(features[2], record.kept), 3, 5)
    full = features[2].clone()
    full.scatter_(1, record.kept[..., None].expand_as(left), left)
    torch.testing.assert_close(result.taps[2], full)
    torch.testing.assert_close(result.taps[3], backbone.run(full, 5, 6))


def test_sizes_count_in_later_attention_and_are_gone_when_all_tokens_are_back(backbone, images):
    plan = PrunePlan((2,), (0.4,), sizes=True, weighting="size", reinsert="copy", fuse_last=True)
    result = run(backbone, images, plan, layers=[4, 5])
    (record,) = result.records
    features = backbone.features(images, [2])[2]
    sizes = torch.ones(3, 31).scatter_add_(1, record.partner, record.merged.float())
    kept_sizes = sizes.gather(1, record.kept).double()
    full = torch.zeros_like(features)
    for image in range(3):
        total = features[image].clone()
        for a, b in zip(record.removed[image], record.partner[image], strict=True):
            total[b] += features[image, a]
        mean = (total / sizes[image, :, None].double())[record.kept[image]][None]
        for block in backbone.blocks[3:5]:
            mean = block(mean, log_sizes=kept_sizes[image : image + 1].log())
        full[image, record.kept[image]] = mean[0]
        full[image, record.removed[image]] = full[image, record.partner[image]]
    torch.testing.assert_close(result.taps[0], full)
    torch.testing.assert_close(result.taps[1], backbone.blocks[5](full))


@pytest.mark.parametrize("name", PLANS)
def test_an_image_alone_and_in_a_batch(backbone, images, name):
    together = run(backbone, images, PLANS[name])
    for number in (0, 2):
        alone = run(backbone, images[number : number + 1], PLANS[name])
        torch.testing.assert_close(together.taps[0][number : number + 1], alone.taps[0], rtol=0, atol=1e-10)
        for ours, theirs in zip(together.records, alone.records, strict=True):
            assert torch.equal(ours.kept[number : number + 1], theirs.kept)
            assert torch.equal(ours.removed[number : number + 1], theirs.removed)


@pytest.mark.parametrize("score", ["head", "bipartite", "strided", "class-attention", "norm", "cls-similarity"])
@pytest.mark.parametrize("dense", [False, True])
def test_every_score_looks_at_its_image_alone(backbone, images, score, dense):
    torch.manual_seed(0)
    chosen = ImportanceHead(64, 16).double() if score == "head" else score
    plan = preset("best", 0.4, [1, 3], dense=dense)
    together = run_pruned(backbone, images, plan, [chosen], layers=[LAST])
    for number in (0, 2):
        alone = run_pruned(backbone, images[number : number + 1], plan, [chosen], layers=[LAST])
        torch.testing.assert_close(together.taps[0][number : number + 1], alone.taps[0], rtol=0, atol=1e-10)
        assert torch.equal(together.records[1].kept[number : number + 1], alone.records[1].kept)


@pytest.mark.parametrize("name", PLANS)
def test_dense_plans_give_all_tokens_back_and_others_what_is_left(backbone, images, name):
    taps = run(backbone, images, PLANS[name], layers=[0, 5]).taps
    assert taps[0].shape == (3, 31, 64)
    assert taps[1].shape == (3, 31 if name.startswith("dense") else 19, 64)


@pytest.mark.parametrize("name", PLANS)
def test_with_nothing_removed_nothing_changes(backbone, images, name):
    taps = run(backbone, images, replace(PLANS[name], shares=0.0), layers=[3, 5]).taps
    for layer, tap in zip((3, 5), taps, strict=True):
        torch.testing.assert_close(tap, backbone.features(images, [layer])[layer], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["dinov3", "dinov2-registers", "deit", "siglip"])
def test_rotary_positions_and_prefix_tokens_travel_along(name):
    """Dropping by a fixed score: the blocks see the same tokens at the same places as when run by hand."""
    backbone, images = load_backbone(model_of(name)), images_for(name, (2, 3))
    result = run_pruned(backbone, images, preset("drop", 0.5, [0]), [by_norm], layers=[2])
    (record,) = result.records
    assert (record.removed >= backbone.prefix).all()
    features, layout = backbone.features(images, [0])[0], backbone.token_layout(images)
    expected = backbone.run(rows(features, record.kept), 1, 3, layout=layout, positions=record.kept)
    torch.testing.assert_close(result.taps[0], expected)


def test_later_stages_score_the_pruned_sequence(backbone, images):
    seen = []

    def watching(tokens, context):
        seen.append((context.layer, tokens.shape[1], context.positions.shape, sorted(context.taps)))
        return tokens.norm(dim=-1)

    run_pruned(backbone, images, preset("best", 0.4, [1, 3]), [watching], layers=[LAST])
    assert seen == [(1, 31, (3, 31), [1]), (3, 25, (3, 25), [1])]


def test_every_kept_token_stays_where_it_was(backbone, images):
    records = run(backbone, images, PLANS["best"]).records
    everything = torch.cat([records[0].removed, records[1].removed, records[1].kept], 1).sort(1).values
    assert torch.equal(everything, torch.arange(31).expand(3, -1))


def test_artifacts_take_nothing_in(backbone, images):
    loud = replace(backbone, blocks=(*backbone.blocks[:2], Loud(backbone.blocks[2], 9), *backbone.blocks[3:]))
    for safe in (False, True):
        plan = PrunePlan((2,), (0.4,), safe=safe, match="cosine")
        (record,) = run_pruned(loud, images, plan, [by_norm], layers=[LAST]).records
        assert bool((record.partner == 9).any()) is not safe


class Loud:
    """A block after which one token is the sum of all, fifty times over."""

    def __init__(self, block, token):
        self.block, self.token = block, token

    def __call__(self, x, rope=None, rows=None, log_sizes=None):
        out = self.block(x, rope, rows, log_sizes)
        out[:, self.token] = 50 * out[:, 1:].sum(1)
        return out


def test_the_gate_drops_what_has_no_similar_partner(backbone, images):
    shares = []
    for gate in (-1.0, 0.5, 1.0):
        (record,) = run(backbone, images, PrunePlan((2,), (0.4,), gates=(gate,))).records
        shares.append(record.merged.double().mean().item())
    assert shares[0] == 1 and shares[2] == 0
    assert shares[0] >= shares[1] >= shares[2]


def test_with_the_fade_at_the_gate_tokens_are_merged_whole_and_far_above_it_hardly(backbone, images):
    plan = PrunePlan((2,), (0.4,), gates=(0.5,), sizes=True)
    hard, same, soft = (run(backbone, images, replace(plan, fades=fades)) for fades in ((), (0.5,), (1e6,)))
    assert torch.equal(hard.taps[-1], same.taps[-1]) and torch.equal(hard.log_sizes, same.log_sizes)
    assert hard.log_sizes.max() > 0.6 and soft.log_sizes.max() < 1e-4
    assert torch.equal(hard.records[0].merged, soft.records[0].merged)  # in part is merged, too


def head_for(**origin):
    return ImportanceHead.from_config(HeadConfig(64, 16, 4, origin=Origin(**origin))).double()


def test_heads_are_checked(backbone, images):
    plan = preset("best", 0.4, [1, 3], dense=True)
    right = [head_for(layer=1, family="depth-anything"), head_for(layer=3)]
    run_pruned(backbone, images, plan, right, layers=[LAST])
    run_pruned(backbone, images, plan, [head_for()], layers=[LAST])  # a head without a layer goes anywhere
    with pytest.raises(ModelError, match="head: it was trained for layer 1, and is used with layer 3"):
        run_pruned(backbone, images, plan, [head_for(layer=1)], layers=[LAST])
    with pytest.raises(ModelError, match="head: it was trained for family dinov2"):
        run_pruned(backbone, images, plan, [head_for(family="dinov2")], layers=[LAST])
    with pytest.raises(ModelError, match="head: expected one for tokens of width 64, got width 32"):
        run_pruned(backbone, images, plan, [ImportanceHead(32, 16, 4)], layers=[LAST])
    with pytest.raises(PullbackError, match="scores: expected one, or one for each of the 2 stages, got 3"):
        run_pruned(backbone, images, plan, ["norm"] * 3, layers=[LAST])
    with pytest.raises(PullbackError, match=r"scores: expected a list .*, \['norm'\]"):
        run_pruned(backbone, images, plan, "norm", layers=[LAST])
    with pytest.raises(PullbackError, match="modes: matching by d_task"):
        run_pruned(backbone, images, PLANS["paper"], ["norm"], layers=[LAST])
    with pytest.raises(PullbackError, match="stages: expected blocks from 0 to 4"):
        run_pruned(backbone, images, preset("best", 0.4, [5]), ["norm"], layers=[LAST])


def test_trust_says_how_much_the_score_counts_against_the_distance():
    scores, away = torch.tensor([[4.0, 9.0, -4.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    for trust, expected in ((1.0, [4.0, 18.0, -12.0]), (0.5, [2.0, 6.0, -6.0]), (0.0, [1.0, 2.0, -3.0])):
        torch.testing.assert_close(removal_costs(scores, away, trust), torch.tensor([expected]))
    with pytest.raises(PullbackError, match="trust: expected a power of the score, 0 or more, got -1"):
        replace(PLANS["best"], trust=-1.0)


def test_the_cost_of_a_token_is_its_score_times_the_way_to_its_partner():
    tokens = random_normal(1, 6, 4)
    scores = torch.tensor([[9.0, 3.0, 1.0, 2.0, 5.0, 4.0]])
    allowed = torch.tensor([[False, True, True, True, False, True]])
    found = residuals(tokens, scores, allowed, cosines(tokens))[0]
    for token in range(6):
        others = [u for u in range(6) if allowed[0, u] and scores[0, u] > scores[0, token]]
        own = tokens[0, token].norm()
        if others:
            cosine = torch.cosine_similarity(tokens[0, token][None], tokens[0, others], dim=1)
            own = torch.minimum(own, (tokens[0, token] - tokens[0, others[int(cosine.argmax())]]).norm())
        assert found[token] == pytest.approx(float(own), rel=1e-6)
