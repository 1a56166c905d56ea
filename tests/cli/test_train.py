"""`pullback train head`, `heads`, `spn`, `drm` and `bottleneck`: what they write and say, how they go on, and how they
fail."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

import pullback as pb
from helpers.pictures import SIZE, SMALL, write_pictures
from pullback.cli.common import BAD_INPUT, INTERRUPTED
from pullback.cli.train import train
from pullback.learning import fit as fitting
from pullback.learning.distilled_metric import DistilledMetric
from pullback.learning.head import ImportanceHead
from pullback.learning.s2vae import S2VAE, S2VAEConfig
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.targets import compute as compute_module
from pullback.targets.compute import compute_targets
from pullback.targets.store import TargetStore

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")

STEPS = ("--steps", 6, "--batch", 8, "--validate-every", 3, "--device", "cpu")
HEAD = (*STEPS, "--width", 32, "--heads", 2)
SPN = (*STEPS, "--width", 16, "--heads", 2, "--rank", 3, "--size", "28x42")
DRM = (*STEPS, "--width", 16, "--heads", 2, "--rank", 3, "--size", 28)
BOTTLENECK = (*STEPS, "--width", 16, "--heads", 2, "--blocks", 1, "--registers", 2, "--latent", 4, "--size", 28)


@pytest.fixture
def figures() -> None:
    """For tests that want figures and a page."""


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    """A process for each figure costs seconds, and one test is enough for them."""
    if "figures" not in request.fixturenames:
        nothing = SimpleNamespace(draw=lambda out: [])
        monkeypatch.setattr(sys.modules["pullback.cli.train"], "Drawing", lambda: nullcontext(nothing))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """model/, photos/, others/, store/ and held-out/: a store of crops and one of other pictures."""
    from helpers.families import model_of, save

    folder = tmp_path_factory.mktemp("place")
    save(model_of("dinov2"), folder / "model")
    save(model_of("depth-v2"), folder / "dense")
    write_pictures(folder / "photos", 10)
    write_pictures(folder / "others", 14, broken=False)
    for number in range(10):
        (folder / "others" / f"{number:02d}.png").unlink()
    probe = pb.load_probe(folder / "model", "cls", 1, device="cpu")
    compute_targets(probe, folder / "photos", out=folder / "store", crops=2, **SMALL)
    compute_targets(probe, folder / "others", out=folder / "held-out", **SMALL)
    return folder


def run(*arguments: object) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None})
    return runner.invoke(train, [str(argument) for argument in arguments])


def head(place: Path, out: Path, *options: object) -> Result:
    stores = ("--targets", place / "store", "--held-out", place / "held-out")
    return run("head", *stores, "--out", out, *HEAD, *options)


def spn(place: Path, out: Path, *options: object) -> Result:
    images = ("--images", place / "photos", "--held-out", place / "others")
    return run("spn", place / "model", *images, "--out", out, *SPN, *options)


def drm(place: Path, out: Path, *options: object) -> Result:
    images = ("--images", place / "photos", "--held-out", place / "others", "--decoder", "depth-2x2", "--layer", 1)
    return run("drm", place / "dense", *images, "--out", out, *DRM, *options)


def bottleneck(place: Path, out: Path, *options: object) -> Result:
    images = ("--images", place / "photos", "--held-out", place / "others", "--decoder", "depth-2x2")
    return run("bottleneck", place / "dense", *images, "--out", out, *BOTTLENECK, *options)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# ---- what they write and say


def test_they_are_commands_of_a_larger_program():
    app = typer.Typer()
    app.add_typer(train)
    for command, option in (
        ("head", "--rank-weight"),
        ("spn", "--supervision"),
        ("drm", "--reference"),
        ("bottleneck", "--kl-weight"),
    ):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", command, "--help"])
        assert result.exit_code == 0 and option in result.output and "torchrun works" in result.output


def test_a_head_is_written_with_its_scores_and_a_page(place, tmp_path, figures):
    result = head(place, tmp_path / "run")
    assert result.exit_code == 0, result.output
    written = ImportanceHead.from_pretrained(tmp_path / "run" / "model")
    assert written.layer == 1 and written.config.origin.resolutions == (SIZE,)
    assert (written.config.scores["training_rows"], written.config.scores["held_out_rows"]) == (20, 4)
    for text in (f"rho: {written.config.scores['rho']:.4g}", "rho of the mean map: ", "training rows: 20"):
        assert text in result.output
    assert f"written to {tmp_path / 'run' / 'model'}/" in result.output
    assert (tmp_path / "run" / "index.html").as_uri() in result.output
    expected = ["checkpoint.pt", "index.html", "metrics.jsonl", "model", "training.png"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == expected


def test_a_head_may_hold_a_share_out_and_start_from_another(place, tmp_path):
    assert head(place, tmp_path / "first", "--held-out", 0.4, "--target", "block-norm").exit_code == 0
    start = ("--start", tmp_path / "first" / "model", "--recompute-features", "--precision", "bf16")
    result = head(place, tmp_path / "second", "--held-out", 0.4, *start, "--learning-rate", 0)
    assert result.exit_code == 0, result.output
    first, second = (ImportanceHead.from_pretrained(tmp_path / name / "model") for name in ("first", "second"))
    assert same(first, second) and (first.config.target, second.config.target) == ("block-norm", "importance")


def test_model_and_images_may_have_moved(place, tmp_path):
    copy = shutil.copytree(place, tmp_path / "place")
    config = copy / "store" / "targets.json"
    config.write_text(config.read_text().replace(str(place), "/gone"))
    missing = head(copy, tmp_path / "run", "--held-out", 0.4)
    assert missing.exit_code == BAD_INPUT and "/gone/model" in missing.output
    missing = head(copy, tmp_path / "run", "--held-out", 0.4, "--model", copy / "model")
    assert missing.exit_code == BAD_INPUT and "/gone/photos" in missing.output
    found = ("--model", copy / "model", "--images", copy / "photos")
    assert head(copy, tmp_path / "run", "--held-out", 0.4, *found).exit_code == 0


def test_a_network_is_written_with_its_scores(place, tmp_path):
    result = spn(place, tmp_path / "run")
    assert result.exit_code == 0, result.output
    written = SpectralPullbackNetwork.from_pretrained(tmp_path / "run" / "model")
    assert written.config.rank == 3 and written.config.origin.layer == 1
    for text in (f"v1: {written.config.scores['v1']:.4g}", "v1 patches: ", "kappa: ", "natural ratio: "):
        assert text in result.output


def test_a_network_may_start_at_a_constant_subspace(place, tmp_path):
    result = spn(place, tmp_path / "run", "--constant-images", 3, "--steps", 1)
    assert result.exit_code == 0, result.output
    assert SpectralPullbackNetwork.from_pretrained(tmp_path / "run" / "model").config.tokens == 7


@pytest.mark.parametrize("layer", [2, "hooks"])
def test_a_network_for_a_dense_decoder(place, tmp_path, layer):
    options = ("--decoder", "depth-2x2", "--layer", layer, "--size", 28, "--limit", 4, "--steps", 2)
    images = ("--images", place / "photos", "--held-out", place / "others")
    result = run(
        "spn", place / "dense", *images, "--out", tmp_path / "run", *SPN, *options, "--supervision", "spectral"
    )
    assert result.exit_code == 0, result.output
    written = SpectralPullbackNetwork.from_pretrained(tmp_path / "run" / "model")
    assert written.config.origin.decoder == "depth-2x2"
    assert (written.config.dim, written.config.origin.layer) == ((24, 2) if layer == 2 else (96, None))


def test_a_metric_is_written_with_its_scores_and_a_page_by_one_command(place, tmp_path, figures):
    result = drm(place, tmp_path / "run")
    assert result.exit_code == 0, result.output
    written = DistilledMetric.from_pretrained(tmp_path / "run")
    assert (written.config.rank, written.layer, written.config.reference) == (3, 1, "relative_l1")
    use = f"to use it: pullback index add GALLERY IMAGES --drm {tmp_path / 'run'}\n"
    for text in (f"rho: {written.config.scores['rho']:.4g}", "constant rho: ", "training images: 10", use):
        assert text in result.output
    assert len(TargetStore.open(tmp_path / "run" / "targets")) == 10
    expected = ["checkpoint.pt", "index.html", "metrics.jsonl", "model", "targets", "training.png"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == expected


def test_a_metric_may_have_its_targets_from_a_store_or_do_without(place, tmp_path):
    probe = pb.load_probe(place / "dense", "depth-2x2", 1, device="cpu")
    compute_targets(probe, place / "others", out=tmp_path / "store", rank=2, size=(28, 42))
    result = drm(place, tmp_path / "one", "--targets", tmp_path / "store", "--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert drm(place, tmp_path / "two", "--distill-weight", 0, "--reference", "relative_l2").exit_code == 0
    assert not (tmp_path / "one" / "targets").exists() and not (tmp_path / "two" / "targets").exists()
    assert DistilledMetric.from_pretrained(tmp_path / "two").config.reference == "relative_l2"


def test_a_metric_is_interrupted_while_importance_is_computed(place, tmp_path, monkeypatch):
    compute, calls = compute_module.targets_in_batches, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(compute_module, "targets_in_batches", interrupted)
        stopped = drm(place, tmp_path / "run")
    assert stopped.exit_code == INTERRUPTED
    assert f"kept in {tmp_path / 'run'}/: 3 images with importance; the same command goes on" in stopped.output
    assert drm(place, tmp_path / "run").exit_code == drm(place, tmp_path / "whole").exit_code == 0
    assert same(*(DistilledMetric.from_pretrained(tmp_path / name) for name in ("run", "whole")))


def test_a_bottleneck_is_written_with_its_scores_and_a_page(place, tmp_path, figures):
    result = bottleneck(place, tmp_path / "run")
    assert result.exit_code == 0, result.output
    written = S2VAE.from_pretrained(tmp_path / "run" / "model")
    assert (
        written.size == 8 and written.config.origin.decoder == "depth-2x2" and written.config.origin.distance == "log"
    )
    shares = [f"unexplained L{layer:02d}: " for layer in written.config.layers]
    use = f"--decoder depth-2x2@{tmp_path / 'run'}, --layer hooks or latent\n"
    for text in (f"delta1: {written.config.scores['delta1']:.4g}", "abs rel: ", "kl: ", *shares, use):
        assert text in result.output
    expected = ["checkpoint.pt", "index.html", "metrics.jsonl", "model", "training.png"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == expected


def test_a_bottleneck_of_another_posterior_on_the_same_features(place, tmp_path):
    options = ("--posterior", "gaussian", "--no-vary", "--task-weight", 0, "--precision", "bf16", "--size", "28x42")
    result = bottleneck(place, tmp_path / "run", *options)
    assert result.exit_code == 0, result.output
    written = S2VAE.from_pretrained(tmp_path / "run" / "model").config
    assert written.posterior == "gaussian" and written.origin.decoder is None
    assert written.origin.resolutions == ((28, 42),) and "--layer hooks or latent-ambient\n" in result.output


def test_a_network_in_the_latent_of_a_bottleneck(place, tmp_path):
    probe = pb.multi_layer_probe(place / "dense", "depth-2x2", device="cpu")
    widths = (probe.backbone.dim,) * len(probe.layers)
    vae = S2VAE(S2VAEConfig(widths, probe.layers, registers=4, latent=5, width=16, heads=2, blocks=1))
    vae.save_pretrained(tmp_path / "vae")
    through = ("--decoder", f"depth-2x2@{tmp_path / 'vae'}", "--layer", "latent")
    options = (*through, "--size", 28, "--limit", 4, "--steps", 2, "--supervision", "spectral", "--constant-images", 3)
    images = ("--images", place / "photos", "--held-out", place / "others")
    result = run("spn", place / "dense", *images, "--out", tmp_path / "run", *SPN, *options)
    assert result.exit_code == 0, result.output
    written = SpectralPullbackNetwork.from_pretrained(tmp_path / "run" / "model")
    assert (written.config.dim, written.config.latent, written.config.tokens) == (24, (4, 5), 4)


def test_heads_of_a_multi_layer_store(place, tmp_path):
    probe = pb.multi_layer_probe(place / "dense", "depth-2x2", device="cpu", after_norm=False)
    compute_targets(probe, place / "photos", out=tmp_path / "store", rank=2, size=28)
    result = run("head", "--targets", tmp_path / "store", "--held-out", 0.3, "--out", tmp_path / "run", *HEAD)
    assert result.exit_code == 0, result.output
    assert ImportanceHead.from_pretrained(tmp_path / "run" / "model").config.dim == 96


# ---- how they go on


@pytest.mark.parametrize("command", [head, spn, drm, bottleneck])
def test_the_same_command_goes_on_where_it_was_interrupted(place, tmp_path, monkeypatch, command):
    advance, steps = fitting._Run.advance, []

    def interrupted(self):
        steps.append(self.step)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return advance(self)

    with monkeypatch.context() as patched:
        patched.setattr(fitting._Run, "advance", interrupted)
        stopped = command(place, tmp_path / "run")
    assert stopped.exit_code == INTERRUPTED and not (tmp_path / "run" / "model").exists()
    kept = f"kept in {tmp_path / 'run'}/: the last checkpoint; the same command goes on from there"
    assert "interrupted" in stopped.output and kept in stopped.output
    resumed, whole = command(place, tmp_path / "run"), command(place, tmp_path / "whole")
    assert resumed.exit_code == whole.exit_code == 0
    kinds = {head: ImportanceHead, spn: SpectralPullbackNetwork, drm: DistilledMetric, bottleneck: S2VAE}
    kind = kinds[command]
    assert same(*(kind.from_pretrained(tmp_path / name / "model") for name in ("run", "whole")))
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("run", "whole")]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) == 2


def test_a_finished_run_is_written_again_without_training(place, tmp_path):
    first, second = head(place, tmp_path / "run"), head(place, tmp_path / "run")
    assert first.exit_code == second.exit_code == 0 and first.output == second.output


@pytest.mark.parametrize("option", [("--rank-weight", 1.0), ("--seed", 3), ("--held-out", 0.3), ("--width", 16)])
def test_a_changed_setting_is_refused_in_one_line(place, tmp_path, option):
    assert head(place, tmp_path / "run").exit_code == 0
    result = head(place, tmp_path / "run", *option)
    assert result.exit_code == BAD_INPUT and "holds a training run with other settings" in result.output
    assert option[0].strip("-").replace("-", "_") in result.output and "Traceback" not in result.output


# ---- how they fail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--targets", "nowhere"),
            "--targets: expected targets.json in nowhere, which `pullback targets --out` writes",
        ),
        (("--held-out", "some"), "--held-out: expected a store of targets or a share such as 0.1, got 'some'"),
        (("--held-out", "."), "--held-out: expected targets.json in ."),
        (("--held-out", "1.5"), "--held-out: expected a share between 0 and 1, or a store of its own, got 1.5"),
        (("--held-out", "nan"), "--held-out: expected a share between 0 and 1, or a store of its own, got nan"),
        (("--width", 30), "--width, --heads: expected width / 4 to be a multiple of heads, got 30 and 2"),
        (("--heads", 3), "--width, --heads: expected width / 4 to be a multiple of heads, got 32 and 3"),
        (("--heads", 0), "Invalid value for '--heads'"),
        (("--target", "gradient"), "Invalid value for '--target'"),
        (("--start", "no/such/head"), "--start: 'no/such/head' is neither a folder nor a hub id that can be reached"),
        (("--images", "nowhere"), "no such file or folder"),
        (("--device", "abacus"), "device: 'abacus' cannot be used here"),
    ],
    ids=lambda value: "=".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_options_of_a_head_are_explained(place, tmp_path, monkeypatch, options, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    result = head(place, tmp_path / "run", *options)
    assert result.exit_code == BAD_INPUT and message in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--images", "nowhere"), "no such file or folder"),
        (("--held-out", "nowhere"), "no such file or folder"),
        (("--width", 30, "--heads", 4), "--width, --heads: expected width to be a multiple of heads, got 30 and 4"),
        (("--rank", 25), "--rank: expected 1 <= rank <= 24"),
        (("--layer", 9), "--layer: expected a block index from 0 to 2"),
        (("--layer", "last"), "--layer: expected a block index such as 10, or 'hooks', got 'last'"),
        (("--size", "30"), "30x30 pixels are not divisible by the patch size 14"),
        (("--sketch-width", 2), "--sketch-width: "),
        (("--supervision", "distances", "--batch", 1), "--batch: distance matching compares pairs"),
        (("--decoder", "words"), "--decoder: expected one of cls"),
    ],
    ids=lambda value: "=".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_options_of_a_network_are_explained(place, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = spn(place, tmp_path / "run", *options)
    assert result.exit_code == BAD_INPUT and message in result.output
    assert "Traceback" not in result.output


def test_a_store_of_another_model_is_refused(place, tmp_path):
    result = head(place, tmp_path / "run", "--model", place / "dense")
    assert result.exit_code == BAD_INPUT
    assert "holds targets of another one (family: 'dinov2' there, 'depth-anything' here" in result.output


# ---- several processes


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes_give_the_head_of_one(place, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    stores = ("--targets", place / "store", "--held-out", place / "held-out")
    fast = ("--learning-rate", 0.5)  # the first steps of a run are a hundredth of it
    script = tmp_path / "script.py"
    script.write_text("from pullback.cli.train import train\n\ntrain()\n")
    command = [str(part) for part in (*launcher, script, "head", *stores, "--out", tmp_path / "two", *HEAD, *fast)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    assert head(place, tmp_path / "one", *fast).exit_code == 0
    assert head(place, tmp_path / "none", "--learning-rate", 0).exit_code == 0
    features = torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(0))
    one, two, none = (
        ImportanceHead.from_pretrained(tmp_path / name / "model")(features).detach() for name in ("one", "two", "none")
    )
    torch.testing.assert_close(two, one, rtol=1e-3, atol=0)
    assert (one / none - 1).abs().max() > 0.1


def test_heads_of_all_layers_by_one_command(place, tmp_path):
    out = tmp_path / "heads"
    options = ("--images", place / "photos", "--images", place / "others", "--out", out, "--size", 28)
    options += ("--device", "cpu")
    sizes = ("--layers", "0,1", "--width", 16, "--steps", 2, "--batch", 2, "--block", 4, "--steps-per-block", 1)
    first = run("heads", place / "model", *options, *sizes, "--judges", 2)
    assert first.exit_code == 0, first.output
    assert "L00" in first.output and "%" in first.output and f"--heads 0={out}/L00,1={out}/L01" in first.output
    assert [ImportanceHead.from_pretrained(out / f"L{layer:02d}").layer for layer in (0, 1)] == [0, 1]
    before = (out / "L01" / "model.safetensors").read_bytes()
    again = run("heads", place / "model", *options, *sizes, "--judges", 2)
    assert again.exit_code == 0 and (out / "L01" / "model.safetensors").read_bytes() == before
    other = run("heads", place / "model", *options, *sizes, "--judges", 2, "--seed", 1)
    assert other.exit_code == BAD_INPUT and "--out:" in other.output and "seed" in other.output
    wrong = run("heads", place / "model", *options, "--layers", "a")
    assert wrong.exit_code == BAD_INPUT and "--layers: expected block indices such as 3,6,9, got 'a'" in wrong.output
    none = run("heads", place / "model", *options, *sizes, "--held-out", "1.5")
    assert none.exit_code == BAD_INPUT and "--held-out:" in none.output
