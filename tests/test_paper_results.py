"""The committed rows of the paper's experiments: pages and verdicts are what the code makes of them today."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from publish_results import SHOWN, WITHHELD, data_of, scale_of_run
from pullback.experiments.experiment import Found
from pullback.experiments.registry import EXPERIMENTS, experiment
from pullback.experiments.scales import DRAWN, Scale
from pullback.report.reproduced import FIGURES, write_report
from pullback.report.results import read_results
from pullback.runs.files import read_arrays

FOLDERS = sorted((Path(__file__).resolve().parents[1] / "docs" / "results").glob("paper-*"))
AGAIN = "once more: pullback reproduce all --scale SCALE --out FOLDER (finished rows stay), then pullback report"


def scale_of(folder: Path) -> Scale:
    return scale_of_run(json.loads((folder / "reproduce.json").read_text(encoding="utf-8")))


def test_all_experiments_are_there_at_the_smallest_scale():
    tiny = next(folder for folder in FOLDERS if folder.name == "paper-tiny")
    assert {path.parent.name for path in tiny.glob("*/experiment.json")} == set(EXPERIMENTS)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_experiment_that_is_not_finished_has_no_verdict_and_is_named(folder):
    page = " ".join((folder / "report.md").read_text("utf-8").split())
    finished = {path.parent.name for path in folder.glob("*/experiment.json")}
    lacking = [name for name in EXPERIMENTS if name not in finished]
    assert all(f"[{name}](#{name})" not in page for name in lacking), "a verdict names its experiment"
    begun = [name for name in lacking if (folder / name / "rows.jsonl").is_file()]
    assert all(f"## {name} (unfinished)" in page for name in begun)
    assert not lacking or all(name in page.partition("Claims that rest on")[2].partition(".")[0] for name in lacking)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_page_is_what_its_rows_say(folder, tmp_path):
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("report*"))
    write_report(copy, order=tuple(EXPERIMENTS), pictures=True)
    assert (copy / "report.md").read_text("utf-8") == (folder / "report.md").read_text("utf-8"), AGAIN
    drawn, committed = (
        {path.name: path.read_text("utf-8") for path in (own / FIGURES).iterdir()} for own in (copy, folder)
    )
    assert drawn == committed, AGAIN


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_photograph_is_published(folder):
    scale = scale_of(folder)
    drawn, withheld = 0, 0
    for path in folder.glob("*/arrays/*.npz"):
        arrays = read_arrays(path)
        if "pictures" not in arrays:
            continue
        own = data_of(scale, path.parents[1].name, path.stem) in DRAWN
        assert len(arrays["pictures"]) <= SHOWN
        assert own or (np.ptp(arrays["pictures"]) == 0 and str(arrays["withheld"]) == WITHHELD), path
        drawn, withheld = drawn + own, withheld + (not own)
    assert drawn and bool(withheld) == (scale.name != "tiny"), "tiny has no photographs"
    assert not {path.suffix for path in folder.rglob("*")} & {".png", ".jpg", ".jpeg", ".webp"}


@pytest.mark.parametrize(
    ("folder", "name"),
    [(folder, path.parent.name) for folder in FOLDERS for path in sorted(folder.glob("*/experiment.json"))],
    ids=lambda own: getattr(own, "name", own),
)
def test_places_and_verdicts_are_those_of_the_code(folder, name):
    found = next(own for own in read_results(folder).experiments if own.name == name)
    scale, own, document = scale_of(folder), experiment(name), found.document
    assert document is not None and set(found.places) == set(found.rows), "no cell is empty"
    assert [list(place) for cell in own.checked_cells(scale) for place in cell.places] == document["places"], AGAIN
    assert all(row["value"] is not None or row["absent"] for row in found.rows.values())
    assert all(row["paper"] == own.paper.get(place) for place, row in found.rows.items()), AGAIN
    rows = [found.rows[place] for place in found.places]
    for claim, committed in zip(own.claims, document["claims"], strict=True):
        told = asdict(claim.judge(Found(rows))) | {"sentence": claim.sentence, "where": claim.where}
        assert told.items() <= committed.items(), AGAIN
