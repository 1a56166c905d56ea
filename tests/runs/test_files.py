"""Files are whole or not there."""

import json
import stat

import numpy as np
import pytest

from pullback.errors import PullbackError
from pullback.runs import documents as files
from pullback.runs.files import write_arrays, write_json, write_text


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
