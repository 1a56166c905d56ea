"""The S2-VAE: shapes, spheres, what passes and what does not, files."""

import dataclasses
import json

import pytest
import torch

from pullback.errors import DamagedModelError, ModelError, ShapeError
from pullback.learning.s2vae import MAX_CONCENTRATION, POSTERIORS, S2VAE, S2VAEConfig, cells_of
from pullback.tokens import Features, TokenLayout

LAYOUT = TokenLayout(1, (3, 4))
VIEWS = TokenLayout(2, (2, 3), views=2)


def made(**changes):
    torch.manual_seed(0)
    sizes = {"registers": 3, "latent": 5, "width": 16, "heads": 2, "blocks": 1} | changes
    return S2VAE(S2VAEConfig((6, 10), (2, 5), **sizes)).eval()


def features(layout=LAYOUT, batch=2, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, layout.tokens, 16, generator=generator, dtype=dtype)


@pytest.mark.parametrize("cells", [None, (3, 4), (5, 2)])
@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("layout", [LAYOUT, VIEWS], ids=["image", "views"])
def test_shapes(posterior, layout, cells):
    vae, x = made(posterior=posterior, prefix=layout.prefix, grid=cells), features(layout)
    z = vae.encode(x, layout)
    assert z.shape == (2, layout.views * 3, 5)
    assert vae.decode(z, layout).shape == x.shape
    assert vae.size == 15


@pytest.mark.parametrize("cells", [None, (3, 4)])
def test_every_register_lies_on_its_sphere(cells):
    z = made(grid=cells).start_from(features(batch=16), LAYOUT).encode(features(), LAYOUT)
    torch.testing.assert_close(z.norm(dim=-1), torch.ones(2, 3))


@pytest.mark.parametrize("cells", [None, (3, 4)])
def test_nothing_of_the_prefix_tokens_passes(cells):
    vae, x = made(grid=cells).start_from(features(batch=16), LAYOUT), features()
    changed = x.clone()
    changed[:, :1] += 100
    reconstruction = vae.reconstruct(x, LAYOUT)
    assert torch.equal(reconstruction, vae.reconstruct(changed, LAYOUT))
    assert not reconstruction[:, :1].any()
    assert reconstruction[:, 1:].abs().sum() > 0


@pytest.mark.parametrize("cells", [None, (2, 3)])
def test_each_view_is_encoded_on_its_own(cells):
    vae, x = made(prefix=2, grid=cells).start_from(features(VIEWS, batch=16), VIEWS), features(VIEWS)
    changed = x.clone()
    changed[:, VIEWS.tokens // 2 :] += 1
    z, moved = vae.encode(x, VIEWS), vae.encode(changed, VIEWS)
    torch.testing.assert_close(z[:, :3], moved[:, :3])
    assert (z[:, 3:] - moved[:, 3:]).abs().max() > 1e-3
    one = TokenLayout(2, (2, 3))
    torch.testing.assert_close(vae.encode(x[:, : one.tokens], one), z[:, :3])


def test_images_of_a_batch_do_not_mix():
    vae, x = made(), features(batch=3)
    torch.testing.assert_close(vae.reconstruct(x, LAYOUT)[1:2], vae.reconstruct(x[1:2], LAYOUT))


def test_a_sample_is_drawn_in_training_and_the_location_taken_otherwise():
    vae, x = made(), Features.attach(features(), LAYOUT, {})
    assert torch.equal(vae(x).latent, vae.encode(x, LAYOUT))
    vae.train()
    torch.manual_seed(0)
    first, second = vae(x).latent, vae(x).latent
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(2, 3))


def test_channels_are_standardised_and_come_back_at_their_own_scale():
    vae = made()
    x = features(batch=64) * torch.logspace(-1, 1, 16) + 7
    x[..., 3] = 7  # a channel that does not vary
    vae.start_from(x, LAYOUT)
    inside = (x[:, 1:] - vae.mean) / vae.spread
    torch.testing.assert_close(inside.mean((0, 1)), torch.zeros(16), atol=1e-4, rtol=0)
    spread = inside.std((0, 1))
    torch.testing.assert_close(spread[spread > 0.5], torch.ones(15), atol=0.02, rtol=0)
    assert spread[3] < 1e-4
    torch.nn.init.zeros_(vae.outward.weight)
    torch.nn.init.zeros_(vae.outward.bias)
    torch.testing.assert_close(vae.reconstruct(x, LAYOUT)[0, 1], vae.mean)


