"""A VAE in a probe: the dense truth about compressed and latent probes, and everything that takes a probe on them."""

import logging
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import pullback as pb
from helpers.families import images_for, model_of
from helpers.truth import truth_of
from helpers.vaes import tiny_vae
from helpers.vggt_models import scenes, tiny
from pullback.errors import DecoderError, ModelError, PullbackError, ShapeError
from pullback.geometry.scores import block_energies
from pullback.learning.bottleneck import LatentLayout
from pullback.learning.pretrained import Origin
from pullback.operators import JacobianOperator, differentiable_attention
from pullback.probes import INPUTS, ProbeMap

GRID = (2, 3)
POSTERIORS = ("power-spherical", "gaussian", "deterministic")


@pytest.fixture(scope="module")
def probe() -> ProbeMap:
    return pb.multi_layer_probe(model_of("depth-v2"), "depth-3x4")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return images_for("depth-v2", GRID)


@pytest.fixture(scope="module")
def views() -> ProbeMap:
    return pb.multi_layer_probe(tiny().requires_grad_(False), "depth-2x3")


@pytest.fixture(scope="module")
def two_views() -> Tensor:
    return scenes(1, 2, 3, 28, 42, seed=1)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def dense(probe: ProbeMap, images: Tensor) -> Tensor:
    """J [B, M, n] by its products."""
    return JacobianOperator(probe, probe.features(images)).dense()


def jacobian(function, x: Tensor) -> Tensor:
    """[B, M, n] by plain reverse mode, one sample at a time."""
    with differentiable_attention():
        return torch.stack([torch.func.jacrev(lambda s: function(s[None]).flatten())(one).flatten(1) for one in x])


CELLS = pytest.mark.parametrize("cells", [None, GRID, (3, 3)], ids=["no cells", "cells", "cells of another grid"])


@CELLS
@pytest.mark.parametrize("posterior", POSTERIORS)
def test_the_compressed_probe_is_the_decoder_of_the_reconstruction(probe, images, posterior, cells):
    vae = tiny_vae(probe, posterior=posterior, grid=cells)
    compressed, x = pb.compressed_probe(probe, vae), probe.features(images)
    layout = probe.token_layout(x)

    def composed(x: Tensor) -> Tensor:
        return probe.decoder.decode(vae.split(vae.reconstruct(x, layout)), layout)

    plain = x.as_subclass(Tensor)
    assert torch.equal(compressed.features(images), x)
    close(compressed(x), composed(plain))
    close(dense(compressed, images), jacobian(composed, plain))


@pytest.mark.parametrize("at", [0, 1, INPUTS])
def test_the_rank_is_never_above_the_size_of_the_latent(probe, images, at):
    vae = tiny_vae(probe, registers=2, latent=3, posterior="deterministic")
    there = replace(probe, at=at)
    before = torch.linalg.svdvals(dense(there, images))
    after = torch.linalg.svdvals(dense(pb.compressed_probe(there, vae), images))
    assert before.shape[-1] > vae.size and (before[:, vae.size] > 1e-6 * before[:, 0]).all()
    assert (after[:, vae.size - 1] > 1e-9 * after[:, 0]).all()
    assert (after[:, vae.size :] < 1e-12 * after[:, :1]).all()


@CELLS
def test_on_spheres_the_rank_is_one_lower_for_every_register(probe, images, cells):
    vae = tiny_vae(probe, registers=2, latent=3, grid=cells)
    for found in (pb.compressed_probe(probe, vae), pb.latent_probe(probe, vae)):
        after = torch.linalg.svdvals(dense(found, images))
        assert (after[:, 3] > 1e-9 * after[:, 0]).all() and (after[:, 4:] < 1e-12 * after[:, :1]).all()


@CELLS
@pytest.mark.parametrize("space", ["sphere", "ambient"])
def test_the_latent_probe_against_plain_reverse_mode(probe, images, space, cells):
    vae = tiny_vae(probe, grid=cells)
    latent, x = pb.latent_probe(probe, vae, space=space), probe.features(images)
    layout, z = probe.token_layout(x), latent.features(images)
    plain = z.as_subclass(Tensor)
    close(plain, vae.encode(x, layout))

    def composed(z: Tensor) -> Tensor:
        z = z / z.norm(dim=-1, keepdim=True) if space == "sphere" else z
        return probe.decoder.decode(vae.split(vae.decode(z, layout)), layout)

    close(latent(z), composed(plain))
    close(latent(z), pb.compressed_probe(probe, vae)(x))
    truth = jacobian(composed, plain)
    close(dense(latent, images), truth)
    cotangents = torch.randn(2, truth.shape[1], 3, dtype=z.dtype, generator=torch.Generator().manual_seed(0))
    close(JacobianOperator(latent, z).T @ cotangents, truth.mT @ cotangents)
    moved = latent(2.5 * z)
    assert torch.allclose(moved, latent(z)) == (space == "sphere"), "only directions along the spheres count there"


