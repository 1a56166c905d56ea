"""Every row of the paper's tables gets the paper's regime."""

import math
from dataclasses import fields, replace

import pytest

from pullback.geometry import Summary, Thresholds, classify
from pullback.geometry.regimes import THRESHOLDS, judge, looks_random

RANK = 20
DEPTH, CLS = 50_000, 768  # output sizes, all far below N*D

# Table 1: config, kappa(20), CV, r_eff, output size, regime
TABLE_1 = [
    ("DA V2 depth L02", 0.956, 0.026, 34, DEPTH, "ii"),
    ("DA V2 depth L10 (1-layer)", 0.966, 0.026, 20, DEPTH, "ii"),
    ("DINOv2 CLS L10", 0.334, 4.06, 270, CLS, "iii"),
    ("VGGT camera L16", 1.0, float("nan"), 9, 9, "iv"),
    ("VGGT pointcloud L08", 0.966, 0.59, 212, 192, "i"),
    ("VGGT depth L16 (full)", 0.762, 0.63, 282, DEPTH, "i"),
]

# the full sweep, whose text puts Depth Anything in (ii) and DINOv2 CLS in (iii)
FULL_SWEEP = [
    ("DA L05 16x16", 0.9630, 1.06, 4.3, 256, "ii"),
    ("DA L05 8x8", 0.9636, 1.17, 4.2, 64, "ii"),
    ("DA L05 32x32", 0.9677, 0.82, 4.4, 1024, "ii"),
    ("DA L08 16x16", 0.9753, 1.16, 3.6, 256, "ii"),
    ("DA L10 16x16", 0.9713, 1.26, 3.9, 256, "ii"),
    ("DA L10 8x8", 0.9759, 1.44, 4.2, 64, "ii"),
    ("DA L10 32x32", 0.9621, 0.98, 4.2, 1024, "ii"),
    ("DINOv2 CLS L02", 0.5829, 0.83, 90.8, CLS, "iii"),
    ("DINOv2 CLS L05", 0.5141, 1.12, 122.1, CLS, "iii"),
    ("DINOv2 CLS L08", 0.4188, 2.03, 189.9, CLS, "iii"),
    ("DINOv2 CLS L10", 0.3336, 4.06, 270.2, CLS, "iii"),
]


@pytest.mark.parametrize(("config", "kappa", "cv", "r_eff", "outputs", "regime"), TABLE_1 + FULL_SWEEP)
def test_the_paper_s_rows_get_the_paper_s_label(config, kappa, cv, r_eff, outputs, regime):
    assert classify(kappa=kappa, effective_rank=r_eff, cv=cv, rank=RANK, max_rank=outputs).label == regime


def test_a_bottleneck_moves_vggt_depth_out_of_the_rich_regime():
    """Appendix: after the VAE r_eff is 30 to 53, within the budget of rank 50 at which kappa reaches 0.9."""
    rich = classify(kappa=0.578, effective_rank=282.6, cv=0.63, rank=50, max_rank=DEPTH)
    compressed = classify(kappa=0.91, effective_rank=53, cv=0.63, rank=50, max_rank=DEPTH)
    assert (rich.label, compressed.label) == ("i", "ii")


def test_the_multi_layer_depth_probe_is_tractable_at_rank_50():
    assert classify(kappa=0.900, effective_rank=36.0, cv=2.381, rank=50, max_rank=DEPTH).label == "ii"


@pytest.mark.parametrize("max_rank", [1, 9, RANK])
@pytest.mark.parametrize(("kappa", "cv"), [(1.0, 0.0), (0.1, 9.0), (0.5, float("nan"))])
def test_no_more_dimensions_than_the_rank_is_always_regime_four(max_rank, kappa, cv):
    assert classify(kappa=kappa, effective_rank=300, cv=cv, rank=RANK, max_rank=max_rank).label == "iv"
    assert classify(kappa=kappa, effective_rank=300, cv=cv, rank=RANK, max_rank=RANK + 1).label != "iv"


