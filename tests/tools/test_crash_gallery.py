"""A few kills of processes that fill a gallery: `tools/crash_gallery.py` on a small job, as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
]
TOOL = Path(__file__).resolve().parents[2] / "tools" / "crash_gallery.py"


def test_killed_processes_lose_nothing_and_add_nothing_twice(tmp_path):
    command = [sys.executable, TOOL, "--kills", "4", "--images", "24", "--batch", "2", "--work", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("4 kills"), done.stdout
    assert done.stdout.rstrip().endswith("of 24 images: 0 lost, 0 twice, 0 wrong"), done.stdout
