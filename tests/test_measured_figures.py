"""Every measured figure of README, docs and model cards comes from a committed result file."""

import json
import re
import shutil
from pathlib import Path

import pytest

import tables
from measured import common, geometry

# What looks like a measurement: an error bar, a p-value, a time, a size, a rate, a factor, a percentage, a correlation.
FIGURE = re.compile(
    r"± ?\d|\bp ?[<=≤] ?\d|\d ?(?:ms|s|min|h|GB|MB|TB|GiB)\b|\d ?\w+/s\b|\d ?×(?! ?\d)|\d ?%|"
    r"[ρκ](?:\(\d+\))? ?(?:=|≈|is) ?\d|V₁ ?(?:=|is) ?\d|\b\d\.\d{2,}\b"
)
# Settings and facts of the method, which no run decides.
SETTINGS = (
    "κ ≥ 0.9",
    "κ is 1",
    "captures 90 %",
    "95 % interval",
    "95 % bootstrap interval",
    "30 % of the patch",
    "at least 90 of 100",
    "area 0.35 to 1",
    "and 0.85 beside it",
    "no p is below 0.12",
    "T = 0.07",
)


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """A copy of the result files that a test may change."""
    folder = tmp_path / "results"
    shutil.copytree(common.RESULTS, folder)
    monkeypatch.setattr(common, "RESULTS", folder)
    return folder


def changed(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def test_every_block_is_what_the_result_files_say(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_is_out_of_date_when_its_result_file_changes(results, capsys):
    layers = json.loads((results / geometry.EXACT).read_text(encoding="utf-8"))["layers"]
    layers[-1]["kappa"]["mean"] += 0.01
    changed(results / geometry.EXACT, layers=layers)
    assert tables.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "README.md" in said and "docs/results/diagnosis.md" in said and "python tools/tables.py" in said


def test_a_sentence_that_its_file_contradicts_stops_the_generator(results):
    layers = json.loads((results / geometry.EXACT).read_text(encoding="utf-8"))["layers"]
    layers[0]["regime"] = "i"
    changed(results / geometry.EXACT, layers=layers)
    with pytest.raises(common.WrongClaim, match="no longer say: Regime"):
        geometry.diagnosis()


def test_a_result_of_an_uncommitted_tree_is_marked(results):
    name = "prune_dinov2s_cls_L03.json"
    assert common.UNCOMMITTED not in common.source(name)
    changed(results / name, commit="0123456789-dirty")
    assert common.UNCOMMITTED in common.source(name)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("<!-- measured: no-such-block -->\n<!-- end -->", "no block 'no-such-block'"),
        ("<!-- measured: diagnosis -->\n| 1 |", "no <!-- end -->"),
        ("a line\n<!-- end -->", "no beginning"),
    ],
)
def test_a_page_with_a_broken_block_is_refused(text, match):
    with pytest.raises(SystemExit, match=match):
        tables.rewritten(text, "page.md")


def prose(path: Path) -> str:
    """A page without its generated blocks, its code and its formulas."""
    text = tables.BLOCK.sub("", path.read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return " ".join(re.sub(r"`[^`]*`", "", text).split())


@pytest.mark.parametrize("path", tables.pages(), ids=lambda path: path.relative_to(common.ROOT).as_posix())
def test_no_measured_figure_stands_outside_a_generated_block(path):
    text = prose(path)
    for setting in SETTINGS:
        text = text.replace(setting, "")
    found = [text[max(0, match.start() - 40) : match.end() + 20] for match in FIGURE.finditer(text)]
    assert not found, f"move these into tools/measured/: {found}"
