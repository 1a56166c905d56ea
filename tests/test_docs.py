"""The Python examples of the README and the docs run as they stand."""

import re
from pathlib import Path

import pytest
import torch

from pullback.experiments.demo import write_pictures
from pullback.scenes.render import render

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search((ROOT / page).read_text())])
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    write_pictures(render(range(2), size=128), tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict = {}
    for number, code in enumerate(BLOCK.findall((ROOT / page).read_text()), start=1):
        exec(compile(code, f"{page}, example {number}", "exec"), namespace)
    assert "False" not in capsys.readouterr().out  # examples print their own checks


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall((ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
