"""The command line on the embedded model: what it writes, what it says, and how it fails."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import pullback.experiments.demo as demo
import pullback.geometry.folder as workflow
from pullback import __version__
from pullback.cli import app
from pullback.cli.common import in_options
from pullback.cli.targets import targets
from pullback.errors import NumericsError
from pullback.experiments.demo import write_pictures
from pullback.report.drawing import Drawing
from pullback.report.progress import ProgressDisplay
from pullback.scenes.render import render

PNG = b"\x89PNG\r\n"
SMALL = ("--size", "56", "--rank", "3", "--limit", "2")

SETTINGS = {
    "model": str, "family": str, "decoder": str, "images": str, "image_files": list, "skipped": list, "size": list,
    "ranks": list, "method_asked": str, "device": str, "machine": str, "precision": str, "seed": int, "versions": dict,
    "date": str, "complete": bool, "layers": list,
}  # fmt: skip
LAYER = {
    "layer": int, "rank": int, "num_images": int, "rank_used": int, "kappa": dict, "kappa_at": dict, "cv": dict,
    "r_eff_trunc": float, "r_eff_slq": dict, "tail_ratio": float, "r90": dict, "regime": str, "regime_title": str,
    "advice": str, "method": str, "output_size": int, "tokens": int, "dim": int, "products": dict,
    "products_per_image": float, "seconds": float, "gradient_signal_ratio": float, "convergence": list,
    "per_image": list,
}  # fmt: skip
IMAGE = {
    "file": str, "kappa": float, "kappa_se": float, "kappa_at": dict, "cv": float, "cv_patches": float,
    "r_eff_trunc": float, "r_eff_slq": float, "r_eff_slq_se": float, "r90": dict, "energy": float, "energy_se": float,
    "gradient_signal_ratio": float, "singular_values": list,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    result: Result
    out: Path
    document: dict


def pullback(*arguments: object) -> Result:
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(app, [str(a) for a in arguments])


def strict(path: Path) -> dict:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def diagnose(images: Path, out: Path, *options: object, size: tuple[str, ...] = SMALL) -> Run:
    result = pullback("diagnose", "tiny-scenes", "--images", images, "--out", out, *size, *options)
    assert result.exit_code == 0, result.output
    return Run(result, out, strict(out / "diagnosis.json"))


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Two pictures and, first of all, a file that is none."""
    folder = tmp_path_factory.mktemp("images")
    write_pictures(render(range(2), size=64), folder)
    (folder / "00-broken.png").write_bytes(b"not a picture")
    return folder


@pytest.fixture(scope="module")
def run(images, tmp_path_factory) -> Run:
    out = tmp_path_factory.mktemp("cli") / "new" / "folder"
    return diagnose(images, out, "--layer", 1, "--layer", 4, "--layer", 1, "--rank", 2)


def check_types(entry: dict, expected: dict[str, type]) -> None:
    for key, kind in expected.items():
        assert key in entry, f"{key} is missing"
        assert isinstance(entry[key], kind), f"{key} is {entry[key]!r}, not {kind.__name__}"


def test_the_settings_are_complete(run):
    check_types(run.document, SETTINGS)
    assert run.document["complete"] and run.document["failure"] is None
    assert run.document["family"] == "tiny-scenes"
    assert run.document["size"] == [56, 56]
    assert set(run.document["versions"]) >= {"pullback", "torch", "transformers"}
    assert [Path(file).name for file in run.document["image_files"]] == ["scene-00.png", "scene-01.png"]


def test_every_layer_is_complete_and_repeated_ones_are_done_once(run):
    assert [layer["layer"] for layer in run.document["layers"]] == [1, 4]
    for layer in run.document["layers"]:
        check_types(layer, LAYER)
        assert set(layer["kappa"]) >= {"mean", "std", "se", "estimation_se", "interval"}
        assert list(layer["kappa_at"]) == ["3", "2"]
        assert set(layer["cv"]) >= {"mean", "null", "patches", "indistinguishable_from_random"}
        assert set(layer["r_eff_slq"]) >= {"mean", "se"}
        assert set(layer["r90"]) == {"value", "is_lower_bound"}
        assert set(layer["products"]) == {"jvp", "vjp"}
        assert layer["regime"] in {"i", "ii", "iii", "iv"}
        assert (layer["rank"], layer["rank_used"], layer["num_images"], layer["tokens"]) == (3, 3, 2, 17)
        assert sum(layer["products"].values()) == pytest.approx(2 * layer["products_per_image"])


