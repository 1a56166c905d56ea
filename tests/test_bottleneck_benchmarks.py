"""The benchmarks of the bottleneck at small sizes: they run, go on, and measure what they say."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import pullback as pb
from helpers.vaes import tiny_vae

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PLACES = ("--size", "42", "--out")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random bottleneck of 72 numbers for the depth of tiny-scenes, under the name that the cases have for it."""
    found = tmp_path_factory.mktemp("bottlenecks")
    probe = pb.multi_layer_probe("tiny-scenes", "depth", device="cpu")
    tiny_vae(probe, registers=9, latent=8).save_pretrained(found / "tiny-scenes")
    return found


def spectra(folder: Path, out: Path) -> list[str]:
    sizes = ("--samples", "2", "--quality-samples", "2", "--rank", "6", "--slq-probes", "2", "--lanczos-steps", "4")
    cases = ("--bottlenecks", str(folder), "--cases", "scenes-depth", "--precision", "float32")
    return [*cases, *sizes, *PLACES, str(out)]


def test_a_case_is_measured_once_and_says_what_a_bottleneck_changes(benchmark, folder, tmp_path, monkeypatch):
    bottleneck = benchmark("bottleneck")
    bottleneck.main(spectra(folder, tmp_path))
    stored = json.loads((tmp_path / "bottleneck_cpu.json").read_text())
    case = stored["cases"]["scenes-depth"]
    assert stored["machine"]["date"] and stored["precision"] == "float32"
    assert case["case"]["bound"] == case["rank"]["bound"] == case["latent, sphere"]["inputs"] == 72
    # the registers cannot leave their spheres: each has one direction less, and nothing lies beyond the bound
    assert case["rank"]["numerical"] <= 63 < case["rank"]["columns"] == 104
    assert case["rank"]["first_beyond_the_bound"] < 1e-12
    for part in ("before", "after", "latent, sphere", "latent, ambient"):
        assert case[part]["r_eff"]["mean"] >= 1 and 0 < case[part]["kappa_20"]["mean"] <= 1.01
    for own in case["agreement"].values():
        assert own["captured"]["mean"] <= 1.01 * own["kappa"]["mean"]
        assert len(own["angles"]) == 6 and 0 <= own["alignment"]["mean"] <= 1
    assert set(case["quality"]["unexplained"]) == {"L02", "L05", "L08", "L11"}
    assert 0 <= case["quality"]["delta1"]["mean"] <= 1

    def measured_again(*arguments, **options):
        raise AssertionError("what is known is measured again")

    monkeypatch.setattr(bottleneck, "measured", measured_again)
    bottleneck.main(spectra(folder, tmp_path))
    with pytest.raises(SystemExit, match="holds other settings"):
        bottleneck.main([*spectra(folder, tmp_path), "--seed", "1"])
    written = tmp_path / "bottleneck_cpu.json"
    written.unlink()
    bottleneck.main(["--out", str(tmp_path)])  # without a case, what is there
    assert json.loads(written.read_text()) == stored


def test_an_output_is_compared_with_itself_and_with_its_double(benchmark):
    truth = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(0)) + 0.5
    same, double = (benchmark("bottleneck").compared(factor * truth, truth, depth=True) for factor in (1, 2))
    assert same["delta1"].tolist() == [1, 1] and same["relative_l2"].tolist() == [0, 0]
    assert double["abs_rel"].tolist() == double["relative_l2"].tolist() == [1, 1] and not double["delta1"].any()
    assert double["correlation"].tolist() == pytest.approx([1, 1])


def test_every_way_to_store_an_image_takes_the_bytes_of_the_latent(benchmark, folder, tmp_path):
    benchmark("bottleneck_storage").main(
        ["--bottlenecks", str(folder), "--cases", "scenes", "--train-images", "10", "--tokens", "64", "--rounds", "2"]
        + ["--held-out", "3", *PLACES, str(tmp_path)]
    )
    case = json.loads((tmp_path / "bottleneck_storage_cpu.json").read_text())["cases"]["scenes"]
    assert (case["latent"], case["images"], case["patches"], case["width"]) == (72, 3, 9, 768)
    for kind, budget in (("float16", 144), ("int8", 72)):
        rows = {row["way"]: row for row in case["rows"] if row["kind"] == kind}
        exact = [row["bytes"] for way, row in rows.items() if way.startswith(("latent", "PCA of tokens", "product"))]
        assert exact == [budget] * 3
        assert rows["PCA of images, 9 components"]["bytes"] < budget  # there are no more directions in ten images
        assert rows["latent"]["delta1 more than the latent"] == {"mean": 0, "se": 0}
        assert all(0 <= row["delta1"]["mean"] <= 1 and row["abs_rel"]["mean"] >= 0 for row in rows.values())


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_principal_components_restore_what_lies_in_them(benchmark, shape):
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(shape[0], 3, generator=generator) @ torch.randn(3, shape[1], generator=generator) + 2
    mean, basis = benchmark("bottleneck_storage").principal(few, 3, chunk=64)
    torch.testing.assert_close((few - mean) @ basis @ basis.mT + mean, few, rtol=1e-4, atol=1e-4)


def test_k_means_finds_separate_clusters(benchmark):
    storage = benchmark("bottleneck_storage")
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.eye(4)
    points = (centres.repeat_interleave(25, 0) + 0.1 * torch.randn(100, 4, generator=generator)).expand(2, -1, -1)
    found = storage.k_means(points, 8, 10, generator)
    restored = storage.chosen(found, storage.nearest(points, found))
    assert (restored - points).norm(dim=-1).max() < 1


def test_int8_keeps_seven_bits(benchmark):
    storage = benchmark("bottleneck_storage")
    values = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    step = storage.step_of(values)
    assert ((storage.rounded(values, "int8", step) - values).abs() <= 0.501 * step).all()


def test_scores_of_both_probes_prune_beside_those_without_a_jacobian(benchmark, folder, tmp_path):
    benchmark("bottleneck_pruning").main(
        ["--bottlenecks", str(folder), "--cases", "scenes", "--train-images", "4", "--steps", "2", "--width", "32"]
        + ["--held-out", "2", "--ratios", "0.5", "--rounds", "0", "--precision", "float32", *PLACES, str(tmp_path)]
    )
    case = json.loads((tmp_path / "bottleneck_pruning_cpu.json").read_text())["cases"]["scenes"]
    rows = {row["score"]: row for row in case["rows"]}
    jacobian = [f"{kind}, {probe}" for kind in ("exact", "32 products", "head") for probe in ("original", "bottleneck")]
    assert set(rows) == {*jacobian, "bipartite", "random", "norm", "cls-similarity"}
    assert case["measure"] == "silog" and all(row["mean"] > 0 for row in rows.values())
    exact = rows.pop("exact, original")
    assert exact["products"] > 32 and "more than exact" not in exact
    for row in rows.values():
        assert row["mean"] - exact["mean"] == pytest.approx(row["more than exact"]["mean"])
    assert rows["head, bottleneck"]["training"]["images"] == 4
