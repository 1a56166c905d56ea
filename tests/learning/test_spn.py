"""The Spectral Pullback Network: orthonormal modes, the metric they make, and that it can be fitted."""

from collections.abc import Iterator

import pytest
import torch

from pullback.errors import ModelError, RankError, ShapeError
from pullback.learning.losses import alignment, energy_loss, subspace_loss
from pullback.learning.pretrained import Origin
from pullback.learning.spn import AttentionBlock, SpectralPullbackNetwork, SpnConfig, orthonormal_columns

DIM, RANK, WIDTH, TOKENS = 12, 4, 16, 9


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other over matrices this small are fifty times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def make(seed: int = 0, **changes) -> SpectralPullbackNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SpectralPullbackNetwork(DIM, RANK, WIDTH, 2, **changes)


@pytest.fixture(params=[None, (5, 6)], ids=["features", "latent"])
def network(request) -> SpectralPullbackNetwork:
    return make(latent=request.param)


def gram_error(basis: torch.Tensor) -> float:
    """basis [B, n, r]: how far from orthonormal its columns are."""
    basis = basis.double()
    return (basis.mT @ basis - torch.eye(basis.shape[-1], dtype=torch.float64)).abs().max().item()


def projector(basis: torch.Tensor) -> torch.Tensor:
    return basis.double() @ basis.double().mT


def nearly_dependent(independence: float, dtype: torch.dtype) -> torch.Tensor:
    """[3, 200, 6] in which two columns are combinations of others, up to ``independence``."""
    columns = normal(3, 200, 6, dtype=dtype)
    columns[..., 3] = columns[..., 0] - 2 * columns[..., 1] + independence * columns[..., 3]
    columns[..., 5] = columns[..., 4] + independence * columns[..., 5]
    return columns


# ---- orthonormal columns


@pytest.mark.parametrize("independence", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_columns_become_orthonormal_and_keep_their_span_also_when_nearly_dependent(dtype, independence):
    columns = nearly_dependent(independence, dtype)
    basis = orthonormal_columns(columns)
    assert basis.dtype == dtype
    assert gram_error(basis) < (1e-5 if dtype == torch.float32 else 1e-10)
    exact = torch.linalg.qr(columns.double()).Q
    assert (projector(basis) - projector(exact)).abs().max() < (1e-6 if dtype == torch.float32 else 1e-8)


def test_the_basis_is_that_of_a_qr_with_positive_diagonal():
    columns = normal(3, 50, 6, dtype=torch.float64)
    basis, upper = torch.linalg.qr(columns)
    signs = upper.diagonal(dim1=1, dim2=2).sign()
    torch.testing.assert_close(orthonormal_columns(columns), basis * signs[:, None], rtol=1e-9, atol=1e-9)


def test_columns_of_very_different_length_are_no_problem():
    lengths = torch.logspace(-25, 25, 6)
    assert gram_error(orthonormal_columns(lengths * normal(3, 200, 6))) < 1e-5


def test_as_many_columns_as_rows_give_a_full_basis():
    assert gram_error(orthonormal_columns(normal(3, 6, 6))) < 1e-5


def test_its_gradient_is_that_of_finite_differences():
    columns = normal(2, 7, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(orthonormal_columns, columns)


def test_the_gradient_does_not_see_the_length_of_a_column():
    """Q is the same for longer columns, so there is no slope in that direction."""
    columns = normal(2, 30, 4, dtype=torch.float64).requires_grad_()
    (orthonormal_columns(columns) * normal(2, 30, 4, seed=1, dtype=torch.float64)).sum().backward()
    assert columns.grad.abs().max() > 1e-2
    torch.testing.assert_close((columns * columns.grad).sum(1), torch.zeros(2, 4, dtype=torch.float64))


def test_columns_that_are_zero_or_equal_give_no_nan():
    columns = normal(2, 40, 4)
    columns[0, :, 2] = 0
    columns[1, :, 3] = columns[1, :, 1]
    columns.requires_grad_()
    basis = orthonormal_columns(columns)
    basis.sum().backward()
    assert basis.isfinite().all()
    assert columns.grad.isfinite().all()
    assert gram_error(basis[0, :, [0, 1, 3]][None]) < 1e-5
    assert gram_error(basis[1, :, :3][None]) < 1e-5


# ---- the network


def test_a_block_is_attention_and_an_mlp_each_behind_a_norm_and_around_a_residual():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = AttentionBlock(8, 2).double()
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    x = normal(3, 5, 8, dtype=torch.float64)
    q, k, v = block.qkv(block.norm1(x)).chunk(3, dim=-1)
    mixed = [
        (q[..., part] @ k[..., part].mT / 4**0.5).softmax(-1) @ v[..., part] for part in (slice(0, 4), slice(4, 8))
    ]
    y = x + block.out(torch.cat(mixed, -1))
    hidden = block.first(block.norm2(y))
    expected = y + block.second(hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5)))
    torch.testing.assert_close(block(x), expected)


