"""Checkpoints in parts."""

import torch

from recipes.scene_run import read_parts, write_parts

CPU = torch.device("cpu")


def test_checkpoints_are_split_and_an_unfinished_one_is_ignored(tmp_path):
    state = {"step": 7, "values": torch.arange(5000.0)}
    parts = write_parts(state, 7, tmp_path, part_bytes=6000)
    assert len(parts) == 4 and all(part.stat().st_size <= 6000 for part in parts)
    loaded = read_parts(tmp_path, CPU)
    assert loaded is not None and torch.equal(loaded["values"], state["values"])
    (tmp_path / "checkpoint-000009-1-of-4").write_bytes(b"the run was stopped here")
    assert read_parts(tmp_path, CPU)["step"] == 7
    assert [path.name for path in write_parts(state, 8, tmp_path)] == ["checkpoint-000008-1-of-1"]
    assert len(list(tmp_path.iterdir())) == 1 and read_parts(tmp_path / "elsewhere", CPU) is None