def test_every_image_is_complete(run):
    for layer in run.document["layers"]:
        assert len(layer["per_image"]) == 2
        for image, file in zip(layer["per_image"], run.document["image_files"], strict=True):
            check_types(image, IMAGE)
            assert image["file"] == file
            assert len(image["singular_values"]) == 3
            shares = np.square(image["singular_values"]) / image["energy"]
            assert shares.sum() == pytest.approx(image["kappa"], rel=1e-4)
        assert np.mean([image["kappa"] for image in layer["per_image"]]) == pytest.approx(layer["kappa"]["mean"])


def test_convergence_has_both_counts(run):
    rows = run.document["layers"][0]["convergence"]
    assert [(row["rounds"], row["paper_q"]) for row in rows] == [(0, None), (1, 0), (3, 2), (6, 5)]
    assert "rounds" in run.result.output and "the paper's" in run.result.output


def test_the_importance_of_every_token_is_kept(run):
    with np.load(run.out / "importance.npz") as arrays:
        assert arrays["L01"].shape == arrays["L04"].shape == (2, 17)
        assert arrays["L01"].dtype == np.float32
        assert arrays["thumbnails"].shape == (2, 56, 56, 3) and arrays["thumbnails"].dtype == np.uint8
        assert arrays["thumbnails"].std() > 20, "the thumbnails are pictures"
        assert tuple(arrays["grid"]) == (4, 4) and int(arrays["prefix"]) == 1


def test_figures_are_drawn_and_named(run):
    for name in ("spectrum.png", "tokens_L01.png", "tokens_L04.png"):
        assert (run.out / name).read_bytes().startswith(PNG)
        assert name in run.result.output
    assert str(run.out) in run.result.output


def test_a_page_is_written_that_needs_nothing_else(run):
    page = (run.out / "index.html").read_text(encoding="utf-8")
    assert "L01" in page and "L04" in page and "±" in page and "data:image/" in page
    assert "http://" not in page and "https://" not in page
    assert (run.out / "index.html").as_uri() in run.result.output


def test_no_temporary_file_is_left(run):
    assert not [path.name for path in run.out.iterdir() if path.name.startswith(".")]


def test_the_table_and_the_advice_are_printed(run):
    layer = run.document["layers"][0]
    for words in ("L01", "L04", "κ(3)", "κ(2)", "±", f"regime ({layer['regime']})", layer["advice"][:40], "CV over"):
        assert words in run.result.output


def test_a_skipped_image_is_named(run):
    (skipped,) = run.document["skipped"]
    assert skipped["file"].endswith("00-broken.png") and "not a readable image" in skipped["reason"]
    assert "00-broken.png: not a readable image" in run.result.output


def test_running_again_goes_on_and_other_settings_are_refused(images, tmp_path):
    diagnose(images, tmp_path, "--layer", 1)
    again = diagnose(images, tmp_path, "--layer", 3, "--layer", 1)
    assert [layer["layer"] for layer in again.document["layers"]] == [1, 3]
    assert f"finished before, taken from {tmp_path}/: L01\n" in again.result.output
    refused = pullback(
        "diagnose", "tiny-scenes", "--images", images, "--out", tmp_path, *SMALL, "--layer", 3, "--seed", 5
    )
    assert refused.exit_code == 2 and "other settings (seed: 0 there, 5 asked for)" in refused.output
    assert strict(tmp_path / "diagnosis.json") == again.document


