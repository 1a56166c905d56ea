"""Two kills of every command: `tools/crash.py` on a small job, as a process of its own, which forks and kills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
]
TOOL = Path(__file__).resolve().parents[2] / "tools" / "crash.py"


def test_killed_commands_go_on_to_the_same_results(tmp_path):
    """What a kill costs is left to the tool itself: here other tests run beside it, and times mean little."""
    command = [sys.executable, TOOL, "--kills", "2", "--images", "3", "--save-every", "0.3", "--work", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=280)
    lines = {line.split(":")[0]: line for line in done.stdout.splitlines()}
    assert list(lines) == ["targets", "train", "prune", "diagnose"], done.stdout + done.stderr
    for line in lines.values():
        assert "2 kills" in line and line.endswith("; the same"), done.stdout
