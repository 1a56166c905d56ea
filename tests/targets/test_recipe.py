"""Targets of a batch of features against the dense Jacobian."""

import pytest
import torch

import pullback as pb
from helpers.truth import FunctionProbe, normal, random_images, seeded, truth_of, with_singular_values
from pullback.errors import DecoderError, ImageError, NumericsError, PullbackError, RankError
from pullback.randnla import modes
from pullback.targets.recipe import targets_of

RANK = 4


@pytest.fixture(scope="module")
def probe():
    return seeded("cls", 1)


@pytest.fixture(scope="module")
def features(probe):
    return probe.features(random_images(3))


@pytest.fixture(scope="module")
def truth(probe):
    return truth_of(probe, random_images(3))


def importance(truth, rank: int = RANK):
    values, right = truth.svd
    return (values[:, :rank, None, None] * right[:, :rank]).square().sum((1, 3)).sqrt()


def block_energy(truth):
    return truth.jacobian.square().sum((1, 3))


def test_exact_targets_are_the_definitions(probe, features, truth):
    found = targets_of(probe, features, RANK, "exact")
    torch.testing.assert_close(found.singular_values, truth.svd[0][:, :RANK])
    torch.testing.assert_close(found.importance, importance(truth))
    torch.testing.assert_close(found.block_energy.value, block_energy(truth))
    torch.testing.assert_close(found.total.value, truth.energies.sum(1))
    torch.testing.assert_close(found.kappa.value, truth.kappa(RANK))
    assert (found.block_energy.relative_se < 1.1e-6).all()
    assert (found.products.vjp, found.products.jvp) == (64, 0), "one dense Jacobian, formed once"
    assert found.method == "exact" and found.modes is None and len(found) == 3


def test_krylov_targets_are_as_accurate_as_they_say(probe, features, truth):
    found = targets_of(probe, features, RANK, "krylov")
    torch.testing.assert_close(found.singular_values, truth.svd[0][:, :RANK], rtol=1e-3, atol=0)
    missed = (found.importance - importance(truth)).norm(dim=1) / importance(truth).norm(dim=1)
    assert (missed < 2e-3).all()
    far = (found.block_energy.value - block_energy(truth)).abs() / found.block_energy.se
    assert (far <= 2).double().mean() >= 0.9
    assert ((found.kappa.value - truth.kappa(RANK)).abs() <= 3 * found.kappa.se).all()
    assert ((found.total.value - truth.energies.sum(1)).abs() <= 3 * found.total.se).all()
    torch.testing.assert_close(found.total.value, found.block_energy.value.sum(1))


def test_a_smaller_tolerance_gives_more_accurate_importance(probe, features, truth):
    rough, fine = (targets_of(probe, features, RANK, "krylov", rtol=rtol) for rtol in (1e-1, 1e-6))
    error = [(found.importance - importance(truth)).norm() / importance(truth).norm() for found in (rough, fine)]
    assert error[1] < 1e-4 < error[0] and fine.products.total > rough.products.total


def test_the_papers_algorithm_is_there_and_errs_low(probe, features, truth):
    found = targets_of(probe, features, RANK, "paper")
    assert found.method == "paper"
    assert (found.singular_values.square().sum(1) < truth.energies[:, :RANK].sum(1)).all()
    far = (found.block_energy.value - block_energy(truth)).abs() / found.block_energy.se
    assert (far <= 2).double().mean() >= 0.9, "its block norms are unbiased all the same"


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_modes_are_kept_on_request(probe, features, method):
    found = targets_of(probe, features, RANK, method, keep_modes=True)
    again = pb.LowRankMetric(found.modes, found.singular_values.square()).importance()
    torch.testing.assert_close(again, found.importance)
    assert found.modes.shape == (3, RANK, 17, 64)


def test_a_decoder_that_reads_lower_layers_keeps_them_in_every_batch():
    probe = seeded("depth-4x4", 3)
    images = random_images(3)
    found = targets_of(probe, probe.features(images), RANK, batch_size=2)
    torch.testing.assert_close(found.block_energy.value, block_energy(truth_of(probe, images)))


@pytest.mark.parametrize("method", ["exact", "krylov", "paper"])
def test_a_samples_targets_do_not_depend_on_its_batch(probe, features, method):
    together, alone = (targets_of(probe, features, RANK, method, seed=3, batch_size=size) for size in (3, 1))
    seeds = [11, 12, 13]
    turned = targets_of(probe, features.flip(0), RANK, method, seeds=seeds[::-1])
    straight = targets_of(probe, features, RANK, method, seeds=seeds, batch_size=2)
    for first, second in ((together, alone), (straight, turned)):
        order = slice(None) if second is alone else [2, 1, 0]
        torch.testing.assert_close(first.importance, second.importance[order], rtol=1e-6, atol=0)
        torch.testing.assert_close(first.block_energy.value, second.block_energy.value[order], rtol=1e-6, atol=0)
        torch.testing.assert_close(first.kappa.se, second.kappa.se[order], rtol=1e-5, atol=0)


def test_out_of_memory_halves_the_batch_and_changes_nothing(probe, features, monkeypatch):
    expected = targets_of(probe, features, RANK, "krylov", batch_size=3)
    sizes: list[int] = []
    krylov = modes.output_krylov

    def tight(op, *args, **options):
        sizes.append(op.batch)
        if op.batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return krylov(op, *args, **options)

    monkeypatch.setattr(modes, "output_krylov", tight)
    found = targets_of(probe, features, RANK, "krylov", batch_size=3)
    assert sizes == [3, 1, 1, 1]
    torch.testing.assert_close(found.block_energy.value, expected.block_energy.value, rtol=1e-6, atol=0)


def test_auto_uses_its_choice():
    few = targets_of(seeded("depth-4x4", 4), seeded("depth-4x4", 4).features(random_images(1)), RANK)
    assert few.method == "exact" and few.products.vjp == 16
    many = targets_of(with_singular_values([0.9**j for j in range(300)], 30, 10, 300), normal(1, 30, 10), 2)
    assert many.method == "krylov" and many.products.total < 300


def test_bad_arguments_are_named(probe, features):
    with pytest.raises(ImageError, match="features: expected at least one sample, got an empty batch"):
        targets_of(probe, features[:0], RANK)
    with pytest.raises(PullbackError, match="method: expected one of auto, krylov, paper, exact, got 'svd'"):
        targets_of(probe, features, RANK, "svd")
    with pytest.raises(PullbackError, match="seeds: expected one per sample, 3, got 2"):
        targets_of(probe, features, RANK, seeds=[1, 2])
    with pytest.raises(PullbackError, match="batch_size: expected at least 1"):
        targets_of(probe, features, RANK, batch_size=0)
    with pytest.raises(RankError, match=r"expected 1 <= rank <= 64, .* got 65"):
        targets_of(probe, features, 65, "exact")


def test_broken_derivatives_are_named():
    """The same messages as everywhere: a NaN derivative, and a decoder that is cut off."""
    broken = FunctionProbe(lambda x: (x[:, 0] * 0).sqrt() + x[:, 1])
    for method in ("exact", "krylov", "paper"):
        with pytest.raises(NumericsError, match="J: its products hold NaN or infinity"):
            targets_of(broken, torch.ones(2, 4, 5, dtype=torch.float64), 2, method)
    with pytest.raises(DecoderError, match=r"zero Jacobian, samples \[0, 1\]"):
        targets_of(FunctionProbe(lambda x: x[:, 0] * 0), normal(2, 4, 5), 2, batch_size=2)
