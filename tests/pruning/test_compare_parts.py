"""The parts of the comparison that need no command line: rules, scores of a batch, tests between rules."""

import json

import numpy as np
import pytest
import torch
from scipy import stats

import pullback as pb
from pullback.errors import PullbackError
from pullback.pruning.compare_examples import panels
from pullback.pruning.compare_scores import BatchScores, ScoreBook
from pullback.pruning.compare_store import RowStore
from pullback.pruning.compare_subject import Combination, Subject, combinations, degradation, measure_of
from pullback.pruning.compare_summary import images_of_all, reference_score, summarise
from pullback.runs.provenance import commit

BEST, OTHER, TOME = (Combination(*rule, 0.5) for rule in (("best", "norm"), ("best", "random"), ("tome", "tome")))


def test_presets_of_the_literature_bring_their_own_score():
    rules = combinations(["best", "evit"], ["norm", "random"], [0.1, 0.5])
    assert [str(rule) for rule in rules] == [
        "best, norm, 0.1", "best, norm, 0.5", "best, random, 0.1", "best, random, 0.5", "evit, evit, 0.1",
        "evit, evit, 0.5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("decoder", "shape", "measure"),
    [("cls", (2, 8), "cosine"), ("depth", (2, 8, 8), "silog"), ("depth-3x3", (2, 3, 3), "silog"),
     ("saliency", (2, 8, 8), "relative_l2")],
)  # fmt: skip
def test_the_measure_follows_the_output(decoder, shape, measure):
    output = torch.rand(shape) + 1
    assert measure_of(decoder, output) == measure
    found = degradation(measure, output, output)
    assert len(found) == 2 and all(row["value"] == 0 for row in found)


def test_an_error_that_does_not_exist_is_none():
    assert degradation("silog", torch.ones(1, 2, 2), torch.zeros(1, 2, 2))[0]["value"] is None


def test_panels_show_the_reference_at_every_ratio_then_other_rules_at_the_highest():
    rules = combinations(["best", "drop", "tome"], ["norm", "random"], [0.1, 0.5])
    shown = [str(rule) for rule in panels(rules, "norm")]
    assert shown == ["best, norm, 0.1", "best, norm, 0.5", "drop, norm, 0.5", "best, random, 0.5", "drop, random, 0.5",
                     "tome, tome, 0.5"]  # fmt: skip


@pytest.fixture(scope="module")
def subject():
    probe = pb.load_probe("tiny-scenes", "cls", 4, device="cpu")
    return Subject(probe.backbone, probe.decoder, (4,))


def test_nothing_removed_changes_nothing(subject):
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    plan = subject.plan(Combination("best", "norm", 0.0))
    output, records = subject.pruned(images, plan, ScoreBook(subject).per_stage("norm"))
    assert torch.equal(output, subject.full(images)) and all(record.removed.numel() == 0 for record in records)


def test_exact_scores_are_computed_once_for_all_plans(subject, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "pullback.pruning.compare_scores.exact_modes",
        lambda probe, rank: lambda tokens, context: calls.append(1) or torch.rand(len(tokens), rank, *tokens.shape[1:]),
    )
    images, scores = torch.randn(2, 3, 56, 56), BatchScores(ScoreBook(subject, rank=2), ["a", "b"])
    for rule in combinations(["best", "paper"], ["exact"], [0.25, 0.5]):
        subject.pruned(images, subject.plan(rule), scores.per_stage("exact"), scores.modes)
    assert len(calls) == 1


def test_exact_importance_is_that_of_the_metric(subject):
    from pullback.geometry.scores import exact_importance
    from pullback.pruning import run_pruned

    images, seen = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(0)), {}
    probe = pb.ProbeMap(subject.backbone, subject.decoder, 4)
    ours, theirs = BatchScores(ScoreBook(subject, rank=3), ["a"]).per_stage("exact")[0], exact_importance(probe, 3)

    def both(tokens, context):
        seen.update(ours=ours(tokens, context), theirs=theirs(tokens, context))
        return seen["ours"]

    with torch.no_grad():
        run_pruned(subject.backbone, images, subject.plan(BEST), [both], layers=(11,))
    torch.testing.assert_close(seen["ours"], seen["theirs"], rtol=1e-4, atol=1e-6)


def test_a_random_score_belongs_to_its_image(subject):
    book = ScoreBook(subject, seed=1)
    images = torch.randn(3, 3, 56, 56)
    plan = subject.plan(OTHER)

    def removed(keys, which):
        _, records = subject.pruned(images[which], plan, BatchScores(book, keys).per_stage("random"))
        return records[0].removed

    together, alone = removed(["a", "b", "c"], [0, 1, 2]), removed(["b"], [1])
    assert torch.equal(together[1:2], alone) and not torch.equal(together[0], together[1])


def settings() -> dict:
    return {"model": "m", "weights": "w", "seed": 0, "head": None}


def row(rule: Combination, image: str, value: float | None) -> dict:
    return {"preset": rule.preset, "score": rule.score, "ratio": rule.ratio, "image": image, "value": value}


def test_the_tests_of_a_summary_are_paired_and_over_common_images(tmp_path):
    store = RowStore(tmp_path, settings())
    generator = np.random.default_rng(0)
    images = [f"{number}.png" for number in range(20)]
    values = {rule: generator.random(20) + shift for rule, shift in ((BEST, 0.0), (OTHER, 0.5), (TOME, 1.0))}
    for rule, own in values.items():
        store.add(row(rule, image, value) for image, value in zip(images, own.tolist(), strict=True))
    store.add([row(BEST, "only-here.png", 1.0), row(OTHER, "none.png", None)])
    wanted = [BEST, OTHER, TOME]
    assert images_of_all(store, wanted, [*images, "only-here.png", "none.png"]) == images
    best, other, tome = summarise(store, wanted, images, ["norm", "random"], 0, {})
    assert best["tests"] == [] and best["images"] == 20
    assert other["tests"][0]["p_value"] == pytest.approx(stats.wilcoxon(values[OTHER], values[BEST]).pvalue)
    assert other["tests"][0]["factor"] == pytest.approx(values[OTHER].mean() / values[BEST].mean())
    assert (tome["tests"][0]["preset"], tome["tests"][0]["score"]) == ("best", "norm")
    low, high = other["tests"][0]["interval"]
    assert 0 < low < other["tests"][0]["difference"] < high


def test_the_reference_is_importance_or_the_first():
    assert reference_score(["random", "importance"]) == "importance" and reference_score(["random", "norm"]) == "random"


def test_a_damaged_line_inside_the_rows_is_refused(tmp_path):
    RowStore(tmp_path, settings()).add([row(BEST, "a", 1.0)])
    (tmp_path / "rows.jsonl").write_text("{nonsense\n" + (tmp_path / "rows.jsonl").read_text())
    with pytest.raises(PullbackError, match=r"out: .*rows.jsonl has a line that is no JSON"):
        RowStore(tmp_path, settings())


def test_another_version_may_go_on_and_other_weights_may_not(tmp_path):
    RowStore(tmp_path, {**settings(), "commit": "a"})
    assert len(RowStore(tmp_path, {**settings(), "commit": "b"})) == 0
    with pytest.raises(PullbackError, match="weights: 'w' there, 'x' asked for"):
        RowStore(tmp_path, {**settings(), "weights": "x"})
    assert json.loads((tmp_path / "settings.json").read_text())["commit"] == "b"


def test_the_commit_is_that_of_the_checkout_or_nothing():
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
