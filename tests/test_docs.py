"""The examples of the README and the docs run as they stand, print what they say, and links lead somewhere."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from helpers.registry import kept_tables
from pullback.experiments.demo import write_pictures
from pullback.scenes.render import render

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^# → (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
TITLE = "Task-Induced Riemannian Metrics for Vision Transformer"


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search((ROOT / page).read_text(encoding="utf-8"))])
def test_the_examples_of_a_page_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, capsys, request):
    write_pictures(render(range(2), size=128), tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    torch.manual_seed(0)
    namespace: dict = {}
    registered = ExitStack()
    request.addfinalizer(registered.close)
    registered.enter_context(kept_tables())  # examples may add to them
    for number, code in enumerate(BLOCK.findall((ROOT / page).read_text(encoding="utf-8")), start=1):
        exec(compile(code, f"{page}, example {number}", "exec"), namespace)
        printed = capsys.readouterr().out
        assert "False" not in printed  # examples print their own checks
        if said := PRINTED.findall(code):
            lines = printed.splitlines()
            assert len(lines) == len(said), f"example {number} prints {lines}"
            for line, claim in zip(lines, said, strict=True):
                assert alike(line, claim), f"example {number} prints {line!r}, the page says {claim!r}"


def alike(printed: str, claimed: str) -> bool:
    """Whether two lines have the same words, and numbers that differ by no more than 2 % and one unit of the last
    digit: sums are added in another order on another CPU."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", claimed):
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(claimed), strict=True)
    return all(abs(float(one) - float(other)) <= 0.02 * abs(float(other)) + unit(other) for one, other in pairs)


def unit(number: str) -> float:
    _, _, decimals = number.partition(".")
    return 10.0 ** -len(decimals) if decimals else 0.0


def test_printed_numbers_are_compared_with_tolerance_and_words_without():
    assert alike("κ = 0.2142 ± 0.01", "κ = 0.2137 ± 0.01") and alike("[6.3, 0.1]", "[6.3, 0.2]")
    assert not alike("κ = 0.25", "κ = 0.21") and not alike("regime (ii)", "regime (iii)") and not alike("4", "5")


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_the_paper_is_cited_by_its_title_where_a_page_mentions_it_first(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    first = re.search(r"\bpaper\b", re.sub(r"`[^`]*`", lambda code: "·" * len(code[0]), text))
    if first is not None:
        assert TITLE in text[: first.end() + 150], f"{page} speaks of a paper without its title"


def test_the_citation_file_names_the_paper_and_the_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert TITLE in text and version is not None and f"\nversion: {version[1]}\n" in text
