"""Tables of targets compared row by row."""

from dataclasses import fields
from typing import Any

import torch

from pullback.targets.table import TargetTable


def rows(table: TargetTable) -> dict[tuple[str, int], dict[str, Any]]:
    """By key and crop, so that the order does not matter."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    assert len(set(zip(table.keys, table.crop_index, strict=True))) == len(table), "no row is there twice"
    return {
        (table.keys[i], table.crop_index[i]): {
            name: column[i] for name, column in columns.items() if column is not None
        }
        for i in range(len(table))
    }


def assert_same_rows(one: TargetTable, other: TargetTable, rtol: float = 1e-5) -> None:
    first, second = rows(one), rows(other)
    assert first.keys() == second.keys()
    for row, columns in first.items():
        for name, value in columns.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(second[row][name], value, rtol=rtol, atol=1e-7, msg=f"{row} {name}")
            else:
                assert second[row][name] == value