def test_a_folder_of_another_command_is_left_alone(images, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    result = pullback("diagnose", "tiny-scenes", "--images", images, "--out", tmp_path, *SMALL)
    assert result.exit_code == 2 and "holds a comparison of pruning rules" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_default_layer_is_the_last_but_one(images, tmp_path):
    assert diagnose(images, tmp_path).document["layers"][0]["layer"] == 10


def test_a_rank_that_is_too_large_is_lowered(images, tmp_path):
    run = diagnose(images, tmp_path, "--rank", "500", size=("--size", "56", "--limit", "1"))
    (layer,) = run.document["layers"]
    assert (layer["rank"], layer["rank_used"], layer["regime"]) == (500, 192, "iv")
    assert layer["kappa"]["mean"] == pytest.approx(1.0)
    assert "rank 500 lowered to 192" in run.result.output


def test_hooks_is_the_multi_layer_probe(images, tmp_path):
    run = diagnose(images, tmp_path, "--decoder", "depth-2x2", "--layer", "hooks")
    (layer,) = run.document["layers"]
    assert layer["layer"] == "hooks"
    assert layer["dim"] == 4 * 192
    assert 1 <= layer["k_eff"]["mean"] <= 4 and len(layer["k_eff"]["per_image"]) == 2
    assert "K_eff = " in run.result.output
    assert (tmp_path / "tokens_hooks.png").exists()


@pytest.mark.parametrize("method", ["krylov", "paper", "exact"])
def test_methods_and_other_options_are_passed_on(images, tmp_path, method):
    options = ("--method", method, "--distance", "cosine", "--precision", "tf32", "--device", "cpu", "--limit", "1")
    run = diagnose(images, tmp_path, *options)
    document = run.document
    assert document["layers"][0]["method"] == method == document["method_asked"]
    assert (document["distance"], document["precision"], document["device"]) == ("cosine", "tf32", "cpu")
    layer, image = document["layers"][0], document["layers"][0]["per_image"][0]
    errors = [layer["cv"]["estimation_se"], layer["cv"]["patches_estimation_se"], layer["r_eff_trunc_estimation_se"]]
    errors += [image["cv_se"], image["cv_patches_se"], image["r_eff_trunc_se"]]
    if method == "paper":
        assert errors == [None] * 6 and "have no estimation error" in run.result.output
    else:
        assert min(errors) > 0 and image["kappa_se"] >= 2.9e-4 * image["kappa"], "the round-off of TF32"
        assert "have no estimation error" not in run.result.output


def test_sizes_may_be_rectangular(images, tmp_path):
    run = diagnose(images, tmp_path, size=("--size", "56x84", "--rank", "3", "--limit", "1"))
    assert run.document["size"] == [56, 84] and run.document["layers"][0]["grid"] == [4, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no-such-model-anywhere"}, "model:"),
        ({"model": "{tmp}"}, "config.json"),
        ({"--layer": "12"}, "layer: expected a block index from 0 to 11"),
        ({"--layer": "-1"}, "layer: expected a block index from 0 to 11"),
        ({"--layer": "last"}, "layer: expected a block index such as 10, or 'hooks', got 'last'"),
        ({"--images": "{tmp}/empty"}, "no image found"),
        ({"--images": "{tmp}/missing"}, "no such file or folder"),
        ({"--decoder": "clss"}, "decoder: expected one of cls"),
        ({"--decoder": "projection"}, "projection"),
        ({"--distance": "manhattan"}, "distance: expected one of cosine"),
        ({"--size": "60"}, "not divisible by the patch size 14"),
        ({"--size": "big"}, "size: expected pixels such as 224"),
        ({"--size": "0"}, "size"),
        ({"--device": "abacus"}, "device:"),
        ({"--out": "{tmp}/file/below"}, "out: cannot make the folder"),
        ({"--rank": "0"}, "rank"),
        ({"--method": "guess"}, "method"),
    ],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_input_gives_one_line_and_exit_code_2(options, message, images, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # no waiting for a network
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    given = {"--images": str(images), "--out": str(tmp_path / "out"), "--size": "56", "--rank": "3", **options}
    given = {name: value.replace("{tmp}", str(tmp_path)) for name, value in given.items()}
    model = given.pop("model", "tiny-scenes")
    result = pullback("diagnose", model, *(part for pair in given.items() for part in pair))
    assert result.exit_code == 2, result.output
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not (tmp_path / "out" / "diagnosis.json").exists()


def fail_at_layer(layer: int, error: BaseException, monkeypatch) -> None:
    honest = workflow.diagnose

    def diagnose_or_fail(probe, *arguments, **options):
        if probe.layer == layer:
            raise error
        return honest(probe, *arguments, **options)

    monkeypatch.setattr(workflow, "diagnose", diagnose_or_fail)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NumericsError("features: NaN in image 1."), 2, "error: features: NaN in image 1."),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, "error: out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
    ],
    ids=["error", "memory", "interrupt", "disk"],
)
def test_a_failing_layer_loses_nothing_before_it(error, code, message, images, tmp_path, monkeypatch):
    fail_at_layer(4, error, monkeypatch)
    options = ("--layer", 1, "--layer", 4, "--images", images, "--out", tmp_path, *SMALL)
    result = pullback("diagnose", "tiny-scenes", *options)
    assert result.exit_code == code, result.output
    assert message in result.output and "Traceback" not in result.output
    assert f"finished before L04 and kept in {tmp_path}/: L01" in result.output
    document = strict(tmp_path / "diagnosis.json")
    assert [layer["layer"] for layer in document["layers"]] == [1]
    assert not document["complete"] and document["failure"]["layer"] == 4
    with np.load(tmp_path / "importance.npz") as arrays:
        assert "L01" in arrays.files


