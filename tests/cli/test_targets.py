"""`pullback targets` on the embedded model: what it writes, what it says, and how it fails."""

from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

import pullback as pb
from helpers.pictures import write_pictures
from pullback.cli.common import BAD_INPUT, INTERRUPTED
from pullback.cli.targets import targets
from pullback.targets import compute as module

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")

app = typer.Typer()
app.command()(targets)
SMALL = ("--size", "28x42", "--rank", 3, "--device", "cpu", "--shard-size", 2)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "photos", 4)


def run(photos: object, out: Path, *options: object) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None})
    return runner.invoke(app, [str(a) for a in ("tiny-scenes", "--images", photos, "--out", out, *SMALL, *options)])


def test_it_writes_a_store_and_sums_it_up(photos, tmp_path):
    result = run(photos, tmp_path / "store", "--crops", 2, "--keep-modes", "--limit", 4, "--method", "exact")
    assert result.exit_code == 0, result.output
    store = pb.TargetStore.open(tmp_path / "store")
    assert len(store) == 6 and store.read().modes.shape == (6, 3, 7, 192)
    assert (store.config["crops"], store.config["size"], store.config["layer"]) == (2, [28, 42], 10)
    for text in (
        "6 rows in 4 shards, 6 of them new",
        "images/s in this run; 192 products per image (exact)",
        "bytes per row",
        "skipped 1 image:\n  02-broken.png: not a readable image",
        f"written to {tmp_path / 'store'}/",
    ):
        assert text in result.output


def test_a_second_run_goes_on_and_says_how_much_is_new(photos, tmp_path):
    assert run(photos, tmp_path / "store", "--limit", 2).exit_code == 0
    result = run(photos, tmp_path / "store")
    assert "4 rows in 3 shards, 2 of them new" in result.output
    again = run(photos, tmp_path / "store")
    assert again.exit_code == 0 and "0 of them new" in again.output and "images/s" not in again.output


def test_a_changed_setting_is_refused_in_one_line(photos, tmp_path):
    assert run(photos, tmp_path / "store", "--limit", 1).exit_code == 0
    result = run(photos, tmp_path / "store", "--seed", 3)
    assert result.exit_code == BAD_INPUT
    assert "error: --out: " in result.output and "seed: 0 there, 3 asked for" in result.output
    assert "Traceback" not in result.output


def test_an_interruption_says_what_is_kept(photos, tmp_path, monkeypatch):
    """Three rows are computed when Ctrl-C comes, two of them written: all three are kept."""
    real, rows = module.targets_in_batches, []

    def interrupted(*arguments, **options):
        for found in real(*arguments, **options):
            for part in range(len(found)):
                rows.append(part)
            yield found
            if len(rows) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(module, "GROUP", 1)
    monkeypatch.setattr(module, "targets_in_batches", interrupted)
    result = run(photos, tmp_path / "store")
    assert result.exit_code == INTERRUPTED
    assert f"kept in {tmp_path / 'store'}/: 3 rows; the same command goes on from there" in result.output
    monkeypatch.undo()
    again = run(photos, tmp_path / "store")
    assert "4 rows in 3 shards, 1 of them new" in again.output, again.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layer", "last"), "--layer: expected a block index such as 10, or 'hooks', got 'last'"),
        (("--size", "big"), "--size: expected pixels such as 224, or height x width such as 224x308, got 'big'"),
        (("--size", "30"), "30x30 pixels are not divisible by the patch size 14"),
        (("--decoder", "words"), "--decoder: expected one of cls"),
        (("--rank", 193), "--rank: expected 1 <= rank <= 192"),
    ],
)
def test_wrong_options_are_explained(photos, tmp_path, options, message):
    result = run(photos, tmp_path / "store", *options)
    assert result.exit_code == BAD_INPUT and message in result.output
    assert "Traceback" not in result.output


def test_missing_images_are_named(tmp_path):
    result = run(tmp_path / "nowhere", tmp_path / "store")
    assert result.exit_code == BAD_INPUT and "no such file or folder" in result.output
    assert not (tmp_path / "store").exists()


def test_the_layers_of_a_dense_decoder_side_by_side_have_targets_too(photos, tmp_path):
    result = run(photos, tmp_path / "store", "--decoder", "depth-2x2", "--layer", "hooks", "--limit", 1)
    assert result.exit_code == 0, result.output
    store = pb.TargetStore.open(tmp_path / "store")
    assert store.config["layer"] == "hooks" and store.config["dim"] == 4 * 192


def test_archives_of_unknown_length_are_counted_as_they_come(photos, tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        archive.add(photos, arcname=".")
    result = run(tmp_path / "0.tar", tmp_path / "store")
    assert result.exit_code == 0, result.output
    assert "4 rows in 3 shards" in result.output and "0.tar/02-broken.png" in result.output
