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
