"""What users of an earlier version have on their disks still opens and says the same.

Where that version did not record which decoder it used, nothing is added to its files: stores of targets, runs of an
SPN and comparisons are refused then, with the reason, and left as they are. Runs of a head go on, since their settings
hold the very rows that they learn from.

`fixtures/legacy/` was written by the code of one earlier commit (see its README). Each test works on a copy, since runs
write into their folders. Stored numbers come from another machine: they are compared to about float32's round-off.
"""

import json
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import pullback as pb

LEGACY = Path(__file__).parent / "fixtures" / "legacy"
PROBE = ("model", "--layer", "1", "--rank", "3", "--size", "28x42", "--device", "cpu")
FIT = ("--steps", "8", "--batch", "4", "--validate-every", "4", "--width", "16", "--heads", "2")
TRAIN = {
    "head": ("train", "head", "--targets", "targets", "--held-out", "held-out-targets", *FIT, "--device", "cpu"),
    "spn": ("train", "spn", *PROBE, "--images", "images", "--held-out", "held-out", *FIT),
}
TARGETS = ("targets", *PROBE, "--images", "images", "--crops", "2", "--shard-size", "6", "--seed", "1")
PRUNE = (
    *("prune", "model", "--images", "images", "--size", "28x42", "--stages", "1", "--rank", "3", "--device", "cpu"),
    *("--head", "run-head/model", "--preset", "best,bipartite", "--scores", "importance,norm,random"),
    *("--ratios", "0.4,0.7", "--batch", "4", "--time", "none"),
)
ABLATION = (
    *("--train", "targets", "--held-out", "held-out-targets", "--name", "E.2", "--model", "model", "--steps", "3"),
    *("--batch", "4", "--seed", "0", "--device", "cpu", "--out", "head_ablations.jsonl"),
)
TAXONOMY = (
    *("--model", "tiny-views", "--scenes", "1", "--views", "2", "--size", "16", "--rank", "4", "--device", "cpu"),
    *("--out", "scene_taxonomy.jsonl"),
)
NEEDS_ARROW = pytest.mark.skipif(
    find_spec("pyarrow") is None,
    reason="pyarrow is not installed (the extra pullback[targets])",
)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A copy to work in; names in the files are relative to it."""
    folder = tmp_path / "legacy"
    shutil.copytree(LEGACY, folder, ignore=shutil.ignore_patterns("make.py", "README.md"))
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # figures take seconds and have tests of their own
    return folder


def run(monkeypatch, *words: str, module: str = "pullback") -> None:
    """`python -m pullback ...` in this process."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as exit:
        assert not exit.code, f"{module} {' '.join(words)} ended with {exit.code}"


