"""The same numbers on a GPU, with the awkward spectra: repeated values, zeros, and columns that are done early."""

import pytest
import torch

from helpers.spectra import exponential, matrix, nearly_flat, power_law, rank_bounded
from pullback.operators import DenseOperator
from pullback.randnla import Streams, effective_rank_from_spectrum, sketch

SPECTRA = [power_law(60, 1.0), exponential(60, 5.0), nearly_flat(60), torch.ones(60).double(), rank_bounded(60, 12)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["krylov", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_gpu_finds_the_known_spectra(method, dtype):
    op = DenseOperator(torch.stack([matrix(sigma, 60, 300) for sigma in SPECTRA]).to("cuda", dtype))
    result = sketch(op, 8, method=method, streams=Streams.from_seed(0, op.batch, "cuda"))
    sigma = torch.stack(SPECTRA).cuda()
    energies = sigma.square()
    total = energies.sum(-1)
    assert result.right.device == op.device
    assert ((result.total.value - total).abs() <= 4 * result.total.se).all()
    assert ((result.kappa.value - energies[:, :8].cumsum(-1) / total[:, None]).abs() <= 4 * result.kappa.se).all()
    truth = effective_rank_from_spectrum(sigma)
    assert ((result.effective_rank.value - truth).abs() <= 4 * result.effective_rank.se).all()
