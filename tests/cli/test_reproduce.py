"""`pullback reproduce`, `pullback report` and `pullback ls experiments`: what they write and say, how a run goes on,
and how wrong commands are refused."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from pullback.cli import app
from pullback.cli.common import BAD_INPUT, FAILED, INTERRUPTED
from pullback.errors import ModelError
from pullback.experiments.experiment import Cell, Claim, Column, Experiment, Figure, Found, Measured, Place, Verdict
from pullback.experiments.registry import EXPERIMENTS, experiment
from pullback.experiments.workshop import Workshop


def cell(name: str) -> Cell:
    place = Place("numbers", name, "0.50")

    def run(shop: Workshop) -> Iterable[Measured]:
        drawn = torch.rand(8, generator=shop.generator(name))
        return [shop.mean(place, drawn)]

    return Cell(name, (place,), run, "tiny-scenes", "scenes", forwards=5.0)


def of_photos(shop: Workshop) -> Iterable[Measured]:
    mean = shop.images("photos", 2, model="tiny-scenes", size=28).mean()
    return [Measured("numbers", "photos", "0.50", float(mean), count=2)]


def cells() -> list[Cell]:
    photos = Cell("photos", (Place("numbers", "photos", "0.50"),), of_photos, "tiny-scenes", "photos")
    return [cell("one"), cell("two"), cell("three"), photos]


def judge(found: Found) -> Verdict:
    value = found.value("numbers", "one", "0.50")
    return Verdict("not at this scale", "nothing") if value is None else Verdict("holds", f"the mean is {value:.3f}")


TOY = Experiment(
    "toy", "A toy of random numbers", "tab:cls_pruning", "Means of random numbers.", (Column("0.50"),),
    lambda scale: cells(), counts={"tiny": {}, "small": {}, "paper": {}},
    paper={Place("numbers", "one", "0.50"): 0.5, Place("numbers", "photos", "0.50"): 0.25},
    claims=(Claim("Random numbers lie below one.", "tab:cls_pruning", judge),),
    figures=(Figure("drawn", "curves", "The numbers", table="numbers"),),
)  # fmt: skip
OTHER = replace(TOY, name="other", claims=(), figures=())


@pytest.fixture
def toys(monkeypatch) -> ModuleType:
    """A registry of two small experiments. Their rows name no commit, which may change between two runs."""
    monkeypatch.setattr("pullback.experiments.run.commit", lambda: "of the test")
    module = ModuleType("pullback.experiments.toys")
    module.TOY, module.OTHER = TOY, OTHER
    monkeypatch.setitem(sys.modules, module.__name__, module)
    listed = {"toy": "toys:TOY", "other": "toys:OTHER"}
    monkeypatch.setattr("pullback.experiments.registry.EXPERIMENTS", listed)
    return module


def pullback(*arguments: object) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    return runner.invoke(app, [str(own) for own in arguments])


def reproduce(name: str, out: Path, *options: object) -> Result:
    return pullback("reproduce", name, "--out", out, "--device", "cpu", *options)


def rows(out: Path, name: str = "toy") -> list[dict]:
    return [json.loads(line) for line in (out / name / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    for number in range(2):
        Image.new("RGB", (40, 40), (90 * number, 9, 9)).save(folder / f"{number}.png")
    return folder


# A run


@pytest.mark.usefixtures("toys")
def test_a_run_writes_rows_and_says_what_came_of_the_claims(tmp_path) -> None:
    out = tmp_path / "new" / "out"
    result = reproduce("toy", out)
    assert result.exit_code == 0, result.output
    found = rows(out)
    assert [(row["row"], row["paper"], row["absent"]) for row in found] == [
        ("one", 0.5, None), ("two", None, None), ("three", None, None),
        ("photos", 0.25, "not at this scale: it has no photos"),
    ]  # fmt: skip
    assert all(row["low"] < row["value"] < row["high"] and row["count"] == 8 for row in found[:3])
    for word in ("Claims of the paper", "Random numbers lie below one.", "holds", "the mean is 0.", "1 experiment done",
                 f"rows in {out}/; a page of them: pullback report {out}"):  # fmt: skip
        assert word in result.output, word


@pytest.mark.usefixtures("toys")
def test_all_and_lists_choose_experiments_that_share_a_folder(tmp_path) -> None:
    for wanted in ("all", "other, toy"):
        result = reproduce(wanted, tmp_path / wanted)
        assert result.exit_code == 0 and "2 experiments done." in result.output, result.output
        assert rows(tmp_path / wanted, "other")[0]["value"] == rows(tmp_path / wanted)[0]["value"]
    settings = json.loads((tmp_path / "all" / "reproduce.json").read_text())
    assert (settings["scale"], settings["seed"], settings["photos"]) == ("tiny", 0, None)


@pytest.mark.usefixtures("toys")
def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch) -> None:
    assert reproduce("toy", tmp_path / "whole").exit_code == 0
    whole, real, calls = (tmp_path / "whole" / "toy" / "rows.jsonl").read_bytes(), Workshop.mean, []

    def stopped(*arguments: object, **options: object) -> Measured:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(Workshop, "mean", stopped)
    out = tmp_path / "out"
    result = reproduce("toy", out)
    assert result.exit_code == INTERRUPTED and "interrupted" in result.output
    assert f"kept in {out}/: 2 numbers; the same command goes on from there" in result.output, result.output
    assert len(rows(out)) == 2 and not (out / "toy" / "experiment.json").exists()
    assert "unfinished: toy" in pullback("report", out).output
    again = reproduce("toy", out)
    assert again.exit_code == 0 and len(calls) == 4, "what was there is not measured again"
    assert (out / "toy" / "rows.jsonl").read_bytes() == whole


@pytest.mark.usefixtures("toys")
def test_a_role_that_is_given_later_fills_what_was_absent(tmp_path, photos) -> None:
    assert reproduce("toy", tmp_path).exit_code == 0
    before = rows(tmp_path)
    result = reproduce("toy", tmp_path, "--images", f"photos={photos}")
    assert result.exit_code == 0, result.output
    *first, last = rows(tmp_path)
    assert first == before[:3] and last["value"] is not None and (last["absent"], last["paper"]) == (None, 0.25)
    document = json.loads((tmp_path / "toy" / "experiment.json").read_text())
    assert document["command"] == "pullback reproduce toy --scale tiny --images photos=… --out DIR"
    (tmp_path / "others").mkdir()
    changed = reproduce("toy", tmp_path, "--images", f"photos={tmp_path / 'others'}")
    assert changed.exit_code == BAD_INPUT and f"photos: '{photos}' there" in changed.output, changed.output


@pytest.mark.usefixtures("toys")
def test_another_seed_and_scale_are_not_mixed_in(tmp_path) -> None:
    assert reproduce("toy", tmp_path / "0").exit_code == 0
    for options, message in ((("--seed", 1), "seed: 0 there, 1 asked for"), (("--scale", "small"), "scale: ")):
        result = reproduce("toy", tmp_path / "0", *options)
        assert result.exit_code == BAD_INPUT and message in result.output, result.output
    assert reproduce("toy", tmp_path / "1", "--seed", 1).exit_code == 0
    assert rows(tmp_path / "1")[0]["value"] != rows(tmp_path / "0")[0]["value"]


def test_an_experiment_that_fails_leaves_the_others_done(tmp_path, toys) -> None:
    def fail(shop: Workshop) -> Iterable[Measured]:
        raise ModelError("model: too small.")

    toys.TOY = replace(TOY, cells=lambda scale: [replace(own, run=fail) for own in cells()])
    result = reproduce("all", tmp_path)
    assert result.exit_code == BAD_INPUT and "Traceback" not in result.output
    assert "too small" in result.output and "In experiment toy" in result.output
    assert (tmp_path / "other" / "experiment.json").exists() and not (tmp_path / "toy" / "experiment.json").exists()


# Before a run


@pytest.mark.usefixtures("toys")
def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, photos, monkeypatch) -> None:
    monkeypatch.setattr("pullback.experiments.workshop.load_any_backbone", None)
    out = tmp_path / "out"
    result = reproduce("all", out, "--dry-run")
    assert result.exit_code == 0, result.output
    assert not out.exists()
    for word in ("scale tiny on cpu", "toy", "other", "together about", "models: tiny-scenes = tiny-scenes",
                 "not at this scale: it has no photos"):  # fmt: skip
        assert word in result.output, word
    given = reproduce("toy", out, "--dry-run", "--scale", "small", "--model", "dinov2=a/b,clip=c/d", "--images",
                      f"photos={photos}")  # fmt: skip
    assert "dinov2 = a/b, clip = c/d" in given.output and "it has no photos" not in given.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("toys", (), "experiment: expected all or one of toy, other, got 'toys'"),
        ("toy,,other", (), "expected all or one of toy, other, got ''"),
        ("toy", ("--scale", "huge"), "--scale: expected one of tiny, small, paper, got 'huge'"),
        ("toy", ("--model", "dinov2"), "--model: expected ROLE=NAME, such as dinov2=DIR, got 'dinov2'"),
        ("toy", ("--model", "dino=a/b"), "--model: expected ROLE=NAME with a role of tiny-scenes, tiny-views, dinov2"),
        ("toy", ("--images", "photos="), "--images: expected ROLE=NAME, such as dinov2=DIR, got 'photos='"),
        ("toy", ("--images", "photo=DIR"), "--images: expected ROLE=NAME with a role of photos-train, photos"),
        ("toy", ("--images", "photos=/nowhere"), "--images: there is no /nowhere, given as photos"),
        ("toy", ("--images", "scenes=DIR"), "--images: scenes are drawn from their seeds. Leave scenes= out."),
        ("toy", ("--device", "abacus"), "--device: "),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.usefixtures("toys")
def test_wrong_commands_are_explained_before_anything_is_written(tmp_path, name, options, message, dry) -> None:
    result = reproduce(name, tmp_path / "out", *options, *dry)
    assert result.exit_code == BAD_INPUT, result.output
    assert message in " ".join(result.output.split()) and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("toys")
def test_a_folder_of_something_else_is_not_taken(tmp_path, photos) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "prune-settings.json").write_text("{}")
    within = reproduce("toy", photos / "out", "--images", f"photos={photos}")
    assert within.exit_code == BAD_INPUT and "lies in" in within.output and not (photos / "out").exists()
    file = photos / "0.png"
    below = reproduce("toy", file / "out")
    assert below.exit_code in (BAD_INPUT, FAILED) and "out: " in below.output


def test_help_names_the_scales_and_the_roles() -> None:
    result = pullback("reproduce", "--help")
    assert result.exit_code == 0
    for word in ("tiny: the embedded models", "ROLE=NAME", "ROLE=FOLDER", "--dry-run", "--seed"):
        assert word in result.output, word


# The report


@pytest.mark.usefixtures("toys")
def test_a_report_is_written_beside_the_rows_and_compares_with_another(tmp_path) -> None:
    assert reproduce("all", tmp_path / "a").exit_code == 0
    assert reproduce("all", tmp_path / "b", "--seed", 1).exit_code == 0
    result = pullback("report", tmp_path / "a")
    assert result.exit_code == 0, result.output
    page, text = ((tmp_path / "a" / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    for word in ("A toy of random numbers", "Random numbers lie below one.", "not at this scale: it has no photos"):
        assert word in page and word in text, word
    assert "claims: 1 holds" in result.output and "report.html" in result.output
    assert (tmp_path / "a" / "report.html").as_uri() in result.output
    compared = pullback("report", tmp_path / "a", "--against", tmp_path / "b")
    assert compared.exit_code == 0 and f"against {tmp_path / 'b'}: " in compared.output
    drawn = pullback("report", tmp_path / "a", "--pictures")
    assert drawn.exit_code == 0 and list((tmp_path / "a").rglob("*.svg"))


def test_a_report_of_a_folder_without_measurements_is_refused(tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        result = pullback("report", folder)
        assert result.exit_code == BAD_INPUT and "Traceback" not in result.output
        assert str(folder) in result.output.replace("\n", "")
    assert not list(tmp_path.iterdir())


# The list


def test_every_experiment_is_listed_with_its_place_in_the_paper() -> None:
    result = pullback("ls", "experiments")
    assert result.exit_code == 0, result.output
    for name in EXPERIMENTS:
        own = experiment(name)
        (line,) = [line for line in result.output.splitlines() if line.split()[:1] == [name]]
        assert own.title in line and own.paper_label in line
    assert "`pullback reproduce NAME --out DIR` measures one of them" in result.output


def test_nothing_else_is_listed_by_name() -> None:
    result = pullback("ls", "everything")
    assert result.exit_code == BAD_INPUT and "expected experiments, or nothing, got 'everything'" in result.output
