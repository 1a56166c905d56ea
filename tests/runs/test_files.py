"""Files are whole or not there."""

import errno
import json
import os
import select
import stat
import subprocess
import sys

import numpy as np
import pytest

from helpers.disk import largest_file
from pullback.errors import FileError, PullbackError
from pullback.runs import documents as files
from pullback.runs.files import (
    check_folder,
    one_at_a_time,
    read_arrays,
    read_json,
    remove_unfinished,
    replaced_folder,
    write_arrays,
    write_json,
    write_network,
    write_text,
)


def test_numbers_stay_on_one_line_and_nothing_changes(tmp_path):
    document = {
        "numbers": [1, -2.5, 3e-7, 1e22],
        "one": [4],
        "empty": [],
        "nested": [[1, 2], [3]],
        "text": "[1,\n 2]",
        "names": ["a", "1"],
        "mixed": [1, None],
        "greek": "κ",
    }
    write_json(tmp_path / "x.json", document)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == document
    assert '"numbers": [1, -2.5, 3e-07, 1e+22]' in text and "κ" in text


def test_a_value_that_is_not_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_failure_while_writing_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    write_arrays(path, {"a": np.arange(3)})

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        write_arrays(path, {"a": np.arange(4)})
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
    assert len(np.load(path)["a"]) == 3


def test_files_are_as_readable_as_any_other(tmp_path):
    write_text(tmp_path / "ours", "")
    (tmp_path / "plain").write_text("")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_folder_without_a_diagnosis_is_refused(tmp_path):
    with pytest.raises(PullbackError, match=r"expected diagnosis.json in .*pullback diagnose --out"):
        files.read_diagnosis(tmp_path)


# ---- a disk that is full, a limit on the size of files, folders that cannot be made, files that are damaged


def test_a_full_disk_is_named_with_the_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    write_json(tmp_path / "x.json", {"a": 1})

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        FileError, match=r"x\.json: cannot be written \(No space left on device\)\. Free some space; what"
    ):
        write_json(tmp_path / "x.json", {"a": 2}, durable=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def test_a_limit_on_the_size_of_files_is_named_whatever_is_written(tmp_path):
    torch = pytest.importorskip("torch")
    network = torch.nn.Linear(100, 100)
    with largest_file(512):
        for name, write in {
            "x.json": lambda path: write_json(path, {"numbers": list(range(1000))}),
            "x.npz": lambda path: write_arrays(path, {"a": np.random.default_rng(0).normal(size=1000)}),
            "model.safetensors": lambda path: write_network(path.parent, network, {}),
        }.items():
            with pytest.raises(FileError, match=rf"{name}: cannot be written \(.*File too large"):
                write(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_takes_the_place_of_another_whole_or_not_at_all(tmp_path):
    for content in "ab":
        with replaced_folder(tmp_path / "folder") as temporary:
            (temporary / "file").write_text(content)
    assert (tmp_path / "folder" / "file").read_text() == "b"
    with (
        pytest.raises(FileError, match=r"folder: cannot be written \(No space left"),
        replaced_folder(tmp_path / "folder") as temporary,
    ):
        (temporary / "file").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "file").read_text() == "b"


def test_what_a_killed_run_left_is_removed(tmp_path):
    (tmp_path / ".x.json.abc.tmp").write_text("")
    (tmp_path / ".model.abc.tmp").mkdir()
    (tmp_path / "x.json").write_text("")
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_what_another_process_is_filling_stays_until_that_has_ended(tmp_path):
    script = (
        "import sys; from pathlib import Path; from pullback.runs.files import replaced_folder\n"
        "with replaced_folder(Path(sys.argv[1])): print('filling', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "filling\n"
        remove_unfinished(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
        other.kill()
    remove_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())


def test_work_on_a_file_waits_for_a_process_that_is_at_it_and_not_for_one_that_was_killed(tmp_path):
    script = (
        "import sys; from pathlib import Path; from pullback.runs.files import one_at_a_time\n"
        "with one_at_a_time(Path(sys.argv[1])): print('at it', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "x")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        ready, _, _ = select.select([first.stdout, second.stdout], [], [], 60)
        assert len(ready) == 1  # the other one waits
        begun, waiting = (first, second) if ready == [first.stdout] else (second, first)
        assert not select.select([waiting.stdout], [], [], 0.3)[0]
        begun.kill()
        assert waiting.stdout.readline() == "at it\n"
        waiting.communicate("go\n")
    with one_at_a_time(tmp_path / "x"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused_and_nothing_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(PullbackError, match=r"out: cannot make the folder .*/file/a/b \(.*/file is not a folder\)"):
        check_folder(tmp_path / "file" / "a" / "b")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PullbackError, match="dangling is not a folder"):
        check_folder(tmp_path / "dangling" / "out")
    assert check_folder(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PullbackError, match=r"out: the folder .* is not writable\. Choose another"):
        check_folder(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half", b"no archive"])
def test_damaged_arrays_are_named(tmp_path, content):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(FileError, match=r"x\.npz: cannot be read \(.*\)\. Delete it, and run again"):
        read_arrays(tmp_path / "x.npz")


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"[1]"])
def test_damaged_json_is_no_fault_of_the_command(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(FileError, match=r"out: .*x\.json (cannot be read as JSON|holds list, expected)"):
        read_json(tmp_path / "x.json", "out")
    with pytest.raises(PullbackError, match=r"folder: there is no .*y\.json"):
        read_json(tmp_path / "y.json")
