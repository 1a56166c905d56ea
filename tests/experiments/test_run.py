"""The runner: rows in order, absent rows with their reason, and runs that were killed come to the same rows."""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pullback.errors import ModelError, PullbackError
from pullback.evaluation.statistics import bootstrap_mean
from pullback.experiments.experiment import Cell, Claim, Column, Experiment, Found, Measured, Place, Verdict, overall
from pullback.experiments.run import repeatable, run_experiments
from pullback.experiments.scales import SCALES, Scale, scale_of
from pullback.experiments.workshop import HeadRecipe, Workshop
from pullback.runs.progress import Progress

TINY, CPU = SCALES["tiny"], torch.device("cpu")
VALUES = Place("numbers", "row 0", "value")


def number(place: int) -> Cell:
    places = tuple(Place("numbers", f"row {place}", column) for column in ("value", "square"))

    def run(shop: Workshop) -> Iterable[Measured]:
        drawn = torch.rand(8, generator=shop.generator("number", place))
        return [shop.mean(places[0], drawn), Measured(*places[1], float(drawn.square().mean()))]

    return Cell(f"number {place}", places, run)


def judged(found: Found) -> Verdict:
    value = found.value(*VALUES)
    return overall({"below one": None if value is None else value < 1}, f"the mean is {value}")


TOY = Experiment(
    name="toy",
    title="A toy",
    paper_label="tab:toy",
    about="Means of random numbers.",
    columns=(Column("value"), Column("square")),
    cells=lambda scale: [
        *(number(place) for place in range(4)),
        Cell("of the paper", (Place("numbers", "DINOv2", "value"),), number(0).run, model="dinov2", data="photos"),
        Cell("never", (Place("numbers", "secret", "value"),), absent="the weights are not published"),
    ],
    counts={"tiny": {}, "small": {}, "paper": {}},
    paper={VALUES: 0.5, Place("numbers", "DINOv2", "value"): "about 1"},
    claims=(Claim("Means are below one.", "tab:toy", judged),),
    footnotes=(lambda found: f"{len(list(found))} numbers", lambda found: None),
)


def run(out: Path, experiment: Experiment = TOY, scale: Scale = TINY) -> list[dict]:
    run_experiments([experiment], scale, out, CPU, Progress())
    return [json.loads(line) for line in (out / experiment.name / "rows.jsonl").read_text().splitlines()]


def test_rows_come_in_the_order_of_the_cells_with_the_paper_beside_them(tmp_path: Path) -> None:
    rows = run(tmp_path)
    assert [(row["row"], row["column"]) for row in rows[:3]] == [
        ("row 0", "value"),
        ("row 0", "square"),
        ("row 1", "value"),
    ]
    first = rows[0]
    assert first["low"] < first["value"] < first["high"]
    assert (first["paper"], first["count"], first["scale"], first["seed"]) == (0.5, 8, "tiny", 0)
    document = json.loads((tmp_path / "toy" / "experiment.json").read_text())
    assert document["claims"][0]["word"] == "holds"
    assert document["footnotes"] == ["8 numbers"]
    assert document["command"] == "pullback reproduce toy --scale tiny --out DIR"
    assert document["places"] == [[row["table"], row["row"], row["column"]] for row in rows]


def test_what_the_scale_lacks_is_listed_and_never_filled(tmp_path: Path) -> None:
    *_, paper, never = run(tmp_path)
    assert paper["value"] is None
    assert paper["absent"] == "not at this scale: it has no dinov2 and no photos"
    assert paper["paper"] == "about 1"
    assert never["absent"] == "not at this scale: the weights are not published"


def test_a_verdict_says_on_which_models_it_was_judged(tmp_path: Path) -> None:
    def on(model: str, place: int) -> Cell:
        return replace(number(place), model=model)

    def run_on(folder: str, cells: list[Cell], scale: Scale = TINY) -> dict:
        own = replace(TOY, cells=lambda scale: cells, paper={})
        return run_experiments([own], scale, tmp_path / folder, CPU, Progress())[0]["claims"][0]

    tiny = run_on("tiny", [on("tiny-scenes", 0), on("tiny-views", 1)])  # the claim reads row 0 alone
    assert (tiny["on"], tiny["stand_in"]) == (["tiny-scenes"], True)
    own = scale_of("small", {"clip": "tiny-scenes"})  # what plays the role does not matter here
    found = run_on("own", [on("clip", 0)], own)
    assert (found["word"], found["on"], found["stand_in"]) == ("holds", ["tiny-scenes"], False)
    substitute = run_on("substitute", [on("dinov2", 0)], scale_of("small", {"dinov2": "tiny-scenes"}))
    assert substitute["stand_in"]
    nothing = run_on("nothing", [on("clip", 0)])
    assert (nothing["word"], nothing["on"], nothing["stand_in"]) == ("not at this scale", [], False)


