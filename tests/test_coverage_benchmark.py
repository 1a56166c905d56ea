"""Error bars hold in every precision: the benchmark that measures it, at small sizes with TF32 rounding emulated."""

import importlib
import json
import statistics
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
WHOLE = (
    "total",
    "kappa, targets",
    "kappa, diagnosis",
    "effective rank",
    "effective rank, first r",
    "CV",
    "CV over patches",
)


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("coverage")


def rows_of(coverage, folder: Path, *arguments: str) -> dict[tuple[str, str], dict]:
    coverage.main(["--model", "tiny-scenes", "--rank", "10", "--out", str(folder), *arguments])
    stored = json.loads((folder / "coverage_cpu.json").read_text())
    assert stored["tf32"] == "emulated" and stored["torch"] == torch.__version__
    return {(row["precision"], row["quantity"]): row for row in stored["rows"]}


def held_by_the_whole(rows: dict[tuple[str, str], dict], precision: str) -> float:
    """The share of all numbers about J as a whole that lie within two standard errors."""
    return statistics.fmean(rows[precision, quantity]["within_2_se"] for quantity in WHOLE)


@pytest.mark.parametrize(
    ("decoder", "layer", "size", "images"), [("cls", "10", "56", "6"), ("depth-8x8", "9", "42", "2")]
)
def test_exact_numbers_lie_within_two_standard_errors(coverage, tmp_path, decoder, layer, size, images):
    options = ("--decoder", decoder, "--layers", layer, "--size", size, "--limit", images)
    rows = rows_of(coverage, tmp_path, *options)
    tokens = (int(size) // 14) ** 2 + 1
    for precision, unit in (("float32", 6e-8), ("tf32", 5e-4), ("bf16", 2e-3)):
        blocks = rows[precision, "block norms"]
        assert blocks["count"] == int(images) * tokens
        assert blocks["within_2_se"] >= 0.9
        # one floor for every layer: it is set by early layers of larger models, so late layers lie well inside
        assert 0.01 <= blocks["median_error_over_se"] <= 1, "neither too narrow nor absurdly wide"
        assert 0.05 * unit < blocks["median_relative_error"] < 20 * unit, "products were rounded as they should be"
        assert held_by_the_whole(rows, precision) >= 0.9


def test_sampled_numbers_lie_within_two_standard_errors(coverage, tmp_path):
    options = ("--method", "krylov", "--layers", "10", "--size", "42", "--limit", "4", "--precisions", "tf32", "bf16")
    rows = rows_of(coverage, tmp_path, *options)
    for precision in ("tf32", "bf16"):
        assert held_by_the_whole(rows, precision) >= 0.9


def test_tf32_keeps_ten_bits_where_it_is_allowed(coverage):
    matrix = torch.tensor([[1 + 2.0**-10, 1 + 2.0**-11], [1 + 3 * 2.0**-11, -1 - 2.0**-12]])
    rounded = torch.tensor([[1 + 2.0**-10, 1.0], [1 + 2.0**-9, -1.0]])
    eye = torch.eye(2)
    assert torch.get_float32_matmul_precision() == "highest"
    with coverage.EmulatedTF32():
        assert torch.equal(matrix @ eye, matrix)
        torch.set_float32_matmul_precision("high")
        try:
            assert torch.equal(matrix @ eye, rounded)
            assert torch.equal(torch.addmm(matrix, matrix, eye), matrix + rounded), "only factors are rounded"
            assert torch.equal(matrix.double() @ eye.double(), matrix.double())
        finally:
            torch.set_float32_matmul_precision("highest")