def test_channels_count_alike_whatever_their_unit():
    x, unit = features(dtype=torch.float64), torch.logspace(-1, 1, 16, dtype=torch.float64)
    one, other = made().double().start_from(x, LAYOUT), made().double().start_from(unit * x + 3, LAYOUT)
    torch.testing.assert_close(other.encode(unit * x + 3, LAYOUT), one.encode(x, LAYOUT))
    restored = one.reconstruct(x, LAYOUT)[:, 1:]
    torch.testing.assert_close(other.reconstruct(unit * x + 3, LAYOUT)[:, 1:], unit * restored + 3)


def test_patches_are_known_by_their_place():
    vae, x = made(), features()
    turned = torch.cat([x[:, :1], x[:, 1:].flip(1)], 1)
    assert not torch.allclose(vae.encode(turned, LAYOUT), vae.encode(x, LAYOUT), atol=1e-3)
    patches = vae.decode(vae.encode(x, LAYOUT), LAYOUT)[:, 1:]
    apart = (patches[:, :, None] - patches[:, None]).norm(dim=-1) + 99 * torch.eye(12)
    assert (apart > 1e-3).all(), "no two places look alike"


def test_places_are_rows_and_columns_as_shares_of_the_image():
    vae = made()
    places = vae._positions(TokenLayout(1, (3, 5))).unflatten(0, (3, 5))
    rows, columns = places.split(8, -1)
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows))
    torch.testing.assert_close(columns, columns[:1].expand_as(columns))
    assert not torch.allclose(rows[0], rows[1]) and not torch.allclose(columns[:, 0], columns[:, 1])
    torch.testing.assert_close(places[1, 2], vae._positions(TokenLayout(1, (1, 1)))[0], rtol=0, atol=1e-5)
    finer = vae._positions(TokenLayout(1, (9, 15))).unflatten(0, (9, 15))
    torch.testing.assert_close(finer[1::3, 1::3], places, rtol=0, atol=1e-4)


def test_concentrations_never_pass_their_limit():
    vae = made()
    with torch.no_grad():
        vae.precision.bias.fill_(1e4)
    concentration = vae.posterior(features(), LAYOUT).concentration
    assert concentration.isfinite().all() and (concentration <= MAX_CONCENTRATION * (1 + 1e-6)).all()
    assert vae.divergence(vae.posterior(features(), LAYOUT)).isfinite().all()


def test_the_divergence_of_a_gaussian_is_the_textbook_one():
    vae = made(posterior="gaussian")
    posterior = vae.posterior(features(), LAYOUT)
    mean, deviation = posterior.mean, posterior.stddev
    expected = 0.5 * (mean.square() + deviation.square() - 1 - 2 * deviation.log()).sum(-1)
    torch.testing.assert_close(vae.divergence(posterior), expected)
    assert made(posterior="deterministic").divergence(None) is None


@pytest.mark.parametrize("cells", [None, (3, 4)])
@pytest.mark.parametrize("posterior", POSTERIORS)
def test_a_folder_holds_it(tmp_path, posterior, cells):
    vae, x = made(posterior=posterior, grid=cells), features()
    vae.start_from(x, LAYOUT)
    again = S2VAE.from_pretrained(vae.save_pretrained(tmp_path / "vae"))
    assert again.config == vae.config
    assert torch.equal(again.reconstruct(x, LAYOUT), vae.reconstruct(x, LAYOUT))


@pytest.mark.parametrize(("name", "value"), [("dims", ["a", "b"]), ("scores", "ab"), ("origin", 3), ("latent", "5")])
def test_a_damaged_config_is_named(tmp_path, name, value):
    folder = made().save_pretrained(tmp_path / "vae")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {name: value}))
    with pytest.raises(DamagedModelError, match=r"name: config\.json in .*vae is not one of s2vae: .* Save it again"):
        S2VAE.from_pretrained(folder)


