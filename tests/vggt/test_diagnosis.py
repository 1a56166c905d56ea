"""`pullback diagnose` and `pullback ls` on a VGGT: what they write and say of scenes, and how they fail."""

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

import pullback as pb
from helpers.vggt_models import tiny
from pullback.cli import app
from pullback.data.images import SkippedImage
from pullback.errors import ImageError, NumericsError
from pullback.geometry import folder as module
from pullback.vggt.views import find_scenes, read_scenes, scenes_that_fit

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n"
SMALL = ("--size", 28, "--rank", 3, "--device", "cpu")


@dataclass(frozen=True)
class Run:
    result: Result
    out: Path
    document: dict


def pullback(*arguments: object) -> Result:
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(app, [str(a) for a in arguments])


def write_views(folder: Path, *sizes: tuple[int, int]) -> Path:
    """One picture (width, height) for each size."""
    folder.mkdir(parents=True)
    for view, size in enumerate(sizes):
        small = np.random.default_rng(view).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(folder / f"{view}.png")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """model/, and scenes/ with three that differ in views and size, between them one that cannot be read."""
    folder = tmp_path_factory.mktemp("scenes")
    tiny(torch.float32).save_pretrained(folder / "model")
    write_views(folder / "scenes" / "garden", *[(56, 28)] * 3)
    broken = write_views(folder / "scenes" / "hall", (56, 28))
    (broken / "1.png").write_bytes(b"not a picture")
    write_views(folder / "scenes" / "kitchen", *[(56, 56)] * 2)
    write_views(folder / "scenes" / "yard", (56, 28), (56, 56))
    return folder


