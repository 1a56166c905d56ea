"""The ablations of the head at toy size: what is listed, what a row says, and a file of rows that is gone on with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import pullback as pb
from helpers.pictures import SMALL, write_pictures
from pullback.errors import ModelError, PullbackError
from pullback.experiments import head_ablations as module
from pullback.experiments.head_ablations import ABLATIONS, PAPER, first_images, run_ablation
from pullback.learning.head import ImportanceHead
from pullback.learning.train_head import HeadExamples, StoredRows
from pullback.runs.progress import Progress
from pullback.runs.rows import Rows
from pullback.targets.compute import compute_targets
from pullback.targets.store import TargetStore

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """model/, train/ (2 crops of 9 pictures) and held-out/ (3 others)."""
    from helpers.families import model_of, save

    folder = tmp_path_factory.mktemp("place")
    save(model_of("dinov2"), folder / "model")
    probe = pb.load_probe(folder / "model", "cls", 1, device="cpu")
    photos = write_pictures(folder / "photos", 12)
    pictures = sorted(photos.glob("[01]?.png"))
    for name, chosen, crops in (("train", pictures[:9], 2), ("held-out", pictures[9:], 0)):
        lines = (str(path.relative_to(folder)) for path in chosen)  # keys seed the crops: not the folder of the day
        (folder / f"{name}.txt").write_text("\n".join(lines))
        compute_targets(probe, folder / f"{name}.txt", out=folder / name, crops=crops, **SMALL)
    return folder


@pytest.fixture(scope="module")
def setting(place) -> tuple:
    """Probe and stores."""
    probe = pb.load_probe(place / "model", "cls", 1, device="cpu")
    return probe, TargetStore.open(place / "train"), TargetStore.open(place / "held-out")


def test_the_four_ablations_of_the_paper_are_listed():
    assert list(ABLATIONS) == list(PAPER) == ["E.1", "E.2", "E.3", "E.4"]
    assert [variant.target for variant in ABLATIONS["E.1"]] == ["importance", "block-norm"]
    assert [variant.rank_weight for variant in ABLATIONS["E.2"]] == [0.0, 0.5, 1.0]
    sizes = {(variant.width, variant.heads) for variant in ABLATIONS["E.3"]}
    assert sizes == {(128, 4), (256, 2), (256, 4), (256, 8), (512, 4)}
    assert [variant.images for variant in ABLATIONS["E.4"]] == [250, 500, 1000, 2000]
    for variants in ABLATIONS.values():
        assert len({variant.name for variant in variants}) == len(variants)
        for variant in variants:
            assert variant.seeds == (0, 1, 2)
            ImportanceHead(768, variant.width, variant.heads)  # a layout that exists


def test_only_the_first_ablation_has_a_rho_in_the_paper():
    stated = {v.name: v.paper_rho for variants in ABLATIONS.values() for v in variants if v.paper_rho is not None}
    assert stated == {"importance": 0.20, "block-norm": 0.09}
    assert all("No rho stated" in PAPER[name] for name in ("E.2", "E.3", "E.4"))


def test_rows_have_the_scores_the_cost_and_the_paper_beside_them(setting):
    rows = run_ablation("E.1", *setting, steps=12, seeds=(0, 5))
    assert [row["variant"] for row in rows] == ["importance", "importance", "block-norm", "block-norm"]
    assert [row["seed"] for row in rows] == [0, 5, 0, 5]
    weights = setting[1].config["weights"]
    for row in rows:
        assert -1 < row["rho_patches"] < 1 and row["rho_se"] > 0 and row["seconds"] > 0 and row["steps"] == 12
        assert (row["images"], row["images_asked"], row["rows"], row["crops"]) == (9, 2000, 18, 2)
        assert row["parameters"] == sum(p.numel() for p in ImportanceHead(24).parameters())
        assert (row["decoder"], row["layer"], row["weights"]) == ("cls", 1, weights)
    assert [row["paper_rho"] for row in rows] == [0.20, 0.20, 0.09, 0.09]
    assert rows[0]["rho"] != rows[1]["rho"]
    assert rows[0]["rho_importance"] == pytest.approx(rows[0]["rho"]) != rows[2]["rho"] != rows[2]["rho_importance"]
    json.dumps(rows)


def test_variants_change_what_they_name(setting, monkeypatch):
    rows = run_ablation("E.3", *setting, steps=2, seeds=(0,))
    assert [(row["width"], row["heads"]) for row in rows] == [(v.width, v.heads) for v in ABLATIONS["E.3"]]
    assert len({row["parameters"] for row in rows}) == 3
    tasks, real = [], module.fit
    monkeypatch.setattr(module, "fit", lambda head, task, config: tasks.append(task) or real(head, task, config))
    for name in ("E.2", "E.1"):
        run_ablation(name, *setting, steps=1, seeds=(0,))
    assert [task.rank_weight for task in tasks] == [0.0, 0.5, 1.0, 0.5, 0.5]
    assert torch.equal(tasks[3].held_out.target, setting[2].read().importance)
    assert torch.equal(tasks[4].train[0].target, setting[1].read().block_norm)


def test_features_are_computed_once_for_all_runs(setting, monkeypatch):
    opened = []
    real = StoredRows.of
    monkeypatch.setattr(StoredRows, "of", lambda *arguments, **options: opened.append(1) or real(*arguments, **options))
    run_ablation("E.1", *setting, steps=1)
    assert len(opened) == 2


def test_fewer_images_are_the_first_ones_with_all_their_crops(setting):
    probe, train, _ = setting
    rows = StoredRows.of(probe, train)
    some = first_images(rows, 4)
    assert some.table.keys == rows.table.keys[:8] and len(first_images(rows, 9)) == len(rows) == 18
    examples: HeadExamples = some.examples()
    assert len(examples) == 8


def test_the_same_seed_gives_the_same_row(setting):
    once, again = (run_ablation("E.1", *setting, steps=3, seeds=(1,)) for _ in range(2))
    for rows in (once, again):
        for row in rows:
            row["seconds"] = row["provenance"]["date"] = None
    assert once == again


class Told(Progress):
    def __init__(self) -> None:
        self.parts: list[str] = []

    def finished(self, part: str, line: str) -> None:
        self.parts.append(part)


def test_runs_that_are_in_the_file_are_not_run_again(setting, tmp_path, monkeypatch):
    out = tmp_path / "new" / "rows.jsonl"
    expected = run_ablation("E.2", *setting, steps=2, seeds=(0, 1))
    real, started = module.run_variant, []

    def killed(variant, *rest):
        started.append(variant.name)
        if len(started) == 4:
            raise KeyboardInterrupt
        return real(variant, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "run_variant", killed)
        run_ablation("E.2", *setting, steps=2, seeds=(0, 1), out=out)
    with out.open("a") as file:
        file.write('{"ablation": "E.2", "vari')  # as a killed run leaves it
    told = Told()
    rows = run_ablation("E.2", *setting, steps=2, seeds=(0, 1), out=out, progress=told)
    assert told.parts == ["w_rank 0.5, seed 1", "w_rank 1, seed 0", "w_rank 1, seed 1"]
    assert len(rows) == 6 == len(Rows(out).read())
    assert [row["rho"] for row in rows] == pytest.approx([row["rho"] for row in expected])
    monkeypatch.setattr(StoredRows, "of", lambda *rest: pytest.fail("features are not needed any more"))
    assert run_ablation("E.2", *setting, steps=2, seeds=(0, 1), out=out) == rows


def test_rows_of_other_settings_stand_beside(setting, tmp_path):
    out = tmp_path / "rows.jsonl"
    run_ablation("E.1", *setting, steps=2, seeds=(0,), out=out)
    run_ablation("E.1", *setting, steps=3, seeds=(0,), out=out)
    probe, train, held_out = setting
    swapped = run_ablation("E.1", probe, held_out, train, steps=2, seeds=(0,), out=out)
    assert len(Rows(out).read()) == 6 and len(swapped) == 2 and {row["rows"] for row in swapped} == {3}


def test_an_unknown_ablation_is_refused(setting):
    with pytest.raises(PullbackError, match=r"name: expected one of E.1, E.2, E.3, E.4, got 'E.9'"):
        run_ablation("E.9", *setting)


def test_stores_of_another_probe_are_refused(setting, place):
    probe = pb.load_probe(place / "model", "cls", 0, device="cpu")
    with pytest.raises(ModelError, match=r"another one \(layer: 1 there, 0 here\)"):
        run_ablation("E.1", probe, *setting[1:])


def test_a_file_of_something_else_is_refused(setting, tmp_path):
    (tmp_path / "notes.txt").write_text("dear diary\n")
    with pytest.raises(PullbackError, match=r"out: line 1 of .*notes.txt is no JSON .* Choose another"):
        run_ablation("E.1", *setting, out=tmp_path / "notes.txt")


# ---- the script


def script(place: Path, out: Path, *options: object):
    app = typer.Typer()
    app.command()(module.main)
    stores = ("--train", place / "train", "--held-out", place / "held-out")
    known = (*stores, "--out", out, "--steps", 2, "--seed", 0, "--device", "cpu")
    return CliRunner().invoke(app, [str(part) for part in (*known, *options)])


def test_the_script_writes_a_line_per_run_and_prints_the_paper_beside(place, tmp_path):
    result = script(place, tmp_path / "rows.jsonl", "--name", "E.1")
    assert result.exit_code == 0, result.output
    assert len(Rows(tmp_path / "rows.jsonl").read()) == 2
    assert "paper: DPT depth at layer 4" in result.output and "(paper 0.09), patches " in result.output
    again = script(place, tmp_path / "rows.jsonl", "--name", "E.1", "--seed", 1)
    assert again.output.count("seed 1: rho") == 2 and "seed 0" not in again.output
    assert all(f"| importance | {seed} |" in again.stdout for seed in (0, 1)), "old rows stand in the table too"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--name", "E.9"), "error: name: expected one of E.1, E.2, E.3, E.4, got 'E.9'"),
        (("--name", "E.1", "--train", "nowhere"), "error: folder: expected targets.json in nowhere"),
    ],
)
def test_wrong_options_are_explained(place, tmp_path, options, message):
    result = script(place, tmp_path / "rows.jsonl", *options)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output


def test_the_module_is_a_program():
    command = [sys.executable, "-m", "pullback.experiments.head_ablations", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--held-out" in done.stdout, done.stderr
