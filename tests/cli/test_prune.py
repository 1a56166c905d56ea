"""`pullback prune` on the embedded model: what it writes, what it says, how it goes on, and how it fails."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from pullback.cli.common import BAD_INPUT, FAILED, INTERRUPTED
from pullback.cli.prune import prune
from pullback.errors import FileError
from pullback.experiments.demo import write_pictures
from pullback.learning.head import HeadConfig, ImportanceHead
from pullback.learning.pretrained import Origin
from pullback.learning.spn import SpectralPullbackNetwork, SpnConfig
from pullback.pruning import compare
from pullback.pruning.rules import Subject
from pullback.registry import PRESETS, SCORES
from pullback.runs.documents import read_examples, read_summary
from pullback.runs.files import write_arrays
from pullback.scenes.render import render

app = typer.Typer()
app.command()(prune)
PNG = b"\x89PNG\r\n"
SMALL = ("--size", 56, "--device", "cpu", "--batch", 2, "--ratios", "0.25,0.5", "--stages", 4)
PLAIN = (*SMALL, "--time", "none", "--scores", "random,norm")


@pytest.fixture
def no_figures(monkeypatch):
    """A process for each figure costs seconds, and two tests are enough for them."""
    monkeypatch.setattr("pullback.report.drawing.importlib.util.find_spec", lambda name: None)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Three pictures and, first of all, a file that is none."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(render(range(3), size=64), folder)
    (folder / "00-broken.png").write_bytes(b"not a picture")
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = HeadConfig(192, 16, 2, origin=Origin(family="tiny-scenes", layer=4))
    return ImportanceHead.from_config(config).save_pretrained(tmp_path_factory.mktemp("head"))


def run(photos: object, out: Path, *options: object) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None})
    return runner.invoke(app, [str(a) for a in ("tiny-scenes", "--images", photos, "--out", out, *options)])


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def summary(out: Path) -> dict:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((out / "summary.json").read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def compared(photos, head, tmp_path_factory) -> tuple[Result, Path]:
    """Everything at once: a head, exact scores, several presets, literature, timing."""
    out = tmp_path_factory.mktemp("prune") / "new" / "folder"
    options = ("--head", head, "--scores", "random,importance,exact,block-norm", "--rank", 3)
    options += ("--preset", "best,paper,bipartite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pullback.pruning.compare._SECONDS", 0.0)
        result = run(photos, out, *SMALL, *options, "--time", "1,2")
    assert result.exit_code == 0, result.output
    return result, out


def test_every_image_has_a_row_for_every_rule(compared):
    _, out = compared
    found = rows(out)
    rules = {(row["preset"], row["score"], row["ratio"]) for row in found}
    assert len(rules) == (2 * 4 + 1) * 2 and len(found) == 3 * len(rules)
    assert ("bipartite", "bipartite", 0.5) in rules and ("bipartite", "random", 0.5) not in rules, (
        "a preset with its own score"
    )
    for row in found:
        assert set(row) == {
            "model", "weights", "commit", "seed", "decoder", "layer", "preset", "score", "ratio", "measure", "image",
            "value",
        }  # fmt: skip
        assert row["layer"] == [4] and row["measure"] == "cosine" and 0 <= row["value"] < 200
    assert {row["image"] for row in found} == {f"scene-0{number}.png" for number in range(3)}


def test_the_summary_has_means_intervals_and_tests_against_importance(compared):
    _, out = compared
    document = summary(out)
    assert document["reference"] == "importance" and document["images_compared"] == 3
    assert document["skipped"][0]["file"].endswith("00-broken.png")
    values = {(row["preset"], row["score"], row["ratio"], row["image"]): row["value"] for row in rows(out)}
    for rule in document["rules"]:
        own = [values[rule["preset"], rule["score"], rule["ratio"], f"scene-0{number}.png"] for number in range(3)]
        assert rule["mean"] == pytest.approx(np.mean(own)) and rule["interval"][0] <= rule["mean"]
        against = [(test["preset"], test["score"]) for test in rule["tests"]]
        assert against == {
            ("best", "importance"): [],
            ("paper", "importance"): [("best", "importance")],
            ("bipartite", "bipartite"): [("best", "importance")],
        }.get(
            (rule["preset"], rule["score"]),
            [("best", "importance")] if rule["preset"] == "best" else [("paper", "importance"), ("best", "importance")],
        )
        for test in rule["tests"]:
            other = [values[test["preset"], test["score"], rule["ratio"], f"scene-0{n}.png"] for n in range(3)]
            assert test["difference"] == pytest.approx(np.mean(own) - np.mean(other))
            assert 0 <= test["p_value"] <= 1


def test_cost_is_measured_where_no_jacobian_is_involved(compared):
    _, out = compared
    document = summary(out)
    for rule in document["rules"]:
        if rule["score"] in ("exact", "block-norm") or rule["preset"] == "paper":  # its matching needs exact modes
            assert rule["cost"] is None
            continue
        assert set(rule["cost"]["milliseconds"]) == {"1", "2"}
        for entry in rule["cost"]["milliseconds"].values():
            assert entry["speedup"] == pytest.approx(entry["unpruned"] / entry["median"])
    saved = {rule["ratio"]: rule["cost"]["flops"] for rule in document["rules"] if rule["preset"] == "bipartite"}
    assert saved[0.5] < saved[0.25] < document["unpruned"]["flops"]


def test_figures_are_drawn_and_the_tables_printed(compared):
    result, out = compared
    for name in ("prune.png", "tokens.png"):
        assert (out / name).read_bytes().startswith(PNG) and name in result.output
    assert not (out / "output.png").exists(), "an embedding is no picture"
    assert "cosine degradation" in (out / "index.html").read_text(encoding="utf-8")
    for words in ("cosine degradation × 100", "η = 0.25", "importance", "GFLOPs/image", "ms, batch 2", "00-broken.png"):
        assert words in result.output


def test_the_fates_of_patches_add_up(compared):
    _, out = compared
    with np.load(out / "examples.npz") as arrays:
        fates, partners, ratios = arrays["fates"], arrays["partners"], arrays["ratios"]
        assert fates.shape == partners.shape == (len(ratios), 3, 4, 4) and arrays["pictures"].shape == (3, 56, 56, 3)
        for fate, partner, ratio in zip(fates, partners, ratios, strict=True):
            assert ((fate > 0).sum((1, 2)) == round(16 * ratio)).all()
            assert (partner[fate == 0] == -1).all()


def test_a_second_run_computes_nothing_and_more_is_added(photos, tmp_path, monkeypatch, no_figures):
    assert run(photos, tmp_path, *PLAIN, "--limit", 2).exit_code == 0
    before = rows(tmp_path)
    monkeypatch.setattr(Subject, "output", lambda *_: pytest.fail("a row was computed again"))
    again = run(photos, tmp_path, *PLAIN, "--limit", 2)
    assert again.exit_code == 0, again.output
    assert "no figures: they need matplotlib" in again.output
    assert rows(tmp_path) == before
    monkeypatch.undo()
    more = run(photos, tmp_path, *PLAIN, "--ratios", "0.5,0.75", "--preset", "best,drop")
    assert more.exit_code == 0, more.output
    assert rows(tmp_path)[: len(before)] == before
    assert {row["ratio"] for row in rows(tmp_path)} == {0.25, 0.5, 0.75}
    document = summary(tmp_path)
    assert document["ratios"] == [0.5, 0.75] and document["images"] == 3


def test_a_folder_with_former_names_is_gone_on_with(photos, tmp_path, monkeypatch, no_figures):
    options = (*PLAIN, "--limit", 1, "--preset", "best,bipartite,attention-drop", "--scores", "norm,class-attention")
    assert run(photos, tmp_path, *options).exit_code == 0
    before, shown = read_summary(tmp_path), read_examples(tmp_path)
    formerly = {"bipartite": "tome", "attention-drop": "evit", "class-attention": "evit"}
    for name in ("rows.jsonl", "summary.json"):
        text = (tmp_path / name).read_text()
        for now, former in formerly.items():
            text = text.replace(f'"{now}"', f'"{former}"')
        (tmp_path / name).write_text(text)
    columns = {name: shown[name].tolist() for name in ("presets", "scores")}
    former = {name: np.array([formerly.get(word, word) for word in words]) for name, words in columns.items()}
    write_arrays(tmp_path / "examples.npz", {**shown, **former})
    assert "evit" in (tmp_path / "summary.json").read_text() and "evit" in former["presets"]
    assert read_summary(tmp_path) == before
    assert {name: read_examples(tmp_path)[name].tolist() for name in columns} == columns
    monkeypatch.setattr(Subject, "output", lambda *_: pytest.fail("a row was computed again"))
    again = run(photos, tmp_path, *options)
    assert again.exit_code == 0, again.output
    assert read_summary(tmp_path)["rules"] == before["rules"]


def test_random_scores_do_not_depend_on_batches(photos, tmp_path, no_figures):
    one, all_at_once = tmp_path / "one", tmp_path / "all"
    assert run(photos, one, *PLAIN, "--batch", 1).exit_code == 0
    assert run(photos, all_at_once, *PLAIN, "--batch", 3).exit_code == 0

    def values(out: Path) -> dict:
        return {(row["score"], row["ratio"], row["image"]): row["value"] for row in rows(out)}

    first, second = values(one), values(all_at_once)
    assert first.keys() == second.keys()
    assert all(first[key] == pytest.approx(second[key], rel=1e-3) for key in first)


def test_an_interruption_keeps_what_is_done_and_half_a_line_is_forgotten(photos, tmp_path, monkeypatch, no_figures):
    real, calls = Subject.output, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Subject, "output", interrupted)
    result = run(photos, tmp_path, *PLAIN)
    assert result.exit_code == INTERRUPTED
    assert f"kept in {tmp_path}/: 4 rows; the same command goes on from there" in result.output
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"preset": "be')
    monkeypatch.setattr(Subject, "output", real)
    assert run(photos, tmp_path, *PLAIN).exit_code == 0
    assert len(rows(tmp_path)) == 3 * 4


def test_changed_settings_are_refused_and_a_head_may_come_later(photos, head, tmp_path, no_figures):
    assert run(photos, tmp_path, *PLAIN, "--limit", 1).exit_code == 0
    changed = run(photos, tmp_path, *PLAIN, "--seed", 3, "--precision", "bf16")
    assert changed.exit_code == BAD_INPUT
    for words in ("holds a comparison with other settings", "seed: 0 there, 3 asked for", "precision: 'float32' there"):
        assert words in changed.output
    assert run(photos, tmp_path, *PLAIN, "--limit", 1, "--scores", "importance", "--head", head).exit_code == 0
    assert run(photos, tmp_path, *PLAIN, "--limit", 1).exit_code == 0
    assert json.loads((tmp_path / "settings.json").read_text())["head"] is not None, "rows of the head are still there"


def test_images_spelled_in_another_way_are_the_same_images(photos, tmp_path, monkeypatch, no_figures):
    assert run(photos, tmp_path / "out", *PLAIN, "--limit", 1).exit_code == 0
    before = rows(tmp_path / "out")
    (tmp_path / "link").symlink_to(photos)
    monkeypatch.chdir(photos.parent)
    monkeypatch.setattr(Subject, "output", lambda *_: pytest.fail("a row was computed again"))
    for spelling in (photos.name, f"./{photos.name}/", tmp_path / "link"):
        again = run(spelling, tmp_path / "out", *PLAIN, "--limit", 1)
        assert again.exit_code == 0, again.output
    assert rows(tmp_path / "out") == before


def test_images_of_a_glob_are_known_by_their_names(photos, tmp_path, monkeypatch, no_figures):
    assert run(photos / "scene-*.png", tmp_path / "out", *PLAIN, "--limit", 1).exit_code == 0
    monkeypatch.chdir(photos)
    monkeypatch.setattr(Subject, "output", lambda *_: pytest.fail("a row was computed again"))
    assert run("scene-*.png", tmp_path / "out", *PLAIN, "--limit", 1).exit_code == 0
    assert {row["image"] for row in rows(tmp_path / "out")} == {"scene-00.png"}


def test_where_jacobians_are_computed_a_cpu_takes_one_image_at_a_time(photos, tmp_path, monkeypatch, no_figures):
    sizes, real = [], compare._add_rows

    def noted(rows, subject, models, batch, *rest):
        sizes.append(len(batch.keys))
        return real(rows, subject, models, batch, *rest)

    monkeypatch.setattr(compare, "_add_rows", noted)
    options = (*PLAIN, "--scores", "exact", "--rank", 2, "--batch", 3)
    assert run(photos, tmp_path, *options).exit_code == 0
    assert sizes == [1, 1, 1] and len(rows(tmp_path)) == 3 * 2
    before = rows(tmp_path)
    monkeypatch.setattr(Subject, "output", lambda *_: pytest.fail("a row was computed again"))
    assert run(photos, tmp_path, *options).exit_code == 0
    assert rows(tmp_path) == before


def test_the_table_is_printed_before_the_figures_are_drawn(photos, tmp_path, monkeypatch):
    def full(self, folder):
        raise FileError(f"{folder}: the figures could not be drawn: no space.")

    monkeypatch.setattr("pullback.report.drawing.Drawing.draw", full)
    result = run(photos, tmp_path, *PLAIN, "--limit", 1)
    assert result.exit_code == FAILED and "cosine degradation × 100" in result.output
    assert "the figures could not be drawn: no space" in result.output and "Traceback" not in result.output
    assert (tmp_path / "summary.json").is_file()


def test_classes_are_checked_before_the_bank_is_embedded(photos, tmp_path, monkeypatch, no_figures):
    for number in range(2):
        write_pictures(render([number], size=64), tmp_path / "bank" / f"class-{number}")
        write_pictures(render([number], size=64), tmp_path / "queries" / f"other-{number}")
    monkeypatch.setattr(Subject, "full", lambda *_: pytest.fail("something was computed"))
    options = ("--bank", tmp_path / "bank", "--scores", "norm")
    other = run(tmp_path / "queries", tmp_path / "out", *PLAIN, *options)
    assert (
        other.exit_code == BAD_INPUT
        and "--bank: none of 2 images is of a class in the bank (2 classes)" in other.output
    )
    unsorted = run(photos, tmp_path / "out", *PLAIN, *options)
    assert (
        unsorted.exit_code == BAD_INPUT
        and "--labels: " in unsorted.output
        and "lies in no class folder" in unsorted.output
    )
    table = tmp_path / "labels.csv"
    table.write_text("file,class_index\nscene-00.png,1\n")
    unlisted = run(photos, tmp_path / "out", *PLAIN, *options, "--labels", table)
    assert unlisted.exit_code == BAD_INPUT and "has no row for" in unlisted.output
    nowhere = run(photos, tmp_path / "out", *PLAIN, "--bank", tmp_path / "nowhere")
    assert nowhere.exit_code == BAD_INPUT and "error: --bank=" in nowhere.output
    assert not (tmp_path / "out").exists()


def test_a_bank_goes_on_where_it_was_stopped(photos, tmp_path, monkeypatch, no_figures):
    for number in range(2):
        write_pictures(render(range(3 * number, 3 * number + 3), size=64), tmp_path / "bank" / f"class-{number}")
    (tmp_path / "bank" / "class-0" / "00-broken.png").write_bytes(b"not a picture")
    write_pictures(render([7], size=64), tmp_path / "queries" / "class-1")
    options = (*PLAIN, "--bank", tmp_path / "bank", "--scores", "norm")
    assert run(tmp_path / "queries", tmp_path / "whole", *options).exit_code == 0
    full, seen = Subject.full, []

    def killed(self, images):
        seen.append(len(images))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return full(self, images)

    monkeypatch.setattr(compare, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(Subject, "full", killed)
    assert run(tmp_path / "queries", tmp_path / "out", *options).exit_code == INTERRUPTED
    assert (tmp_path / "out" / "bank.partial.npz").is_file()
    monkeypatch.setattr(Subject, "full", lambda self, images: (seen.append(len(images)), full(self, images))[1])
    assert run(tmp_path / "queries", tmp_path / "out", *options).exit_code == 0
    assert seen[3] == 2 and not (tmp_path / "out" / "bank.partial.npz").exists()
    ours, theirs = (dict(np.load(tmp_path / name / "bank.npz")) for name in ("out", "whole"))
    assert ours["classes"].tolist() == theirs["classes"].tolist() and len(ours["embeddings"]) == 6
    np.testing.assert_allclose(ours["embeddings"], theirs["embeddings"], rtol=1e-5, atol=1e-6)


def test_depth_is_measured_by_silog_and_shown_before_and_after(photos, tmp_path):
    result = run(photos, tmp_path, *PLAIN, "--decoder", "depth", "--preset", "best,strided", "--limit", 2)
    assert result.exit_code == 0, result.output
    assert "additional SILog × 100" in result.output and (tmp_path / "output.png").read_bytes().startswith(PNG)
    for row in rows(tmp_path):
        assert row["value_085"] >= row["value"] > 0 and 0 <= row["floored"] <= 1
    assert all({"mean_085", "floored"} <= set(rule) for rule in summary(tmp_path)["rules"])


def test_two_stages_take_a_head_each_and_the_matching_takes_an_spn(photos, head, tmp_path, no_figures):
    torch.manual_seed(0)
    later = HeadConfig(192, 16, 2, origin=Origin(family="tiny-scenes", layer=8))
    second = ImportanceHead.from_config(later).save_pretrained(tmp_path / "head8")
    spns = [
        SpectralPullbackNetwork.from_config(
            SpnConfig(192, 2, 16, 2, origin=Origin(family="tiny-scenes", layer=layer))
        ).save_pretrained(tmp_path / f"spn{layer}")
        for layer in (4, 8)
    ]
    options = ("--stages", "4,8", "--head", f"{head},{second}", "--spn", ",".join(map(str, spns)), "--limit", 1)
    result = run(photos, tmp_path / "out", *PLAIN, *options, "--scores", "importance,spn", "--preset", "paper")
    assert result.exit_code == 0, result.output
    assert {row["score"] for row in rows(tmp_path / "out")} == {"importance", "spn"}
    assert "after blocks 4, 8" in result.output


def test_knn_votes_come_from_a_bank_with_classes(photos, tmp_path, no_figures):
    for folder, numbers in {"bank": range(2, 6), "queries": range(2)}.items():
        for number in numbers:
            write_pictures(render([number], size=64), tmp_path / folder / f"class-{number % 2}")
    options = ("--bank", tmp_path / "bank", "--scores", "norm")
    result = run(tmp_path / "queries", tmp_path / "out", *PLAIN, *options)
    assert result.exit_code == 0, result.output
    found = rows(tmp_path / "out")
    assert all(isinstance(row["knn"], bool) for row in found)
    assert sum(row["preset"] == "unpruned" for row in found) == 2
    assert "k-NN top-1 in % (unpruned" in result.output and (tmp_path / "out" / "bank.npz").is_file()


def test_bf16_changes_little(photos, tmp_path, no_figures):
    assert run(photos, tmp_path / "a", *PLAIN, "--limit", 1, "--scores", "norm").exit_code == 0
    assert run(photos, tmp_path / "b", *PLAIN, "--limit", 1, "--scores", "norm", "--precision", "bf16").exit_code == 0
    exact, lower = ([row["value"] for row in rows(tmp_path / name)] for name in "ab")
    assert exact != lower and lower == pytest.approx(exact, rel=0.5, abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ratios", "a"), "--ratios: expected a list such as 0.1,0.3, got 'a'"),
        (("--ratios", "1.0"), "--ratios: expected a share of the patch tokens from 0 up to, but without, 1, got 1"),
        (("--stages", "8,4"), "--stages: expected ascending blocks"),
        (("--stages", "4,4"), "--stages: expected ascending blocks, each once, got [4, 4]"),
        (("--stages", "11"), "--stages: expected blocks from 0 to 10"),
        (("--scores", "wisdom"), "--scores: expected some of importance, exact, block-norm"),
        (("--scores", "importance"), "--scores: no importance head that comes with the package fits"),
        (("--scores", "spn"), "--scores: 'spn' needs --spn DIR"),
        (("--preset", "worst"), "--preset: expected one of best, paper"),
        (("--time", "soon"), "--time: expected auto, none or batch sizes such as 1,8,64, got 'soon'"),
        (("--decoder", "depth", "--bank", "."), "--bank: k-NN classifies embeddings"),
        (("--head", "a,b"), "--head: expected one folder for each of the stages [4], got 2"),
        (("--size", "30"), "30x30 pixels are not divisible by the patch size 14"),
    ],
)
def test_wrong_options_are_explained(photos, tmp_path, options, message, no_figures):
    result = run(photos, tmp_path / "out", *PLAIN, *options)
    assert result.exit_code == BAD_INPUT and message in result.output, result.output
    assert "Traceback" not in result.output and not (tmp_path / "out").exists()


def test_a_head_of_another_layer_is_refused(photos, head, tmp_path, no_figures):
    result = run(photos, tmp_path / "out", *PLAIN, "--stages", 6, "--head", head)
    assert result.exit_code == BAD_INPUT
    assert "--head: it was trained for layer 4, and is used with layer 6" in result.output


@pytest.mark.parametrize("command", ["prune", "plan"])
def test_help_lists_what_the_registry_holds_and_needs_no_torch(command):
    code = (
        f"import sys\nfrom pullback.cli import app\napp([{command!r}, '--help'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    words = set(re.findall(r"[a-z][a-z0-9-]*", done.stdout))
    wanted = [*SCORES, *PRESETS] if command == "prune" else [name for name, entry in SCORES.items() if not entry.needs]
    assert set(wanted) <= words


def test_a_folder_of_before_goes_on(photos, tmp_path, no_figures):
    """Settings and rows as the first release wrote them: other version, other commit, costs of another machine."""
    assert run(photos, tmp_path, *PLAIN, "--limit", 2).exit_code == 0
    before = rows(tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text()) | {"pullback": "0.0.1", "commit": "f" * 40}
    (tmp_path / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
    (tmp_path / "cost.json").write_text('{"machine": "x86_64, 1 thread", "unpruned_flops": 7, "rules": []}\n')
    again = run(photos, tmp_path, *PLAIN, "--limit", 3)
    assert again.exit_code == 0, again.output
    assert rows(tmp_path)[: len(before)] == before and len(rows(tmp_path)) == len(before) * 3 // 2
