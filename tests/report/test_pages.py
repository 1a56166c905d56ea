"""The page of every kind of run, from files made by hand: whole, safe, and without a request to anywhere."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers.comparison import arrays as examples
from helpers.comparison import document as comparison
from pullback.runs import documents as files
from pullback.runs.files import write_arrays, write_json

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pullback[plot])")

from pullback.report.figures import draw_all
from pullback.report.page import write_page_of

PLAN = {
    "folder": "runs/<plan>", "summary": "Remove 40 % of the patch tokens after block 4", "model": "some/vit",
    "budget": {"name": "flops", "limit": 0.8, "unit": "of the model’s operations"}, "stages": [4], "ratio": 0.4,
    "scores": {"4": "norm"}, "flops": 0.79, "milliseconds": 10.0, "whole_milliseconds": 13.0, "degradation": 2.0,
    "degradation_se": None, "measured": 2, "images": 6, "batch": 16, "machine": "a machine", "date": "2026-01-01",
    "versions": {"pullback": "0", "torch": "0"},
    "trials": [
        {"stages": [4], "ratio": 0.4, "cost": 0.79, "degradation": 2.0},
        {"stages": [4], "ratio": 0.2, "cost": 0.9, "degradation": None},
    ],
}  # fmt: skip
SIZED_PLAN = PLAN | {
    "size": 196, "stages": [4, 8], "shares": [0.1, 0.3], "class_row": True, "interval": [1.5, 2.5],
    "notes": ["few <images>"], "tuning": {"steps": 700, "images": 2000},
    "alternatives": [{
        "name": "ToMe (r = 14)", "flops": 0.78, "verdict": "worse",
        "degradation": {"mean": 3.0, "low": 2.5, "high": 3.5},
        "difference": {"mean": 1.25, "low": 0.5, "high": 1.75},
    }],
    "trials": [
        {"stages": [4, 8], "ratio": 0.4, "cost": 0.79, "degradation": 2.0, "size": 196},
        {"stages": [], "ratio": 0.0, "cost": 0.7, "degradation": 2.8, "size": 182},
    ],
}  # fmt: skip
ROWS = (
    '{"step": 10, "loss": 3.0, "score": 0.1, "rho": 0.1, "rho_se": 0.01}\n'
    '{"step": 20, "loss": 2.0, "score": null, "rho": null, "rho_se": null}\n'
    '{"step": 30, "loss": 1.0, "score": 0.5, "rho": 0.5, "rho_se": 0.02}\n'
)
MODEL = {
    "kind": "importance-head", "scores": {"rho": 0.5},
    "origin": {"family": "dinov2", "weights": "a" * 64, "layer": 10, "decoder": "<cls>", "resolutions": [[112, 140]]},
}  # fmt: skip


class Tags(HTMLParser):
    """Checks that every tag is closed in order, and remembers addresses and parents."""

    VOID = {"meta", "img", "source", "br", "rect", "line"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.addresses: list[str] = []
        self.tables: list[bool] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.addresses += [given[name] for name in ("src", "srcset", "href") if name in given]
        if tag == "table":
            self.tables.append(any("scroll" in style for _, style in self.open))
        if tag not in self.VOID:
            self.open.append((tag, given.get("class") or ""))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop()[0] == tag, tag


def checked(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert not tags.open and all(tags.tables), "every tag is closed, every table scrolls inside its card"
    assert tags.addresses and all(address.startswith("data:image/") for address in tags.addresses)
    assert "http://" not in text and "https://" not in text and "<script" not in text and "@import" not in text
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    return text


def test_a_diagnosis_has_a_page(folder):
    draw_all(folder)
    page = write_page_of(folder)
    assert page == folder / "index.html"
    text = checked(page)
    assert "40.0 ± 1.0 %" in text and "class token" in text and text.count("<h4>") == 2
    assert "max-width: 600px" in text, "figures for narrow screens"


@pytest.mark.parametrize("measure", ["cosine", "silog"])
def test_a_comparison_has_a_page(measure, tmp_path):
    write_json(tmp_path / files.SUMMARY, {**comparison(measure), "seed": 0, "pullback": "0", "torch": "0", "date": "x"})
    write_arrays(tmp_path / files.EXAMPLES, examples(measure == "silog"))
    text = checked(write_page_of(tmp_path))
    for words in (
        "facebook/dinov2-small",
        "after blocks",
        "4, 8",
        "bipartite",
        "4.2×",
        "75.0 %",
        "62.5 %",
        "GFLOPs",
        "a.png",
    ):
        assert words in text, words
    assert ("The output before and after" in text) == (measure == "silog")
    assert "1 images left out" in text or "1 image left out" in text


def test_a_comparison_without_rules_classes_or_costs_has_a_page(tmp_path):
    found = {**comparison(), "seed": 0, "pullback": "0", "torch": "0", "date": "x", "rules": []}
    found["unpruned"] = {"flops": None, "knn": None}
    write_json(tmp_path / files.SUMMARY, found)
    write_arrays(tmp_path / files.EXAMPLES, examples(False))
    assert "GFLOPs" not in checked(write_page_of(tmp_path))


@pytest.mark.parametrize("budget", ["flops", "milliseconds", "degradation"])
def test_a_plan_has_a_page(budget, tmp_path):
    limit = {"flops": 0.8, "milliseconds": 11.0, "degradation": 3.0}[budget]
    asked = {"budget": {"name": budget, "limit": limit, "unit": "of something"}}
    write_json(tmp_path / files.PLAN, {**SIZED_PLAN, **asked})
    assert draw_all(tmp_path) == ["plan.png"]
    text = checked(write_page_of(tmp_path))
    for words in (
        "Remove 40 % of the patch tokens",
        "79.0 %",
        "10 ms instead of 13 ms",
        "runs/&lt;plan&gt;",
        "2 plans",
        "shrunk to 196 pixels",
        "10.0 %, 30.0 %",
        "(95 %: 1.5 to 2.5)",
        "ToMe (r = 14)",
        "1.25 (0.5 to 1.75)",
        "few &lt;images&gt;",
        "the class token alone",
        "700 steps on 2,000 images",
    ):
        assert words in text, words


@pytest.mark.parametrize("budget", ["flops", "milliseconds"])
def test_a_plan_of_an_earlier_version_has_a_page(budget, tmp_path):
    asked = {"budget": {"name": budget, "limit": 0.8, "unit": "of something"}}
    write_json(tmp_path / files.PLAN, {**PLAN, **asked})
    assert draw_all(tmp_path) == (["plan.png"] if budget == "flops" else [])
    text = write_page_of(tmp_path).read_text(encoding="utf-8")
    assert "Remove 40 % of the patch tokens" in text and "as they come" in text and "What else" not in text


def test_a_training_run_has_a_page_before_and_after_its_end(tmp_path):
    (tmp_path / files.METRICS).write_text(ROWS)
    assert draw_all(tmp_path) == ["training.png"]
    assert "has not ended" in checked(write_page_of(tmp_path))
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / "config.json", MODEL)
    text = checked(write_page_of(tmp_path))
    assert "importance head" in text and "112×140" in text and "&lt;cls&gt;" in text and "a" * 40 not in text


def test_a_training_run_without_a_validation_has_no_figure(tmp_path):
    (tmp_path / files.METRICS).write_text("")
    assert draw_all(tmp_path) == []


def test_styles_have_no_address(folder):
    text = write_page_of(folder).read_text(encoding="utf-8")
    assert not re.findall(r"url\(", text)
