"""Tables of targets: chosen, joined and refused."""

import pytest
import torch

from helpers.truth import normal, with_singular_values
from pullback.data import Crop
from pullback.errors import PullbackError
from pullback.targets.recipe import targets_of
from pullback.targets.table import TargetTable


def table(names: str, tokens: int = 6, keep_modes: bool = False) -> TargetTable:
    probe = with_singular_values([2.0, 1.0, 0.5], tokens, 5, 8)
    found = targets_of(probe, normal(len(names), tokens, 5), 2, keep_modes=keep_modes)
    crops = [Crop((0, 0, index + 1, 2), flip=True) if index else None for index in range(len(names))]
    return TargetTable.of(found, list(names), [name * 2 for name in names], range(len(names)), crops)


def test_a_table_holds_what_a_store_keeps_and_no_pyarrow_is_needed():
    small = table("abc", keep_modes=True)
    assert (len(small), small.tokens, small.rank) == (3, 6, 2)
    assert small.importance.dtype == torch.float32 and small.total.dtype == torch.float64
    assert small.modes.dtype == torch.float16 and small.modes.shape == (3, 2, 6, 5)
    torch.testing.assert_close(small.block_norm.square(), small.block_energy)


def test_rows_are_selected_in_any_order():
    picked = table("abc", keep_modes=True).select(torch.tensor([2, 0]))
    assert picked.keys == ("c", "a") and picked.image_sha256 == ("cc", "aa") and picked.crop_index == (2, 0)
    assert picked.crops == (Crop((0, 0, 3, 2), True), None)
    torch.testing.assert_close(picked.modes, table("abc", keep_modes=True).modes[[2, 0]])
    assert table("ab").select([1]).modes is None


def test_tables_are_joined_row_after_row():
    joined = TargetTable.join([table("ab"), table("c")])
    assert joined.keys == ("a", "b", "c") and joined.importance.shape == (3, 6) and joined.modes is None
    assert joined.select([0, 1]).importance.equal(table("ab").importance)


def test_tables_of_different_token_counts_are_not_joined():
    with pytest.raises(PullbackError, match=r"one number of tokens and one rank, got \[\(4, 2\), \(6, 2\)\]"):
        TargetTable.join([table("a"), table("b", tokens=4)])
    with pytest.raises(PullbackError, match="tables: expected at least one, got none"):
        TargetTable.join([])
