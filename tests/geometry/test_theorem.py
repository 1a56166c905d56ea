"""The pruning theorem on real decoders of small models: every term against the dense Jacobian and its definition."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from pullback.errors import PullbackError, ShapeError
from pullback.geometry.theorem import MOVED, SEGMENT, PruningBound, first_order_term, pruning_bound
from pullback.operators import differentiable_attention
from pullback.probes import Features, ProbeMap

GRID, KEPT = (2, 3), [0, 2, 4, 5]  # of 7 tokens, the class token first
STAGE = 0


def run(probe: ProbeMap, seed: int = 0, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """F^L, what pruning to KEPT after block STAGE makes of it (removed tokens frozen), and the removed mask."""
    backbone = probe.backbone
    full = probe.features(images_for("depth-v2", GRID, batch=batch, seed=seed))
    start = backbone.features(images_for("depth-v2", GRID, batch=batch, seed=seed), [STAGE])[STAGE]
    pruned = start.clone()
    pruned[:, KEPT] = backbone.run(start[:, KEPT], STAGE + 1, backbone.depth)
    removed = torch.ones(batch, full.shape[1], dtype=torch.bool)
    removed[:, KEPT] = False
    return full, pruned, removed


def dense_block_norms(function: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """|J_:,t|_F [N] at tokens [1, N, D]."""
    with differentiable_attention():
        jacobian = torch.func.jacrev(function)(tokens)
    return jacobian.reshape(-1, *tokens.shape[1:]).square().sum((0, 2)).sqrt()


def dense_product(function: Callable[[Tensor], Tensor], tokens: Tensor, direction: Tensor) -> Tensor:
    with differentiable_attention():
        return torch.func.jvp(function, (tokens,), (direction,))[1].flatten()


def close(found: Tensor, expected: Tensor, rtol: float = 1e-8) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("decoder", ["depth-3x4", "mean", "cls"])
def test_every_term_is_what_its_name_says(decoder):
    probe = pb.load_probe(model_of("depth-v2"), decoder, 4)
    full, pruned, removed = run(probe)
    found = pruning_bound(probe, full, pruned, removed)
    for i in range(2):
        phi, reached = probe.bind(full[i : i + 1]), pruned[i : i + 1]
        last = full[i : i + 1].as_subclass(Tensor)
        rho = last - reached
        lengths, gone = rho[0].norm(dim=1), removed[i]
        blocks = dense_block_norms(phi, reached)
        linear = dense_product(phi, reached, rho)
        change = (phi(last) - phi(reached)).flatten()
        remainder = (change - linear).norm()
        beta = 2 * remainder / lengths.square().sum()
        close(found.block_norms[i], blocks)
        close(found.residuals[i], lengths)
        close(found.true_error[i], change.norm())
        close(found.linear_change[i], linear.norm())
        close(found.remainder[i], remainder)
        close(found.beta[i], beta)
        close(found.first_term[i], (blocks[gone] * lengths[gone]).sum())
        close(found.second_term[i], beta / 2 * lengths[gone].square().sum())
        close(found.stated[i], found.first_term[i] + found.second_term[i])
        close(found.corrected_first_term[i], blocks @ lengths)
        close(found.corrected_second_term[i], beta / 2 * lengths.square().sum())
        close(found.corrected[i], blocks @ lengths + remainder)
        close(found.kept_energy[i], lengths[KEPT].square().sum() / lengths.square().sum())
        relative = lengths / last[0].norm(dim=1)
        close(found.kept_moved[i], (relative[KEPT] > MOVED).double().mean())
        close(found.kept_residual[i], relative[KEPT].mean())
        close(found.removed_residual[i], relative[gone].mean())
        half = (phi(reached + 0.5 * rho) - phi(reached)).flatten() - 0.5 * linear
        close(found.remainders[i, SEGMENT.index(0.5)], half.norm())
        only_removed = last.clone()
        only_removed[:, gone] = reached[:, gone]
        close(found.removed_error[i], (phi(last) - phi(only_removed)).norm())


def test_the_premise_about_kept_tokens_fails_on_a_real_run_and_the_corrected_bound_holds():
    probe = pb.load_probe(model_of("depth-v2"), "depth-3x4", 4)
    found = pruning_bound(probe, *run(probe, batch=4))
    assert (found.kept_moved == 1).all() and (found.kept_energy > 1e-3).all()
    assert (found.true_error <= found.corrected).all()
    assert (found.corrected > found.stated).all()


def test_for_a_class_token_decoder_the_stated_first_term_is_zero_and_the_error_is_not():
    probe = pb.load_probe(model_of("depth-v2"), "cls", 4)
    full, pruned, removed = run(probe)
    found = pruning_bound(probe, full, pruned, removed)
    assert (found.zero_blocks == 1).all() and (found.first_term == 0).all()
    assert (found.removed_error == 0).all() and (found.true_error > 0.01).all()
    moved = found.residuals[:, 0]  # of the class token, the only one that is read
    close(found.beta_where_read, 2 * found.remainder / moved.square())
    assert (found.beta_where_read > found.beta).all()
    close(found.holds_for_sure, found.beta_needed <= found.beta_where_read)
    lever = (found.residuals.square() * removed).sum(1) / 2
    close(found.first_term + found.beta_needed * lever, found.true_error)
    perfect = torch.where(removed[..., None], full, pruned)  # nobody reads the removed tokens, so say they are right
    promised = pruning_bound(probe, full, perfect, removed)
    close(promised.true_error, found.true_error)
    assert (promised.stated == 0).all() and promised.fails.all() and promised.beta_needed.isinf().all()
    assert not promised.holds_for_sure.any()
    assert (promised.true_error <= promised.corrected).all()


def test_with_kept_tokens_unchanged_both_bounds_are_one_and_hold():
    probe = pb.load_probe(model_of("depth-v2"), "depth-3x4", 4)
    full, pruned, removed = run(probe, batch=4)
    pruned = torch.where(removed[..., None], pruned, full.as_subclass(Tensor))
    found = pruning_bound(probe, full, pruned, removed)
    assert (found.kept_moved == 0).all() and (found.kept_energy == 0).all() and (found.kept_residual == 0).all()
    close(found.stated, found.corrected)
    close(found.removed_error, found.true_error)
    assert not found.fails.any() and found.holds_for_sure.all() and (found.true_error > 0).all()


def test_layers_below_the_last_stay_what_the_image_made_them():
    probe = pb.load_probe(model_of("depth-v2"), "depth-3x4", 4)
    full, pruned, removed = run(probe)
    assert isinstance(full, Features) and sorted(full.below) == [0, 1, 3]
    found = pruning_bound(probe, full, pruned, removed)
    taps = [probe.backbone.norm(full.below[layer]) for layer in (0, 1, 3)]

    def decode(last: Tensor) -> Tensor:
        return probe.decoder.decode([*taps, probe.backbone.norm(last)], full.token_layout).flatten(1)

    close(found.true_error, (decode(full.as_subclass(Tensor)) - decode(pruned)).norm(dim=1))


def test_all_layers_that_a_decoder_reads_may_be_one_tensor():
    probe = pb.multi_layer_probe(model_of("depth-v2"), "depth-3x4", after_norm=False)
    full = probe.features(images_for("depth-v2", GRID))
    pruned = full.as_subclass(Tensor) + 0.1 * random_normal(*full.shape)
    removed = torch.zeros(2, 7, dtype=torch.bool)
    removed[:, 3:] = True
    found = pruning_bound(probe, full, pruned, removed)
    function = probe.bind(full[:1])
    close(found.block_norms[0], dense_block_norms(function, pruned[:1]))
    close(found.true_error[0], (function(full[:1].as_subclass(Tensor)) - function(pruned[:1])).norm())


def bound_of(phi: Callable[[Tensor], Tensor], full: Tensor, pruned: Tensor) -> PruningBound:
    return pruning_bound(phi, full, pruned, torch.ones(full.shape[:2], dtype=torch.bool))


def test_a_quadratic_decoder_has_a_quadratic_remainder_and_the_beta_that_it_has_in_that_direction():
    raw = random_normal(5, 12, 12)
    hessians = raw + raw.mT

    def phi(x: Tensor) -> Tensor:
        return 0.5 * torch.einsum("bi,mij,bj->bm", x.flatten(1), hessians, x.flatten(1))

    full, pruned = random_normal(3, 4, 3, seed=1), random_normal(3, 4, 3, seed=2)
    found = bound_of(phi, full, pruned)
    step = (full - pruned).flatten(1)
    curvature = torch.einsum("bi,mij,bj->bm", step, hessians, step).norm(dim=1)
    close(found.remainder, curvature / 2)
    close(found.beta, curvature / step.square().sum(1))
    close(found.beta_on_segment, found.beta)
    close(found.remainder_order, torch.full_like(found.beta, 2.0))
    supremum = torch.linalg.matrix_norm(hessians, 2).square().sum().sqrt()
    assert (found.beta < supremum).all(), "one direction is a lower bound"


def test_beta_at_the_end_may_hide_what_the_segment_shows():
    """sin(k x) comes back to where it started: the remainder at the end is small, the Hessian is not."""

    def phi(x: Tensor) -> Tensor:
        return torch.sin(x.flatten(1).sum(1, keepdim=True) + torch.pi / 2)

    full, pruned = torch.full((1, 1, 1), 2 * torch.pi, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    found = bound_of(phi, full, pruned)
    assert found.beta < 1e-12
    assert 0.9 < found.beta_on_segment <= 1  # |sin''| <= 1


def test_at_a_kink_the_remainder_is_of_first_order():
    full, pruned = random_normal(2, 3, 4).abs(), torch.zeros(2, 3, 4, dtype=torch.float64)
    close(bound_of(torch.relu, full, pruned).remainder_order, torch.ones(2, dtype=torch.float64))


def test_a_linear_decoder_has_no_remainder_to_speak_of():
    matrix = random_normal(12, 5)
    found = bound_of(lambda x: x.flatten(1) @ matrix, random_normal(2, 4, 3), random_normal(2, 4, 3, seed=1))
    assert (found.remainder <= found.round_off).all() and found.remainder_order.isnan().all()
    close(found.true_error, found.linear_change)


def test_nothing_removed_and_nothing_moved_gives_zeros():
    full = random_normal(2, 4, 3)
    found = pruning_bound(torch.tanh, full, full.clone(), torch.zeros(2, 4, dtype=torch.bool))
    for name in ("true_error", "beta", "stated", "corrected", "kept_moved", "kept_energy", "zero_blocks"):
        assert (getattr(found, name) == 0).all(), name
    assert not found.fails.any() and (found.beta_needed == 0).all()


def test_block_norms_that_are_known_are_taken_as_they_are():
    probe = pb.load_probe(model_of("depth-v2"), "depth-3x4", 4)
    full, pruned, removed = run(probe)
    exact = pruning_bound(probe, full, pruned, removed)
    told = pruning_bound(probe, full, pruned, removed, block_norms=2 * exact.block_norms.float())
    close(told.first_term, 2 * exact.first_term, rtol=1e-6)
    close(told.remainder, exact.remainder)
    with pytest.raises(ShapeError, match=r"block_norms: expected \[2, 7\], got \[2, 6\]"):
        pruning_bound(probe, full, pruned, removed, block_norms=exact.block_norms[:, 1:])


def test_the_optimal_set_with_equal_residuals_is_the_one_of_the_lowest_block_norms():
    """Corollary `cor:opt_prune` on a real decoder, against all sets of that size; with residuals of its own the best
    set is that of the lowest products, which is another one."""
    probe = pb.load_probe(model_of("depth-v2"), "depth-3x4", 4)
    found = pruning_bound(probe, *run(probe, batch=1))
    norms, own = found.block_norms[0, 1:], found.residuals[0, 1:]  # the patches: class tokens stay
    sets = [list(chosen) for chosen in combinations(range(6), 3)]

    def best(residuals: Tensor) -> set[int]:
        masks = torch.zeros(len(sets), 6, dtype=torch.bool)
        for row, chosen in zip(masks, sets, strict=True):
            row[chosen] = True
        terms = first_order_term(norms.expand(len(sets), -1), residuals.expand(len(sets), -1), masks)
        return set(sets[int(terms.argmin())])

    lowest = set(norms.argsort()[:3].tolist())
    assert best(torch.full_like(own, 0.7)) == lowest
    uneven = own.clone()
    uneven[norms.argmin()] *= 100
    assert best(uneven) == set((norms * uneven).argsort()[:3].tolist()) != lowest


def test_wrong_arguments_are_named():
    full, mask = random_normal(2, 4, 3), torch.zeros(2, 4, dtype=torch.bool)
    with pytest.raises(
        ShapeError, match=r"full, pruned: .* \[2, 4, 3\] and \[2, 3, 3\]\. Removed tokens must be re-in"
    ):
        pruning_bound(torch.tanh, full, full[:, :3], mask)
    with pytest.raises(ShapeError, match=r"removed: expected a bool mask \[2, 4\], got torch.float64 \[2, 4\]"):
        pruning_bound(torch.tanh, full, full, mask.double())
    probe = pb.load_probe(model_of("depth-v2"), "depth-3x4", 4, output_metric=random_normal(12, 2))
    with pytest.raises(PullbackError, match="phi: expected the decoder itself, got a probe with an output metric"):
        pruning_bound(probe, *run(probe))
