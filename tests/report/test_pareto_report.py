"""Tables, figure and page of methods at their operating points from a file made by hand."""

import io

import pytest
from rich.console import Console

from pullback.report.pareto_console import pareto_summary
from pullback.runs import documents as files
from pullback.runs.files import write_json

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pullback[plot])")

from pullback.report.figures import draw_all
from pullback.report.page import write_page_of
from pullback.report.pareto_figures import pareto_png


def point(method: str, label: str, operations: float, mean: float, tuned: bool = False) -> dict:
    timing = {"median": 5.0, "low": 4.0, "high": 6.0, "rounds": 5, "unpruned": 10.0, "speedup": 2.0}
    votes = {"accuracy": 0.5, "interval": [0.4, 0.6], "p_value": 0.031}
    return {
        "method": method, "point": label, "tuned": tuned, "ours": method == "<best>", "plan": {}, "scores": [],
        "mean": mean, "interval": [0.5 * mean, 2 * mean], "median": mean, "operations": operations,
        "milliseconds": {"8": timing}, "neighbours": {"10": {"same": votes, "unpruned": votes}},
    }  # fmt: skip


def document() -> dict:
    points = [
        point("<best>", "block 3", 0.7, 1.0),
        point("<best>", "block 6", 0.8, 2.0),
        point("resize", "182 px", 0.6, 3.0),
    ]
    points += [point("<best>", "folder", 0.7, 0.5, tuned=True), point("tome", "r = 0", 1.0, 0.0)]
    test = {
        "budget": 0.8, "tuned": False, "ours": {"method": "<best>", "point": "block 3"},
        "rival": {"method": "resize", "point": "182 px"}, "p_value": 3e-9, "difference": -2.0, "interval": [-3.0, -1.0],
        "factor": 0.33, "better_on": 0.9,
    }  # fmt: skip
    lines = {
        ("<best>", False): "block 3",
        ("<best>", True): "folder",
        ("resize", False): "182 px",
        ("tome", False): None,
    }
    return {
        "model": "some/vit", "decoder": "cls", "size": [224, 224], "measure": "cosine", "images": 5,
        "images_compared": 4, "budgets": [0.8], "class_row": True, "selection": "Chosen here.", "seed": 0,
        "notes": ["evit is left out."], "skipped": [{"file": "x.png", "reason": "no picture"}], "machine": "a machine",
        "date": "2026-01-01", "pullback": "0", "torch": "0", "points": points, "tests": [test],
        "unpruned": {"neighbours": {"10": {"accuracy": 0.75, "interval": [0.7, 0.8]}}},
        "frontiers": [
            {"method": name, "tuned": tuned, "ours": name == "<best>", "points": 2, "frontier": [], "budgets": [label]}
            for (name, tuned), label in lines.items()
        ],
    }  # fmt: skip


def text_of(found: dict) -> str:
    screen = Console(file=io.StringIO(), width=200)
    screen.print(pareto_summary(found))
    return screen.file.getvalue()


def test_the_tables_say_what_was_found():
    text = text_of(document())
    for words in (
        "vit, cls: 5 points, 4 images of 224x224 pixels", "cosine degradation × 100: mean", "≤ 80 %", "<best>, tuned",
        "2 points", "2×, batch 8", "50.0 / 50.0", "p 0.031 / 0.031", "(unpruned 75.0)", "Chosen here.",
        "evit is left out.",
        "1 image left out", "x.png: no picture",
        "≤ 80 %: <best> (block 3) has 0.33× the error of resize (182 px), p 3e-09, less on 90 % of the images",
    ):  # fmt: skip
        assert words in text, words


def test_a_folder_has_its_figure_and_page(tmp_path):
    write_json(tmp_path / files.PARETO, document())
    assert draw_all(tmp_path) == ["pareto.png"]
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG\r\n")
    page = write_page_of(tmp_path).read_text(encoding="utf-8")
    for words in ("&lt;best&gt;, tuned", "exact McNemar test", "Chosen here.", "ms, batch 8", "0.5 to 2"):
        assert words in page, words
    assert "<best>" not in page and "http" not in page.replace("http-equiv", "")


def test_no_points_and_points_without_an_error_can_be_shown(tmp_path):
    found = {**document(), "points": [], "frontiers": [], "tests": [], "images_compared": 0}
    found["unpruned"] = {"neighbours": None}
    assert "0 points" in text_of(found) and "p 0.031" not in text_of(found)
    write_json(tmp_path / files.PARETO, found)
    assert draw_all(tmp_path) == [] and write_page_of(tmp_path).is_file()
    nothing = {**document(), "points": [point("tome", "r = 0", 1.0, 0.0)]}
    nothing["frontiers"] = nothing["frontiers"][-1:]
    assert pareto_png(nothing, dpi=30).startswith(b"\x89PNG")