# ---- registers that have a cell each


@pytest.mark.parametrize(
    ("registers", "grid"), [(32, (16, 16)), (32, (14, 14)), (6, (5, 7)), (7, (3, 4)), (64, (2, 2))]
)
def test_every_patch_belongs_to_one_cell(registers, grid):
    index, count = cells_of(registers, grid), grid[0] * grid[1]
    assert len(index) == registers
    assert index[index < count].sort().values.tolist() == list(range(count))
    assert (index <= count).all()


@pytest.mark.parametrize(
    ("registers", "grid"), [(32, (16, 16)), (32, (14, 14)), (8, (4, 2)), (6, (3, 8)), (64, (8, 8))]
)
def test_no_register_is_without_a_patch_where_there_are_factors(registers, grid):
    assert (cells_of(registers, grid) < grid[0] * grid[1]).any(1).all()


def test_cells_are_compact_and_alike():
    for cell in cells_of(32, (16, 16)):
        rows, columns = cell // 16, cell % 16
        assert len(cell) == 8 and rows.max() - rows.min() == 3 and columns.max() - columns.min() == 1


QUARTERS = TokenLayout(1, (4, 4))


def with_quarters(posterior: str = "deterministic") -> S2VAE:
    """A network with 4 registers of 5 numbers, each of which has 4 patches of its own."""
    return made(registers=4, posterior=posterior, grid=(4, 4)).double()


def one_component(batch: int) -> torch.Tensor:
    """Features whose patches vary in one direction alone."""
    generator = torch.Generator().manual_seed(3)
    strength = torch.randn(batch, QUARTERS.tokens, 1, generator=generator, dtype=torch.float64)
    return strength * torch.linspace(1, 2, 16, dtype=torch.float64)


@torch.no_grad()
def lost(vae: S2VAE, x: torch.Tensor, layout: TokenLayout = QUARTERS) -> torch.Tensor:
    """The share of the variance of x that does not come back."""
    return ((vae.reconstruct(x, layout) - x)[:, 1:] / vae.spread).square().mean()


@pytest.mark.parametrize("posterior", ["gaussian", "deterministic"])
def test_cells_start_at_the_principal_components(posterior):
    vae = with_quarters(posterior).start_from(one_component(64), QUARTERS)
    assert lost(vae, one_component(8)) < 1e-6  # 4 patches of one number each fit in 5 numbers


def test_cells_lose_what_principal_components_of_a_cell_lose():
    x = features(QUARTERS, batch=64, dtype=torch.float64) @ torch.randn(16, 16, dtype=torch.float64)
    vae = with_quarters().start_from(x, QUARTERS)
    inside = ((x[:, 1:] - vae.mean) / vae.spread)[:, cells_of(4, (4, 4))].flatten(2).flatten(0, 1)  # [256, 4 * 16]
    total = inside.square().sum()
    around_zero, around_mean = (
        torch.linalg.svdvals(own)[5:].square().sum() / total for own in (inside, inside - inside.mean(0))
    )
    assert 0.1 < around_mean < around_zero < 0.9
    assert around_mean <= lost(vae, x) <= around_zero * (1 + 1e-4)  # the way back has a bias


def test_on_a_sphere_the_length_of_a_cell_is_kept_too():
    x = one_component(64)
    vae = with_quarters("power-spherical").start_from(x, QUARTERS)
    z = vae.encode(torch.cat([x[:8], 2 * x[:8]]), QUARTERS)
    assert (z[8:, :, -1] < z[:8, :, -1]).all(), "a longer cell leaves less for the constant"
    assert lost(vae, x) < 0.1  # the fit is linear, and the sphere is not