def test_low_rank_comes_with_advice_for_spread_and_for_local_directions():
    spread, local = (classify(kappa=0.97, effective_rank=4, cv=cv, rank=RANK, max_rank=DEPTH) for cv in (0.026, 1.2))
    assert spread.label == local.label == "ii"
    assert "attention" in spread.advice and "importance head" in local.advice


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ({"low_rank_kappa": 0.98}, "ii", "i"),
        ({"rank_budget": 1.0}, "ii", "i"),
        ({"low_rank_kappa": 0.98, "concentrated_cv": 0.1}, "ii", "iii"),
    ],
)
def test_thresholds_are_data(change, before, after):
    row = {"kappa": 0.96, "effective_rank": 34, "cv": 0.5, "rank": RANK, "max_rank": DEPTH}
    assert classify(**row).label == before
    assert classify(**row, thresholds=replace(THRESHOLDS, **change)).label == after
    assert set(change) <= {field.name for field in fields(Thresholds)}


def test_a_cv_at_the_null_looks_random_and_one_above_it_does_not():
    null = 0.0255
    assert looks_random(0.026, null)  # the paper's "delocalized" rows
    assert not looks_random(0.82, null)
    assert not looks_random(0.026, null, Thresholds(null_factor=1.0))


# Means with errors: what lies within two of them


def verdict(kappa, effective_rank, cv, *, count=4, rank=RANK, max_rank=DEPTH):
    """The verdict on (mean, standard error) pairs over ``count`` samples."""
    values = {"kappa": kappa, "effective_rank": effective_rank, "cv": cv}
    single = {"std": math.nan, "se": math.nan} if count == 1 else {"std": 0.0}
    summaries = {
        name: Summary(**{"mean": mean, "se": se, "estimation_se": se, "count": count} | single)
        for name, (mean, se) in values.items()
    }
    return judge(**summaries, rank=rank, max_rank=max_rank)


def labels(found):
    return found.regime.label, [regime.label for regime in found.could_be]


@pytest.mark.parametrize(
    ("kappa", "effective_rank", "cv", "expected"),
    [
        ((0.95, 0.01), (10, 1), (0.5, 0.1), ("ii", [])),
        ((0.91, 0.01), (10, 1), (0.5, 0.1), ("ii", ["i"])),
        ((0.91, 0.01), (10, 1), (1.5, 0.1), ("ii", ["iii"])),
        ((0.89, 0.01), (10, 1), (1.5, 0.1), ("iii", ["ii"])),
        ((0.95, 0.01), (48, 2), (1.5, 0.1), ("ii", ["iii"])),
        ((0.50, 0.01), (90, 1), (0.9, 0.06), ("iii", ["i"])),
        ((0.50, 0.01), (90, 1), (0.9, 0.04), ("iii", [])),
        ((0.50, math.nan), (90, math.nan), (0.81, math.nan), ("iii", [])),
    ],
)
@pytest.mark.parametrize("count", [1, 4])
def test_a_threshold_within_two_standard_errors_hedges_the_regime(kappa, effective_rank, cv, expected, count):
    assert labels(verdict(kappa, effective_rank, cv, count=count)) == expected


def test_a_hedge_names_both_kinds_of_regime_two():
    found = verdict((0.95, 0.01), (10, 1), (0.85, 0.1))
    assert str(found) == "(ii) low rank, concentrated on tokens, could be (ii) low rank, spread over tokens"
    several = verdict((0.91, 0.01), (10, 1), (0.85, 0.1))
    assert [regime.label for regime in several.could_be] == ["ii", "iii", "i"]


def test_a_bounded_rank_is_never_in_doubt():
    assert labels(verdict((0.9, 1.0), (50, 50), (0.8, 1.0), max_rank=RANK)) == ("iv", [])
