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
    assert stored["ratio"] == loaded.plan.ratio and len(stored["trials"]) == stored["measured"]
    assert stored["flops"] <= 0.9 == stored["budget"]["limit"]
    (tmp_path / "plan.json").write_text(json.dumps({**stored, "scores": {"4": "norm", "8": "evit"}}))
    assert read_plan(tmp_path)["scores"] == {"4": "norm", "8": "class-attention"}, "as earlier versions called it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--heads", "norm", "--flops", "0.9"],
            "--heads: expected BLOCK=HEAD by commas, such as 3=heads/L03, or importance, got 'norm'",
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
