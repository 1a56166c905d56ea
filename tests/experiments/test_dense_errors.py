"""Errors of pruned dense decoders against blocks that are run one by one here, and the rows made of them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pullback.evaluation.fidelity import silog
from pullback.experiments import dense_errors as module
from pullback.experiments.dense_errors import (
    CAUSES,
    COUNTS,
    FLOOR,
    FUSION,
    IMPORTANCE,
    PHOTOS_DA,
    PHOTOS_S,
    RANDOM,
    REMOVAL,
    ROOMS_S,
    SCENES,
    SHIFT,
    STALE,
    STALE_FUSED,
    TOME,
    WHOLE,
    causes,
    difference_row,
    errors,
    mean_row,
    plan_of,
    seeds_std,
)
from pullback.experiments.dense_pruning import DENSE_PRUNING
from pullback.experiments.scales import SCALES
from pullback.experiments.workshop import Workshop
from pullback.pruning.rules import Subject
from pullback.runs.progress import Progress

SMALL = SCENES.at(56)
"""16 patches."""
FEW = {"scenes": 2, "scenes to train": 8, "larger scenes to train": 8, "seeds": 2, "steps": 4, "batch": 4, "width": 32}
STAGE, HALF, REMOVED = 4, 0.5, 8


def workshop(out: Path) -> Workshop:
    return Workshop(DENSE_PRUNING, SCALES["tiny"], out, torch.device("cpu"), Progress())


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COUNTS, "tiny", {**COUNTS["tiny"], **FEW})
        yield workshop(tmp_path_factory.mktemp("run"))


class ByHand:
    """The paper's pipeline of one picture after another, with the tokens that a head scores lowest."""

    def __init__(self, shop: Workshop, seed: int) -> None:
        subject = SMALL.subject(shop, (STAGE,))
        self.decoder, self.backbone = subject.decoder, subject.backbone
        self.head = SMALL.heads(shop, [STAGE], seed)[0]
        self.images = SMALL.images(shop)

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        return self.backbone.blocks[layer](tokens, None, None, None)

    @torch.no_grad()
    def taps(self, image: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        """Every layer of the whole model; of a model without the removed tokens, these as in the whole one; and which
        tokens are removed."""
        exact = self.backbone.features(image[None], list(range(12)))
        scores = self.head(exact[STAGE])[0]
        prefix = self.backbone.prefix
        gone = torch.zeros(len(scores), dtype=torch.bool)
        gone[prefix + scores[prefix:].argsort()[:REMOVED]] = True
        pruned, tokens = dict(exact), exact[STAGE][:, ~gone]
        for layer in range(STAGE + 1, 12):
            tokens = self.block(layer, tokens)
            pruned[layer] = exact[layer].clone()
            pruned[layer][:, ~gone] = tokens
        return exact, pruned, gone

    def stale(self, taps: Mapping[int, Tensor], exact: Mapping[int, Tensor], gone: Tensor) -> dict[int, Tensor]:
        """Put the removed tokens back as they were at the stage."""
        found = {}
        for layer, tap in taps.items():
            found[layer] = tap.clone()
            if layer > STAGE:
                found[layer][:, gone] = exact[STAGE][:, gone]
        return found

    @torch.no_grad()
    def decode(self, taps: Mapping[int, Tensor], image: Tensor) -> Tensor:
        layout = self.backbone.token_layout(image[None])
        return self.decoder.output([taps[layer] for layer in self.decoder.layers], layout, self.backbone.norm)

    @torch.no_grad()
    def fused(self, taps: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {**taps, 11: self.block(11, taps[10])}


def test_errors_are_those_of_blocks_run_by_hand(shop):
    own = ByHand(shop, shop.seed)
    for pipeline in ("paper", "not fused"):
        found = errors(shop, SMALL, pipeline, (STAGE,), (HALF,), IMPORTANCE)
        assert found.shape == (1, 2, 2), "ratios, seeds, pictures"
        for number, image in enumerate(own.images):
            exact, pruned, gone = own.taps(image)
            taps = own.stale(pruned, exact, gone)
            output = own.decode(own.fused(taps) if pipeline == "paper" else taps, image)
            truth = silog(output, own.decode(exact, image)).error
            assert found[0, 0, number].item() == pytest.approx(truth.item(), rel=1e-3)
        assert not torch.equal(found[0, 1], found[0, 0]), "the second seed has a head of its own"


def test_causes_are_those_of_blocks_run_by_hand(shop):
    own = ByHand(shop, shop.seed)
    found = dict(zip(CAUSES, causes(shop, SMALL, STAGE, (HALF,), IMPORTANCE), strict=True))
    whole = errors(shop, SMALL, "paper", (STAGE,), (HALF,), IMPORTANCE)[0, 0]
    torch.testing.assert_close(found[WHOLE][0], whole, rtol=1e-4, atol=1e-4)
    for number, image in enumerate(own.images):
        exact, pruned, gone = own.taps(image)
        stale = own.stale(exact, exact, gone)
        last = own.fused(stale)[11]
        full = own.decode(exact, image)
        for cause, taps in {
            REMOVAL: pruned,
            STALE: stale,
            STALE_FUSED: {**stale, 11: last},
            FUSION: {**exact, 11: last},
        }.items():
            truth = silog(own.decode(taps, image), full).error.item()
            assert found[cause][0, number].item() == pytest.approx(truth, rel=1e-3), cause
        output = own.decode(own.fused(own.stale(pruned, exact, gone)), image)
        shift = (output.double().log() - full.double().log()).mean().abs().item()
        assert found[SHIFT][0, number].item() == pytest.approx(100 * shift, rel=1e-2)
        assert found[FLOOR][0, number] == 0


def test_nothing_removed_is_no_error(shop):
    assert (errors(shop, SMALL, "ours", (STAGE,), (0.01,), TOME) < 1e-3).all()
    assert (causes(shop, SMALL, STAGE, (0.01,), RANDOM) < 1e-2).all()


def test_errors_are_measured_once(shop, monkeypatch):
    first = errors(shop, SMALL, "paper", (STAGE,), (HALF,), TOME)
    monkeypatch.setattr(Subject, "full", lambda *_: pytest.fail("measured again"))
    assert torch.equal(errors(shop, SMALL, "paper", (STAGE,), (HALF,), TOME), first)
    assert first.shape == (1, 1, 2), "nothing is drawn, so that one seed is enough"
    with pytest.raises(BaseException, match="measured again"):
        errors(shop, SMALL, "not fused", (STAGE,), (HALF,), TOME)


def test_what_decides_an_error_names_it(shop):
    known = module._key(shop, SMALL, (STAGE,), (HALF,), RANDOM)
    other = [
        module._key(shop, SMALL.at(112), (STAGE,), (HALF,), RANDOM),
        module._key(shop, SMALL, (STAGE, 8), (HALF,), RANDOM),
        module._key(shop, SMALL, (STAGE,), (0.4,), RANDOM),
        module._key(shop, SMALL, (STAGE,), (HALF,), IMPORTANCE),
        module._key(shop, SMALL.of("scenes-shifted", "scenes-train"), (STAGE,), (HALF,), RANDOM),
    ]
    assert all(key != known for key in other)


def test_the_soft_merge_asks_for_the_modes_of_a_batch_once(shop, monkeypatch):
    asked = []

    def modes(probe, rank):
        def run(tokens, context):
            asked.append(rank)
            return torch.ones(len(tokens), rank, *tokens.shape[1:])

        return run

    monkeypatch.setattr(module, "exact_modes", modes)
    monkeypatch.setattr(module, "_BATCH", 1)
    errors(shop, SMALL, "soft merge", (STAGE,), (0.25, HALF), IMPORTANCE)
    assert asked == [9, 9], "two pictures, of nine outputs each"


def test_pipelines_are_what_their_names_say():
    paper, unfused, soft, ours = (plan_of(name, HALF, (4, 8)) for name in ("paper", "not fused", "soft merge", "ours"))
    assert (paper.match, paper.reinsert, paper.fuse_last) == ("none", "frozen", True)
    assert unfused == replace(paper, fuse_last=False)
    assert (soft.match, soft.reinsert, soft.fuse_last) == ("task", "copy", False)
    assert ours.reinsert == "drift" and ours.stages == paper.stages == (4, 8)


def test_heads_never_learn_from_pictures_that_are_measured(shop):
    assert SCENES.recipe(shop, 0).skip == 0 and SCENES.recipe(shop, 0).data == "scenes-train"
    same = SCENES.of("scenes-shifted", "scenes-shifted").recipe(shop, 0)
    assert (same.data, same.skip) == ("scenes-shifted", shop.count("scenes"))
    assert SCENES.recipe(shop, 7).seed == 7 and SCENES.at(168).recipe(shop, 0).size == 168


def test_larger_pictures_may_have_heads_of_fewer(shop, monkeypatch):
    monkeypatch.setitem(COUNTS["tiny"], "larger scenes to train", 5)
    assert [SCENES.at(size).recipe(shop, 0).images for size in (56, 112, 168)] == [8, 8, 5]
    assert ROOMS_S.at(448).recipe(shop, 0).images == COUNTS["tiny"]["rooms to train"]


def test_the_depth_head_that_ships_is_of_the_small_model():
    paper = SCALES["paper"]
    assert PHOTOS_S.absent(paper) and not PHOTOS_DA.absent(paper) and not PHOTOS_S.absent(SCALES["small"])


def test_a_cell_costs_what_its_passes_and_products_do():
    counts = COUNTS["paper"]
    cell = PHOTOS_DA.cell(SCALES["paper"], "one", [], None, passes=2, trains=1, modes=True)
    assert cell.forwards == 2 * counts["photos"] + 3 * 130 * (counts["photos to train"] + counts["photos"])
    assert cell.needs == ("photos-train",) and PHOTOS_DA.cell(SCALES["paper"], "one", [], None).needs == ()
    assert PHOTOS_DA.at(448).cell(SCALES["paper"], "one", [], None, passes=1).forwards == 4 * counts["photos"]


def test_rows_leave_out_pictures_without_an_error(shop):
    values = torch.tensor([[1.0, 2.0, torch.nan, 3.0], [3.0, 4.0, 5.0, 5.0]])
    row = mean_row(shop, ("table", "row", "0.50"), values)
    assert (row.value, row.count) == (3.0, 3) and row.low < 3 < row.high
    assert row.note == "2 seeds, std 1.4" and seeds_std(values[:, :1]) == pytest.approx(2**0.5)
    assert mean_row(shop, ("table", "row", "0.50"), values[:1]).note is None


def test_a_difference_is_a_share_of_the_others_mean_on_the_same_pictures(shop):
    second = torch.tensor([[1.0, 10.0, 100.0, torch.nan], [3.0, 30.0, 300.0, 1.0]])
    row = difference_row(shop, ("table", "row", "0.50"), second * 0.75, second)
    assert [row.value, row.low, row.high] == pytest.approx([-25] * 3) and row.count == 3
    values = torch.from_numpy(np.random.default_rng(0).lognormal(size=(1, 50)))
    other = torch.from_numpy(np.random.default_rng(1).lognormal(size=(1, 50)))
    apart = difference_row(shop, ("table", "row", "0.50"), values, other)
    assert -100 < apart.low < 100 * float(values.mean() / other.mean() - 1) < apart.high
    nothing = difference_row(shop, ("table", "row", "0.05"), torch.zeros(2, 3), torch.zeros(2, 3))
    assert math.isnan(nothing.value) and nothing.low is None
