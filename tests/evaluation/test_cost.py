"""Operations that can be counted by hand, and times that can be waited for."""

import time

import pytest
import torch
import torch.nn.functional as F

from pullback.errors import PullbackError
from pullback.evaluation.cost import flops, laps, milliseconds, race


def test_a_matrix_product_has_two_operations_per_term():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    assert flops(lambda: a @ b) == 2 * 3 * 4 * 5


def test_fused_attention_is_counted_on_a_cpu_too():
    q, k, v = torch.ones(2, 3, 7, 8), torch.ones(2, 3, 9, 8), torch.ones(2, 3, 9, 8)
    products = 2 * (2 * 3 * 7 * 9 * 8)  # q k^T, and the weights with v
    assert flops(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * products


def test_fewer_tokens_cost_in_proportion_in_a_linear_layer():
    layer = torch.nn.Linear(16, 32)
    few, many = (flops(lambda n=n: layer(torch.ones(1, n, 16))) for n in (10, 40))
    assert many == 4 * few == 2 * 40 * 16 * 32


def test_a_pause_is_measured():
    timing = milliseconds(lambda: time.sleep(0.005), "cpu", rounds=5)
    assert timing.rounds == 5 and 5 <= timing.low <= timing.median <= timing.high < 50


def test_a_race_times_all_in_turn_after_warming_up():
    calls = []
    slow, quick = race([lambda: (calls.append("slow"), time.sleep(0.01)), lambda: calls.append("quick")], "cpu", 4)
    assert calls[:4] == ["slow", "slow", "quick", "quick"] and calls[4:] == ["slow", "quick"] * 4
    assert slow.median > 10 > quick.median


def test_laps_are_the_rounds_one_by_one():
    found = laps([lambda: time.sleep(0.01), lambda: None], "cpu", 3)
    assert found.shape == (3, 2) and (found[:, 0] >= 10).all() and (found[:, 1] < found[:, 0]).all()


def test_no_graph_is_kept_while_timing():
    layer, graphs = torch.nn.Linear(2, 2), []
    milliseconds(lambda: graphs.append(layer(torch.ones(1, 2)).requires_grad), "cpu", rounds=1)
    flops(lambda: graphs.append(layer(torch.ones(1, 2)).requires_grad))
    assert not any(graphs)


def test_no_round_is_refused():
    with pytest.raises(PullbackError, match="rounds: expected at least 1, got 0"):
        milliseconds(lambda: None, "cpu", rounds=0)
