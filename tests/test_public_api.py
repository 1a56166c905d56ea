"""The public names: what type checkers know of them, where they are documented, what importing them costs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pullback as pb

ROOT = Path(__file__).resolve().parents[1]
NAMES = [name for name in pb.__all__ if name != "__version__"]


def test_every_name_can_be_imported_and_unknown_ones_are_refused():
    for name in pb.__all__:
        assert getattr(pb, name) is not None
    assert dir(pb) == sorted(pb.__all__)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = pb.no_such_name


def test_a_type_checker_sees_a_real_type_for_every_name(tmp_path):
    program = tmp_path / "user.py"
    lines = ["import pullback as pb", *(f"reveal_type(pb.{name})" for name in pb.__all__)]
    program.write_text("\n".join(lines))
    options = ("--cache-dir", ROOT / ".mypy_cache", "--config-file", ROOT / "pyproject.toml")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, options), str(program)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT / "src",  # the sources of this checkout, whichever one is installed
    )
    assert done.returncode == 0, done.stdout + done.stderr
    revealed = re.findall(r'user\.py:(\d+): note: Revealed type is "(.*)"', done.stdout)
    types = {lines[int(number) - 1]: found for number, found in revealed}
    assert len(types) == len(pb.__all__)
    assert [line for line, found in types.items() if found in ("Any", "builtins.object")] == []


def test_every_name_is_on_one_page_of_the_reference():
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    listed = [name for page in pages for name in re.findall(r"^::: pullback\.(\w+)$", page.read_text(), re.MULTILINE)]
    assert sorted(listed) == sorted(NAMES)
