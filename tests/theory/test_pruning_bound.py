"""Theorem 4: what pruning tokens can do to the output, to second order."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

import pullback as pb
from helpers.families import seeded_vit
from helpers.known_jacobians import normal
from pullback.operators import JacobianOperator

TOKENS, WIDTH, OUTPUTS = 6, 4, 5
SIZE = TOKENS * WIDTH


class QuadraticDecoder:
    """phi(x)_m = a_m x + x^T H_m x / 2, with |R_2| <= beta |d|^2 / 2 for beta^2 = sum_m |H_m|_op^2."""

    def __init__(self, outputs: int = OUTPUTS, seed: int = 0) -> None:
        self.linear = normal(outputs, SIZE, seed=seed)
        raw = normal(outputs, SIZE, SIZE, seed=seed + 1)
        self.hessians = raw + raw.mT
        self.beta = torch.linalg.matrix_norm(self.hessians, 2).square().sum().sqrt()

    def __call__(self, features: Tensor) -> Tensor:
        x = features.flatten(1)
        return x @ self.linear.T + 0.5 * torch.einsum("bi,mij,bj->bm", x, self.hessians, x)


class SineDecoder:
    """phi(x) = sin(W x): |sin''| <= 1, so |R_2| <= |W d|^2 / 2 and beta = |W|_op^2."""

    def __init__(self, seed: int = 0) -> None:
        self.weight = normal(OUTPUTS, SIZE, seed=seed)
        self.beta = torch.linalg.matrix_norm(self.weight, 2).square()

    def __call__(self, features: Tensor) -> Tensor:
        return torch.sin(features.flatten(1) @ self.weight.T)


def block_norms(decoder, features: Tensor) -> Tensor:
    """|J_:,t|_F [N] at features [N, D]."""
    dense = JacobianOperator(decoder, features[None]).dense()[0]
    return dense.unflatten(1, (TOKENS, WIDTH)).square().sum((0, 2)).sqrt()


def bound(decoder, corrected: Tensor, residuals: Tensor) -> Tensor:
    """Right-hand side for residuals rho [N, D], zero at kept tokens, at the LLF-corrected features F_hat [N, D]."""
    lengths = residuals.norm(dim=1)
    return block_norms(decoder, corrected) @ lengths + 0.5 * decoder.beta * lengths.square().sum()


def error(decoder, last: Tensor, corrected: Tensor) -> Tensor:
    return (decoder(last[None]) - decoder(corrected[None])).norm()


@pytest.mark.parametrize("decoder", [QuadraticDecoder(), SineDecoder()], ids=["quadratic", "sine"])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 3.0])
@pytest.mark.parametrize("pruned", [1, 3, TOKENS])
def test_the_bound_holds_when_kept_tokens_are_unchanged(decoder, scale, pruned):
    for seed in range(20):
        last, residuals = normal(TOKENS, WIDTH, seed=seed), scale * normal(TOKENS, WIDTH, seed=seed + 100)
        residuals[pruned:] = 0
        corrected = last - residuals  # F_hat = F^l + Delta, and rho = F^L - F_hat
        assert error(decoder, last, corrected) <= bound(decoder, corrected, residuals)


def test_the_bound_is_reached():
    """One output, one pruned token, its drift and its Jacobian along the Hessian's top eigenvector."""
    decoder = QuadraticDecoder(outputs=1)
    hessian = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    block = normal(WIDTH, WIDTH, seed=9)
    hessian[:WIDTH, :WIDTH] = block @ block.T
    values, vectors = torch.linalg.eigh(block @ block.T)
    decoder.hessians, decoder.beta = hessian[None], values[-1]
    decoder.linear = torch.zeros(1, SIZE, dtype=torch.float64)
    decoder.linear[0, :WIDTH] = vectors[:, -1]
    corrected = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    residuals = corrected.clone()
    residuals[0] = 0.7 * vectors[:, -1]
    limit = bound(decoder, corrected, residuals)
    torch.testing.assert_close(error(decoder, corrected + residuals, corrected), limit, rtol=1e-12, atol=0)


def test_the_second_order_term_is_needed():
    """At a point where J vanishes the first-order term alone would promise no error at all."""
    decoder = QuadraticDecoder()
    decoder.linear = torch.zeros_like(decoder.linear)
    origin = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    residuals = normal(TOKENS, WIDTH, seed=3)
    first_order = block_norms(decoder, origin) @ residuals.norm(dim=1)
    assert first_order == 0
    assert 0 < error(decoder, residuals, origin) <= bound(decoder, origin, residuals)


def test_with_equal_residuals_the_lowest_block_norms_minimise_the_bound():
    """Corollary `cor:opt_prune`, against every set of that size."""
    decoder, corrected = QuadraticDecoder(), normal(TOKENS, WIDTH, seed=4)
    norms = block_norms(decoder, corrected)
    lowest = set(norms.argsort()[:3].tolist())

    def limit(pruned: tuple[int, ...]) -> float:
        residuals = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
        residuals[list(pruned), 0] = 0.5
        return bound(decoder, corrected, residuals).item()

    assert set(min(combinations(range(TOKENS), 3), key=limit)) == lowest


def test_the_premise_fails_in_a_transformer_kept_tokens_do_change():
    """The proof takes kept tokens as unchanged. They attended to the pruned ones, so they are not, and the bound then
    says nothing: with a perfect correction of the pruned tokens it would promise zero error."""
    probe = pb.load_probe(seeded_vit(), decoder="mean", layer=2)
    backbone = probe.backbone
    start = probe.features(normal(1, 3, 56, 56, seed=0))
    layout = probe.token_layout(start)

    def run(tokens: Tensor) -> Tensor:
        for block in backbone.blocks[3:]:
            tokens = block(tokens, backbone.rope(layout), None)
        return tokens

    last = run(start)
    kept = torch.tensor([0, *range(1, layout.tokens, 2)])
    corrected = last.clone()  # rho_t = 0 for every pruned token
    corrected[:, kept] = run(start[:, kept])
    drift = (corrected - last)[0].norm(dim=1) / last[0].norm(dim=1)
    assert drift[kept].min() > 1e-3
    change = (backbone.norm(last) - backbone.norm(corrected)).norm()
    assert change > 1e-2, "while sum_t |J_:,t| |rho_t| + beta/2 sum_t |rho_t|^2 over pruned tokens is zero"