def test_on_the_sphere_the_ambient_jacobian_has_the_tangent_projector_behind_it(probe, images):
    vae = tiny_vae(probe)
    sphere, ambient = (dense(pb.latent_probe(probe, vae, space=space), images) for space in ("sphere", "ambient"))
    z = pb.latent_probe(probe, vae).features(images).as_subclass(Tensor)  # [B, R, d]
    for own, wide, registers in zip(sphere, ambient, z, strict=True):
        blocks = [torch.eye(4, dtype=z.dtype) - torch.outer(unit, unit) for unit in registers]
        close(own, wide @ torch.block_diag(*blocks))
        radial = torch.block_diag(*registers[:, :, None])  # one column for each register
        assert (own @ radial).abs().max() < 1e-12 * own.abs().max()
        assert (wide @ radial).abs().max() > 1e-3 * wide.abs().max()


@pytest.mark.parametrize("at", [1, INPUTS])
@pytest.mark.parametrize("space", ["sphere", "ambient"])
def test_the_compressed_jacobian_is_that_of_the_latent_times_that_of_the_encoder(probe, images, at, space):
    vae, there = tiny_vae(probe), replace(probe, at=at)
    encoder = pb.encoder_probe(there, vae)
    whole, inner = dense(pb.compressed_probe(there, vae), images), dense(encoder, images)
    close(whole, dense(pb.latent_probe(there, vae, space=space), images) @ inner)
    features = encoder.features(images)
    close(encoder(features), pb.latent_probe(there, vae).features(images).as_subclass(Tensor))


def test_layers_below_the_probe_are_held_in_the_bottleneck_too(probe, images):
    vae, there = tiny_vae(probe), replace(probe, at=1)
    compressed = pb.compressed_probe(there, vae)
    features = compressed.features(images)
    truth = truth_of(compressed, images).jacobian.flatten(2)
    close(JacobianOperator(compressed, features).dense(), truth)
    assert compressed.layer == 1 and compressed.by_hand


@pytest.mark.parametrize("space", ["sphere", "ambient"])
def test_views_of_a_scene_have_their_own_registers(views, two_views, space):
    vae = tiny_vae(views, registers=3, latent=2)
    compressed, latent = pb.compressed_probe(views, vae), pb.latent_probe(views, vae, space=space)
    z, x = latent.features(two_views), views.features(two_views)
    layout = latent.token_layout(z)
    assert isinstance(layout, LatentLayout) and (layout.tokens, layout.views, layout.prefix) == (6, 2, 0)
    assert layout.image == views.token_layout(x) and latent.backbone.views and latent.backbone.unit == "scenes"
    close(latent(z), compressed(x))
    whole = dense(compressed, two_views)
    close(whole, dense(latent, two_views) @ dense(pb.encoder_probe(views, vae), two_views))
    values = torch.linalg.svdvals(whole)
    assert (values[:, 6:] < 1e-12 * values[:, :1]).all(), "R (d - 1) for each view"
    alone = replace(layout.image, views=1)
    close(z.as_subclass(Tensor)[:, 3:], vae.encode(x.as_subclass(Tensor)[:, alone.tokens :], alone))


def test_a_single_register_keeps_the_layout_of_its_image(probe):
    square = images_for("depth-v2", (2, 2))
    latent = pb.latent_probe(probe, tiny_vae(probe, registers=1, latent=5))
    z = latent.features(square)
    assert latent.token_layout(z).image.grid == (2, 2) and latent(z[:1] + 0).shape == (1, 3, 4)
    with pytest.raises(ShapeError, match=r"features: expected what probe\.features\(images\) returned .* \[2, 1, 5\]"):
        latent(z.as_subclass(Tensor))


# What takes a probe


@pytest.fixture(scope="module", params=["compressed", "latent"])
def other(request, probe) -> ProbeMap:
    vae = tiny_vae(probe)
    return pb.compressed_probe(probe, vae) if request.param == "compressed" else pb.latent_probe(probe, vae)


