"""The benchmark of VGGT's heads at its small size: it runs, and writes what it measured."""

import importlib
import json
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_the_benchmark_writes_a_row_for_every_head_and_layer(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    importlib.import_module("vggt").main(
        ["--pixels", "28", "--layers", "1", "hooks", "--decoders", "camera", "points", "--tangents", "2"]
        + ["--out", str(tmp_path)]
    )
    stored = json.loads((tmp_path / "vggt_small_cpu.json").read_text())
    assert stored["images"] == [1, 2, 3, 28, 28] and stored["parameters"] > 1e5
    rows = {(row["decoder"], row["layer"]): row for row in stored["rows"]}
    assert set(rows) == {(decoder, layer) for decoder in ("camera", "points") for layer in ("1", "hooks")}
    camera, points = rows["camera", "1"], rows["points", "hooks"]
    assert (camera["outputs"], camera["vjps per scene"], camera["regime"]) == (18, 18, "iv")
    assert (points["outputs"], points["inputs"]) == (192, 18 * 4 * 64)
    assert all(row["diagnosis s"] > 0 and row["peak GB"] > 0 and row["jvp ms"] > 0 for row in rows.values())
    assert "written to" in capsys.readouterr().out


def test_pruning_is_compared_scene_by_scene_with_strided_merging(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    importlib.import_module("vggt_pruning").main(
        ["--views", "2", "--scenes", "3", "--batch", "2", "--ratios", "0.5", "0.75", "--scopes", "view"]
        + ["--importance", "--rounds", "1", "--out", str(tmp_path)]
    )
    stored = json.loads((tmp_path / "vggt_pruning_small_2views_cpu.json").read_text())
    assert (stored["scenes"], stored["timed"]) == (3, [2, 2, 3, 56, 56])
    half = {row["rule"]: row for row in stored["rows"] if row["ratio"] == 0.5}
    assert set(half) == {"random, view", "norm, view", "importance, view", "strided merging, view"}
    assert {row["tokens"] for row in half.values()} == {26}  # 5 others and 8 of 16 patches a view
    rival, own = half["strided merging, view"], half["random, view"]
    for name, gap in own["more than strided"].items():
        assert abs(own[name]["mean"] - rival[name]["mean"] - gap["mean"]) < 1e-4 * rival[name]["mean"]
        assert gap["se"] > 0
    assert all("more than strided" not in row for row in stored["rows"] if row["ratio"] == 0.75)


def test_choices_of_the_preset_are_changed_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    rules = importlib.import_module("vggt_rules")
    rules.main(["--views", "2", "--scenes", "2", "--scopes", "view", "--scores", "random", "--out", str(tmp_path)])
    stored = json.loads((tmp_path / "vggt_rules_tiny-views_cpu.json").read_text())
    rows = {(row["score"], row["variant"]): row for row in stored["rows"]}
    assert set(rows) == {*(("random", variant) for variant in rules.VARIANTS), ("strided", rules.PRESET)}
    gaps = {variant: row["more than the preset"]["depth change"]["mean"] for (_, variant), row in rows.items()}
    assert gaps.pop(rules.PRESET) == 0
    assert all(gaps.values())  # each of them changes something
