"""The pruning theorem on runs of small models: the rows say what happened, and the command writes them."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typer import Typer
from typer.testing import CliRunner

from helpers.families import images_for, model_of, save
from pullback.errors import PullbackError
from pullback.experiments import pruning_bound as module
from pullback.experiments.pruning_bound import MEASURED, Measured, bound_rows, once, plan_for, read_pictures, table
from pullback.geometry.scores import exact_importance, exact_modes
from pullback.probes import load_probe
from pullback.pruning import run_pruned
from pullback.scenes.splits import QUERIES

GRID = (2, 3)


def measured(decoder: str, stage: int = 1, name: str = "depth-v2") -> Measured:
    """In float64 throughout: `Measured.load` runs in float32, which would blur what is compared here."""
    runner = load_probe(model_of(name), decoder, stage)
    return Measured(runner, replace(runner, at=runner.backbone.depth - 1))


def rows_for(decoder: str, ratios: tuple[float, ...] = (0.5,), name: str = "depth-v2") -> list[dict]:
    return list(bound_rows(measured(decoder, name=name), images_for(name, GRID, batch=3), ratios, rank=5, batch=2))


def test_a_row_for_every_image_ratio_and_preset():
    rows = rows_for("cls", (0.0, 0.5))
    keys = {(row["image"], row["ratio"], row["preset"]) for row in rows}
    assert len(rows) == len(keys) == 3 * 2 * 2
    assert {row["tensor"] for row in rows} == {"final"}
    assert [row["removed"] for row in rows if row["image"] == 2] == [0, 0, 3, 3]
    json.dumps(rows, allow_nan=False)
    assert all(set(MEASURED) <= set(row) for row in rows)


def test_removing_nothing_changes_nothing():
    for row in rows_for("depth-3x4", (0.0,)):
        assert row["output_error"] == row["true_error"] == row["kept_moved"] == 0 and not row["fails"]


def test_a_class_token_decoder_sees_no_removed_token():
    for row in rows_for("cls", name="dinov2"):
        assert row["zero_blocks"] == 1 and row["first_term"] == row["removed_error"] == 0
        assert row["reinsert"] == "frozen"
        assert row["true_error"] > 0 and row["kept_moved"] == 1
        assert math.isclose(row["true_error"], row["output_error"], rel_tol=1e-9)


@pytest.mark.parametrize("preset", ["paper", "best"])
def test_the_rows_are_those_of_the_pruned_run(preset):
    """Against a run made here; at "final" the other layers that the decoder reads are the unpruned ones."""
    setting = measured("depth-3x4")
    probe, images = setting.runner, images_for("depth-v2", GRID, batch=2)
    rows = list(bound_rows(setting, images, (0.5,), (preset,), rank=5, batch=1))
    plan = plan_for(preset, 0.5, setting)
    scores, modes = [exact_importance(probe, 5)], exact_modes(probe, 5)
    run = run_pruned(probe.backbone, images, plan, scores, layers=(0, 1, 3, 4), modes=modes)
    unpruned = probe.backbone.features(images, (0, 1, 3, 4))
    layout = probe.backbone.token_layout(images)

    def decode(taps: list[Tensor]) -> Tensor:
        return probe.decoder.decode([probe.backbone.norm(tap) for tap in taps], layout).flatten(1)

    truth = decode(list(unpruned.values()))
    really = (truth - decode(list(run.taps))).norm(dim=1)
    only_final = (truth - decode([*list(unpruned.values())[:3], run.taps[3]])).norm(dim=1)
    for image in range(2):
        found = {row["tensor"]: row for row in rows if row["image"] == image}
        assert math.isclose(found["all"]["true_error"], really[image], rel_tol=1e-8)
        assert math.isclose(found["final"]["true_error"], only_final[image], rel_tol=1e-8)
        assert found["all"]["output_error"] == found["final"]["output_error"]
        assert math.isclose(found["all"]["output_error"], really[image], rel_tol=1e-8)
        assert found["final"]["true_error"] != pytest.approx(found["all"]["true_error"], rel=1e-3)
        gone = run.records[0].removed[image]
        moved = (unpruned[4] - run.taps[3])[image].norm(dim=1).square()
        share = 1 - moved[gone].sum() / moved.sum()
        assert math.isclose(found["final"]["kept_energy"], share, rel_tol=1e-8)


def test_the_geometry_of_a_stage_is_asked_once():
    calls = []

    def modes(tokens, context):
        calls.append(tokens)
        return tokens + 1

    remembered = once(modes)
    tokens = torch.zeros(1, 2, 3)
    assert remembered(tokens, None) is remembered(tokens, None) and len(calls) == 1


def test_procedural_pictures_are_those_that_the_model_is_judged_by(monkeypatch):
    asked = []

    def spy(seeds, **options):
        asked.append((list(seeds), options))
        return render(range(2), size=28)

    render = module.render
    monkeypatch.setattr(module, "render", spy)
    pictures = read_pictures(measured("depth-3x4", name="tiny-scenes").runner, "scenes", 2)
    assert asked == [([QUERIES, QUERIES + 1], {"size": 224})] and pictures.shape == (2, 3, 28, 28)


def test_the_table_holds_means_over_images():
    rows = rows_for("depth-3x4", (0.3,))
    lines = table(rows).splitlines()
    assert len(lines) == 2 + 4 and [line.split(" | ")[0] for line in lines[2:]] == ["| final"] * 2 + ["| all"] * 2
    chosen = [row for row in rows if row["tensor"] == "final" and row["preset"] == "best"]
    error = sum(100 * row["output_error"] / row["output_norm"] for row in chosen) / len(chosen)
    assert lines[2].startswith(f"| final | 0.3 | best | {error:.3g} |")


def test_the_command_writes_rows_and_prints_the_table(tmp_path):
    from helpers.pictures import write_pictures

    save(model_of("depth-v2"), tmp_path / "model")
    write_pictures(tmp_path / "photos", 3)
    app = Typer()
    app.command()(module.main)
    options = ["--model", tmp_path / "model", "--decoder", "depth-3x4", "--images", tmp_path / "photos"]
    more = ["--stage", 1, "--ratios", "0.5", "--count", 2, "--rank", 4, "--size", 42, "--device", "cpu"]
    more += ["--out", tmp_path / "out.jsonl"]
    done = CliRunner().invoke(app, [str(part) for part in options + more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 and rows[0]["model"] == str(tmp_path / "model")
    assert done.output.strip() == table(rows)
    refused = CliRunner().invoke(app, [str(part) for part in [*options, *more, "--presets", "worst"]])
    assert refused.exit_code == 2 and "preset: expected one of" in refused.output


def test_a_ratio_that_is_no_number_is_refused():
    with pytest.raises(PullbackError, match=r"ratios: expected numbers separated by commas, got '0\.1;0\.3'"):
        module.shares_of("0.1;0.3")