def test_spectra_and_importances(other, images):
    truth = truth_of(other, images)
    found = pb.spectrum(other, images, rank=3)
    close(found.singular_values, truth.svd[0][:, :3], 1e-7)
    importance = pb.token_importance(found)
    assert importance.shape == (2, found.token_layout.tokens)
    close(importance, (truth.energies[:, :3, None] * truth.svd[1][:, :3].square().sum(-1)).sum(1).sqrt(), 1e-6)
    assert found.plot() is not None and "κ" in found._repr_html_()


def test_a_diagnosis(other, images):
    report = pb.diagnose(other, images, rank=(2, 3))
    close(
        torch.tensor([sample.kappa[3][0] for sample in report.samples]).double(), truth_of(other, images).kappa(3), 1e-6
    )
    assert report.plot() is not None and report._repr_html_()


@pytest.mark.parametrize("kappa", [0.5, 1.0])
@pytest.mark.parametrize("cv", [0.1, 2.0])
def test_the_advice_knows_that_there_is_a_bottleneck_and_what_registers_are(other, probe, images, kappa, cv):
    """Nobody is told to compress what is compressed, or to prune registers."""
    report = pb.diagnose(other, images, rank=2)
    samples = [
        replace(s, kappa={2: (kappa, 0)}, r_eff_slq=(2.0, 0), cv=(cv, 0), cv_patches=(cv, 0)) for s in report.samples
    ]
    advice = replace(report, samples=tuple(samples)).advice
    assert "compress the features first" not in advice
    assert ("bottleneck" in advice) == (kappa < 0.9 and (cv < 0.8 or other.layer == "latent"))
    if other.layer == "latent":
        assert "prune" not in advice and "importance head" not in advice and "per token" not in advice
    assert not pb.diagnose(probe, images, rank=2).bottleneck


def test_reprs_fit_on_a_line(probe, images):
    vae = tiny_vae(probe)
    compressed, latent = pb.compressed_probe(probe, vae), pb.latent_probe(probe, vae)
    size = f"{vae.config.registers} registers of {vae.config.latent}"
    for decoder in (compressed.decoder, latent.decoder):
        assert size in repr(decoder) and repr(compressed.decoder.name) in repr(decoder) and "0x" not in repr(decoder)
    assert f"{size} numbers, power-spherical, for layers {list(probe.layers)}" in repr(vae)
    found = repr(pb.agreement(probe, compressed, images, rank=2))
    assert f"{compressed.name} for {probe.name}, 2 images, rank 2, captured" in found and "tensor" not in found


@pytest.mark.parametrize("method", ["exact", "krylov", "paper"])
def test_targets(other, images, method):
    features, truth = other.features(images), truth_of(other, images)
    found = pb.targets_of(other, features, rank=3, method=method, keep_modes=True, num_probes=4, rtol=1e-8)
    if method != "paper":
        close(found.singular_values, truth.svd[0][:, :3], 1e-6)
    if method == "exact":
        close(found.block_energy.value, truth.jacobian.square().sum((1, 3)), 1e-7)
        rows, cols = truth.jacobian[0].flatten(1).shape
        assert (found.products.jvp, found.products.vjp) == ((cols, 0) if cols < rows else (0, rows))
    close(block_energies(JacobianOperator(other, features), features.shape[1]), truth.jacobian.square().sum((1, 3)))


def test_wide_outputs_take_products_along_the_registers(probe, images):
    latent = pb.latent_probe(
        replace(probe, decoder=pb.load_probe(model_of("depth-v2"), "depth", 0).decoder), tiny_vae(probe)
    )
    features = latent.features(images)
    found = pb.targets_of(latent, features, rank=2, method="exact")
    assert (found.products.jvp, found.products.vjp) == (8, 0)
    operator = JacobianOperator(latent, features)
    wide = operator.linearization.bytes_per_tangent
    inputs = pb.compressed_probe(probe, tiny_vae(probe)).features(images)
    assert wide >= 8 * (inputs.numel() + operator.output.numel()), "the decoder's inputs are what fills the memory"


# Who it is


def test_files_know_a_compressed_decoder_by_the_decoder_and_the_weights(probe):
    vae, again, larger = tiny_vae(probe), tiny_vae(probe), tiny_vae(probe, registers=3)
    known = [pb.compressed_probe(probe, one).identity["decoder_identity"] for one in (vae, again, larger)]
    assert known[0] == known[1] != known[2] and known[0].startswith(
        f"{probe.identity['decoder_identity']}, bottleneck 2x4"
    )
    with torch.no_grad():
        again.expand.bias[0] += 1
    assert pb.compressed_probe(probe, again).identity["decoder_identity"] != known[0]
    assert pb.latent_probe(probe, vae).identity == pb.compressed_probe(probe, vae).identity
    places = [pb.latent_probe(probe, vae, space=space).layer for space in ("sphere", "ambient")]
    assert places == ["latent", "latent-ambient"]
    assert pb.latent_probe(probe, vae).name.endswith("depth-3x4@2x4 latent")