def test_finished_rows_are_never_measured_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "toy" / "rows.jsonl").read_bytes()

    def refuse(shop: Workshop) -> Iterable[Measured]:
        raise AssertionError("measured again")

    idle = replace(TOY, cells=lambda scale: [replace(cell, run=cell.run and refuse) for cell in TOY.cells(scale)])
    run(tmp_path, idle)
    assert (tmp_path / "toy" / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.35, 0.62, 0.99])
def test_a_run_that_was_killed_comes_to_the_same_bytes(tmp_path: Path, share: float) -> None:
    whole = run(tmp_path / "whole") and (tmp_path / "whole" / "toy" / "rows.jsonl").read_bytes()
    run(tmp_path / "killed")
    rows = tmp_path / "killed" / "toy" / "rows.jsonl"
    rows.write_bytes(whole[: int(share * len(whole))])  # also in the middle of a cell, and of a line
    run(tmp_path / "killed")
    assert rows.read_bytes() == whole


def test_a_role_that_comes_later_fills_what_was_absent(tmp_path: Path) -> None:
    needs = replace(TOY, cells=lambda scale: [replace(number(0), data="photos"), number(1)], paper={}, claims=())
    assert run(tmp_path / "out", needs)[0]["absent"]
    (tmp_path / "photos").mkdir()
    more = scale_of("tiny", data={"photos": str(tmp_path / "photos")})
    found = {row["row"]: row for row in run(tmp_path / "out", needs, more)}
    assert found["row 0"]["value"] is not None
    with pytest.raises(PullbackError, match="photos"):  # and cannot be exchanged
        (tmp_path / "others").mkdir()
        run(tmp_path / "out", needs, scale_of("tiny", data={"photos": str(tmp_path / "others")}))


def test_another_seed_belongs_into_another_folder(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(PullbackError, match="seed: 0 there, 1 asked for"):
        run(tmp_path, scale=replace(TINY, seed=1))


def test_an_experiment_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def fail(shop: Workshop) -> Iterable[Measured]:
        raise ModelError("model: too small.")

    failing = replace(TOY, name="failing", cells=lambda scale: [replace(number(0), run=fail)], paper={}, claims=())
    with pytest.raises(ModelError, match=r"too small.*In experiment failing"):
        run_experiments([failing, TOY], TINY, tmp_path, CPU, Progress())
    assert (tmp_path / "toy" / "experiment.json").is_file()


def test_a_cell_that_fails_leaves_the_others_and_is_measured_by_the_next_run(tmp_path: Path) -> None:
    def fail(shop: Workshop) -> Iterable[Measured]:
        raise RuntimeError("CUDA error: out of memory")

    first, *others = TOY.cells(TINY)
    failing = replace(TOY, cells=lambda scale: [replace(first, run=fail), *others])
    with pytest.raises(RuntimeError, match="out of memory"):
        run_experiments([failing, replace(TOY, name="toy 2")], TINY, tmp_path, CPU, Progress())
    cells = {json.loads(line)["cell"] for line in (tmp_path / "toy" / "rows.jsonl").read_text().splitlines()}
    assert cells == {cell.key for cell in others}
    assert not (tmp_path / "toy" / "experiment.json").exists()  # nothing is judged by a part of the rows
    assert (tmp_path / "toy 2" / "experiment.json").is_file()
    document = run_experiments([TOY], TINY, tmp_path, CPU, Progress())[0]
    assert document["claims"] == run_experiments([TOY], TINY, tmp_path / "whole", CPU, Progress())[0]["claims"]


_BESIDE = """
import sys, time
from pathlib import Path
import torch
from pullback.experiments.experiment import Cell, Column, Experiment, Measured, Place
from pullback.experiments.run import run_experiments
from pullback.experiments.scales import SCALES
from pullback.runs.progress import Progress

out, names = Path(sys.argv[1]), sys.argv[2].split(",")

def shared():
    with open(out.parent / "computed", "a") as file:
        file.write("once\\n")
    time.sleep(0.5)
    return {"value": torch.tensor([0.25])}

def experiment(name):
    def run(shop):
        return [Measured("numbers", "row", "value", float(shop.kept({"what": "shared"}, shared)["value"]))]
    cell = Cell("shared", (Place("numbers", "row", "value"),), run)
    return Experiment(name, "", "", "", (Column("value"),), lambda scale: [cell])

run_experiments([experiment(name) for name in names], SCALES["tiny"], out, torch.device("cpu"), Progress())
"""


def test_processes_beside_each_other_fill_one_folder_and_share_what_takes_long(tmp_path: Path) -> None:
    lists = ("a,c", "b,c", "c,a")
    command = [sys.executable, "-c", _BESIDE, str(tmp_path / "out")]
    processes = [subprocess.Popen([*command, names]) for names in lists]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert (tmp_path / "computed").read_text() == "once\n"
    for name in "abc":
        (row,) = [json.loads(line) for line in (tmp_path / "out" / name / "rows.jsonl").read_text().splitlines()]
        assert row["value"] == 0.25
    assert not list((tmp_path / "out").rglob(".*"))  # neither locks nor halves


def test_what_is_no_number_is_said_and_not_shown(tmp_path: Path) -> None:
    nan = Cell("nan", (VALUES,), lambda shop: [Measured(*VALUES, float("nan"))])
    (row,) = run(tmp_path, replace(TOY, cells=lambda scale: [nan], paper={}))
    assert (row["value"], row["absent"]) == (None, "not a finite number")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda cells: [*cells, cells[0]], "listed twice"),
        (lambda cells: [*cells, replace(cells[0], key="other")], "two cells"),
        (lambda cells: [*cells, Cell("x", (Place("numbers", "x", "cube"),), cells[0].run)], "column 'cube'"),
        (lambda cells: cells[1:], "the paper's"),
        (lambda cells: [*cells, Cell("x", (Place("numbers", "x", "value"),))], "neither run nor absent"),
    ],
)
def test_lists_that_are_wrong_are_refused_before_anything_runs(tmp_path: Path, changed, message: str) -> None:
    wrong = replace(TOY, cells=lambda scale: changed(TOY.cells(scale)))
    with pytest.raises(PullbackError, match=message):
        run(tmp_path / "out", wrong)
    assert not (tmp_path / "out").exists()


