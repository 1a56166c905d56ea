"""`diagnose` against the dense truth, sample by sample."""

import itertools
import math
import statistics
from collections import Counter
from dataclasses import replace

import pytest
import torch

import pullback as pb
from helpers.truth import FunctionProbe, load_seeded, normal, random_images, seeded, truth_of, with_singular_values
from pullback.errors import DecoderError, ImageError, NumericsError, RankError
from pullback.geometry import null_cv
from pullback.operators import JacobianOperator
from pullback.operators.execution import round_off_of
from pullback.tokens import TokenLayout

RANKS = (4, 1, 12)


@pytest.fixture(scope="module")
def images():
    return random_images(3)


@pytest.fixture(scope="module", params=[("cls", 1), ("depth-4x4", 4)], ids=str)
def exact(request, images):
    """(report, truth) by the exact route."""
    probe = seeded(*request.param)
    return pb.diagnose(probe, images, RANKS, "exact"), truth_of(probe, images)


def column(report, read) -> torch.Tensor:
    return torch.tensor([read(sample) for sample in report.samples], dtype=torch.float64)


def test_kappa_at_every_rank(exact):
    report, truth = exact
    for rank in RANKS:
        torch.testing.assert_close(column(report, lambda s, r=rank: s.kappa[r][0]), truth.kappa(rank))
        assert report.kappa_at(rank).mean == pytest.approx(truth.kappa(rank).mean().item())
    assert report.kappa == report.kappa_at(RANKS[0])
    assert report.rank == RANKS[0] and report.ranks == report.ranks_used == RANKS


def test_effective_ranks(exact):
    report, truth = exact
    tolerance = {"rtol": 1e-6, "atol": 0}
    torch.testing.assert_close(column(report, lambda s: s.r_eff_slq[0]), truth.effective_rank(), **tolerance)
    torch.testing.assert_close(column(report, lambda s: s.r_eff_trunc[0]), truth.effective_rank(RANKS[0]), **tolerance)
    ratio = truth.effective_rank() / truth.effective_rank(RANKS[0])
    assert report.tail_ratio.mean == pytest.approx(ratio.mean().item(), rel=1e-6)
    assert all(sample.r_eff_trunc[0] <= RANKS[0] for sample in report.samples), "the paper prints 46 to 64 at r = 20"


def test_concentration_over_all_tokens_and_over_patches_at_the_first_rank(exact):
    report, truth = exact
    torch.testing.assert_close(column(report, lambda s: s.cv[0]), truth.cv(RANKS[0]))
    torch.testing.assert_close(column(report, lambda s: s.cv_patches[0]), truth.cv(RANKS[0], skip=1))
    assert report.cv.mean == pytest.approx(truth.cv(RANKS[0]).mean().item())
    assert report.cv_null == null_cv(64)


def test_rank_for_ninety_percent(exact):
    report, truth = exact
    expected = truth.rank_for(0.9)
    assert [sample.r90 for sample in report.samples] == [(rank, False) for rank in expected]
    assert report.r90 == (statistics.median(expected), False)


def test_energy_gradient_signal_and_singular_values(exact):
    report, truth = exact
    torch.testing.assert_close(column(report, lambda s: s.energy[0]), truth.energies.sum(1))
    signal = truth.energies[:, 0] * 17 * 64 / truth.energies.sum(1)
    torch.testing.assert_close(column(report, lambda s: s.gradient_signal_ratio), signal)
    values = torch.tensor([sample.singular_values for sample in report.samples], dtype=torch.float64)
    torch.testing.assert_close(values, truth.svd[0][:, : max(RANKS)])


def test_importance_is_that_of_the_first_rank(exact):
    report, truth = exact
    values, right = truth.svd
    energies = values[:, : RANKS[0], None].square() * right[:, : RANKS[0]].square().sum(-1)
    torch.testing.assert_close(report.importance, energies.sum(1).sqrt(), rtol=1e-7, atol=1e-10)


def test_exact_numbers_claim_nothing_beyond_round_off(exact):
    report, _ = exact
    for sample in report.samples:
        for value, se in (sample.kappa[4], sample.r_eff_slq, sample.r_eff_trunc, sample.cv, sample.cv_patches):
            assert se == pytest.approx(round_off_of(torch.float64) * value, rel=1e-9)
        value, se = report.tail_ratio.mean, report.tail_ratio.estimation_se
        assert 0 < se < 2 * round_off_of(torch.float64) * value