def stamps(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def lines(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["run-head/model", "head-two-rounds", "run-spn/model", "spn-from-a-constant"])
def test_networks_load_and_score_as_they_did(place, name):
    stored = np.load("networks.npz")
    kind = pb.ImportanceHead if "head" in name else pb.SpectralPullbackNetwork
    network = kind.from_pretrained(name)
    with torch.no_grad():
        found = network(torch.from_numpy(stored["features"]))
    scores = found if isinstance(found, torch.Tensor) else found.importance()
    torch.testing.assert_close(scores, torch.from_numpy(stored[name]), rtol=1e-4, atol=1e-5)


def test_networks_know_what_they_were_made_for(place):
    head = pb.ImportanceHead.from_pretrained("run-head/model")
    origin = head.config.origin
    assert (head.layer, origin.family, origin.decoder, origin.rank) == (1, "dinov2", "cls", 3)
    assert -1 <= head.config.scores["rho"] <= 1 and head.config.scores["training_rows"] == 12
    metric = pb.SpectralPullbackNetwork.from_pretrained("run-spn/model")
    assert metric.config.origin.layer == 1 and 0 <= metric.config.scores["v1"] <= 1


@NEEDS_ARROW
@pytest.mark.parametrize(
    ("name", "rows", "modes"), [("targets", 12, False), ("held-out-targets", 3, False), ("modes", 3, True)]
)
def test_stores_open(place, name, rows, modes):
    store = pb.TargetStore.open(name)
    table = store.read()
    assert len(store) == len(table) == rows and store.skipped == ()
    assert table.importance.shape == (rows, 7) and table.singular_values.shape == (rows, 3)
    assert torch.isfinite(torch.as_tensor(table.importance)).all()
    assert (table.modes is not None) == modes
    assert store.config["decoder"] == "cls" and store.config["layer"] == 1


def refused(monkeypatch, capsys, folder: Path, *words: str) -> str:
    """Run a command that must leave the folder as it is; return what it says."""
    before = stamps(folder)
    with pytest.raises(AssertionError, match="ended with"):
        run(monkeypatch, *words, "--out", str(folder))
    assert stamps(folder) == before
    return capsys.readouterr().err


@NEEDS_ARROW
@pytest.mark.parametrize("name", ["targets", "targets-stopped"])
def test_a_store_is_not_added_to(place, monkeypatch, capsys, name):
    said = refused(monkeypatch, capsys, place / name, *TARGETS)
    assert f"{name} holds targets of an older version of pullback, which did not record decoder_identity" in said
    assert len(pb.TargetStore.open(name)) == (12 if name == "targets" else 6)


@NEEDS_ARROW
def test_a_store_of_other_settings_is_still_refused(place, monkeypatch, capsys):
    with pytest.raises(AssertionError, match="ended with 2"):
        run(monkeypatch, *TARGETS, "--seed", "2", "--out", "targets")
    assert "seed" in capsys.readouterr().err


@NEEDS_ARROW
def test_a_finished_run_is_left_alone(place, monkeypatch):
    """Its last line and its weights stay, since no step is left to do."""
    out = place / "run-head"
    metrics, weights = lines(out / "metrics.jsonl"), load_file(out / "model" / "model.safetensors")
    run(monkeypatch, *TRAIN["head"], "--out", str(out))
    assert lines(out / "metrics.jsonl") == metrics
    again = load_file(out / "model" / "model.safetensors")
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)


@NEEDS_ARROW
def test_a_stopped_run_ends_as_if_it_had_not_been(place, monkeypatch):
    """Stopped after step 6, it goes on from the checkpoint of step 4 and ends where its uninterrupted twin did."""
    out = place / "run-head-stopped"
    assert [row["step"] for row in lines(out / "metrics.jsonl")] == [4] and not (out / "model").exists()
    run(monkeypatch, *TRAIN["head"], "--out", str(out))
    twin = place / "run-head"
    assert [row["step"] for row in lines(out / "metrics.jsonl")] == [4, 8]
    found, expected = (load_file(folder / "model" / "model.safetensors") for folder in (out, twin))
    assert found.keys() == expected.keys()
    # The middle one of all weights: those whose gradient is nothing but round-off move by the sign of it. A step moves
    # weights by about 1e-4.
    gaps = torch.cat([(found[name] - expected[name]).abs().flatten() for name in expected])
    assert float(gaps.median()) < 1e-6
    last, should = lines(out / "metrics.jsonl")[-1], lines(twin / "metrics.jsonl")[-1]
    assert last["loss"] == pytest.approx(should["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["run-spn", "run-spn-stopped"])
def test_a_run_of_an_spn_is_not_gone_on_with(place, monkeypatch, capsys, name):
    said = refused(monkeypatch, capsys, place / name, *TRAIN["spn"])
    assert "holds a training run of an older version of pullback, which did not record probe.decoder_identity" in said


@NEEDS_ARROW
def test_a_run_of_other_settings_is_still_refused(place, monkeypatch, capsys):
    with pytest.raises(AssertionError, match="ended with 2"):
        run(monkeypatch, *TRAIN["head"], "--seed", "3", "--out", "run-head-stopped")
    assert "seed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["comparison", "comparison-stopped"])
def test_a_comparison_is_not_added_to(place, monkeypatch, capsys, name):
    said = refused(monkeypatch, capsys, place / name, *PRUNE)
    assert f"{name} holds a comparison of an older version of pullback, which did not record decoder_identity" in said


def test_rules_of_a_comparison_have_the_names_of_today(place):
    """Two presets of one stage were once named after published methods, which these are not."""
    from pullback.pruning.compare import RuleRows
    from pullback.pruning.rules import Rule
    from pullback.runs.documents import ROWS, read_summary

    found = read_summary(Path("comparison"))
    rules = {(rule["preset"], rule["score"]) for rule in found["rules"]}
    assert found["presets"] == ["best", "bipartite"]
    assert ("bipartite", "bipartite") in rules and "tome" not in str(found)
    rows = RuleRows(Path("comparison") / ROWS)
    assert len(rows.of(Rule("bipartite", "bipartite", 0.4))) == 6 and not rows.of(Rule("tome", "tome", 0.4))


def test_a_diagnosis_is_still_shown(place):
    from rich.console import Console

    from pullback.report.console import diagnosis_summary
    from pullback.runs.documents import read_diagnosis, read_importance

    document, arrays = read_diagnosis(Path("diagnosis")), read_importance(Path("diagnosis"))
    assert document["complete"] and [layer["layer"] for layer in document["layers"]] == [0, 1]
    assert arrays["L00"].shape == arrays["L01"].shape == (2, 7)
    screen = Console(width=120)
    with screen.capture() as printed:
        screen.print(diagnosis_summary(document, screen.width))
    shown = printed.get()
    assert "captured energy" in shown and "L01" in shown


def test_a_diagnosis_is_still_drawn():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pullback[plot])")
    from pullback.report.figures import spectrum_png, tokens_png
    from pullback.runs.documents import read_diagnosis, read_importance

    document, arrays = read_diagnosis(LEGACY / "diagnosis"), read_importance(LEGACY / "diagnosis")
    assert spectrum_png(document, dpi=40).startswith(b"\x89PNG")
    assert tokens_png(document["layers"][1], arrays, dpi=40).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["diagnosis", "comparison", "run-head", "run-spn", "run-head-stopped"])
