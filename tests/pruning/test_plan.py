"""A plan refuses what makes no sense, and splits its ratio as promised."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pullback.errors import PullbackError
from pullback.pruning import PrunePlan, preset
from pullback.pruning.plan import even
from pullback.registry import PRESETS


@pytest.mark.parametrize("patches", [1, 7, 100, 256, 1369])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.1, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("stages", [(4,), (4, 8), (1, 4, 7, 10)])
def test_the_counts_add_up_to_the_rounded_ratio_and_are_even(patches, ratio, stages):
    counts = PrunePlan(stages, even(ratio, len(stages))).counts(patches)
    assert sum(counts) == round(ratio * patches)
    assert max(counts) - min(counts) <= 1


def test_a_share_for_each_stage():
    assert PrunePlan((2, 5), (0.5, 0.25)).counts(100) == (50, 25)
    assert preset("best", [0.5, 0.25], [2, 5]).ratio == 0.75


@pytest.mark.parametrize("ratio", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), [0.5]])
@pytest.mark.parametrize("stages", [(4,), [np.int64(4)], np.array([4]), torch.tensor([4]), range(4, 5)])
def test_numbers_of_numpy_and_torch(ratio, stages):
    plan = preset("best", ratio, stages)
    assert plan == preset("best", 0.5, [4])
    assert type(plan.shares[0]) is float and type(plan.stages[0]) is int, "as JSON takes them"


@pytest.mark.parametrize("ratio", ["0.5", None, True, ["0.5"], [None], np.array("0.5"), object()])
def test_a_ratio_that_is_no_number(ratio):
    with pytest.raises(
        PullbackError, match=r"ratio: expected a share of the patch tokens such as 0\.5, or a list of one"
    ):
        preset("best", ratio, [4])


@pytest.mark.parametrize("stages", [4, None, "4", ["1"], [1.0], [None], [np.float32(1)], [[1]]])
def test_stages_that_are_no_block_indices(stages):
    with pytest.raises(PullbackError, match=r"stages: expected block indices from 0 in a list, such as \[3, 6\], got"):
        preset("best", 0.5, stages)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shares": (1.0,)}, "ratio: expected a share .* got 1"),
        ({"shares": (-0.1,)}, "ratio: expected a share"),
        ({"shares": (float("nan"),)}, "ratio: expected a share"),
        ({"stages": ()}, "shares: expected one for each of 0 stages"),
        ({"stages": (4, 2), "shares": (0.1, 0.1)}, r"stages: expected ascending .* got \[4, 2\]"),
        ({"stages": (4, 4), "shares": (0.1, 0.1)}, "stages: expected ascending"),
        ({"stages": (-1,)}, r"stages: expected block indices from 0, got \[-1\]"),
        ({"stages": (True,)}, "stages: expected block indices"),
        ({"shares": (0.1, 0.1)}, "shares: expected one for each of 1 stages, got 2"),
        ({"gates": (0.1, 0.1)}, "gates: expected one for each of 1 stages, got 2"),
        ({"fades": (0.9, 0.9)}, "fades: expected one for each of 1 stages, got 2"),
        ({"gates": (0.6,), "fades": (0.5,)}, r"fades: expected cosines that are not under the gates \[0\.6\], got"),
        ({"match": "nearest"}, "match: expected one of none, task, cosine, bipartite, strided, got 'nearest'"),
        ({"reinsert": "yes"}, "reinsert: expected one of none, frozen, drift, copy, got 'yes'"),
        ({"trust": "much"}, "trust: expected a power of the score, 0 or more, got 'much'"),
        ({"shares": ("0.5",)}, "ratio: expected a share of the patch tokens"),
        ({"fuse_last": True}, "fuse_last: removed tokens must come back"),
    ],
)
def test_bad_plans_are_refused(changes, message):
    with pytest.raises(PullbackError, match=message):
        PrunePlan(**{"stages": (3,), "shares": (0.5,), **changes})


def test_stages_past_the_last_block_are_refused():
    with pytest.raises(PullbackError, match=r"stages: expected blocks from 0 to 10 \(of 12.* got \[11\]"):
        PrunePlan((11,), (0.5,)).check_depth(12)
    PrunePlan((10,), (0.5,)).check_depth(12)


def test_fusion_after_the_last_but_one_block_says_that_it_is_useless():
    plan = preset("paper", 0.5, [10], dense=True)
    plan.check_depth(12)
    assert "this stage changes nothing" in plan.notes(12)[0]
    assert plan.notes(13) == preset("best", 0.5, [10]).notes(12) == ()


def test_presets():
    for name in (name for name, entry in PRESETS.items() if not entry.knob):
        for dense in (False, True):
            plan = preset(name, 0.3, [4, 8], dense=dense)
            assert plan.ratio == pytest.approx(0.3)
            assert (plan.reinsert != "none") == dense
    paper = preset("paper", 0.3, [4], dense=True)
    assert (paper.match, paper.reinsert, paper.fuse_last, paper.sizes) == ("none", "frozen", True, False)
    merge = preset("paper", 0.3, [4])
    assert (merge.match, merge.weighting, merge.sizes, merge.select) == ("task", "importance", False, "score")
    with pytest.raises(PullbackError, match=r"preset: expected one of best, paper, .* got 'fast'"):
        preset("fast", 0.3, [4])
    with pytest.raises(PullbackError, match="stages: expected at least one block"):
        preset("best", 0.3, [])
    with pytest.raises(PullbackError, match="preset: 'tome' runs as its authors published it"):
        preset("tome", 0.3, [4])


def test_one_number_for_all_shares_is_split_equally():
    assert replace(preset("best", 0.3, [1, 4]), shares=0.5).shares == (0.25, 0.25)
