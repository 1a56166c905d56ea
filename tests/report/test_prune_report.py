"""Tables and figures of a pruning comparison from files made by hand: the report must need nothing else."""

import io

import numpy as np
import pytest
from rich.console import Console

from pullback.report.prune_console import p_value, prune_summary
from pullback.runs import documents as prune_files
from pullback.runs.files import write_arrays, write_json

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pullback[plot])")

RATIOS = (0.1, 0.5)
RULES = [("best", "importance"), ("best", "random"), ("paper", "importance"), ("paper", "random"), ("tome", "tome")]


def rule(preset: str, score: str, ratio: float, level: float) -> dict:
    mean = level * ratio
    own = (preset, score) == ("best", "importance")
    test = {"preset": "best", "score": "importance", "p_value": 3e-9, "difference": 1.0, "interval": [0.5, 1.5],
            "factor": 4.2, "worse_on": 0.9}  # fmt: skip
    entry = {"median": 10.0, "low": 9.0, "high": 11.0, "unpruned": 20.0, "speedup": 2.0, "rounds": 5}
    return {
        "preset": preset, "score": score, "ratio": ratio, "images": 4, "mean": mean, "median": mean,
        "interval": [0.8 * mean, 1.3 * mean], "tests": [] if own else [test], "knn": 0.625,
        "cost": {"flops": 2e9, "milliseconds": {"1": entry}},
    }  # fmt: skip


def document(measure: str = "cosine") -> dict:
    rules = [rule(*name, ratio, 1 + place) for place, name in enumerate(RULES) for ratio in RATIOS]
    return {
        "model": "facebook/dinov2-small", "decoder": "cls", "stages": [4, 8], "size": [224, 224], "measure": measure,
        "reference": "importance", "presets": ["best", "paper", "tome"], "scores": ["importance", "random"],
        "ratios": list(RATIOS), "images": 5, "images_compared": 4, "machine": "a machine", "notes": ["stages: odd."],
        "skipped": [{"file": "x.png", "reason": "no picture"}], "unpruned": {"flops": 4e9, "knn": 0.75},
        "rules": rules,
    }  # fmt: skip


def arrays(dense: bool, images: int = 2, shape: tuple[int, int] = (3, 4)) -> dict[str, np.ndarray]:
    generator, count = np.random.default_rng(0), 3
    fates = generator.integers(0, 3, (count, images, *shape)).astype(np.uint8)
    partners = np.where(fates > 0, generator.integers(-1, 12, fates.shape), -1)
    found = {
        "pictures": generator.integers(0, 256, (images, 42, 56, 3), dtype=np.uint8),
        "names": np.array(["a.png", "b.png"][:images]),
        "presets": np.array(["best", "best", "tome"]),
        "scores": np.array(["importance", "importance", "tome"]),
        "ratios": np.array([0.1, 0.5, 0.5]),
        "fates": fates,
        "partners": partners,
        "values": np.array([[0.1] * images, [0.5] * images, [np.nan] * images]),
    }
    if dense:
        found |= {"before": generator.random((images, 42, 56)), "after": generator.random((count, images, 42, 56))}
    return found


def text_of(found: dict) -> str:
    screen = Console(file=io.StringIO(), width=160)
    screen.print(prune_summary(found))
    return screen.file.getvalue()


def test_the_tables_say_what_was_found():
    text = text_of(document())
    for words in (
        "dinov2-small, cls: tokens removed after blocks 4, 8, 4 images of 224x224 pixels",
        "cosine degradation × 100: mean", "4.2×  p 3e-09", "k-NN top-1 in % (unpruned 75.0)", "62.5",
        "operations and time on a machine", "2 (2×)", "10 (2×)", "stages: odd.", "1 image left out",
        "x.png: no picture",
    ):  # fmt: skip
        assert words in text, words


def test_a_comparison_without_cost_classes_or_rules_is_said_too():
    found = document()
    found["unpruned"] = {"flops": None, "knn": None}
    found["rules"] = [{**one, "cost": None} for one in found["rules"]]
    assert "GFLOPs" not in text_of(found) and "k-NN" not in text_of(found)
    found["rules"] = []
    assert "tokens removed" in text_of(found)


@pytest.mark.parametrize(("p", "text"), [(1.0, "1"), (0.0312, "0.031"), (3.2e-9, "3e-09")])
def test_p_values_keep_their_size(p, text):
    assert p_value(p) == text


@pytest.mark.parametrize("measure", ["cosine", "silog", "relative_l2"])
def test_figures_of_a_folder_are_drawn(measure, tmp_path):
    from pullback.report.figures import draw_all

    dense = measure != "cosine"
    write_json(tmp_path / prune_files.SUMMARY, document(measure))
    write_arrays(tmp_path / prune_files.EXAMPLES, arrays(dense))
    drawn = draw_all(tmp_path)
    assert drawn == ["prune.png", "tokens.png", *(["output.png"] if dense else [])]
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n")


def test_a_mean_of_zero_and_literature_alone_can_be_drawn():
    from pullback.report.prune_figures import curves_png

    found = document()
    found["rules"][0]["mean"] = 0.0
    assert curves_png(found).startswith(b"\x89PNG")
    found = {**document(), "presets": ["tome"], "scores": ["importance"]}
    found["rules"] = [one for one in found["rules"] if one["preset"] == "tome"]
    assert curves_png(found).startswith(b"\x89PNG")