def test_runs_still_get_a_page(name, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pullback[plot])")
    from pullback.report.page import write_page_of

    folder = shutil.copytree(LEGACY / name, tmp_path / name)
    page = write_page_of(folder).read_text(encoding="utf-8")
    assert "<section" in page and "data:image/" in page


@pytest.mark.parametrize("name", ["pruned", "pruned-paper", "pruned-scenes"])
def test_pruned_models_load_and_answer_as_they_did(place, name):
    """``pruned`` holds a head and a model of transformers; the others hold networks of this package, by their class."""
    stored = np.load("pruned.npz")
    pruned = pb.PrunedModel.from_pretrained(name)
    with torch.no_grad():
        output = pruned(torch.from_numpy(stored["images"]))
    found = output.predicted_depth if name == "pruned-scenes" else output.pooler_output
    torch.testing.assert_close(found, torch.from_numpy(stored[name]), rtol=1e-3, atol=1e-4)
    assert pruned.plan.ratio == 0.5


@NEEDS_ARROW
def test_rows_of_an_ablation_are_gone_on_with(place, monkeypatch):
    path = place / "head_ablations.jsonl"
    before = path.read_text()
    run(monkeypatch, *ABLATION, module="pullback.experiments.head_ablations")
    assert path.read_text() == before
    path.write_text("".join(before.splitlines(keepends=True)[:2]))
    run(monkeypatch, *ABLATION, module="pullback.experiments.head_ablations")
    assert path.read_text().splitlines()[:2] == before.splitlines()[:2]
    found, expected = lines(path)[2], json.loads(before.splitlines()[2])
    assert found["variant"] == expected["variant"] == "w_rank 1" and found["train"] == expected["train"]
    assert found["rho"] == pytest.approx(expected["rho"], abs=0.2)  # of three images, whose ranks may swap


def test_rows_of_the_taxonomy_are_left_alone(place, monkeypatch):
    before = (place / "scene_taxonomy.jsonl").read_text()
    run(monkeypatch, *TAXONOMY, module="pullback.experiments.scene_taxonomy")
    assert (place / "scene_taxonomy.jsonl").read_text() == before
