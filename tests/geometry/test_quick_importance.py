"""Quick importance: near the exact one, and nearer with every round."""

import pytest
import torch

from helpers.truth import random_images, seeded
from pullback.errors import RankError
from pullback.geometry.importance import quick_importance
from pullback.operators import JacobianOperator
from pullback.randnla import Streams
from pullback.targets.recipe import targets_of

RANK = 4


@pytest.fixture(scope="module")
def case():
    probe = seeded("cls", 1)
    features = probe.features(random_images(3))
    return JacobianOperator(probe, features), targets_of(probe, features, RANK, "exact").importance


def found(op, tokens, **options):
    return quick_importance(op, tokens, RANK, streams=Streams.from_seed(0, op.batch), **options)


def test_rounds_bring_it_to_the_exact_importance(case):
    op, exact = case
    errors = [
        float((found(op, exact.shape[1], width=8, rounds=rounds) - exact).norm() / exact.norm())
        for rounds in (0, 2, 40)
    ]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-3


def test_it_costs_what_it_says(case):
    op, exact = case
    before = op.products
    found(op, exact.shape[1], width=8, rounds=3)
    spent = op.products - before
    assert (spent.jvp, spent.vjp) == (3 * 8, 4 * 8)


def test_all_outputs_make_it_exact_at_once(case):
    op, exact = case
    torch.testing.assert_close(found(op, exact.shape[1], width=op.rows, rounds=0), exact, rtol=1e-4, atol=0)


def test_fewer_columns_than_modes_are_refused(case):
    op, exact = case
    with pytest.raises(RankError, match="width: expected rank <= width"):
        found(op, exact.shape[1], width=3)