def test_a_cell_that_gives_other_places_is_an_error(tmp_path: Path) -> None:
    wrong = replace(TOY, cells=lambda scale: [replace(number(0), run=number(1).run)], paper={})
    with pytest.raises(PullbackError, match="gave other places"):
        run(tmp_path, wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "huge"}, "scale: expected one of tiny, small, paper, got 'huge'"),
        ({"name": "tiny", "models": {"dino": "x"}}, "model: expected ROLE=NAME with a role of .*got 'dino'"),
        ({"name": "tiny", "data": {"scenes": "x"}}, "images: scenes are drawn from their seeds"),
        ({"name": "tiny", "data": {"photos": "/nowhere"}}, "images: there is no /nowhere"),
    ],
)
def test_scales_name_what_is_wrong(arguments: dict, message: str) -> None:
    with pytest.raises(PullbackError, match=message):
        scale_of(**arguments)


def test_heads_are_trained_once_and_found_again(tmp_path: Path) -> None:
    shop = Workshop(TOY, TINY, tmp_path, CPU, Progress())
    probe = shop.probe("tiny-scenes", "cls", 10)
    recipe = HeadRecipe("scenes-train", images=8, size=56, steps=6, width=16, heads=2)
    head = shop.head(probe, recipe)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    again = Workshop(TOY, TINY, tmp_path, CPU, Progress())
    features = shop.targets(probe, "scenes", 2, size=56)["features"]
    assert torch.equal(again.head(again.probe("tiny-scenes", "cls", 10), recipe)(features), head(features))
    assert before.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}.items()
    other = shop.head(probe, replace(recipe, seed=1))
    assert not torch.equal(other(features), head(features))


def test_pictures_of_a_role_are_the_same_in_parts(tmp_path: Path) -> None:
    shop = Workshop(TOY, TINY, tmp_path, CPU, Progress())
    five = shop.images("scenes", 5, model="tiny-scenes", size=28)
    assert torch.allclose(shop.images("scenes", 2, model="tiny-scenes", size=28, skip=3), five[3:], atol=1e-3)
    assert len(shop.labels("scenes", 5)) == 5


@pytest.mark.parametrize("count", [1, 2, 7, 200, 401])
def test_intervals_of_means_are_those_of_the_bootstrap(tmp_path: Path, count: int) -> None:
    values = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64) ** 3
    found = Workshop(TOY, replace(TINY, seed=3), tmp_path, CPU, Progress()).mean(VALUES, values)
    wanted = bootstrap_mean(values.numpy(), generator=np.random.default_rng(3))
    assert found.value == pytest.approx(wanted.mean, abs=1e-12) and found.count == count
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_pictures_are_taken_in_larger_parts_on_a_gpu(tmp_path: Path) -> None:
    shops = [Workshop(TOY, TINY, tmp_path, torch.device(name), Progress()) for name in ("cpu", "cuda")]
    assert [shop.together(8) for shop in shops] == [8, 32]


def test_a_gpu_repeats_what_is_computed_and_a_processor_is_left_as_it_is() -> None:
    usual = (torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cudnn.deterministic)
    with repeatable(CPU):
        assert (torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cudnn.deterministic) == usual
    with repeatable(torch.device("cuda")):
        assert not torch.backends.cuda.mem_efficient_sdp_enabled() and torch.backends.cudnn.deterministic
    assert (torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cudnn.deterministic) == usual
