"""A diagnosis into a folder, from Python: what is told on the way, and samples of several shapes as one report."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import pullback as pb
from helpers.truth import load_seeded, random_images
from pullback.errors import PullbackError
from pullback.geometry.folder import DiagnosisRequest, join_reports, run_diagnosis

SMALL = dict(layers=(10, "hooks"), decoder="depth-2x2", ranks=(3,), size=28, device="cpu", convergence_samples=0)


@pytest.fixture
def photos(tmp_path):
    for number in range(2):
        noise = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
    return tmp_path


class Heard:
    """A `Progress` that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


def test_a_run_tells_its_progress_and_hands_over_every_layer(photos, tmp_path):
    heard, layers = Heard(), []
    request = DiagnosisRequest("tiny-scenes", str(photos), **SMALL)
    document = run_diagnosis(request, tmp_path / "out", heard, on_layer=layers.append)
    assert heard.calls[:5] == [
        ("stage", "loading tiny-scenes"),
        ("stage", f"reading images from {photos}"),
        ("stage", "timing one product"),
        ("work", "", 4, "images"),
        ("describe", "L10"),
    ]
    assert ("describe", "hooks") in heard.calls and ("stage", "alignment of the layers") in heard.calls
    assert sum(call[1] for call in heard.calls if call[0] == "advance") == 4
    assert [layer["layer"] for layer in layers] == [10, "hooks"] and layers == document["layers"]
    assert document == json.loads((tmp_path / "out" / "diagnosis.json").read_text(encoding="utf-8"))
    assert len(layers[1]["k_eff"]["layers"]) == 4 and "k_eff" not in layers[0]
    assert document["threads"] == torch.get_num_threads() and "commit" in document


def test_progress_and_decoder_may_be_left_out(photos, tmp_path):
    request = DiagnosisRequest("tiny-scenes", str(photos), **(SMALL | {"layers": (11,), "decoder": None}))
    assert run_diagnosis(request, tmp_path / "out")["decoder"] == "cls"


def test_a_precision_that_a_probe_does_not_have_is_refused_before_anything_is_computed(photos, tmp_path):
    request = DiagnosisRequest("tiny-scenes", str(photos), **SMALL, precision="bf16")
    with pytest.raises(
        PullbackError, match=r"precision: expected float32 or tf32 for .* after the norm, .* got 'bf16'"
    ):
        run_diagnosis(request, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_reports_of_several_shapes_are_joined():
    probe = load_seeded("cls")
    reports = [
        pb.diagnose(probe, random_images(2, size), rank=5, seed=seed, convergence_samples=1)
        for seed, size in enumerate([(28, 28), (42, 28)])
    ]
    joined = join_reports(reports)
    assert len(joined.samples) == 4 and joined.importance.shape == (4, 7)
    assert joined.importance[:2, 5:].isnan().all() and joined.importance[2:].isfinite().all()
    assert joined.products == reports[0].products + reports[1].products
    assert len(joined.convergence[0].alignment_error) == 2
    assert joined.samples[0].kappa[5] == reports[0].samples[0].kappa[5]
    assert (joined.input_shape, joined.seed) == (reports[1].input_shape, 0)


def test_a_single_report_stays_as_it_is():
    report = pb.diagnose(load_seeded("cls"), random_images(1, (28, 28)), rank=3)
    assert join_reports([report]) is report
    twice = join_reports([report, replace(report, seed=7)])
    assert twice.kappa.mean == pytest.approx(report.kappa.mean) and twice.regime == report.regime


def test_a_folder_of_another_command_is_refused_before_anything_is_computed(photos, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "rows.jsonl").write_text("")
    request = DiagnosisRequest("no-such-model", str(photos), **SMALL)  # it is not even loaded
    with pytest.raises(PullbackError, match=r"holds a comparison of pruning rules \(rows.jsonl of `pullback prune`\)"):
        run_diagnosis(request, out)
    assert [path.name for path in out.iterdir()] == ["rows.jsonl"]
