"""Write every measured figure of README, docs and model cards from the files under benchmarks/results.

    python tools/tables.py            # rewrite the blocks between <!-- measured: NAME --> and <!-- end -->
    python tools/tables.py --check    # change nothing; fail if a page differs from its result files

A block is a function in tools/measured/ that returns Markdown: a table with its source line, and sentences whose claim
is checked against the same file. Nothing outside the blocks may carry a measured figure.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from measured import (
    bottleneck,
    bottleneck_changes,
    bottleneck_spn,
    bottleneck_uses,
    depth,
    embedded,
    first_contact,
    frontier,
    geometry,
    learning,
    overview,
    pruning,
    retrieval,
    theorem,
    vggt,
)
from measured.common import ROOT

SUBJECTS = (
    geometry,
    learning,
    bottleneck,
    bottleneck_changes,
    bottleneck_spn,
    bottleneck_uses,
    pruning,
    frontier,
    retrieval,
    theorem,
    vggt,
    embedded,
    depth,
    first_contact,
    overview,
)
BLOCKS: dict[str, Callable[[], str]] = {}
for module in SUBJECTS:
    BLOCKS |= module.BLOCKS
BLOCK = re.compile(r"<!-- measured: (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
MARKER = re.compile(r"<!-- (?:measured: [\w-]+|end) -->")


def pages() -> list[Path]:
    """Return README, the pages of the docs and the cards of the embedded models. Reports of the paper's experiments are
    written by `pullback report` as a whole, and tested against their rows."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("weights/*/README.md")]
    return sorted(page for page in found if not page.parent.name.startswith("paper-"))


def rewritten(text: str, where: str) -> tuple[str, list[str]]:
    """Return the page with its blocks made anew, and their names."""
    names: list[str] = []

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise SystemExit(f"{where}: no block {name!r}; there are {', '.join(BLOCKS)}")
        names.append(name)
        return f"<!-- measured: {name} -->\n{BLOCKS[name]()}\n<!-- end -->"

    text = BLOCK.sub(block, text)
    if len(MARKER.findall(text)) != 2 * len(names):
        raise SystemExit(f"{where}: a block has no beginning or no <!-- end -->")
    return text, names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    check = parser.parse_args(arguments).check
    stale, used = [], set()
    for page in pages():
        before = page.read_text(encoding="utf-8")
        where = str(page.relative_to(ROOT))
        after, names = rewritten(before, where)
        used.update(names)
        if after != before:
            stale.append(where)
            if not check:
                page.write_text(after, encoding="utf-8")
    unused = sorted(set(BLOCKS) - used)
    if unused:
        print(f"no page shows: {', '.join(unused)}")
    if stale:
        print(f"{'out of date' if check else 'rewritten'}: {', '.join(stale)}")
        if check:
            print("run: python tools/tables.py")
    return int(bool(unused) or (check and bool(stale)))


if __name__ == "__main__":
    sys.exit(main())
