"""Fresh crops: blocks follow from seed and number, targets are those of the features beside them, runs resume."""

import copy

import pytest
import torch

from helpers.families import seeded_vit
from pullback import load_probe
from pullback.errors import PullbackError
from pullback.evaluation import spearman
from pullback.learning.fit import FitConfig, fit
from pullback.learning.head import ImportanceHead
from pullback.learning.target_streams import FreshCrops, FreshHeadTask
from pullback.targets.recipe import targets_of

PICTURES = torch.randint(0, 256, (6, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def probe():
    return load_probe(copy.deepcopy(seeded_vit()).float().eval(), "cls", 3)  # the model itself is shared by all tests


def crops(probe, **options) -> FreshCrops:
    return FreshCrops(probe, PICTURES, 56, **{"block": 6, "batch": 3, **options})


def test_a_block_follows_from_seed_and_number(probe):
    blocks = crops(probe)
    first, again, other = blocks(0), blocks(0), blocks(1)
    rows = torch.arange(6)
    assert torch.equal(first.features(rows), again.features(rows)) and torch.equal(first.target, again.target)
    assert not torch.equal(first.features(rows), other.features(rows))
    assert not torch.equal(first.target, crops(probe, seed=1)(0).target)
    assert first.target.shape == (6, 17) and first.prefix == 1


def test_exact_targets_are_the_importance_of_these_very_features(probe):
    block = crops(probe, num_probes=None, rank=5)(0)
    expected = targets_of(probe, block.features(torch.arange(6)), 5).importance
    torch.testing.assert_close(block.target, expected, rtol=5e-3, atol=0)  # features were rounded to float16


def test_more_probes_bring_the_block_norms_nearer_to_the_truth(probe):
    few, many = (crops(probe, num_probes=count)(0) for count in (2, 256))
    truth = targets_of(probe, many.features(torch.arange(6)), 5, "exact").block_energy.value.sqrt().float()
    rho = [spearman(block.target, truth).mean() for block in (few, many)]
    assert rho[1] > 0.95 and rho[1] > rho[0]


def test_a_run_on_fresh_crops_resumes_exactly(probe, tmp_path):
    held_out = crops(probe, seed=9)(0)
    config = FitConfig(steps=8, batch=3, warmup=2, validate_every=4)

    def run(out, limit):
        torch.manual_seed(0)
        head = ImportanceHead(64, 16, 2)
        task = FreshHeadTask(crops(probe), held_out, steps_per_block=3)

        def stop(step, numbers):
            if step == limit:
                raise KeyboardInterrupt

        try:
            fit(head, task, config, out=out, on_step=stop)
        except KeyboardInterrupt:
            return None
        return head

    whole = run(tmp_path / "whole", None)
    assert run(tmp_path / "parts", 5) is None
    parts = run(tmp_path / "parts", None)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_block_needs_at_least_one_step(probe):
    with pytest.raises(PullbackError, match="steps_per_block: expected at least 1, got 0"):
        FreshHeadTask(crops(probe), crops(probe)(0), steps_per_block=0)
