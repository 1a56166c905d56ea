"""The table of networks in a latent, at toy sizes: what it measures, that it goes on, and what it refuses."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import pullback as pb
from pullback.errors import PullbackError
from pullback.learning.s2vae import S2VAE, S2VAEConfig
from pullback.operators.linearization import differentiable_attention
from pullback.randnla import Streams

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SIZES = ["--size", "56", "--train", "6", "--held-out", "3", "--rank", "3", "--width", "32", "--steps", "4"]
SIZES += ["--batch", "2", "--chunk", "4", "--precision", "float32"]
RESULT = "bottleneck_spn_tiny-scenes_depth-4x4_ambient_cpu.json"


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("bottleneck_spn")


@pytest.fixture(scope="module")
def bottleneck(tmp_path_factory) -> Path:
    probe = pb.multi_layer_probe("tiny-scenes", "depth", device="cpu")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = S2VAEConfig((192,) * 4, probe.layers, registers=4, latent=8, width=32, heads=2, blocks=1)
        return S2VAE(config).save_pretrained(tmp_path_factory.mktemp("vae"))


def arguments(bottleneck: Path, work: Path, *more: str) -> list[str]:
    places = ["--bottleneck", str(bottleneck), "--work", str(work), "--out", str(work.parent)]
    return [*places, "--decoder", "depth-4x4", *SIZES, *more]


@pytest.fixture(scope="module")
def work(benchmark, bottleneck, tmp_path_factory) -> Path:
    """A finished table, made by two runs."""
    folder = tmp_path_factory.mktemp("table") / "work"
    benchmark.main(arguments(bottleneck, folder, "--rows", benchmark.CONSTANT, benchmark.UNTRAINED))
    assert len(json.loads((folder.parent / RESULT).read_text())["rows"]) == 2
    benchmark.main(arguments(bottleneck, folder))
    return folder


def test_every_row_has_its_error_its_lead_and_the_value_of_the_paper(benchmark, work):
    stored = json.loads((work.parent / RESULT).read_text())
    rows = {row["network"]: row for row in stored["rows"]}
    assert tuple(rows) == benchmark.ROWS
    for name, row in rows.items():
        assert 0 < row["v1"] < 1 and row["v1_se"] > 0 and row["paper_v1"] == benchmark.PAPER.get(name)
        assert 0 < row["natural_ratio"] <= stored["kappa"] + 1e-6
        assert row["v1_lead"] == pytest.approx(row["v1"] - rows[benchmark.CONSTANT]["v1"], abs=1e-6)
    assert stored["latent"] == [4, 8] and stored["random_v1"] == 3 / 32
    assert 0.5 < stored["sketch_v1"] < 1 and stored["machine"]["device"]


def test_a_finished_table_computes_nothing_again(benchmark, bottleneck, work, monkeypatch):
    monkeypatch.setattr(benchmark, "fit", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(benchmark, "power_iteration", lambda *_, **__: pytest.fail("sketched again"))
    before = json.loads((work.parent / RESULT).read_text())
    benchmark.main(arguments(bottleneck, work))
    assert json.loads((work.parent / RESULT).read_text())["rows"] == before["rows"]


def test_other_settings_are_refused(benchmark, bottleneck, work):
    with pytest.raises(PullbackError, match=r"holds a table with other settings .*seed: 0 there, 1 asked for"):
        benchmark.main(arguments(bottleneck, work, "--seed", "1"))


def test_without_time_it_stops_and_says_where(benchmark, bottleneck, tmp_path):
    with pytest.raises(SystemExit, match="time is up before modes 0 of 6; the same command goes on from there"):
        benchmark.main(arguments(bottleneck, tmp_path / "work", "--seconds", "-1"))


@pytest.fixture(scope="module")
def table(benchmark, bottleneck, work):
    return benchmark.SpnTable(benchmark.parsed(arguments(bottleneck, work)), benchmark.Parts(work))


def dense_jacobian(table, latents: torch.Tensor) -> torch.Tensor:
    """Of z -> head(G(z)) at one z [1, 4, 8]: [M, 32]."""
    plain = latents.as_subclass(torch.Tensor)
    with differentiable_attention():
        return torch.func.jacrev(table.probe.bind(latents))(plain).reshape(-1, 32).double()


def test_sketches_are_algorithm_2_at_the_scene_of_their_place(table):
    """Q of J^T J Omega, from the dense Jacobian."""
    for place in (0, 5):
        dense = dense_jacobian(table, table.train.latent_rows(table.order[place : place + 1]))
        omega = Streams.from_seed(table.options.seed + 1, 1, "cpu", place).gaussian(32, 3, torch.float32)[0].double()
        expected = torch.linalg.qr(dense.T @ (dense @ omega)).Q
        found = table.sketches.modes[place].double().flatten(1)
        torch.testing.assert_close(found.T @ found, expected @ expected.T, rtol=0, atol=5e-3)


def test_training_and_held_out_modes_are_those_of_the_dense_jacobian(table):
    for scenes, modes in ((table.train, table.modes), (table.held_out, table.examples.modes)):
        for row in (0, len(modes) - 1):
            right = torch.linalg.svd(dense_jacobian(table, scenes.latent_rows(torch.tensor([row]))))[2][:3]
            assert (modes[row].double().flatten(1) @ right.T).square().sum() / 3 > 0.999
    dense = dense_jacobian(table, table.held_out.latent_rows(torch.tensor([1])))
    assert table.examples.total[1].item() == pytest.approx(dense.square().sum().item(), rel=1e-3)


def test_networks_start_equal_and_from_the_constant_at_it(benchmark, table):
    one, other = table.new_network(), table.new_network()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    started = benchmark.example_scores(one.start_at(table.subspace).eval(), table.examples)
    torch.testing.assert_close(started.v1.double(), table.of_constant.v1.double(), rtol=1e-4, atol=1e-5)