def test_modes_have_the_shape_of_the_features_and_any_number_of_tokens_will_do():
    for tokens in (1, 2, 50):
        metric = make()(normal(3, tokens, DIM))
        assert metric.modes.shape == (3, RANK, tokens, DIM)
        assert metric.energies.shape == (3, RANK)
        assert metric.floor == 1e-3


def test_in_a_latent_space_modes_have_its_shape_whatever_the_number_of_tokens():
    network = make(latent=(5, 6), floor=0.1)
    for tokens in (1, 50):
        metric = network(normal(3, tokens, DIM))
        assert metric.modes.shape == (3, RANK, 5, 6)
        assert metric.energies.shape == (3, RANK)
        assert metric.floor == 0.1


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16 autocast"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_modes_are_orthonormal_and_energies_positive(network, scale, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        metric = network(scale * normal(3, TOKENS, DIM))
    assert metric.modes.dtype == metric.energies.dtype == torch.float32
    assert gram_error(metric.modes.flatten(2).mT) < 1e-5
    assert (metric.energies > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_features_may_have_another_dtype_than_the_network(network, dtype):
    features = normal(2, TOKENS, DIM).to(dtype)
    assert torch.equal(network(features).modes, network(features.float()).modes)


def test_permuted_tokens_get_permuted_modes_and_the_same_energies():
    features, network = normal(3, TOKENS, DIM), make()
    order = torch.randperm(TOKENS, generator=seeded())
    metric, permuted = network(features), network(features[:, order])
    assert (metric.modes - metric.modes[:, :, order]).abs().max() > 0.1
    torch.testing.assert_close(permuted.modes, metric.modes[:, :, order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(permuted.energies, metric.energies)


def test_a_latent_metric_does_not_depend_on_the_order_of_the_tokens():
    features, network = normal(3, TOKENS, DIM), make(latent=(5, 6))
    metric, flipped = network(features), network(features.flip(1))
    torch.testing.assert_close(flipped.modes, metric.modes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flipped.energies, metric.energies)


def test_the_metric_depends_on_all_tokens_of_its_own_image_and_of_no_other(network):
    features = normal(3, TOKENS, DIM)
    changed = features.clone()
    changed[1, 4] += 3
    before, after = network(features), network(changed)
    for difference in ((after.modes - before.modes).abs().amax((1, 3)), (after.energies - before.energies).abs()):
        assert (difference[1] > 1e-5).all()
        assert (difference[[0, 2]] < 1e-5).all()


def test_the_same_seed_and_features_give_the_same_metric(network):
    features = normal(3, TOKENS, DIM)
    state = torch.random.get_rng_state()
    first, again = network(features), network(features)
    same = make(latent=network.config.latent)(features)
    other = make(seed=1, latent=network.config.latent)(features)
    assert torch.equal(torch.random.get_rng_state(), state)
    for metric in (again, same):
        assert torch.equal(metric.modes, first.modes)
        assert torch.equal(metric.energies, first.energies)
    assert not torch.allclose(other.modes, first.modes, atol=1e-2)


def test_its_importance_in_closed_form_is_that_of_the_token_blocks(network):
    metric = network(normal(3, TOKENS, DIM))
    channels = metric.modes.shape[-1]
    traces = metric.token_blocks().diagonal(dim1=-2, dim2=-1).sum(-1) - metric.floor * channels
    torch.testing.assert_close(metric.importance(), traces.sqrt(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(metric.importance().square().sum(1), metric.energies.sum(1))  # |u_j| = 1


def test_woodbury_solves_with_its_metric(network):
    metric = network(normal(3, TOKENS, DIM))
    w = normal(3, *metric.modes.shape[2:], seed=1)
    basis = metric.modes.detach().double().flatten(2)
    dense = torch.einsum("br,brm,brn->bmn", metric.energies.detach().double(), basis, basis)
    dense = dense + metric.floor * torch.eye(basis.shape[-1], dtype=torch.float64)
    expected = torch.linalg.solve(dense, w.double().flatten(1)[..., None])[..., 0].unflatten(1, w.shape[1:])
    torch.testing.assert_close(metric.solve(w).double(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    torch.testing.assert_close(metric @ metric.solve(w), w, rtol=1e-3, atol=1e-3)


def test_every_parameter_learns(network):
    metric = network(normal(2, TOKENS, DIM))
    target = torch.linalg.qr(normal(2, metric.modes[0, 0].numel(), RANK, seed=1)).Q.mT.reshape(metric.modes.shape)
    singular_values = torch.tensor([8.0, 4.0, 2.0, 1.0]).expand(2, -1)
    (subspace_loss(metric.modes, target) + energy_loss(metric.energies, singular_values)).mean().backward()
    assert all((parameter.grad != 0).any() for parameter in network.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def test_it_fits_the_subspace_and_the_energies_of_one_image():
    network, features = make(), normal(1, TOKENS, DIM)
    target = torch.linalg.qr(normal(1, TOKENS * DIM, RANK, seed=1)).Q.mT.unflatten(-1, (TOKENS, DIM))
    singular_values = torch.tensor([[8.0, 4.0, 2.0, 1.0]])
    assert alignment(network(features).modes, target).item() < 0.2
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(300):
        metric = network(features)
        errors = subspace_loss(metric.modes, target), energy_loss(metric.energies, singular_values)
        if errors[0] < 0.02 and errors[1] < 0.02:
            break
        optimizer.zero_grad()
        (errors[0] + 0.1 * errors[1]).mean().backward()
        optimizer.step()
    assert alignment(network(features).modes, target).item() > 0.95
    torch.testing.assert_close(network(features).energies, singular_values.square(), rtol=0.4, atol=0)


def test_it_starts_from_standardised_features_at_the_level_of_the_energies(network):
    spread = torch.logspace(-1, 2, DIM)
    features = spread * (normal(40, TOKENS, DIM) + torch.linspace(-100, 100, DIM))
    features[..., 3] = 3.3
    singular_values = torch.tensor([1e3, 1.0, 1e-2, 1e-6]) * normal(40, RANK, seed=1).exp()
    flat = features.double().flatten(0, 1)
    scale = flat.std(0, correction=0)
    scale[3] = scale.mean()
    layer = network.project
    expected = ((features.double() - flat.mean(0)) / scale) @ layer.weight.detach().double().T + layer.bias.double()

    assert network.start_from(features, singular_values) is network
    torch.testing.assert_close(network.project(features).double(), expected, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        levels = network(features).energies.log().mean(0)
    assert (levels - singular_values.square().log().mean(0)).abs().max() < 0.5


def test_it_says_what_it_was_made_for():
    network = make(blocks=1, floor=0.2, latent=(5, 6))
    assert len(network.blocks) == 1
    assert network.config == SpnConfig(DIM, RANK, WIDTH, 2, 1, 0.2, (5, 6))
    origin = Origin("dinov2", layer=10, rank=RANK)
    assert network.describe(origin=origin, scores={"V1": 0.9}) is network
    assert network.config == SpnConfig(DIM, RANK, WIDTH, 2, 1, 0.2, (5, 6), origin, {"V1": 0.9})


def test_more_modes_than_there_are_dimensions_are_refused():
    with torch.random.fork_rng():
        network, latent = (
            SpectralPullbackNetwork(3, 7, WIDTH, 2),
            SpectralPullbackNetwork(3, 7, WIDTH, 2, latent=(2, 3)),
        )
    with pytest.raises(RankError, match="rank: expected at most 2 tokens x 3 channels, got 7"):
        network(torch.zeros(1, 2, 3))
    with pytest.raises(RankError, match="rank: expected at most 2 tokens x 3 channels, got 7"):
        latent(torch.zeros(1, 50, 3))


@pytest.mark.parametrize("shape", [(2, TOKENS, DIM + 1), (TOKENS, DIM), (1, 2, TOKENS, DIM)], ids=str)
def test_features_of_another_shape_are_refused(network, shape):
    with pytest.raises(ShapeError, match=r"features: expected \[B, N, 12\], got \["):
        network(torch.zeros(shape))


def test_a_width_that_cannot_be_shared_among_the_heads_is_refused():
    with pytest.raises(ModelError, match="expected width to be a multiple of heads, got 16 and 3"):
        SpectralPullbackNetwork(DIM, RANK, 16, 3)


def test_a_network_can_start_at_a_constant_subspace_and_learn_from_there(tmp_path):
    network, features = make(), normal(2, TOKENS, DIM)
    subspace = torch.linalg.qr(normal(TOKENS * DIM, RANK, seed=1)).Q.mT.unflatten(-1, (TOKENS, DIM))
    assert network.start_at(subspace) is network and network.config.tokens == TOKENS
    metric = network(features)
    assert alignment(metric.modes, subspace.expand(2, -1, -1, -1)).min() > 1 - 1e-5
    target = torch.linalg.qr(normal(2, TOKENS * DIM, RANK, seed=2)).Q.mT.reshape(metric.modes.shape)
    subspace_loss(metric.modes, target).mean().backward()
    assert (network.modes.weight.grad != 0).any() and (network.base.grad != 0).any()
    again = SpectralPullbackNetwork.from_pretrained(network.save_pretrained(tmp_path))
    torch.testing.assert_close(again(features).modes, network(features).modes)


def test_in_a_latent_space_it_starts_at_a_constant_subspace_whatever_the_number_of_tokens(tmp_path):
    network = make(latent=(5, 6))
    subspace = torch.linalg.qr(normal(30, RANK, seed=1)).Q.mT.unflatten(-1, (5, 6))
    assert network.start_at(subspace) is network and network.config.tokens == 5
    network.save_pretrained(tmp_path)
    again = SpectralPullbackNetwork.from_pretrained(tmp_path)
    assert again.config == network.config
    for own in (network, again):
        for tokens in (1, TOKENS):
            modes = own(normal(2, tokens, DIM)).modes
            span = projector(subspace.flatten(1).T)
            for mode in modes.flatten(2):
                assert (projector(mode.T) - span).abs().max() < 1e-5
    target = torch.linalg.qr(normal(2, 30, RANK, seed=2)).Q.mT.unflatten(-1, (5, 6))
    subspace_loss(network(normal(2, TOKENS, DIM)).modes, target).mean().backward()
    assert (network.modes.weight.grad != 0).any() and (network.base.grad != 0).any()


def test_a_start_that_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"subspace: expected \[4, N, 12\], .* got \[4, 9, 11\]"):
        make().start_at(torch.zeros(RANK, TOKENS, DIM - 1)[:, :9])
    for shape in ((RANK, TOKENS, DIM), (RANK, 6, 6), (RANK + 1, 5, 6), (RANK, 30)):
        with pytest.raises(ShapeError, match=r"subspace: expected \[4, 5, 6\], .* latent space of \(5, 6\), got \["):
            make(latent=(5, 6)).start_at(torch.zeros(shape))
    bound = make().start_at(torch.linalg.qr(normal(TOKENS * DIM, RANK)).Q.mT.unflatten(-1, (TOKENS, DIM)))
    with pytest.raises(ShapeError, match=f"features: expected {TOKENS} tokens"):
        bound(torch.zeros(1, TOKENS + 1, DIM))
