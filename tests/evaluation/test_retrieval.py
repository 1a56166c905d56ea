"""Measures of predicted distances: known truths, fits that do not see what they are judged by, and comparisons."""

import json

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import kendalltau, spearmanr, wilcoxon

from pullback.errors import NumericsError, PullbackError, ShapeError
from pullback.evaluation.retrieval import ERRORS, monotone_fit, retrieval_scores, scale_fit


def scores(predicted, reference, **options):
    return retrieval_scores(predicted, reference, generator=np.random.default_rng(0), resamples=200, **options)


def distances(queries: int = 8, items: int = 60, seed: int = 0) -> torch.Tensor:
    return torch.rand(queries, items, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_points(count: int = 30, seed: int = 0) -> torch.Tensor:
    """Symmetric distances of images with themselves."""
    points = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cdist(points, points)


def mean(found, name: str) -> float:
    return found.means[name].mean


def test_equal_distances_are_perfect():
    reference = distances()
    found = scores(reference.float(), reference.float())
    assert [mean(found, name) for name in ("spearman", "kendall", "recall@10")] == pytest.approx([1, 1, 1])
    assert found.spearman_pairs == pytest.approx(1)
    assert all(mean(found, name) == pytest.approx(0, abs=1e-12) for name in ERRORS[:4])
    assert mean(found, "mae_monotone") < 1e-3  # beyond the distances of the other half it is constant


def test_reversed_distances_are_the_worst():
    reference = distances()
    found = scores(1 - reference, reference, neighbours=(30,))
    assert [mean(found, name) for name in ("spearman", "kendall", "recall@30")] == pytest.approx([-1, -1, 0])
    # the best increasing function of a reversed order is a constant, the mean of the other half
    others = torch.stack([reference[1::2].mean(), reference[::2].mean()]).repeat(4)
    torch.testing.assert_close(found.queries["mae_monotone"], (reference - others[:, None]).abs().mean(1))


def test_another_unit_costs_only_the_raw_errors():
    reference = distances()
    found = scores(50 * reference, reference)
    assert mean(found, "spearman") == pytest.approx(1)
    torch.testing.assert_close(found.queries["mae"], 49 * reference.mean(1))
    torch.testing.assert_close(found.queries["rmse"], 49 * reference.square().mean(1).sqrt())
    assert all(mean(found, f"{name}_scaled") == pytest.approx(0, abs=1e-12) for name in ("mae", "rmse"))


def test_a_monotone_change_costs_nothing_after_the_monotone_fit():
    reference = distances(items=4000)
    found = scores(reference.pow(3).exp(), reference)
    assert mean(found, "spearman") == mean(found, "kendall") == mean(found, "recall@10") == pytest.approx(1)
    assert mean(found, "mae_scaled") > 0.05
    assert mean(found, "mae_monotone") < 1e-3 and mean(found, "rmse_monotone") < 2e-3


def test_each_query_is_measured_as_scipy_and_numpy_do():
    reference, predicted = distances(), distances(seed=1) + distances()
    found = scores(predicted, reference, neighbours=(5, 10))
    for row, (p, r) in zip(found.rows(), zip(predicted.numpy(), reference.numpy(), strict=True), strict=True):
        assert row["spearman"] == pytest.approx(spearmanr(p, r).statistic)
        assert row["kendall"] == pytest.approx(kendalltau(p, r).statistic)
        assert row["mae"] == pytest.approx(np.abs(p - r).mean())
        assert row["rmse"] == pytest.approx(np.sqrt(np.square(p - r).mean()))
        for k in (5, 10):
            assert row[f"recall@{k}"] == pytest.approx(len({*np.argsort(p)[:k]} & {*np.argsort(r)[:k]}) / k)
    assert found.spearman_pairs == pytest.approx(spearmanr(predicted.flatten(), reference.flatten()).statistic)
    interval = found.means["kendall"]
    assert interval.mean == pytest.approx(found.queries["kendall"].mean().item())
    assert interval.low < interval.mean < interval.high


def test_images_are_not_compared_with_themselves_where_these_pairs_are_left_out():
    reference = of_points()
    own = torch.eye(30, dtype=torch.bool)
    predicted = (reference + of_points(seed=1)).masked_fill(own, 1e9)
    found = scores(predicted, reference, leave_out=own)
    others = ~own
    expected = [spearmanr(predicted[i, others[i]], reference[i, others[i]]).statistic for i in range(30)]
    torch.testing.assert_close(found.queries["spearman"], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(
        found.queries["mae"], torch.stack([(predicted - reference)[i, others[i]].abs().mean() for i in range(30)])
    )
    once = torch.triu_indices(30, 30, offset=1).unbind()
    assert found.spearman_pairs == pytest.approx(spearmanr(predicted[once], reference[once]).statistic)


def test_queries_may_leave_out_different_numbers_of_items():
    reference, predicted = distances(), distances(seed=1)
    left_out = torch.zeros(8, 60, dtype=torch.bool)
    left_out[2, :7] = True
    found, whole = scores(predicted, reference, leave_out=left_out), scores(predicted, reference)
    assert found.queries["kendall"][2] == pytest.approx(kendalltau(predicted[2, 7:], reference[2, 7:]).statistic)
    rest = [0, 1, 3, 4, 5, 6, 7]
    for name in ("spearman", "kendall", "mae", "recall@10"):
        torch.testing.assert_close(found.queries[name][rest], whole.queries[name][rest])


def test_the_fits_of_a_query_never_see_its_own_values():
    reference, predicted = distances(), distances(seed=1)
    found = scores(predicted, reference)
    changed = reference.clone()
    changed[3] += 5
    other = scores(predicted, changed)
    same_half, other_half = [1, 5, 7], [0, 2, 4, 6]
    for name in ERRORS[2:]:
        torch.testing.assert_close(other.queries[name][same_half], found.queries[name][same_half], rtol=0, atol=0)
        assert (other.queries[name][other_half] != found.queries[name][other_half]).all()


def test_the_fits_of_images_among_themselves_use_no_pair_from_both_halves():
    reference, predicted, own = of_points(), of_points(seed=1), torch.eye(30, dtype=torch.bool)
    found = scores(predicted, reference, leave_out=own)
    changed = reference.clone()
    changed[3, 4] = changed[4, 3] = 77.0  # seen by the queries 3 and 4, each of another half
    other = scores(predicted, changed, leave_out=own)
    rest = [i for i in range(30) if i not in (3, 4)]
    for name in ERRORS:
        torch.testing.assert_close(other.queries[name][rest], found.queries[name][rest], rtol=0, atol=0)


def test_fits_on_a_calibration_set_see_nothing_of_the_queries():
    reference, predicted = distances(), distances(seed=1)
    known = (distances(seed=2), distances(seed=2) * 3)
    found = scores(predicted, reference, calibration=known)
    torch.testing.assert_close(found.queries["mae_scaled"], (3 * predicted - reference).abs().mean(1))
    one = scores(predicted[:1], reference[:1], calibration=known)
    for name in ERRORS:
        torch.testing.assert_close(one.queries[name], found.queries[name][:1])


def test_the_best_factors_are_those_of_a_search():
    p, r = distances(1, 101)[0], distances(1, 101, seed=1)[0]
    for power in (1, 2):
        best = minimize_scalar(
            lambda c, q=power: float((c * p - r).abs().pow(q).sum()), bounds=(0, 5), method="bounded"
        )
        assert scale_fit(p, r, power=power) == pytest.approx(best.x, abs=1e-4)


def test_the_monotone_fit_increases_and_takes_the_mean_of_equal_distances():
    curve = monotone_fit(torch.tensor([1.0, 1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 5.0, 3.0, 8.0]))
    asked = torch.tensor([-9.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 9.0])
    assert curve(asked).tolist() == [1, 1, 2.5, 4, 4, 4, 8, 8]


def test_a_prediction_without_order_finds_nothing_and_a_reference_without_order_counts_for_nobody():
    reference, predicted = distances(), distances()
    predicted[1], reference[2] = 0.5, 0.25
    found = scores(predicted, reference)
    assert found.queries["spearman"][1] == found.queries["kendall"][1] == 0
    assert found.queries["spearman"].isnan().nonzero().tolist() == [[2]]
    assert mean(found, "spearman") == pytest.approx(6 / 7)
    assert found.rows()[2]["spearman"] is None and found.rows()[2]["mae"] is not None


def test_two_methods_are_compared_query_by_query():
    reference = distances(queries=20)
    good, bad = reference + 0.1 * distances(20, seed=1), reference + distances(20, seed=2)
    first, second = scores(good, reference), scores(bad, reference)
    found = first.compared(second, generator=np.random.default_rng(0))
    gap = first.queries["spearman"] - second.queries["spearman"]
    assert found.difference.mean == pytest.approx(gap.mean().item()) and found.difference.low > 0
    assert found.p_value == pytest.approx(wilcoxon(gap.numpy()).pvalue) and found.count == 20
    errors = first.compared(second, "mae_monotone", generator=np.random.default_rng(0))
    assert errors.difference.high < 0
    with pytest.raises(PullbackError, match=r"measure: expected one of spearman, kendall, recall@10, mae, .*got 'rho'"):
        first.compared(second, "rho", generator=np.random.default_rng(0))
    with pytest.raises(ShapeError, match="first, second: expected one value per image each"):
        first.compared(scores(good[:4], reference[:4]), generator=np.random.default_rng(0))


def test_what_was_found_can_be_written_as_json():
    reference = distances()
    reference[0] = 1.0
    found = scores(distances(seed=1), reference)
    text = json.dumps([found.summary(), found.rows()], allow_nan=False)
    assert '"spearman_low"' in text and '"recall@10"' in text and '"queries": 8' in text
    assert repr(found).startswith("RetrievalScores(rho ")


BAD = {
    "other shapes": (lambda r: scores(r[:, 1:], r), ShapeError, r"predicted, reference: .* same pairs, got \[8, 59\]"),
    "no matrices": (lambda r: scores(r[0], r[0]), ShapeError, r"expected distances \[Q, n\], got \[60\]"),
    "one item": (lambda r: scores(r[:, :1], r[:, :1]), ShapeError, "two items for each, .* with 1 left for some query"),
    "nan": (lambda r: scores(r * torch.nan, r), NumericsError, "finite distances, got 480 predicted ones that are not"),
    "mask of whole numbers": (
        lambda r: scores(r, r, leave_out=torch.zeros(8, 60)),
        ShapeError,
        r"leave_out: expected bool \[8, 60\], one for each pair, got torch.float32",
    ),
    "a mask that leaves no fit": (
        lambda r: scores(r, r, leave_out=torch.arange(480).view(8, 60) % 60 // 2 % 2 == torch.arange(8)[:, None] % 2),
        PullbackError,
        "leave_out: half of the queries leave out all items of the others",
    ),
    "too many neighbours": (
        lambda r: scores(r, r, neighbours=(61,)),
        PullbackError,
        "neighbours: expected at most 60, the items that each query has, got 61",
    ),
    "one query": (
        lambda r: scores(r[:1], r[:1]),
        PullbackError,
        "calibration: with a single query there are no others",
    ),
    "half a calibration": (
        lambda r: scores(r, r, calibration=(r, r[0])),
        ShapeError,
        "calibration: expected distances of the same pairs",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_measured_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(distances())
