"""A disk that fills up, or a limit on the size of files, in the middle of a command: one message that names the file,
exit code 1, no temporary file, and the same command goes on when there is space again."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import pullback as pb
from helpers.disk import largest_file
from helpers.pictures import write_pictures
from pullback.cli import app
from pullback.cli.common import FAILED
from pullback.targets.compute import compute_targets

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")

SMALL = "--size 56 --device cpu"
COMMANDS = {
    "targets": (f"targets tiny-scenes --images {{photos}} --out {{out}} --rank 2 {SMALL}", "targets-00000.parquet"),
    "train head": (
        "train head --targets {store} --held-out 0.5 --out {out} --device cpu --steps 2 --width 16 --heads 2",
        "checkpoint.pt",
    ),
    "prune": (
        f"prune tiny-scenes --images {{photos}} --out {{out}} {SMALL} --time none --scores norm --ratios 0.5",
        "examples.npz",
    ),
    "plan": (
        f"plan tiny-scenes --images {{photos}} --out {{out}} {SMALL} --heads 4=norm --flops 0.9",
        "model/model.safetensors",
    ),
    "tune": (
        f"tune {{fast}} --images {{photos}} --out {{out}} {SMALL} --held-out 0.5 --steps 2 --batch 2",
        "checkpoint.pt",
    ),
    "diagnose": (f"diagnose tiny-scenes --images {{photos}} --out {{out}} {SMALL} --rank 2", "images.jsonl"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("place")
    photos = write_pictures(root / "photos", 4, broken=False)
    compute_targets(pb.load_probe("tiny-scenes", device="cpu"), photos, out=root / "store", rank=2, size=56)
    model = pb.load_probe("tiny-scenes", device="cpu").backbone.model
    fast = pb.prune(model, "norm", ratio=0.5, stages=[4]).save_pretrained(root / "fast")
    return {"photos": photos, "store": root / "store", "fast": fast}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr("pullback.report.drawing.importlib.util.find_spec", lambda name: None)


def invoke(typed: str, place: dict[str, Path], out: Path) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "200"})
    return runner.invoke(app, shlex.split(typed.format(**place, out=out)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_written_is_named_and_the_same_command_goes_on(command, place, tmp_path):
    typed, file = COMMANDS[command]
    with largest_file(4096):
        result = invoke(typed, place, tmp_path / "out")
    assert result.exit_code == FAILED, result.output
    assert f"error: {tmp_path / 'out'}/{file}" in result.output and "Traceback" not in result.output
    assert ": cannot be written (" in result.output
    assert "File too large" in result.output
    assert not list(tmp_path.rglob(".*.tmp")), "a temporary file was left"
    again = invoke(typed, place, tmp_path / "out")
    assert again.exit_code == 0, again.output


def test_what_was_finished_before_the_disk_was_full_is_kept(place, tmp_path, monkeypatch):
    """The third shard finds no space: the rows of the first two are there."""
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 8:  # the mark, the settings and two shards, each with its folder
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    typed = COMMANDS["targets"][0] + " --shard-size 1"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        result = invoke(typed, place, tmp_path / "out")
    assert result.exit_code == FAILED
    assert "targets-00002.parquet: cannot be written (No space left on device). Free some space" in result.output
    assert f"kept in {tmp_path / 'out'}/: 2 rows; the same command goes on from there" in result.output
    again = invoke(typed, place, tmp_path / "out")
    assert "4 rows in 4 shards, 2 of them new" in again.output, again.output
