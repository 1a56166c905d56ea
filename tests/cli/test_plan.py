"""`pullback plan` on the embedded model."""

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

import pullback as pb
from pullback.cli import app
from pullback.runs.documents import read_plan
from pullback.scenes.render import render


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number, picture in enumerate(render(range(2), size=112).rgb[:, 0]):
        pixels = (picture * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["plan", "tiny-scenes", *map(str, arguments), "--device", "cpu", "--size", "112"])


def test_a_plan_within_a_share_of_the_operations(photos, tmp_path):
    result = run(
        "--images", photos, "--heads", "4=norm,8=class-attention", "--flops", "0.9", "--stages", 1, "--out", tmp_path
    )
    assert result.exit_code == 0, result.output
    assert "of the patch tokens after block" in result.output and "plans tried on 2 images" in result.output
    loaded = pb.PrunedModel.from_pretrained(tmp_path)
    assert loaded.plan.stages in ((4,), (8,)) and loaded.plan.ratio > 0
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert f"block {loaded.plan.stages[0]}" in page and "2 images" in page and "data:image/webp" in page
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "index.html"
    ).as_uri() in result.output
    stored = read_plan(tmp_path)
    assert stored["size"] == loaded.plan.size and stored["interval"][0] <= stored["degradation"]
    assert {other["name"].split(" (")[0] for other in stored["alternatives"]} <= {"ToMe", "a smaller picture"}
    assert stored["alternatives"] and all(other["name"] in page for other in stored["alternatives"])
    assert "with fewer than 16 images" in result.output and "with fewer than 16 images" in page
    assert stored["ratio"] == loaded.plan.ratio and len(stored["trials"]) == stored["measured"]
    assert stored["flops"] <= 0.9 == stored["budget"]["limit"]
    (tmp_path / "plan.json").write_text(json.dumps({**stored, "scores": {"4": "norm", "8": "evit"}}))
    assert read_plan(tmp_path)["scores"] == {"4": "norm", "8": "class-attention"}, "as earlier versions called it"


def test_a_tuned_plan_with_a_smaller_picture(photos, tmp_path):
    result = run(
        *("--images", photos, "--heads", "4=norm", "--flops", "0.5", "--stages", 1, "--sizes", "84", "--tune", photos),
        *("--tune-best", 1, "--tune-steps", 1, "--tune-batch", 1, "--tune-held-out", 0.5, "--out", tmp_path),
    )
    assert result.exit_code == 0, result.output
    loaded = pb.PrunedModel.from_pretrained(tmp_path)
    assert loaded.plan.size == 84 and loaded.tuning["steps"] == 1 and loaded.tuning["size"] == [112, 112]
    assert "shrink pictures to 84 px" in result.output and ", tuned:" in result.output
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "shrunk to 84 pixels" in page and "1 steps on 1 image" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--heads", "norm", "--flops", "0.9"],
            "--heads: expected BLOCK=HEAD by commas, such as 3=heads/L03, or importance, got 'norm'",
        ),
        (
            ["--heads", "4=norm", "--flops", "0.9", "--sizes", "large"],
            "--sizes: expected pixels by commas such as 210,196, or auto or own, got 'large'",
        ),
        (
            ["--heads", "4=norm", "--flops", "0.9", "--sizes", "100"],
            "--sizes: expected multiples of the patch size 14",
        ),
        (
            ["--heads", "4=norm", "--flops", "0.9", "--output", "cls"],
            '--output: "cls" is for outputs of the class token alone',
        ),
        (["--heads", "4=norm"], "budget: expected one of flops, milliseconds and degradation, got none"),
        (["--heads", "4=no/such/folder", "--flops", "0.9"], "is neither a folder nor a hub id"),
    ],
)
def test_bad_input(photos, arguments, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run("--images", photos, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
