"""Tables and figures of a pruning comparison from files made by hand: the report must need nothing else."""

import io

import numpy as np
import pytest
from rich.console import Console

from helpers.comparison import arrays, document
from pullback.report.prune_console import prune_summary
from pullback.report.wording import p_value
from pullback.runs import documents as prune_files
from pullback.runs.files import write_arrays, write_json

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pullback[plot])")


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
    found = {**document(), "presets": ["bipartite"], "scores": ["importance"]}
    found["rules"] = [one for one in found["rules"] if one["preset"] == "bipartite"]
    assert curves_png(found).startswith(b"\x89PNG")


def test_a_long_title_is_broken_into_lines_that_fit():
    from pullback.report.canvas import _inches, lines_of

    text = "facebook/dinov2-small, cls, after block 4+8: mean of 1000 images, 95 % bootstrap intervals"
    lines = lines_of(text, 4.8)
    assert len(lines) > 1 and " ".join(lines) == text
    assert all(_inches(line) <= 4.8 for line in lines)
    assert lines_of(text, 30.0) == [text]


def test_figures_of_pictures_stay_below_a_megabyte_and_are_large_enough_to_read():
    from PIL import Image

    from pullback.report.prune_figures import tokens_png

    found = arrays(dense=False, images=2, shape=(16, 16))
    noise = np.random.default_rng(0).integers(0, 256, (4, 224, 224, 3), dtype=np.uint8)  # nothing compresses worse
    panels = 7
    found |= {
        "pictures": noise,
        "names": np.array(list("abcd")),
        "presets": np.array(["best"] * panels),
        "scores": np.array(["importance"] * panels),
        "ratios": np.array([0.1, 0.2, 0.3, 0.5, 0.5, 0.5, 0.5]),
        "fates": np.zeros((panels, 4, 16, 16), np.uint8),
        "partners": np.full((panels, 4, 16, 16), -1),
        "values": np.ones((panels, 4)),
    }
    drawn = tokens_png(document(), found)
    assert len(drawn) < 1_000_000
    assert Image.open(io.BytesIO(drawn)).width >= 600


@pytest.mark.parametrize(
    ("ratios", "shown"),
    [
        ([0.1, 0.2, 0.3, 0.5, 0.5, 0.5, 0.5], [0, 3, 4, 5, 6]),
        ([0.1, 0.5, 0.5], [0, 1, 2]),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], [0, 3, 4, 5, 6]),
        ([0.5] * 7, [0, 1, 2, 3, 4]),
    ],
)
def test_a_figure_leaves_out_ratios_in_between_first(ratios, shown):
    from pullback.report.prune_figures import chosen_panels

    assert chosen_panels(np.array(ratios)) == shown
