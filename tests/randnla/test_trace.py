import torch

from helpers.spectra import copies, matrix, power_law
from pullback.operators import ProductCount
from pullback.randnla import Streams, block_krylov, deflated_hutchinson, hutchinson

SIGMA = power_law(80, 1.5)
TRUTH = SIGMA.square().sum()


def repetitions(count=100):
    return copies(matrix(SIGMA, 80, 300), count), Streams.from_seed(0, count, "cpu")


def test_hutchinson_is_unbiased_and_knows_its_error():
    op, streams = repetitions()
    total = hutchinson(op, num_probes=50, streams=streams)
    assert (total.value.mean() - TRUTH).abs() < 3 * total.value.std() / 10
    assert ((total.value - TRUTH).abs() <= 2 * total.se).double().mean() >= 0.9
    assert op.products == ProductCount(jvp=50)


def test_deflation_lowers_the_noise_and_leaves_the_estimate_unbiased():
    op, streams = repetitions()
    plain = hutchinson(op, num_probes=30, streams=streams)
    svd = block_krylov(op, 10, depth=3, streams=streams)
    spent = op.products
    deflated = deflated_hutchinson(op, svd.basis, svd.image, num_probes=30, streams=streams)
    assert op.products - spent == ProductCount(jvp=30)
    assert deflated.value.std() < plain.value.std() / 5
    assert (deflated.value.mean() - TRUTH).abs() < 3 * deflated.value.std() / 10


def test_rtol_draws_probes_until_every_sample_is_that_accurate():
    op, streams = repetitions(5)
    svd = block_krylov(op, 4, depth=2, streams=streams)
    rough = deflated_hutchinson(op, svd.basis, svd.image, num_probes=8, streams=streams)
    accurate = deflated_hutchinson(op, svd.basis, svd.image, num_probes=8, rtol=0.01, streams=streams)
    assert (rough.relative_se > 0.01).any() and (accurate.relative_se <= 0.01).all()
    stopped = deflated_hutchinson(op, svd.basis, svd.image, num_probes=8, rtol=1e-5, max_probes=20, streams=streams)
    assert (stopped.relative_se > 1e-5).all()


def test_single_precision_agrees_with_the_truth():
    dense = matrix(SIGMA, 80, 300).float()
    op, streams = copies(dense, 3), Streams.from_seed(0, 3, "cpu")
    svd = block_krylov(op, 10, streams=streams)
    total = deflated_hutchinson(op, svd.basis, svd.image, streams=streams)
    assert ((total.value - TRUTH).abs() < 4 * total.se).all() and torch.isfinite(total.se).all()
