"""The importance head: its formula, its symmetries, its range and where it starts."""

import pytest
import torch
import torch.nn.functional as F

from pullback.errors import ModelError, ShapeError
from pullback.learning.head import HeadConfig, ImportanceHead, inverse_softplus
from pullback.learning.losses import conformal_loss
from pullback.learning.pretrained import Origin

DIM, WIDTH, TOKENS = 24, 32, 11


@pytest.fixture
def head() -> ImportanceHead:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = ImportanceHead(DIM, WIDTH, heads=2)
        for parameter in head.parameters():  # norms and biases too, so that no two mistakes cancel
            torch.nn.init.normal_(parameter, std=0.3)
    return head


@pytest.fixture
def fresh() -> ImportanceHead:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return ImportanceHead(DIM, WIDTH)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven_features(images: int = 40) -> torch.Tensor:
    """Channels with means up to 100 times their spread, and spreads over three powers of ten."""
    spread = torch.logspace(-1, 2, DIM)[torch.randperm(DIM, generator=torch.Generator().manual_seed(3))]
    return spread * (normal(images, TOKENS, DIM, seed=4) + torch.linspace(-100, 100, DIM))


def plain_scores(head: ImportanceHead, features: torch.Tensor) -> torch.Tensor:
    """The head in float64, head by head and image by image, as its description says."""
    w = {name: value.detach().double() for name, value in head.state_dict().items()}
    heads, inner = head.config.heads, head.config.width // 4

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    scores = []
    for image in features.double():
        x = linear("project", image)
        q, k, v = linear("qkv", norm("norm1", x)).chunk(3, dim=-1)
        mixed = []
        for part in torch.arange(inner).chunk(heads):
            weights = (q[:, part] @ k[:, part].T / (inner // heads) ** 0.5).softmax(-1)
            mixed.append(weights @ v[:, part])
        x = x + linear("out", torch.cat(mixed, -1))
        hidden = linear("first", norm("norm2", x))
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        scores.append(torch.log1p(linear("second", hidden).exp())[:, 0])
    return torch.stack(scores)


def test_at_the_width_of_vit_base_it_has_313409_parameters():
    assert sum(parameter.numel() for parameter in ImportanceHead(768).parameters()) == 313_409


def test_it_is_the_network_of_its_description(head):
    features = 3 * normal(3, TOKENS, DIM)
    expected = plain_scores(head, features)
    assert expected.std() > 0.05
    torch.testing.assert_close(head(features).double(), expected, rtol=1e-5, atol=1e-5)


def test_permuted_tokens_get_permuted_scores(head):
    features = normal(3, TOKENS, DIM)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    scores = head(features)
    assert not torch.allclose(scores[:, order], scores, atol=1e-3)
    torch.testing.assert_close(head(features[:, order]), scores[:, order])


def test_a_score_depends_on_all_tokens_of_its_own_image_and_of_no_other(head):
    features = normal(3, TOKENS, DIM)
    changed = features.clone()
    changed[1, 4] += 3
    difference = (head(changed) - head(features)).abs()
    assert (difference[1] > 1e-5).all()
    assert (difference[[0, 2]] < 1e-6).all()


@pytest.mark.parametrize("tokens", [1, 2, 50, 257])
def test_any_number_of_tokens_will_do(head, tokens):
    scores = head(normal(2, tokens, DIM))
    assert scores.shape == (2, tokens)
    assert (scores > 0).all()


def extreme_features() -> dict[str, torch.Tensor]:
    loud_channel, loud_token = normal(2, TOKENS, DIM), normal(2, TOKENS, DIM)
    loud_channel[..., 3] *= 1e6
    loud_token[:, 5] *= 1e6
    return {
        "zeros": torch.zeros(2, TOKENS, DIM),
        "constant": torch.full((2, TOKENS, DIM), 7.0),
        "tiny": 1e-20 * normal(2, TOKENS, DIM),
        "huge": 1e15 * normal(2, TOKENS, DIM),
        "one loud channel": loud_channel,
        "one loud token": loud_token,
    }


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16 autocast"])
@pytest.mark.parametrize("case", extreme_features())
def test_scores_are_positive_and_finite_for_extreme_features(head, case, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = head(extreme_features()[case])
        loss = conformal_loss(scores, torch.ones(2, TOKENS), generator=torch.Generator().manual_seed(0))
    loss.backward()
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert (scores > 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in head.parameters())


@pytest.mark.parametrize("bias", [-300.0, 300.0])
def test_scores_are_positive_and_finite_where_softplus_saturates(head, bias):
    with torch.no_grad():
        head.second.bias.fill_(bias)
    scores = head(normal(2, TOKENS, DIM))
    assert (scores > 0).all()
    assert scores.log().isfinite().all()


def test_bf16_autocast_changes_scores_by_its_round_off_only(head):
    features = normal(2, TOKENS, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        scores = head(features)
    assert not torch.equal(scores, head(features))
    torch.testing.assert_close(scores, head(features), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_features_may_have_another_dtype_than_the_head(head, dtype):
    features = normal(2, TOKENS, DIM).to(dtype)
    assert torch.equal(head(features), head(features.float()))


def test_logits_have_the_order_of_the_scores(head):
    features = normal(2, TOKENS, DIM)
    assert torch.equal(head.logits(features).argsort(1), head(features).argsort(1))
    torch.testing.assert_close(F.softplus(head.logits(features)), head(features))


def test_every_parameter_learns(head):
    scores = head(normal(2, TOKENS, DIM))
    target = normal(2, TOKENS, seed=1).exp()
    conformal_loss(scores, target, generator=torch.Generator().manual_seed(0)).backward()
    assert all((parameter.grad != 0).any() for parameter in head.parameters())


def test_it_starts_as_if_each_channel_had_mean_zero_and_spread_one(fresh):
    features = uneven_features()
    flat = features.double().flatten(0, 1)
    standard = (features.double() - flat.mean(0)) / flat.std(0, correction=0)
    weight, bias = fresh.project.weight.detach().double(), fresh.project.bias.detach().double()
    expected = standard @ weight.T + bias

    assert fresh.project(features).std() > 10
    assert fresh.start_from(features, torch.ones(40, TOKENS)) is fresh
    projected = fresh.project(features)
    torch.testing.assert_close(projected.double(), expected, rtol=1e-3, atol=1e-3)
    assert 0.3 < projected.std() < 1.5
    assert projected.mean((0, 1)).abs().max() < 0.3


@pytest.mark.parametrize("level", [1e-30, 1e-6, 1e-2, 1.0, 30.0, 1e6])
def test_it_starts_at_the_level_of_the_targets(fresh, level):
    features = uneven_features()
    target = level * (1.5 * normal(40, TOKENS, seed=5)).exp()
    fresh.start_from(features, target)
    with torch.no_grad():
        assert abs(fresh(features).log().mean() - target.log().mean()) < 0.4


def test_a_start_keeps_a_target_of_zero_finite(fresh):
    target = torch.ones(40, TOKENS)
    target[0, 0] = 0
    fresh.start_from(uneven_features(), target)
    assert fresh.second.bias.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 3.3, -1000.1])
def test_a_constant_channel_gets_the_weight_of_an_average_one(fresh, value):
    features = uneven_features()
    features[..., 7] = value
    before = fresh.project.weight[:, 7].detach().clone()
    fresh.start_from(features, torch.ones(40, TOKENS))
    average = features.std((0, 1), correction=0).mean()
    torch.testing.assert_close(fresh.project.weight[:, 7], before / average, rtol=1e-3, atol=0)
    assert 0.3 < fresh.project(features).std() < 1.5
    stirred = features.clone()
    stirred[..., 7] += 1e-3  # it was not constant after all
    torch.testing.assert_close(fresh(stirred), fresh(features), rtol=1e-2, atol=0)


def test_features_that_do_not_vary_at_all_leave_the_weights_alone(fresh):
    before = fresh.project.weight.detach().clone()
    one_token = normal(1, 1, DIM)
    fresh.start_from(one_token, torch.ones(1, 1))
    assert torch.equal(fresh.project.weight, before)
    assert fresh(one_token).isfinite().all()


@pytest.mark.parametrize("value", [1e-30, 1e-6, 0.5, 1.0, 20.0, 1e6])
def test_inverse_softplus_undoes_softplus(value):
    value = torch.tensor(value, dtype=torch.float64)
    torch.testing.assert_close(F.softplus(inverse_softplus(value)), value)


def test_it_says_what_it_was_made_for(head):
    assert head.config == HeadConfig(DIM, WIDTH, 2)
    assert head.layer is None
    origin = Origin("dinov2", layer=10)
    assert head.describe(origin=origin, scores={"spearman": 0.9}) is head
    assert head.config == HeadConfig(DIM, WIDTH, 2, origin=origin, scores={"spearman": 0.9})
    assert head.layer == 10


@pytest.mark.parametrize("shape", [(2, TOKENS, DIM + 1), (TOKENS, DIM), (1, 2, TOKENS, DIM)], ids=str)
def test_features_of_another_shape_are_refused(head, shape):
    with pytest.raises(ShapeError, match=r"features: expected \[B, N, 24\], got \["):
        head(torch.zeros(shape))


@pytest.mark.parametrize(("width", "heads"), [(30, 2), (32, 3)])
def test_a_width_that_cannot_be_shared_among_the_heads_is_refused(width, heads):
    with pytest.raises(ModelError, match=rf"expected width / 4 to be a multiple of heads, got {width} and {heads}"):
        ImportanceHead(DIM, width, heads)


def test_more_rounds_are_put_in_front_and_one_round_is_the_plain_head():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one, two = ImportanceHead(DIM, WIDTH, 2), ImportanceHead(DIM, WIDTH, 2, rounds=2)
    assert set(one.state_dict()) < set(two.state_dict())
    assert all(name.startswith("before.0.") for name in set(two.state_dict()) - set(one.state_dict()))
    two.load_state_dict(one.state_dict(), strict=False)
    features = normal(2, TOKENS, DIM)
    assert not torch.allclose(one(features), two(features), atol=1e-3)
    for parameter in (two.before[0].out, two.before[0].down):  # a round that adds nothing
        torch.nn.init.zeros_(parameter.weight)
        torch.nn.init.zeros_(parameter.bias)
    torch.testing.assert_close(one(features), two(features))


def test_rounds_are_kept_in_the_folder(tmp_path):
    head = ImportanceHead(DIM, WIDTH, 2, rounds=2)
    again = ImportanceHead.from_pretrained(head.save_pretrained(tmp_path))
    features = normal(1, TOKENS, DIM)
    assert again.config.rounds == 2 and torch.equal(again(features), head(features))


def test_there_is_at_least_one_round():
    with pytest.raises(ModelError, match="rounds: expected a whole number of at least 1, got 0"):
        ImportanceHead(DIM, WIDTH, rounds=0)


def test_scores_follow_from_the_state(head):
    features = normal(2, TOKENS, DIM)
    assert torch.equal(head.scores_of(head.state(features)), head(features))
    assert head.state(features).shape == (2, TOKENS, WIDTH)
