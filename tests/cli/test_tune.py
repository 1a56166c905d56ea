"""`pullback tune` on a pruned copy of the embedded model."""

import json

import pytest
import torch
from typer.testing import CliRunner

import pullback as pb
from pullback.cli import app
from pullback.experiments.demo import write_pictures
from pullback.scenes.render import render

OPTIONS = ("--held-out", 0.25, "--steps", 4, "--batch", 4, "--size", 56, "--validate-every", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("place")
    write_pictures(render(range(8), size=64), root / "photos")
    model = pb.load_probe("tiny-scenes", device="cpu").backbone.model
    pb.prune(model, "strided", ratio=0.5, stages=[4], preset="drop").save_pretrained(root / "fast")
    return root


def run(place, out, *options):
    typed = ["tune", place / "fast", "--images", place / "photos", "--out", out, *OPTIONS, *options]
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(part) for part in typed])


def test_a_tuned_model_with_its_curve(place, tmp_path):
    result = run(place, tmp_path)
    assert result.exit_code == 0, result.output
    assert "additional SILog × 100: " in result.output and " after, on 2 held-out images" in result.output
    loaded, images = pb.PrunedModel.from_pretrained(tmp_path), torch.randn(1, 3, 56, 56)
    record = loaded.tuning
    assert f"{record['before']:.3g} ± " in result.output and record["steps"] == 4 and record["images"] == 6
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4] and {"loss", "degradation", "degradation_se"} <= rows[0].keys()
    untuned = pb.PrunedModel.from_pretrained(place / "fast")
    assert untuned.vectors is None and loaded(images).predicted_depth.shape == untuned(images).predicted_depth.shape
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_again_is_done_at_once_and_another_is_refused(place, tmp_path):
    first, again = run(place, tmp_path), run(place, tmp_path)
    assert first.exit_code == again.exit_code == 0
    assert [line for line in first.output.splitlines() if "SILog" in line] == [
        line for line in again.output.splitlines() if "SILog" in line
    ]
    other = run(place, tmp_path, "--seed", 3)
    assert other.exit_code == 2 and "--out: " in other.output and "seed: 0 there, 3 asked for" in other.output


def test_what_was_saved_survives_an_interruption(place, tmp_path, monkeypatch):
    import pullback.learning.fit as loop

    save = loop._Run.save

    def stopped(self):
        save(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop._Run, "save", stopped)
    result = run(place, tmp_path)
    assert result.exit_code == 130 and "the last checkpoint; the same command goes on from there" in result.output
    monkeypatch.setattr(loop._Run, "save", save)
    assert run(place, tmp_path).exit_code == 0


def test_a_tuned_model_may_be_tuned_on(place, tmp_path):
    run(place, tmp_path / "first")
    typed = ["tune", tmp_path / "first", "--images", place / "photos", "--out", tmp_path / "second", *OPTIONS]
    result = CliRunner().invoke(app, [str(part) for part in typed])
    assert result.exit_code == 0, result.output
    records = [pb.PrunedModel.from_pretrained(tmp_path / name).tuning for name in ("first", "second")]
    assert records[1]["before"] == pytest.approx(records[0]["after"], rel=1e-4)
