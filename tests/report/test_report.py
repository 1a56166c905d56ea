"""Tables, figures and the page from the files alone."""

import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from pullback.report.console import diagnosis_summary
from pullback.runs import documents as files
from pullback.runs.files import write_json

figures = pytest.importorskip("pullback.report.figures", exc_type=ImportError)
canvas = pytest.importorskip("pullback.report.canvas", exc_type=ImportError)

NULL = "CV 0.260 is indistinguishable from a random direction (null 0.250): the modes have probably not converged."


def printed(document: dict, width: int) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(diagnosis_summary(document, width))
    return capture.get()


def make_random(document: dict) -> None:
    document["layers"][0]["cv"].update(mean=0.26, indistinguishable_from_random=True)
    document["layers"][0]["advice"] = NULL


def test_the_table_carries_every_quantity_with_its_error(document):
    text = printed(document, 100)
    for words in (
        "some-vit, cls",
        "L02",
        "hooks",
        "40.0 ± 1.0 %",
        "≥ 4",
        "12.0 ± 0.5",
        "1.50 ± 0.05",
        "0.25",
        "90 krylov",
    ):
        assert words in text


def test_a_cv_at_its_null_is_called_random(document):
    assert "indistinguishable" not in printed(document, 200)
    make_random(document)
    assert "indistinguishable from a random direction" in printed(document, 200)


def test_one_sentence_of_advice_per_distinct_finding(document):
    text = printed(document, 200)
    assert text.count("Score tokens.") == 1 and "L02, hooks: regime (iii) marginal rank." in text


def test_convergence_gives_both_counts_and_no_negative_error(document):
    rows = [line.split() for line in printed(document, 100).splitlines()]
    assert ["0", "–", "0.990", "1.1×", "0.990", "1.1×"] in rows
    assert ["1", "0", "<0.001", "1,234×", "<0.001", "1,234×"] in rows


def test_many_layers_stay_within_the_terminal(document):
    document["layers"] = [{**document["layers"][0], "layer": index} for index in range(12)]
    text = printed(document, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"L{index:02d}" in text for index in range(12)) and "…" not in text


def test_skipped_files_are_named_up_to_a_point(document):
    document["skipped"] = [{"file": f"{i}.png", "reason": "empty"} for i in range(12)]
    text = printed(document, 100)
    assert "skipped 12 image files" in text and "9.png: empty" in text and "and 2 more" in text


def test_figures_are_drawn_for_every_layer_and_old_ones_removed(folder):
    (folder / "tokens_L09.png").write_bytes(b"old")
    assert figures.draw_all(folder) == ["spectrum.png", "tokens_L02.png", "tokens_hooks.png"]
    assert not (folder / "tokens_L09.png").exists()


def test_scenes_have_one_figure(scenes):
    assert figures.draw_all(scenes) == ["scenes.png"]
    assert (scenes / "scenes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_scenes_survive_a_picture_that_is_all_sky_and_a_task_that_sees_nothing(scenes, theme):
    arrays = files.read_scenes(scenes)
    arrays["true_depth"][1] = 0
    arrays["energy"][0] = 0
    arrays["abs_rel"][1] = np.nan
    assert figures.scenes_png(arrays, getattr(canvas, theme), 40).startswith(b"\x89PNG")


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_figures_survive_extreme_numbers(folder, theme):
    """One image, one direction, energy on the class token alone, no error at all."""
    document, arrays = files.read_diagnosis(folder), files.read_importance(folder)
    (entry, _), chosen = document["layers"], getattr(canvas, theme)
    entry["per_image"] = [{"file": "0.png", "singular_values": [1.0], "energy": 1.0, "energy_se": 0.0}]
    document.update(layers=[entry], image_files=["0.png"])
    arrays["L02"][:, 1:] = 0
    arrays["thumbnails"] = arrays["thumbnails"][:1]
    assert figures.spectrum_png(document, chosen, 40).startswith(b"\x89PNG")
    assert figures.tokens_png(entry, arrays, chosen, 40).startswith(b"\x89PNG")


def test_the_report_needs_no_torch(folder, scenes):
    (folder / "run").mkdir()
    for name in (files.DIAGNOSIS, files.IMPORTANCE):
        (folder / name).rename(folder / "run" / name)
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'scipy'): sys.modules[name] = None\n"
        "from pathlib import Path\nfrom pullback.report.figures import draw_all\n"
        "from pullback.report.page import write_page\nout = Path(sys.argv[1])\n"
        "draw_all(out / 'run')\ndraw_all(out / 'scenes')\nprint(write_page(out, ['run'], 'a <note>', 'scenes'))"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert (
        "a &lt;note&gt;" in page
        and "40.0 ± 1.0 %" in page
        and page.count("data:image/webp;base64,") == 6
        and page.count("data:image/jpeg;base64,") == 6
    )


