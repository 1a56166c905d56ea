"""The tool that types the README's jobs finds them, and tells those that work from those that do not."""

import sys
from pathlib import Path

from readme_jobs import Block, blocks, type_them

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_has_five_jobs_each_with_something_to_type():
    found = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len({block.job for block in found}) == 5
    assert {block.language for block in found} == {"python", "shell"}


def test_python_blocks_share_one_interpreter_and_failures_are_seen(tmp_path):
    todo = [
        Block("one", "python", "x = 1\n"),
        Block("two", "python", "print('x is', x)\n"),
        Block("three", "python", "print(missing)\n"),
        Block("four", "shell", "echo begun\nfalse\necho not reached\n"),
        Block("five", "shell", "ls photos\n"),
        Block("six", "python", "print(x, end='')\n"),
    ]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    rows = list(type_them(todo, tmp_path, Path(sys.executable)))
    assert [row.worked for row in rows] == [True, True, False, False, True, True]
    assert rows[1].tail == ["x is 1"] and "NameError" in rows[2].tail[-1]
    assert not any(line == "not reached" for line in rows[3].tail) and rows[4].tail[-1] == "a.png"
    assert rows[5].tail == ["1"]