def test_a_metric_decides_which_components_are_kept():
    x, costly = features(QUARTERS, batch=256, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    costly[3] = 1e4
    errors = []
    for metric in (None, torch.diag(costly)):
        vae = with_quarters().start_from(x, QUARTERS, metric)
        errors.append((vae.reconstruct(x, QUARTERS) - x)[:, 1:, 3].square().mean() / x[:, 1:, 3].var())
    assert errors[0] > 0.5 and errors[1] < 1e-3  # 4 patches of one channel fit in 5 numbers


def test_cells_give_back_images_of_other_sizes():
    def pictures(side: int) -> torch.Tensor:
        slope = (torch.arange(side, dtype=torch.float64) + 0.5) / side - 0.5
        maps = (slope[:, None] + 2 * slope).flatten()[None, :, None] * torch.linspace(-1, 1, 64)[:, None, None]
        return torch.nn.functional.pad(maps * torch.linspace(1, 2, 16, dtype=torch.float64), (0, 0, 1, 0))

    vae = with_quarters().start_from(pictures(4), QUARTERS)
    assert lost(vae, pictures(4)) < 1e-6
    assert lost(vae, pictures(8), TokenLayout(1, (8, 8))) < 0.05


def test_few_samples_give_the_components_that_they_have():
    """More numbers in a cell than cells: the smaller moments, and no direction out of round-off."""
    x = features(QUARTERS, batch=3, dtype=torch.float64)  # 12 cells of 64 numbers
    vae = made(registers=4, latent=30, posterior="deterministic", grid=(4, 4)).double().start_from(x, QUARTERS)
    assert lost(vae, x) < 1e-3
    assert (vae.fold.weight[12:] == 0).all()


def test_a_channel_that_hardly_varies_is_not_worth_a_component():
    x = features(QUARTERS, batch=64, dtype=torch.float64)
    x[..., 4:] = 1e-4 * x[..., 4:5]
    vae = with_quarters().start_from(x, QUARTERS, 1e-9 * torch.eye(16, dtype=torch.float64))
    loud = made(registers=4, posterior="deterministic", grid=(4, 4)).double().start_from(x, QUARTERS)
    torch.testing.assert_close(lost(vae, x), lost(loud, x), rtol=1e-3, atol=0)


def test_features_that_do_not_vary_come_back():
    vae = with_quarters("power-spherical").start_from(torch.ones(8, 17, 16, dtype=torch.float64), QUARTERS)
    assert vae.reconstruct(features(QUARTERS, dtype=torch.float64), QUARTERS).isfinite().all()
    torch.testing.assert_close(
        vae.reconstruct(torch.ones(1, 17, 16).double(), QUARTERS)[:, 1:], torch.ones(1, 16, 16).double()
    )


def test_a_start_from_nan_is_refused():
    with pytest.raises(ShapeError, match="x: expected finite features to start from, got NaN"):
        with_quarters().start_from(torch.full((8, 17, 16), float("nan"), dtype=torch.float64), QUARTERS)


def test_what_the_cells_know_is_not_trained():
    vae = made(grid=(3, 4))
    frozen = {name.partition(".")[0] for name, value in vae.named_parameters() if not value.requires_grad}
    assert frozen == {"inward", "outward", "fold", "unfold"}


def test_layers_are_split_as_they_were_joined():
    x = features()
    assert [part.shape[-1] for part in made().split(x)] == [6, 10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"registers": 0}, "registers: expected"),
        ({"latent": 1}, "latent: expected at least 2"),
        ({"width": 18}, "width, heads: expected width to be a multiple"),
        ({"posterior": "uniform"}, "posterior: expected one of power-spherical"),
        ({"dims": (6,)}, "dims: expected one width for each"),
        ({"dims": (6, 0)}, "dims: expected a whole number of at least 1, got 0"),
        ({"layers": (2, "5")}, "layers: expected a whole number of at least 0, got '5'"),
        ({"grid": (3, 0)}, "grid: expected a whole number of at least 1, got 0"),
        ({"grid": (3,)}, r"grid: expected rows and columns of patches, or None, got \(3,\)"),
        ({"grid": 3}, "grid: expected rows and columns of patches, or None, got 3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(made().config, **changes)


def test_features_and_latents_of_another_size_are_refused():
    vae = made()
    with pytest.raises(ShapeError, match=r"x: expected \[B, 13, 16\], the layers \[2, 5\] side by side"):
        vae.encode(features()[..., :6], LAYOUT)
    with pytest.raises(ShapeError, match=r"z: expected \[B, 3, 5\], 3 registers for each of 1 views"):
        vae.decode(torch.zeros(2, 4, 5), LAYOUT)