def test_the_vae_of_the_caller_stays_where_and_as_it_is(probe, images):
    vae = tiny_vae(probe).float()
    compressed = pb.compressed_probe(probe, vae)
    assert compressed.decoder.vae.mean.dtype == torch.float64 and vae.mean.dtype == torch.float32
    same = tiny_vae(probe)
    assert pb.compressed_probe(probe, same).decoder.vae is same


# What does not fit


def test_a_vae_that_does_not_fit_is_refused(probe):
    """All that is compared is in the tests of `S2VAE.check`."""
    vae, small = tiny_vae(probe), pb.multi_layer_probe(model_of("dinov2"), "mean")
    with pytest.raises(
        ModelError,
        match=r"vae: expected one of the layers \[2\], which decoder 'mean' reads, got one of \[0, 1, 3, 4\]",
    ):
        pb.compressed_probe(small, vae)
    with pytest.raises(ModelError, match=r"vae: expected an S2VAE; .* got 'folder'"):
        pb.compressed_probe(probe, "folder")
    with pytest.raises(PullbackError, match=r"probe: expected a probe map, .* got 'depth'"):
        pb.latent_probe("depth", vae)


def test_decoders_of_the_class_token_and_second_bottlenecks_are_refused(probe):
    with pytest.raises(DecoderError, match=r"decoder: 'cls' reads the first 1 tokens alone, of which nothing passes"):
        pb.compressed_probe(pb.load_probe(model_of("dinov2"), "cls", 1), tiny_vae(probe))
    vae = tiny_vae(probe)
    for found in (pb.compressed_probe(probe, vae), pb.latent_probe(probe, vae)):
        with pytest.raises(DecoderError, match=r"decoder: expected one without a bottleneck, got 'depth-3x4@2x4'"):
            pb.compressed_probe(found, vae)


@pytest.mark.parametrize("posterior", ["gaussian", "deterministic"])
def test_without_spheres_there_is_only_the_ambient_latent(probe, images, posterior):
    vae = tiny_vae(probe, posterior=posterior)
    with pytest.raises(
        ModelError, match=rf"space: .* a {posterior} posterior and lie on no spheres, expected 'ambient'"
    ):
        pb.latent_probe(probe, vae)
    with pytest.raises(PullbackError, match=r"space: expected one of sphere, ambient, got 'ball'"):
        pb.latent_probe(probe, vae, space="ball")
    found = dense(pb.latent_probe(probe, vae, space="ambient"), images)
    close(dense(pb.compressed_probe(probe, vae), images), found @ dense(pb.encoder_probe(probe, vae), images))


def test_other_sizes_than_those_of_training_are_noticed_once(probe, images, caplog):
    vae = tiny_vae(probe, origin=Origin(resolutions=((28, 28), (28, 42))))
    square, larger = images_for("depth-v2", (2, 2)), images_for("depth-v2", (3, 4))
    for found in (pb.compressed_probe(probe, vae), pb.latent_probe(probe, vae)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for seen in (images, square):
                found(found.features(seen))
            assert not caplog.messages
            found(found.features(larger))
            found(found.features(larger))
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith(
            "vae: it was trained on images of 28x28 and 28x42 pixels, and sees 42x56:"
        )


def test_a_vae_of_no_task_is_not_put_before_a_decoder_that_also_reads_class_tokens():
    """Its decoder is free, and what it reads is not known from a name."""

    def everything(tokens: Tensor) -> Tensor:
        return tokens.mean(1)

    def patches(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].mean(1)

    model = deepcopy(model_of("dinov2"))
    for dtype in (torch.float64, torch.bfloat16):
        read, unread = (pb.multi_layer_probe(model.to(dtype), decoder) for decoder in (everything, patches))
        vae = tiny_vae(unread, origin=Origin(family="dinov2", resolutions=((28, 42),))).float()
        with pytest.raises(DecoderError, match=r"decoder: 'everything' reads class or register tokens"):
            pb.compressed_probe(read, vae)
        found = pb.compressed_probe(unread, vae)
        assert found(found.features(images_for("dinov2", GRID).to(dtype))).dtype == dtype