def test_an_interruption_keeps_every_finished_image_and_says_so(images, tmp_path, monkeypatch):
    honest = ProgressDisplay.advance

    def interrupt(display, count):
        honest(display, count)
        raise KeyboardInterrupt

    command = ("diagnose", "tiny-scenes", "--layer", 4, "--images", images, "--out", tmp_path, *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(ProgressDisplay, "advance", interrupt)
        stopped = pullback(*command)
    assert stopped.exit_code == 130
    words = f"finished before L04 and kept in {tmp_path}/: 1 image of L04; the same command goes on from there"
    assert words in stopped.output
    refused = pullback(*command, "--seed", 7)
    assert refused.exit_code == 2 and "other settings (seed: 0 there, 7 asked for)" in refused.output
    assert "kept in" not in refused.output, "nothing of this run is"
    assert pullback(*command).exit_code == 0
    assert len((tmp_path / "images.jsonl").read_text().splitlines()) == 2


def test_the_table_is_printed_before_the_figures_are_drawn(images, tmp_path, monkeypatch):
    def fail(drawing, folder):
        raise RuntimeError("no figures today")

    monkeypatch.setattr(Drawing, "draw", fail)
    result = pullback("diagnose", "tiny-scenes", "--images", images, "--out", tmp_path, *SMALL)
    assert "captured energy" in result.output and "no figures today" in str(result.exception)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("path='x': no such file", "--images='x': no such file"),
        ("source: 3 of 4", "--images: 3 of 4"),
        ("shard_size: expected more", "--shard-size: expected more"),
        ("rank, limit: expected more", "--rank, --limit: expected more"),
        ("rank, weather: expected more", "rank, weather: expected more"),
        ("model: expected a folder", "model: expected a folder"),
        ("weather: rain", "weather: rain"),
        ("/tmp/x: cannot be written", "/tmp/x: cannot be written"),
        ("Nothing in front", "Nothing in front"),
    ],
)
def test_messages_name_the_options_of_the_command(message, shown):
    assert in_options(message, targets) == shown and in_options(message, None) == message


def test_a_bug_is_not_hidden(images, tmp_path, monkeypatch):
    fail_at_layer(10, RuntimeError("a bug"), monkeypatch)
    result = pullback("diagnose", "tiny-scenes", "--images", images, "--out", tmp_path, *SMALL)
    assert isinstance(result.exception, RuntimeError)


def test_without_matplotlib_it_finishes_and_names_the_extra(images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "pullback.report.figures", raising=False)
    run = diagnose(images, tmp_path, "--limit", 1)
    assert "pip install 'pullback[plot]'" in run.result.output
    assert not list(tmp_path.glob("*.png"))


def test_ls_names_every_family_and_the_embedded_models():
    result = pullback("ls")
    assert result.exit_code == 0
    for words in ("dinov2-registers", "dinov3_vit", "google/siglip-base-patch16-224", "projection", "tiny-scenes"):
        assert words in result.output


def test_the_demo_writes_a_page_that_needs_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SIZE", 56)
    monkeypatch.setattr(demo, "DECODERS", ("cls", "depth-2x2"))
    monkeypatch.setattr(demo, "LAYERS", (10,))
    result = pullback("demo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "trained on procedural scenes" in result.output and (tmp_path / "index.html").as_uri() in result.output
    pictures = sorted((tmp_path / "images").glob("*.png"))
    assert len(pictures) == demo.COUNT
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("<section>") == 3 and "trained on procedural scenes" in page and "±" in page
    assert "http://" not in page and "https://" not in page
    assert (tmp_path / "scenes" / "scenes.png").read_bytes().startswith(PNG)
    for decoder in ("cls", "depth-2x2"):
        document = strict(tmp_path / decoder / "diagnosis.json")
        assert document["complete"] and document["image_files"] == [str(path) for path in pictures]
        assert (tmp_path / decoder / "tokens_L10.png").exists()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


COMMANDS = (
    *("diagnose", "demo", "look", "ls", "pareto", "plan", "prune", "reproduce", "targets", "train head", "train spn"),
    "tune",
)


def test_help_and_ls_import_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom pullback.cli import app\n"
        f"for command in {COMMANDS!r}: app([*command.split(), '--help'], standalone_mode=False)\n"
        "app(['ls'], standalone_mode=False)\n"
        "heavy = ('torch', 'transformers', 'matplotlib', 'scipy', 'jinja2')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert done.stdout.count("Usage: ") == len(COMMANDS)


def test_help_shows_what_is_written_in_it():
    """Words in square brackets would be taken for colours, and vanish."""
    from rich.text import Text
    from typer.main import get_command

    def texts(command) -> list[str]:
        inner = [text for one in getattr(command, "commands", {}).values() for text in texts(one)]
        return [command.help or "", *(getattr(param, "help", None) or "" for param in command.params), *inner]

    for text in texts(get_command(app)):
        assert Text.from_markup(text).plain == text


def test_every_command_is_in_the_list_of_commands():
    result = pullback("--help")
    for command in COMMANDS:
        assert command.split()[0] in result.output


def test_python_dash_m_is_the_same_program():
    done = python("-m", "pullback", "--version")
    assert done.stdout.strip() == f"pullback {__version__}", done.stderr
