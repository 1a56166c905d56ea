"""Type the README's five jobs into a shell, literally, and note which worked and how long each took.

    python tools/readme_jobs.py --model ../shared/models/dinov2-small --images ../shared/data/imagenet_val/heldout

The folder it happens in is new and holds two things, named as the README names them: the model in
`facebook/dinov2-small`, and pictures in `photos/`. There is no network (`HF_HUB_OFFLINE`). Shell blocks run as a script
that stops at the first failure; Python blocks one after the other in one interpreter, as somebody who reads on would.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOBS = re.compile(r"^## Five jobs\n(.*?)^## ", re.MULTILINE | re.DOTALL)
JOB = re.compile(r"^### (.*?)\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(python)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KEPT_LINES = 6
LISTENER = """
import json, sys, traceback
names = {}
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "<README>", "exec"), names)
        failed = False
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        failed = True
    print("\\x00failed" if failed else "\\x00done", flush=True)
"""


@dataclass(frozen=True)
class Block:
    """What stands between two fences of the README."""

    job: str
    language: str  # "python" or "shell"
    text: str


@dataclass(frozen=True)
class Row:
    """How a block went; ``tail`` are the last lines that it printed."""

    job: str
    language: str
    text: str
    worked: bool
    seconds: float
    tail: list[str]


def blocks(readme: str) -> list[Block]:
    """Return the blocks of the five jobs, in order."""
    part = JOBS.search(readme)
    if part is None:
        raise SystemExit('README.md: expected a section "## Five jobs", followed by another section.')
    return [
        Block(title, language or "shell", text)
        for title, body in JOB.findall(part[1])
        for language, text in BLOCK.findall(body)
    ]


def type_them(todo: list[Block], folder: Path, command: Path) -> Iterator[Row]:
    """Run the blocks in a folder, with the `pullback` and `python` that lie beside ``command``."""
    environment = os.environ | {
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    python = subprocess.Popen(
        ["python", "-c", LISTENER], cwd=folder, env=environment, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert python.stdin is not None and python.stdout is not None
    for block in todo:
        start = time.perf_counter()
        if block.language == "shell":
            done = subprocess.run(
                ["bash", "-euxo", "pipefail", "-c", block.text], cwd=folder, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            worked, lines = done.returncode == 0, done.stdout.splitlines()
        else:
            python.stdin.write(json.dumps(block.text) + "\n")
            python.stdin.flush()
            lines, end = [], ""
            for line in python.stdout:
                if "\x00" in line:
                    before, _, end = line.rstrip("\n").partition("\x00")
                    lines += [before] if before else []
                    break
                lines.append(line.rstrip("\n"))
            worked = end == "done"
        yield Row(block.job, block.language, block.text, worked, time.perf_counter() - start, lines[-KEPT_LINES:])
    python.stdin.close()
    python.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of DINOv2-S")
    parser.add_argument("--images", type=Path, required=True, help="folder of pictures")
    parser.add_argument("--count", type=int, default=50, help="pictures that go into photos/")
    parser.add_argument("--out", type=Path, help="file for the rows (JSON)")
    arguments = parser.parse_args()

    import torch

    from pullback.runs.provenance import provenance

    pictures = sorted(arguments.images.resolve().rglob("*.jp*g"))[: arguments.count]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "facebook").mkdir()
        (folder / "facebook" / "dinov2-small").symlink_to(arguments.model.resolve())
        (folder / "photos").mkdir()
        for picture in pictures:
            shutil.copy(picture, folder / "photos")
        rows = []
        for row in type_them(blocks((ROOT / "README.md").read_text(encoding="utf-8")), folder, Path(sys.executable)):
            rows.append(row)
            print(f"{'works' if row.worked else 'FAILS'} {row.seconds:7.1f} s  {row.job} ({row.language})", flush=True)
            print(*(f"    {line}" for line in row.tail), sep="\n", flush=True)
    if arguments.out is not None:
        document = provenance(torch.device("cpu")) | {"pictures": len(pictures), "rows": [asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(not all(row.worked for row in rows))


if __name__ == "__main__":
    main()
