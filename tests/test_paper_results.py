"""The committed rows of the paper's experiments: pages and verdicts are what the code makes of them today."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pullback.experiments.experiment import Found
from pullback.experiments.registry import EXPERIMENTS, experiment
from pullback.experiments.scales import DATA, MODELS, SCALES, Scale
from pullback.report.reproduced import FIGURES, write_report
from pullback.report.results import read_results

FOLDERS = sorted((Path(__file__).resolve().parents[1] / "docs" / "results").glob("paper-*"))
AGAIN = "once more: pullback reproduce all --scale SCALE --out FOLDER (finished rows stay), then pullback report"


def scale_of_run(folder: Path) -> Scale:
    """The scale of a committed run, whose models and pictures need not be here."""
    settings = json.loads((folder / "reproduce.json").read_text(encoding="utf-8"))
    models, data = ({role: settings[role] for role in roles if settings.get(role)} for roles in (MODELS, DATA))
    return replace(SCALES[settings["scale"]], models=models, data=data, seed=settings["seed"])


def test_all_experiments_are_there_at_the_smallest_scale():
    tiny = next(folder for folder in FOLDERS if folder.name == "paper-tiny")
    assert {path.parent.name for path in tiny.glob("*/experiment.json")} == set(EXPERIMENTS)


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


@pytest.mark.parametrize(
    ("folder", "name"),
    [(folder, path.parent.name) for folder in FOLDERS for path in sorted(folder.glob("*/experiment.json"))],
    ids=lambda own: getattr(own, "name", own),
)
def test_places_and_verdicts_are_those_of_the_code(folder, name):
    found = next(own for own in read_results(folder).experiments if own.name == name)
    scale, own, document = scale_of_run(folder), experiment(name), found.document
    assert document is not None and set(found.places) == set(found.rows), "no cell is empty"
    assert [list(place) for cell in own.checked_cells(scale) for place in cell.places] == document["places"], AGAIN
    assert all(row["value"] is not None or row["absent"] for row in found.rows.values())
    assert all(row["paper"] == own.paper.get(place) for place, row in found.rows.items()), AGAIN
    rows = [found.rows[place] for place in found.places]
    for claim, committed in zip(own.claims, document["claims"], strict=True):
        told = asdict(claim.judge(Found(rows))) | {"sentence": claim.sentence, "where": claim.where}
        assert told.items() <= committed.items(), AGAIN
