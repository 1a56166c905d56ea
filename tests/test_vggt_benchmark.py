"""The benchmarks of VGGT at small sizes: they run, write what they measured, and can see how memory is bounded."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from pullback.vggt.matching import CHUNK_NUMBERS, nearest
from pullback.vggt.network import block

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
    assert len(stored["rows"]) == 8 and all("more than strided" in row for row in stored["rows"])
    assert stored["unpruned"]["peak GB"] > 0 and all(row["peak GB"] > 0 for row in stored["rows"])


@pytest.fixture
def peak_megabytes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    measured = importlib.import_module("measure").peak_gigabytes
    return lambda call: 1e3 * measured(call, torch.device("cpu"))


def test_peaks_are_those_of_what_a_call_holds_at_once(peak_megabytes):
    before, kept = torch.ones(1_000_000), []

    def call():
        kept.append(before + 1)  # 4 MB
        twice = kept[-1] + 1  # 8
        del twice
        kept.append(torch.cat([before, before]))  # 12
        return kept[-1] + 1  # 20

    assert peak_megabytes(call) == pytest.approx(20, rel=0.01)
    assert peak_megabytes(kept.clear) == peak_megabytes(lambda: None) == 0


def test_matching_needs_much_less_memory_than_all_cosines(peak_megabytes):
    """Of 4096 tokens: all cosines are 67 MB, and it would take masks and copies beside them."""
    tokens = torch.randn(1, 4096, 8, generator=torch.Generator().manual_seed(0))
    places, allowed = torch.arange(4096)[None], torch.ones(1, 4096, dtype=torch.bool)
    assert peak_megabytes(lambda: nearest(tokens, places, allowed, places)) < 1.5 * 4e-6 * CHUNK_NUMBERS


def test_a_block_of_many_tokens_needs_less_memory_in_parts(peak_megabytes, monkeypatch):
    """What an MLP makes of a sequence is eight times as long as it is: its hidden layer before and after the GELU."""
    own = random_block()
    for shape in ((1, 4096, 64), (32, 128, 64)):
        x, sequence = torch.zeros(shape), 4e-6 * 4096 * 64
        with torch.no_grad():
            monkeypatch.setattr(block, "CHUNK_TOKENS", 1 << 14)
            whole = peak_megabytes(lambda x=x: own(x))
            monkeypatch.setattr(block, "CHUNK_TOKENS", 256)
            parts = peak_megabytes(lambda x=x: own(x))
        assert whole > 9 * sequence
        assert parts < (8.1 if len(x) == 1 else 2.5) * sequence  # attention itself takes a sequence as a whole


def random_block():
    return block.Block(64, 4, 4.0, layer_scale=1.0, qk_norm=True).requires_grad_(False)


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


def test_matching_never_holds_all_cosines_at_once(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    peak_gigabytes = importlib.import_module("measure").peak_gigabytes
    tokens = torch.randn(1, 6000, 8, generator=torch.Generator().manual_seed(0))
    places = torch.arange(6000)[None]
    everybody = torch.ones(1, 6000, dtype=torch.bool)
    peak = peak_gigabytes(lambda: nearest(tokens, places, everybody), torch.device("cpu"))
    assert peak < 0.06  # of 0.144 for the whole matrix in float32