@pytest.mark.parametrize(("decoder", "layer", "knobs"), [("cls", 1, {}), ("depth-4x4", 4, {"slq_probes": 6})])
def test_krylov_agrees_with_exact_within_its_printed_errors(images, decoder, layer, knobs):
    probe = seeded(decoder, layer)
    truth = truth_of(probe, images)
    report = pb.diagnose(probe, images, RANKS, "krylov", convergence_samples=0, **knobs)
    assert report.method == "krylov" and report.convergence == ()
    for i, sample in enumerate(report.samples):
        for rank in RANKS:
            value, se = sample.kappa[rank]
            assert abs(value - truth.kappa(rank)[i].item()) <= 3 * se < 0.5 * value
        value, se = sample.r_eff_slq
        assert abs(value - truth.effective_rank()[i].item()) <= 3 * se < 0.5 * value
        value, se = sample.energy
        assert abs(value - truth.energies[i].sum().item()) <= 3 * se < 0.5 * value
        of_modes = (
            (sample.cv, truth.cv(RANKS[0])[i]),
            (sample.cv_patches, truth.cv(RANKS[0], skip=1)[i]),
            (sample.r_eff_trunc, truth.effective_rank(RANKS[0])[i]),
        )
        for (value, se), right in of_modes:
            assert abs(value - right.item()) <= 3 * se < 0.2 * value
    assert report.cv.mean == pytest.approx(truth.cv(RANKS[0]).mean().item(), rel=0.1)


def test_the_papers_modes_come_without_an_error(images):
    report = pb.diagnose(seeded("cls", 4), images, 4, "paper", convergence_samples=0, slq_probes=2)
    for sample in report.samples:
        assert all(math.isnan(se) for _, se in (sample.cv, sample.cv_patches, sample.r_eff_trunc))
    for summary in (report.cv, report.cv_patches, report.r_eff_trunc):
        assert math.isnan(summary.estimation_se) and summary.se == summary.std / math.sqrt(3) > 0
    assert report.tail_ratio.estimation_se > 0, "that of the effective rank above it is known"


def test_an_unreached_ninety_percent_is_a_lower_bound(images):
    probe = seeded("cls", 4)
    report = pb.diagnose(probe, images, 4, "krylov", convergence_samples=0, slq_probes=2)
    assert [sample.r90 for sample in report.samples] == [(5, True)] * 3
    assert report.r90 == (5, True) and "r90 >=5" in str(report)
    assert min(truth_of(probe, images).rank_for(0.9)) > 5


def test_a_rank_above_the_output_size_is_lowered_and_means_regime_four(images):
    report = pb.diagnose(seeded("depth-4x4", 4), images, (20, 4, 500))
    assert report.ranks == (20, 4, 500) and report.ranks_used == (16, 4, 16)
    assert report.regime.label == "iv" and report.output_size == 16
    assert report.kappa.mean == pytest.approx(1) == report.kappa_at(20).mean == report.kappa_at(16).mean
    assert report.kappa_at(500) == report.kappa and report.kappa_at(4).mean < 0.99
    assert pb.diagnose(seeded("depth-4x4", 4), images[:1], 4).regime.label != "iv"
    with pytest.raises(RankError, match=r"rank: expected one of those diagnosed, \[20, 4, 500\], got 7"):
        report.kappa_at(7)


def test_an_output_metric_of_low_rank_bounds_the_rank(images):
    report = pb.diagnose(load_seeded("cls", output_metric=normal(64, 5)), images, 8)
    assert (report.ranks_used, report.output_size, report.regime.label) == ((5,), 5, "iv")


class Counted:
    """Columns that really went through the Jacobian, all samples together."""

    def __init__(self, monkeypatch) -> None:
        self.products: Counter[str] = Counter()
        for name in ("_matmat", "_rmatmat"):
            monkeypatch.setattr(JacobianOperator, name, self._wrap(name, getattr(JacobianOperator, name)))

    def _wrap(self, name, original):
        def counted(op, columns):
            self.products[name] += columns.shape[0] * columns.shape[2]
            return original(op, columns)

        return counted


