"""Every measured figure of README, docs and model cards comes from a committed result file."""

import json
import re
import shutil
from pathlib import Path

import pytest

import tables
from measured import bottleneck, bottleneck_spn, bottleneck_uses, common, geometry

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
    "focal length of 1.23 times",
    "f / 1.23",
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


def test_a_case_of_another_machine_than_its_file_is_named(results):
    assert "(AMD EPYC" in bottleneck.kinds() and "except" not in bottleneck.kinds()
    edit_case(results, "gaussian", ("machine", "device"), "another machine")
    assert "except “Gaussian VAE” (another machine" in bottleneck.kinds()


def edit_case(results: Path, name: str, keys: tuple[str, ...], value: object, file: str = bottleneck.SPECTRA) -> None:
    document = json.loads((results / file).read_text(encoding="utf-8"))
    place = document["cases"][name]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    changed(results / file, cases=document["cases"])


@pytest.mark.parametrize(
    ("block", "name", "keys", "value", "match"),
    [
        (bottleneck.spectra, "dinov2-depth", ("after", "r_eff", "mean"), 1e6, "Rich without a bottleneck"),
        (bottleneck.agreement, "dinov2-depth", ("agreement", "20", "spearman_patches", "mean"), 0.1, "Importances of"),
        (bottleneck.weights, "weight-1000", ("agreement", "20", "share", "mean"), 0.0, "The more the task weighs"),
        (bottleneck.start, "dinov2-depth", ("agreement", "20", "share", "mean"), 0.0, "From the cells"),
        (bottleneck.sizes, "size-8192", ("quality", "delta1", "mean"), 0.5, "More numbers are more faithful"),
        (bottleneck.rank_bound, "size-256", ("rank", "numerical"), 257, "exactly the number of directions"),
    ],
)
def test_a_bottleneck_that_measured_otherwise_contradicts_its_page(results, block, name, keys, value, match):
    block()
    edit_case(results, name, keys, value)
    with pytest.raises(common.WrongClaim, match=match):
        block()


@pytest.mark.parametrize(
    ("block", "name", "keys", "values", "sentence"),
    [
        (
            bottleneck.answer,
            "dinov2-depth",
            ("after", "kappa_50", "mean"),
            (0.5, 0.95),
            "L10, DINOv2-S depth at its inputs and `tiny-views` depth at x_vis.",
        ),
        (
            bottleneck.answer,
            "dinov2-depth",
            ("quality", "delta1", "mean"),
            (0.5, 0.99),
            "output: kept in part.** δ1 against the depth without a bottleneck is 0.500",
        ),
        (
            bottleneck.quality,
            "dinov2-depth",
            ("quality", "delta1", "mean"),
            (0.5, 0.99),
            "δ1 is below 0.97 for DINOv2-S depth (0.500)",
        ),
        (
            bottleneck.kinds,
            "gaussian",
            ("quality", "delta1", "mean"),
            (0.5, 0.999),
            "They differ in δ1, by",
        ),
    ],
)
def test_a_verdict_on_bottlenecks_follows_what_was_measured(results, block, name, keys, values, sentence):
    edit_case(results, name, keys, values[0])
    assert sentence in block()
    edit_case(results, name, keys, values[1])
    assert sentence not in block()


def test_the_spn_in_the_latent_is_compared_with_the_paper_as_it_came_out(results):
    def sentence(best: float) -> str:
        rows = json.loads((results / bottleneck_spn.SPN).read_text(encoding="utf-8"))["rows"]
        rows[-1]["v1"] = best
        changed(results / bottleneck_spn.SPN, rows=rows)
        return next(line for line in bottleneck_spn.spn().splitlines() if "(500 steps" in line)

    assert "stay far below the paper's 0.710 to 0.713: the best is 0.307" in bottleneck_spn.spn()
    assert "stay below the paper's 0.710 to 0.713: the best is 0.600" in sentence(0.6)
    assert "The best reaches 0.800 (paper: 0.710 to 0.713)" in sentence(0.8)


def test_a_cheaper_importance_through_the_bottleneck_would_contradict_the_page(results):
    assert "It saves nothing" in bottleneck_uses.pruning()
    cases = json.loads((results / bottleneck_uses.PRUNING).read_text(encoding="utf-8"))["cases"]
    for row in cases["scenes"]["rows"]:
        if row["score"] == "exact, bottleneck":
            row["milliseconds"] = 1.0
    changed(results / bottleneck_uses.PRUNING, cases=cases)
    with pytest.raises(common.WrongClaim, match="It saves nothing"):
        bottleneck_uses.pruning()


def test_a_way_to_store_features_is_ahead_or_behind_outside_two_standard_errors(results):
    assert "less than the picture as JPEG and the depth map" in bottleneck_uses.storage()
    cases = json.loads((results / bottleneck_uses.STORAGE).read_text(encoding="utf-8"))["cases"]
    for row in (row for case in cases.values() for row in case["rows"]):
        row["delta1 more than the latent"] = {"mean": 0.01, "se": 0.006}
    changed(results / bottleneck_uses.STORAGE, cases=cases)
    assert "keeps" not in bottleneck_uses.storage()


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


# The cards of heads are made whole from the configurations beside them, to which tests/recipes/test_importance_heads.py
# holds them.
WRITTEN = [path for path in tables.pages() if not path.parent.name.endswith("-heads")]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(common.ROOT).as_posix())
def test_no_measured_figure_stands_outside_a_generated_block(path):
    text = prose(path)
    for setting in SETTINGS:
        text = text.replace(setting, "")
    found = [text[max(0, match.start() - 40) : match.end() + 20] for match in FIGURE.finditer(text)]
    assert not found, f"move these into tools/measured/: {found}"
