"""The soft merge by a head: the same as the pruned model's own, its errors against another way, and their intervals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pullback.evaluation.fidelity import degradation
from pullback.experiments import ablations
from pullback.experiments.ablations import HEAD_ABLATIONS, SCENES_CLS, SCENES_DEPTH, Variant, recipes_of
from pullback.experiments.merging import Point
from pullback.experiments.scales import SCALES
from pullback.experiments.soft_merge import (
    RATIOS,
    Block,
    _known,
    _parts,
    degradations,
    judged_by,
    known_of,
    seeds_change,
    seeds_mean,
    soft_merge,
)
from pullback.experiments.workshop import Workshop
from pullback.geometry.scores import exact_modes
from pullback.runs.progress import Progress

COUNTS = {
    "seeds": 2, "steps": 4, "batch": 4, "size of scenes": 56, "scenes: tested": 3, "scenes: trained on": 8,
    "scenes: most": 16, "scenes: tested, dense": 2, "scenes: trained on, dense": 2, "scenes: most, dense": 3,
    "photos: tested": 2, "photos: trained on": 4, "photos: most": 8, "photos: tested, dense": 2,
    "photos: trained on, dense": 4, "photos: most, dense": 8,
}  # fmt: skip
PLACE = ("table", "row", "column")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    experiment = replace(HEAD_ABLATIONS, counts={"tiny": COUNTS})
    out: Path = tmp_path_factory.mktemp("out")
    return Workshop(experiment, SCALES["tiny"], out, torch.device("cpu"), Progress())


@pytest.mark.parametrize("block", [SCENES_CLS, SCENES_DEPTH], ids=["cls", "depth"])
def test_errors_are_those_of_the_pruned_model(shop: Workshop, block: Block) -> None:
    """The shared first blocks change nothing, and the output is that of the decoder that is read."""
    (recipe, _), ((first, pixels),) = recipes_of(shop, block, Variant("")), _parts(shop, block)
    head, known = shop.head(block.probe(shop), recipe), _known(shop, block, first, pixels)
    subject = block.subject(shop)
    assert subject.decoder.name == ("depth" if block.dense else "cls")
    ours = degradations(subject, head, pixels, known["modes"], known["whole"])
    assert ours.shape == (len(RATIOS), len(pixels))
    assert torch.allclose(known["whole"], subject.full(pixels))
    for number in (0, 6):
        plan = soft_merge(float(RATIOS[number]), block.layer, dense=block.dense)
        model = subject.pruned(plan, [head], lambda *_: known["modes"].float())
        output, _ = subject.output(model, pixels)
        expected = degradation(output, subject.full(pixels), depth=block.dense).value
        torch.testing.assert_close(ours[number], expected, rtol=1e-3, atol=1e-9)
    assert (ours[-1] > ours[0]).all() and (ours[-1] > 0).all()
    kept = judged_by(shop, block, recipe)
    assert torch.equal(kept["errors"].double(), ours.double())


def test_class_tokens_merge_as_in_the_experiments_on_class_tokens(shop: Workshop) -> None:
    recipe, ((_, pixels),) = recipes_of(shop, SCENES_CLS, Variant(""))[0], _parts(shop, SCENES_CLS)
    probe = SCENES_CLS.probe(shop)
    head, point = shop.head(probe, recipe), Point(probe, pixels)
    modes = exact_modes(probe, 20)(point.tokens, point.context)
    output = point.output(point.plan("paper", 0.5), head(point.tokens), modes=modes)
    expected = degradation(output, point.full).value
    torch.testing.assert_close(judged_by(shop, SCENES_CLS, recipe)["errors"][-1], expected, rtol=1e-2, atol=1e-9)


def test_what_is_kept_of_the_modes_is_in_proportion_to_the_importance(shop: Workshop) -> None:
    known = [_known(shop, SCENES_CLS, first, part) for first, part in _parts(shop, SCENES_CLS)]
    norms = torch.cat([torch.linalg.vector_norm(part["modes"].double(), dim=(1, 3)) for part in known])
    importance = known_of(shop, SCENES_CLS)["importance"].double()
    torch.testing.assert_close(norms / norms.sum(1, True), importance / importance.sum(1, True), rtol=5e-3, atol=1e-6)


def test_rho_is_against_the_exact_importance_and_own_against_the_target(shop: Workshop) -> None:
    usual, norms = (recipes_of(shop, SCENES_CLS, variant)[0] for variant in (Variant(""), ablations.NORMS))
    assert norms.target == "block-norm"
    found = judged_by(shop, SCENES_CLS, usual)
    assert torch.equal(found["rho"], found["own"]) and found["rho"].shape == (3,)
    found = judged_by(shop, SCENES_CLS, norms)
    assert not torch.equal(found["rho"], found["own"])


def test_means_are_over_seeds_and_pictures(shop: Workshop) -> None:
    values = torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]])
    mean = seeds_mean(shop, PLACE, values, "told")
    assert (mean.value, mean.count, mean.over) == (3.5, 3, "images and seeds")
    assert 1 < mean.low < 2.5 and 4.5 < mean.high < 6
    assert mean.note == "told; ± 0.71 over 2 seeds"
    same = seeds_mean(shop, PLACE, torch.full((3, 4), 2.0), "told")
    assert same.low == pytest.approx(2) and same.high == pytest.approx(2)
    seeds_alone = seeds_mean(shop, PLACE, torch.tensor([[1.0, 1.0], [3.0, 3.0]]), "told")
    assert (seeds_alone.low, seeds_alone.high) == pytest.approx((1, 3))


def test_a_change_is_a_quotient_of_means_on_the_same_pictures() -> None:
    shop = Workshop(HEAD_ABLATIONS, SCALES["tiny"], Path("nowhere"), torch.device("cpu"), Progress())
    usual = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) ** 4
    doubled = seeds_change(shop, PLACE, 2 * usual, usual, "told")
    assert (doubled.value, doubled.low, doubled.high) == pytest.approx((1, 1, 1))
    less = seeds_change(shop, PLACE, usual.flip(1) / 100, usual, "told")
    assert less.value == pytest.approx(-0.99)
    assert -1 < less.low < less.value < less.high < 0
