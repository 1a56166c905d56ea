"""`pullback pareto` on the embedded model: what it writes, what it says, how it goes on, and how it fails."""

import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

import pullback as pb
from pullback.backbones import load_backbone
from pullback.cli.common import BAD_INPUT, INTERRUPTED
from pullback.cli.pareto import pareto
from pullback.cli.prune import prune
from pullback.experiments.demo import write_pictures
from pullback.pruning.rules import Subject
from pullback.scenes.render import render

app = typer.Typer()
app.command()(pareto)
other = typer.Typer()
other.command()(prune)
PNG = b"\x89PNG\r\n"
SMALL = ("--size", 56, "--device", "cpu", "--batch", 2, "--time", "none")
FEW = (*SMALL, "--methods", "resize,evit", "--sizes", "42", "--evit-keep", "0.5")


@pytest.fixture
def no_figures(monkeypatch):
    """A process for each figure costs seconds, and one test is enough for it."""
    monkeypatch.setattr("pullback.report.drawing.importlib.util.find_spec", lambda name: None)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(4):
        write_pictures(render([number], size=64), folder / f"class-{number % 2}" / str(number))
    return folder


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    model = load_backbone("tiny-scenes", device="cpu").model
    folder = tmp_path_factory.mktemp("plans") / "fast"
    return pb.prune(model, "norm", ratio=0.5, stages=[4]).save_pretrained(folder)


def run(photos: object, out: Path, *options: object, command: typer.Typer = app) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    return runner.invoke(command, [str(a) for a in ("tiny-scenes", "--images", photos, "--out", out, *options)])


def test_everything_at_once(photos, plan, tmp_path, monkeypatch):
    monkeypatch.setattr("pullback.pruning.compare._SECONDS", 0.0)
    options = ("--methods", "resize,tome-decreasing,best", "--sizes", 42, "--r", 1, "--stages", "3;3,6")
    options += (
        "--ratios",
        0.5,
        "--smaller",
        0,
        "--plan",
        f"mine={plan}",
        "--neighbours",
        "1,2",
        "--budgets",
        "0.9,0.6",
    )
    result = run(photos, tmp_path / "out", *SMALL, *options, "--time", "1,2")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out" / "pareto.json").read_text())
    assert [(entry["method"], entry["point"]) for entry in document["points"]] == [
        ("resize", "42 px"), ("tome, decreasing", "r = 1"), ("best", "block 3, 0.5"), ("best", "blocks 3, 6, 0.5"),
        ("mine", "fast"),
    ]  # fmt: skip
    assert document["budgets"] == [0.9, 0.6] and set(document["points"][0]["milliseconds"]) == {"1", "2"}
    words = ("5 points", "cosine degradation × 100: mean", "≤ 90 %", "tome, decreasing", "blocks 3, 6, 0.5", "mine",
             "k = 1, every image asks the others", "×, batch 2", "chosen on these same images",
             "computes the class token alone", "against the best rival")  # fmt: skip
    for word in words:
        assert word in result.output, word
    assert (tmp_path / "out" / "pareto.png").read_bytes().startswith(PNG)
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    for word in ("blocks 3, 6, 0.5", "exact McNemar test", "no cheaper one beats", "ms, batch 2"):
        assert word in page, word


def test_the_same_command_goes_on_and_dense_decoders_work(photos, tmp_path, monkeypatch, no_figures):
    real, calls = Subject.output, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Subject, "output", interrupted)
    stopped = run(photos, tmp_path, *FEW, "--decoder", "depth")
    assert stopped.exit_code == INTERRUPTED
    assert f"kept in {tmp_path}/: 6 rows; the same command goes on from there" in stopped.output
    monkeypatch.setattr(Subject, "output", real)
    result = run(photos, tmp_path, *FEW, "--decoder", "depth")
    assert result.exit_code == 0 and "additional SILog × 100" in result.output, result.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and all(row["value_085"] >= row["value"] > 0 for row in rows)


def test_a_folder_is_not_taken_for_that_of_prune(photos, tmp_path, no_figures):
    assert run(photos, tmp_path, *FEW, "--limit", 1).exit_code == 0
    taken = run(photos, tmp_path, *SMALL, "--scores", "norm", command=other)
    assert taken.exit_code == BAD_INPUT
    assert "holds a comparison of methods at their operating points (pareto-settings.json" in taken.output
    assert run(photos, tmp_path / "p", *SMALL, "--scores", "norm", "--limit", 1, command=other).exit_code == 0
    assert "holds a comparison of pruning rules" in run(photos, tmp_path / "p", *FEW).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", ","), "--methods: expected a list such as tome,best, got ','"),
        (("--methods", "pixie"), "--methods: expected some of resize, tome, tome-decreasing, pitome, evit, best"),
        (("--sizes", "large"), "--sizes: expected a list such as 210,196, got 'large'"),
        (("--sizes", "84"), "--sizes: expected multiples of the patch size 14 below the 56 pixels"),
        (("--r", "0.5", "--methods", "tome"), "--r: expected a list such as 4,8, got '0.5'"),
        (("--evit-keep", "2"), "--evit-keep: expected a share of the patch tokens above 0"),
        (("--stages", "3;;6"), "--stages: expected a list such as 4,8, got ''"),
        (("--plan", "fast"), "--plan: expected METHOD=FOLDER by commas, such as ours=fast, got 'fast'"),
        (("--plan", "a=nowhere"), "--plan: nowhere holds no pruned model that can be read"),
        (("--budgets", "80"), "--budgets: expected shares of the operations, above 0 and up to 1, got 80.0"),
        (("--labels", "nowhere.csv"), "--labels: nowhere.csv cannot be read as a CSV"),
        (("--neighbours", "few"), "--neighbours: expected a list such as 10,20, got 'few'"),
        (("--methods", "best", "--heads", "3=norm,3=norm"), "--heads: expected each block once"),
        (("--methods", "best", "--heads", "wisdom"), "--heads: expected importance, a score"),
        (("--time", "soon"), "--time: expected auto, none or batch sizes"),
    ],
)
def test_wrong_options_are_explained(photos, tmp_path, options, message, no_figures):
    result = run(photos, tmp_path / "out", *FEW, *options)
    assert result.exit_code == BAD_INPUT and message in result.output, result.output
    assert "Traceback" not in result.output and not (tmp_path / "out").exists()