def diagnose(place: Path, out: Path, *options: object, images: str = "scenes") -> Run:
    result = pullback("diagnose", place / "model", "--images", place / images, "--out", out, *SMALL, *options)
    assert result.exit_code == 0, result.output
    return Run(result, out, json.loads((out / "diagnosis.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def run(place, tmp_path_factory) -> Run:
    return diagnose(place, tmp_path_factory.mktemp("run"), "--layer", 1, "--layer", "hooks", "--rank", 20)


def test_scenes_are_the_folders_that_hold_images(run, place):
    scenes = [(Path(scene["scene"]).name, scene["views"], scene["size"]) for scene in run.document["scenes"]]
    assert scenes == [("garden", 3, [14, 28]), ("kitchen", 2, [28, 28]), ("yard", 2, [28, 28])]
    assert run.document["size"] is None and run.document["complete"]
    assert (run.document["family"], run.document["decoder"]) == ("vggt", "camera"), "the default decoder of a VGGT"
    assert len(run.document["image_files"]) == 7
    assert "3 scenes of 2 to 3 views, 28 wide" in run.result.output
    assert "products per scene" in run.result.output and "3 scenes in" in run.result.output


def test_a_scene_that_cannot_be_read_is_skipped_and_named(run):
    (skipped,) = run.document["skipped"]
    assert Path(skipped["file"]).name == "hall" and "1.png: not a readable image" in skipped["reason"]
    assert "skipped 1 scene:" in run.result.output and "hall: " in run.result.output


def test_what_was_done_to_views_is_said(run):
    notes = [scene["note"] for scene in run.document["scenes"]]
    assert notes[:2] == [None, None] and "views of different shapes (14x28, 28x28) get white edges" in notes[2]
    assert "yard: views of different shapes" in run.result.output


def test_every_scene_has_its_own_numbers(run, place):
    """Those of `pb.diagnose`, whatever the others are."""
    probe = pb.load_probe(place / "model", "camera", 1, device="cpu")
    first = run.document["layers"][0]
    assert [layer["layer"] for layer in run.document["layers"]] == [1, "hooks"]
    assert first["num_images"] == 3 and first["method"] == "exact"
    for scene, found in zip(run.document["scenes"], first["per_image"], strict=True):
        with pytest.warns(UserWarning) if scene["note"] else nullcontext():
            views = probe.load_views(scene["scene"], 28)
        alone = pb.diagnose(probe, views, rank=[3, 20], convergence_samples=0)
        assert found["file"] == scene["scene"]
        assert found["kappa"] == pytest.approx(alone.kappa.mean, rel=1e-4)
        assert found["cv"] == pytest.approx(alone.cv.mean, rel=1e-3)
        known = np.array(alone.samples[0].singular_values)
        np.testing.assert_allclose(found["singular_values"][: len(known)], known, rtol=1e-3, atol=1e-6)


def test_scenes_with_fewer_outputs_than_the_rank_count_as_captured(run):
    """27 outputs of three views, 18 of two: rank 20 exists, for these all of it is in 18 directions."""
    layer = run.document["layers"][0]
    assert (layer["output_size"], layer["ranks_used"]) == (27, [3, 20])
    shares = [image["kappa_at"]["20"]["value"] for image in layer["per_image"]]
    assert shares[0] < 1 - 1e-6 and shares[1:] == pytest.approx([1, 1], abs=1e-5)
    assert [len(image["singular_values"]) for image in layer["per_image"]] == [20, 20, 20]
    assert layer["per_image"][1]["singular_values"][18:] == [0, 0]


def test_the_importance_of_every_token_is_kept(run):
    with np.load(run.out / "importance.npz") as arrays:
        assert arrays["L01"].shape == arrays["hooks"].shape == (3, 15)
        views, grid, prefix = arrays["views"], arrays["grid"], int(arrays["prefix"])
        assert views.tolist() == [3, 2, 2] and grid.tolist() == [[1, 2], [2, 2], [2, 2]] and prefix == 3
        known = np.isfinite(arrays["L01"]).sum(1)
        assert known.tolist() == (views * (prefix + grid.prod(1))).tolist() == [15, 14, 14]
        assert arrays["scenes"].tolist() == ["garden", "kitchen", "yard"]
        assert [arrays[f"thumbnails_{scene}"].shape for scene in range(2)] == [(3, 14, 28, 3), (2, 28, 28, 3)]


def test_figures_are_drawn_and_a_page_can_be_written(run):
    for name in ("spectrum.png", "tokens_L01.png", "tokens_hooks.png"):
        assert (run.out / name).read_bytes().startswith(PNG)
        assert name in run.result.output
    from pullback.report.page import write_page

    page = write_page(run.out, ["."]).read_text(encoding="utf-8")
    assert "a mean over scenes ±" in page and "products per scene" in page and "up to 15 tokens" in page
    assert "camera and register tokens" in page


def test_hooks_of_a_dense_decoder_have_a_multiplicity_and_a_folder_of_images_is_one_scene(place, tmp_path):
    run = diagnose(place, tmp_path, "--decoder", "depth-2x2", "--layer", "hooks", images="scenes/kitchen")
    (layer,) = run.document["layers"]
    assert layer["dim"] == 4 * 2 * 32 and layer["num_images"] == 1 and run.document["size"] == [28, 28]
    assert 1 <= layer["k_eff"]["mean"] <= 4 and len(layer["k_eff"]["per_image"]) == 1
    assert "1 scene of 2 views at 28×28" in run.result.output and "K_eff = " in run.result.output


def test_points_distance_method_and_limit_are_passed_on(place, tmp_path):
    options = ("--decoder", "points-4", "--layer", 2, "--limit", 1, "--method", "krylov", "--distance", "cosine")
    run = diagnose(place, tmp_path, *options, "--precision", "tf32")
    (layer,) = run.document["layers"]
    assert (layer["method"], layer["output_size"], layer["num_images"]) == ("krylov", 12, 1)
    assert (run.document["distance"], run.document["precision"]) == ("cosine", "tf32")


def test_a_file_of_weights_is_a_model_too(place, tmp_path, monkeypatch):
    """Weights alone are taken for the published size, so only what is loaded is looked at."""
    asked = []
    monkeypatch.setattr("pullback.vggt.checkpoint.load_vggt", lambda name, *_: asked.append(name) or 1 / 0)
    for name in ("model.safetensors", "facebook/VGGT-1B"):
        result = pullback("diagnose", name, "--images", place / "scenes", "--out", tmp_path)
        assert isinstance(result.exception, ZeroDivisionError)
    assert asked == ["model.safetensors", "facebook/VGGT-1B"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--size": "28x42"}, "size: expected the width of the views, such as 518"),
        ({"--size": "28x42"}, "got 28x42. Use 42."),
        ({"--size": "30"}, "size=30: expected a multiple of patch_size=14"),
        ({"--size": "0"}, "size=0: expected a multiple of patch_size=14"),
        (
            {"--precision": "bf16"},
            "precision: expected float32 or tf32 for {place}/model camera L02, whose products have no bf16",
        ),
        ({"--decoder": "cls"}, "decoder: expected one of camera, camera-V"),
        ({"--decoder": "camera-2"}, "decoder: 'camera-2' needs at least 3 views, got scenes of 2."),
        ({"--decoder": "camera-2"}, "This is about the scene {place}/scenes/kitchen."),
        ({"--layer": "4"}, "layer: expected a layer of the aggregator from 0 to 3"),
        ({"--layer": "4"}, "got 4. The heads' own input is multi_layer_probe(...), on the command line --layer hooks."),
        ({"--distance": "manhattan"}, "distance: expected one of cosine"),
        ({"--images": "{place}/scenes/hall"}, "expected at least one readable scene, but none of the 1 could be used"),
        ({"--images": "{place}/missing"}, "no such file or folder"),
        ({"--images": "{place}/model"}, "no image found"),
    ],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_input_gives_one_line_and_exit_code_2(options, message, place, tmp_path):
    given = {"--images": "{place}/scenes", "--out": str(tmp_path / "out"), "--size": "28", "--device": "cpu", **options}
    given = {name: value.replace("{place}", str(place)) for name, value in given.items()}
    result = pullback("diagnose", place / "model", *(part for pair in given.items() for part in pair))
    assert result.exit_code == 2, result.output
    assert message.replace("{place}", str(place)) in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not (tmp_path / "out" / "diagnosis.json").exists()


def test_a_failing_layer_loses_nothing_before_it(place, tmp_path, monkeypatch):
    honest = module.diagnose

    def diagnose_or_fail(probe, *arguments, **options):
        if probe.layer == 2:
            raise NumericsError("features: NaN.")
        return honest(probe, *arguments, **options)

    monkeypatch.setattr(module, "diagnose", diagnose_or_fail)
    options = ("--layer", 1, "--layer", 2, "--images", place / "scenes" / "kitchen", "--out", tmp_path, *SMALL)
    result = pullback("diagnose", place / "model", *options)
    assert result.exit_code == 2 and "finished before L02" in result.output
    document = json.loads((tmp_path / "diagnosis.json").read_text())
    assert [layer["layer"] for layer in document["layers"]] == [1] and document["failure"]["layer"] == 2


def test_many_views_are_drawn_in_rows_and_scenes_only_as_a_whole():
    assert scenes_that_fit([3, 20, 2]) == 2
    assert scenes_that_fit([30, 2]) == 1
    assert scenes_that_fit([8, 8, 8]) == 3


def test_ls_names_vggt_and_its_decoders():
    result = pullback("ls")
    assert result.exit_code == 0
    for words in ("facebook/VGGT-1B", "camera-V", "points-K", "depth-GxG", "scenes of several views"):
        assert words in result.output


@pytest.mark.parametrize(
    ("command", "instead", "page"),
    [
        (
            ("targets", "{model}", "--images", "x", "--out", "y"),
            "targets_of(probe, probe.features(scenes))",
            "guide/vggt",
        ),
        (
            ("train", "spn", "{model}", "--images", "x", "--held-out", "x", "--out", "y"),
            "targets_of(probe,",
            "guide/vggt",
        ),
        (
            ("prune", "{model}", "--images", "x", "--out", "y"),
            "pb.prune_views(model",
            "guide/vggt-pruning",
        ),
        (
            ("plan", "{model}", "--images", "x", "--heads", "1=norm"),
            "pb.prune_views(model",
            "guide/vggt-pruning",
        ),
    ],
    ids=["targets", "spn", "prune", "plan"],
)
def test_commands_of_single_images_say_what_to_use_instead(command, instead, page, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = pullback(*(part.replace("{model}", str(place / "model")) for part in command))
    assert result.exit_code == 2, result.output
    words = "expects a model of single images, got"
    assert words in result.output and instead in result.output and result.output.count("error:") == 1
    assert f"(docs/{page}.md)" in result.output and (ROOT / "docs" / f"{page}.md").is_file()
    assert "Traceback" not in result.output


def test_a_head_of_single_images_cannot_be_trained_on_a_vggt(place, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
    from helpers.pictures import SMALL as STORE
    from helpers.pictures import small_probe, write_pictures
    from pullback.targets.compute import compute_targets

    compute_targets(small_probe(), write_pictures(tmp_path / "photos", 2), out=tmp_path / "store", **STORE)
    store = ("--targets", tmp_path / "store", "--out", tmp_path / "head")
    result = pullback("train", "head", *store, "--model", place / "model")
    assert result.exit_code == 2 and "`pullback train head` expects a model of single images" in result.output


def test_the_images_of_a_folder_are_not_those_of_folders_below(tmp_path):
    write_views(tmp_path / "house", (56, 28), (56, 28))
    write_views(tmp_path / "house" / "attic", (56, 28))
    found = [(scene.folder.name, [file.name for file in scene.files]) for scene in find_scenes(tmp_path)]
    assert found == [("house", ["0.png", "1.png"]), ("attic", ["0.png"])]
    (one,) = find_scenes(tmp_path / "house" / "1.png")
    assert [file.name for file in one.files] == ["1.png"]
    (some,) = find_scenes(str(tmp_path / "house" / "*.png"))
    assert len(some.files) == 2


def test_a_limit_counts_readable_scenes(place):
    found = read_scenes(place / "scenes", size=28, limit=2)
    assert [scene.folder.name for scene in found.scenes] == ["garden", "kitchen"]
    assert [type(scene) for scene in found.skipped] == [SkippedImage]
    with pytest.raises(ImageError, match="size=7: expected a multiple of patch_size=14"):
        read_scenes(place / "scenes", size=7)


def test_without_matplotlib_it_finishes(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = diagnose(place, tmp_path, images="scenes/kitchen").result
    assert "pip install 'pullback[plot]'" in result.output