def test_the_page_calls_a_cv_at_its_null_random(folder, document):
    from pullback.report.page import write_page

    make_random(document)
    write_json(folder / files.DIAGNOSIS, document)
    page = write_page(folder, ["."]).read_text(encoding="utf-8")
    assert "indistinguishable from a random direction" in page


def alone(document: dict) -> dict:
    """The document of one image, as earlier versions wrote it: errors of the estimate as if they were over images."""
    layer = document["layers"][0]
    layer.update(num_images=1, per_image=layer["per_image"][:1])
    document.update(layers=[layer], image_files=["0.png"])
    return document


def test_one_image_has_no_error_over_images_anywhere(folder, document):
    from pullback.report.page import write_page

    write_json(folder / files.DIAGNOSIS, alone(document))
    read = files.read_diagnosis(folder)
    layer = read["layers"][0]
    assert layer["kappa"]["se"] is layer["cv"]["se"] is layer["cv"]["patches_se"] is layer["r_eff_trunc_se"] is None
    assert layer["kappa"]["estimation_se"] is not None and layer["per_image"][0]["energy_se"] == 0.01
    text = printed(read, 100)
    assert "1 image at 42×56, no error over images" in text and "±" not in text and "40 %" in text
    page = write_page(folder, ["."]).read_text(encoding="utf-8")
    assert (
        "no error over images" in page
        and not re.search(r"\d ± ", page)
        and "two standard errors of the estimate" in page
    )


HEDGED = [{"regime": "i", "regime_title": "rich"}, {"regime": "ii", "regime_title": "low rank, spread over tokens"}]


def test_a_hedged_regime_and_that_of_the_patches_are_printed(folder, document):
    from pullback.report.page import write_page

    assert "over patches  " not in printed(document, 200).replace("CV over patches", ""), "older files have none"
    over_patches = {"regime": "i", "regime_title": "rich spectrum", "regime_could_be": []}
    document["layers"][0].update(regime_could_be=HEDGED, regime_over_patches=over_patches)
    words = "(iii) marginal rank, could be (i) or (ii, spread over tokens)"
    rows = [" ".join(line.split()) for line in printed(document, 200).splitlines()]
    assert any(row.startswith("over patches (i) rich spectrum") for row in rows)
    assert f"L02: regime {words}." in rows and "hooks: regime (iii) marginal rank." in rows
    write_json(folder / files.DIAGNOSIS, document)
    page = write_page(folder, ["."]).read_text(encoding="utf-8")
    assert words in page and page.count("over patches (i) rich spectrum") == 1


def test_patches_at_the_null_are_marked(document):
    document["layers"][0]["cv"].update(patches=0.26, patches_indistinguishable_from_random=True)
    assert "0.26 ± 0.02, random" in printed(document, 200)


def test_registers_are_not_called_patches_and_have_a_size_of_their_own(folder, document):
    from pullback.report.page import write_page

    registers = {"layer": "latent", "in_picture": False, "tokens": 32, "dim": 128, "regime_over_patches": None}
    document["layers"].append({**document["layers"][0], **registers})
    row = next(line for line in printed(document, 200).splitlines() if "CV over patches" in line)
    assert row.count("0.80") == 2, "of three layers, two have patches"
    write_json(folder / files.DIAGNOSIS, document)
    page = write_page(folder, ["."]).read_text(encoding="utf-8")
    assert page.count("<br>patches 0.8") == 2
    assert "13 tokens of width 8 (L02, hooks) · 32 tokens of width 128 (latent)" in page
