"""benchmarks/frontier_parts/polish.py: changes of a plan differ in one thing, and are taken if they help."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

import pullback as pb
from pullback.pruning.plan import preset

BUDGET = 0.8


@pytest.fixture
def polish(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "benchmarks")
    return importlib.import_module("frontier_parts.polish")


@pytest.fixture
def polisher(polish):
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=48, num_hidden_layers=4, num_attention_heads=3, image_size=84)
    model = Dinov2Model(config).eval().requires_grad_(False)
    heads = {layer: pb.ImportanceHead(48, 16).requires_grad_(False) for layer in range(3)}
    return polish.Polisher(model, heads, torch.randn(8, 3, 84, 84), BUDGET, 4)


def plan(stages=(0, 2), shares=(0.3, 0.1)):
    return replace(preset("best", shares, stages, depth=4), class_row=True)


def test_changes_differ_in_one_thing_and_keep_the_stages_in_order(polish):
    found = list(polish.changes(plan(), {0: None, 1: None, 2: None}))
    assert len(found) == len(set(found)) and plan() not in found
    assert {changed.stages for changed in found} == {(0, 2), (1, 2), (0, 1)}
    for changed in found:
        assert sum(changed.shares) == pytest.approx(0.4)
        names = [name for name in ("stages", "shares", "trust", "gates", "fades")
                 if getattr(changed, name) != getattr(plan(), name)]  # fmt: skip
        assert len(names) == 1


def test_a_change_is_scaled_to_the_budget(polisher):
    fitted = polisher.fitted(plan())
    used = pb.operations(polisher.build(fitted), polisher.choosing)
    assert used <= BUDGET and fitted.shares[0] == pytest.approx(3 * fitted.shares[1])
    more = replace(fitted, shares=tuple(0.9 * share for share in fitted.shares))
    assert pb.operations(polisher.build(more), polisher.choosing) > BUDGET
    polisher.budget = 0.1
    assert polisher.fitted(plan()) is None


def test_what_is_taken_is_better_on_the_images_that_choose(polisher):
    start = polisher.fitted(plan())
    better = polisher.improved(start)
    assert polisher.mean(better) < polisher.mean(start)
    assert pb.operations(polisher.build(better), polisher.choosing) <= BUDGET
    assert polisher.improved(replace(start, stages=(), shares=(), gates=(), fades=())).stages == ()