@pytest.mark.parametrize("method", ["exact", "krylov", "paper"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_products_are_those_that_were_spent(images, monkeypatch, method, batch_size):
    counted = Counted(monkeypatch)
    report = pb.diagnose(seeded("cls", 4), images, 4, method, batch_size=batch_size, slq_probes=2)
    assert (report.products.jvp, report.products.vjp) == (counted.products["_matmat"], counted.products["_rmatmat"])
    if method == "exact":
        table = 6 * 4
        assert all((sample.products.jvp, sample.products.vjp) == (0, 64) for sample in report.samples)
        assert (report.products.jvp, report.products.vjp) == (table + 1, 3 * 64 + table)
    else:
        assert sum(sample.products.jvp for sample in report.samples) < report.products.jvp


def cut_off(x):
    return x[:, 0].detach()


def constant(x):
    return torch.ones(len(x), 5, dtype=x.dtype)


def not_a_number(x):
    return x[:, 0] * math.nan


@pytest.mark.parametrize("method", ["auto", "krylov", "paper", "exact"])
@pytest.mark.parametrize("decoder", [cut_off, constant])
def test_a_decoder_without_derivative_is_an_error(images, decoder, method):
    with pytest.raises(DecoderError, match=r"does not depend on the features \(zero Jacobian.*detach"):
        pb.diagnose(load_seeded(decoder), images, 3, method)


@pytest.mark.parametrize("method", ["auto", "krylov", "paper", "exact"])
def test_a_decoder_that_returns_nan_is_an_error(images, method):
    with pytest.raises(NumericsError, match="decoder: its output holds NaN"):
        pb.diagnose(load_seeded(not_a_number), images, 3, method)


@pytest.mark.parametrize(("output", "kind"), [(lambda x: {"depth": x}, "dict"), (lambda x: (x, x), "tuple")])
def test_a_decoder_that_returns_no_tensor_is_an_error(images, output, kind):
    with pytest.raises(DecoderError, match=f"expected it to return one tensor .* got {kind}"):
        pb.diagnose(load_seeded(lambda x: output(x[:, 0])), images, 3)


def test_bad_arguments_are_named(images):
    probe = seeded("cls", 4)
    with pytest.raises(ImageError, match="at least one image, got an empty batch"):
        pb.diagnose(probe, images[:0])
    for rank in (0, (4, 0), ()):
        with pytest.raises(RankError, match="rank: expected one or several numbers from 1 up"):
            pb.diagnose(probe, images, rank)


def test_power_iteration_starts_at_error_one_and_signal_one_and_improves():
    probe = with_singular_values([8, 4, 2, 1, 0.4, 0.2, *[0.1] * 40], 17, 64, 50)
    report = pb.diagnose(probe, normal(3, 1, 17, 64), 4, convergence_samples=3)
    assert [(row.rounds, row.paper_q) for row in report.convergence] == [(0, None), (1, 0), (3, 2), (6, 5)]
    errors = torch.stack([row.alignment_error for row in report.convergence])
    assert errors.shape == (4, 3)
    assert (errors[0] > 0.97).all() and (errors.diff(dim=0) < 0).all() and (errors[-1] < 1e-4).all()
    signal = report.convergence[-1].gradient_signal_ratio
    torch.testing.assert_close(signal, column(report, lambda s: s.gradient_signal_ratio), rtol=1e-3, atol=0)


def test_the_signal_of_a_random_start_is_one():
    flat = with_singular_values([1.0] * 60, 17, 64, 60)
    row = pb.diagnose(flat, normal(8, 1, 17, 64), 4, "exact", convergence_samples=8).convergence[0]
    assert row.rounds == 0 and row.gradient_signal_ratio.mean().item() == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_as_many_samples_as_asked_for_get_a_convergence_table(batch_size):
    probe, images = seeded("cls", 4), random_images(5)
    report = pb.diagnose(probe, images, 4, convergence_samples=3, batch_size=batch_size)
    together = pb.diagnose(probe, images, 4, convergence_samples=3, batch_size=3)
    for row, other in zip(report.convergence, together.convergence, strict=True):
        assert row.alignment_error.shape == (3,)
        torch.testing.assert_close(row.alignment_error, other.alignment_error)
        torch.testing.assert_close(row.gradient_signal_ratio, other.gradient_signal_ratio)


def test_the_paper_s_unconverged_modes_do_not_judge_convergence():
    """Against the modes of two rounds, six rounds would seem to be off by the error of the two."""
    probe = with_singular_values([2, 1.9, 1.8, 1.7, 1.1, *[1.0] * 40], 17, 64, 50)
    by_paper, by_svd = (
        pb.diagnose(probe, normal(2, 1, 17, 64), 4, method, slq_probes=2, convergence_samples=2).convergence
        for method in ("paper", "exact")
    )
    for row, truth in zip(by_paper, by_svd, strict=True):
        torch.testing.assert_close(row.alignment_error, truth.alignment_error, rtol=0, atol=1e-3)


@pytest.mark.parametrize("decoder", ["cls", "depth-2x3"])
def test_images_need_not_be_square(decoder):
    probe, images = seeded(decoder, 4), random_images(2, (28, 70))
    report = pb.diagnose(probe, images, 3, "exact")
    truth = truth_of(probe, images)
    assert report.token_layout.grid == (2, 5) and report.importance.shape == (2, 11)
    torch.testing.assert_close(column(report, lambda s: s.kappa[3][0]), truth.kappa(3))
    torch.testing.assert_close(column(report, lambda s: s.cv_patches[0]), truth.cv(3, skip=1))


def test_an_image_of_one_patch_has_no_spread_over_patches():
    report = pb.diagnose(seeded("cls", 4), random_images(1, (14, 14)), 3)
    assert report.cv_patches.mean == 0 and report.cv.mean > 0


def test_modes_at_the_null_are_called_random(images):
    """A linear probe with random right vectors: the CV is that of noise, and the advice says so."""
    probe = with_singular_values([1.0] * 6, 40, 64, 10)
    report = pb.diagnose(probe, normal(2, 1, 40, 64), 4)
    assert report.cv.mean == pytest.approx(report.cv_null, rel=0.3)
    assert "indistinguishable from a random direction" in report.advice and report.advice in str(report)
    assert "indistinguishable" not in pb.diagnose(seeded("cls", 4), images[:1], 4).advice


def test_progress_counts_samples_and_the_batch_size_changes_nothing(images):
    seen: list[int] = []
    probe = seeded("cls", 4)
    one = pb.diagnose(probe, images, 4, "krylov", batch_size=1, slq_probes=2, on_progress=seen.append)
    all_at_once = pb.diagnose(probe, images, 4, "krylov", batch_size=3, slq_probes=2)
    assert seen == [1, 1, 1]
    for a, b in zip(one.samples, all_at_once.samples, strict=True):
        assert a.kappa[4] == pytest.approx(b.kappa[4], rel=1e-6)
        assert a.r_eff_slq == pytest.approx(b.r_eff_slq, rel=1e-6)
        assert a.cv[0] == pytest.approx(b.cv[0], rel=1e-6)
    assert one.regime == all_at_once.regime


def test_a_known_spectrum_gives_the_numbers_one_expects():
    """sigma^2 = 6, 3, 1: kappa(1) = 0.6, r90 = 2, GSR = 0.6 N D, H = -(.6 ln .6 + .3 ln .3 + .1 ln .1)."""
    probe = with_singular_values([math.sqrt(6), math.sqrt(3), 1.0], 5, 4, 8)
    report = pb.diagnose(probe, normal(1, 1, 5, 4), (1, 2))
    assert report.kappa.mean == pytest.approx(0.6) and report.kappa_at(2).mean == pytest.approx(0.9)
    assert report.r90 == (2, False)
    assert report.samples[0].gradient_signal_ratio == pytest.approx(0.6 * 20)
    entropy = -sum(p * math.log(p) for p in (0.6, 0.3, 0.1))
    assert report.r_eff_slq.mean == pytest.approx(math.exp(entropy))
    assert report.r_eff_trunc.mean == pytest.approx(1)


def test_a_scalar_output_is_regime_four():
    probe = FunctionProbe(lambda x: x.square().sum((1, 2)))
    report = pb.diagnose(probe, normal(2, 1, 5, 4))
    assert report.ranks_used == (1,) and report.regime.label == "iv" and report.output_size == 1
    assert report.kappa.mean == pytest.approx(1) and report.r_eff_slq.mean == pytest.approx(1)


# What is said of one image, of patches, and of numbers near a threshold


def test_one_image_has_no_error_over_images():
    report = pb.diagnose(seeded("cls", 4), random_images(1), 4, "krylov", slq_probes=2)
    assert math.isnan(report.kappa.se) and math.isnan(report.cv.std) and report.kappa.estimation_se > 0
    assert "one image, no error over images" in str(report) and "±" not in str(report)
    several = str(pb.diagnose(seeded("cls", 4), random_images(2), 4, "krylov", slq_probes=2))
    assert "no error over images" not in several and "±" in several


def class_token_and_patches(report, *, over_all: float, over_patches: float, error: float = 0.001):
    """The report with these CVs at every sample, their values spread so that the mean has this error."""
    spread = error * math.sqrt(len(report.samples))
    samples = [
        replace(sample, cv=(over_all + sign * spread, 0.0), cv_patches=(over_patches + sign * spread, 0.0))
        for sample, sign in zip(report.samples, itertools.cycle((1, -1)), strict=False)
    ]
    return replace(report, samples=tuple(samples))


@pytest.fixture(scope="module")
def marginal():
    """A report whose kappa is far below every threshold."""
    report = pb.diagnose(seeded("cls", 4), random_images(4), 4)
    assert report.kappa.mean < 0.8 and report.token_layout.prefix == 1
    return report


def test_the_regime_over_patches_stands_beside_and_the_advice_follows_it(marginal):
    report = class_token_and_patches(marginal, over_all=7.4, over_patches=0.5)
    assert (report.regime.label, report.verdict_over_patches.regime.label) == ("iii", "i")
    assert "Only patches can be pruned, and over them it is regime (i) rich spectrum." in report.advice
    assert report.verdict_over_patches.regime.advice in report.advice and report.regime.advice not in report.advice
    assert "over patches CV = 0.50, regime (i) rich spectrum" in str(report)
    agreeing = class_token_and_patches(marginal, over_all=7.4, over_patches=1.3)
    assert agreeing.advice == agreeing.regime.advice and agreeing.verdict_over_patches.regime == agreeing.regime


def test_patches_at_the_null_are_called_random_whatever_the_class_token_does(marginal):
    report = class_token_and_patches(marginal, over_all=7.4, over_patches=marginal.cv_null)
    assert report.patches_look_random and not report.looks_random
    assert "CV over patches 0.0" in report.advice and "indistinguishable from a random direction" in report.advice


def test_without_prefix_tokens_there_is_no_second_regime(marginal):
    report = replace(marginal, token_layout=TokenLayout(0, (17, 1)))
    assert report.verdict_over_patches is None and "over patches" not in str(report)


def test_a_regime_within_the_error_of_another_is_hedged(marginal):
    report = class_token_and_patches(marginal, over_all=7.4, over_patches=0.81, error=0.05)
    hedged = report.verdict_over_patches
    assert (hedged.regime.label, [regime.label for regime in hedged.could_be]) == ("iii", ["i"])
    assert report.verdict.could_be == ()
    assert "could also be (i) rich spectrum over patches: more images would tell" in report.advice


def test_a_layer_whose_patches_move_nothing_says_so_and_does_not_speak_of_convergence(images):
    report = pb.diagnose(seeded("cls", 5), images, rank=2)  # behind the last attention
    assert report.advice.startswith("No patch of this layer moves the output, only the 1 token before them")
    assert "converged" not in report.advice and "an earlier layer" in report.advice
    assert report.verdict_over_patches is None and not report.patches_look_random


def test_exact_modes_that_are_as_even_as_random_ones_are_not_called_unconverged(marginal):
    alike = class_token_and_patches(marginal, over_all=7.4, over_patches=marginal.cv_null)
    assert "tokens count alike" in replace(alike, method="exact").advice
    assert "not converged" in replace(alike, method="krylov").advice
