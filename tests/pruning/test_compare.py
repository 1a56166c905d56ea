"""The parts of the comparison that need no command line: rules, scores of a batch, tests between rules."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import pullback as pb
from helpers.families import images_for, model_of
from helpers.registry import kept_tables
from pullback.backbones import load_backbone
from pullback.data.images import PixelFormat
from pullback.decoders import build_decoder
from pullback.errors import ModelError, PullbackError
from pullback.evaluation.cost import Timing
from pullback.pruning import compare
from pullback.pruning.compare import NOT_COMPARED, Costs, RuleRows, images_of_all, summarise
from pullback.pruning.examples import MAX_IMAGES, Examples, panels, write_examples
from pullback.pruning.rules import Rule, Scores, Subject, reference_score, rules
from pullback.registry import BACKBONES
from pullback.runs.documents import read_examples
from pullback.runs.progress import Progress
from pullback.runs.provenance import commit
from pullback.runs.settings import keep_settings

BEST, OTHER, OWN = (Rule(*rule, 0.5) for rule in (("best", "norm"), ("best", "random"), ("bipartite", "bipartite")))


def test_presets_of_the_literature_bring_their_own_score():
    found = rules(["best", "attention-drop"], ["norm", "random"], [0.1, 0.5])
    assert [str(rule) for rule in found] == [
        "best, norm, 0.1", "best, norm, 0.5", "best, random, 0.1", "best, random, 0.5",
        "attention-drop, class-attention, 0.1", "attention-drop, class-attention, 0.5",
    ]  # fmt: skip


def test_panels_show_the_reference_at_every_ratio_then_other_rules_at_the_highest():
    found = rules(["best", "drop", "bipartite"], ["norm", "random"], [0.1, 0.5])
    shown = [str(rule) for rule in panels(found, "norm")]
    assert shown == ["best, norm, 0.1", "best, norm, 0.5", "drop, norm, 0.5", "best, random, 0.5", "drop, random, 0.5",
                     "bipartite, bipartite, 0.5"]  # fmt: skip


def test_the_figures_show_a_few_images_of_a_larger_batch(tmp_path):
    pytest.importorskip("matplotlib")
    from pullback.report.prune_figures import output_png, tokens_png

    subject, keys = subject_of("depth-v2", "depth"), [f"{number}.png" for number in range(MAX_IMAGES + 2)]
    scores, images = Scores(subject), images_for("depth-v2", (3, 3), batch=len(keys))
    scores.begin(keys)
    shown = {rule: scores.pruned(rule) for rule in rules(["best"], ["norm", "random"], [0.5])}
    pixels = PixelFormat.of(tuple(images.shape[-2:]))
    few = Examples(scores)
    few.add(keys[:3], images[:3])
    assert not few.full
    few.add(keys[3:], images[3:])
    few.begin()
    write_examples(tmp_path, subject, shown, few.images, few.keys, pixels)
    arrays = read_examples(tmp_path)
    assert few.full and arrays["names"].tolist() == keys[:MAX_IMAGES]
    assert len(arrays["pictures"]) == len(arrays["before"]) == MAX_IMAGES
    for name in ("fates", "partners", "values", "after"):
        assert arrays[name].shape[:2] == (len(shown), MAX_IMAGES), name
    document = {"model": "depth-v2", "decoder": "depth", "stages": [1], "measure": "silog"}
    for draw in (output_png, tokens_png):
        assert draw(document, arrays, dpi=20).startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def subject():
    probe = pb.load_probe("tiny-scenes", "cls", 4, device="cpu")
    return Subject(probe.backbone, probe.decoder, (4,))


def test_nothing_removed_changes_nothing(subject):
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    output, records = subject.output(Scores(subject).pruned(Rule("best", "norm", 0.0)), images)
    assert torch.equal(output, subject.full(images)) and all(record.removed.numel() == 0 for record in records)


def test_exact_scores_are_computed_once_for_all_plans(subject, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "pullback.pruning.rules.exact_modes",
        lambda probe, rank: lambda tokens, context: calls.append(1) or torch.rand(len(tokens), rank, *tokens.shape[1:]),
    )
    images, scores = torch.randn(2, 3, 56, 56), Scores(subject, rank=2)
    models = [scores.pruned(rule) for rule in rules(["best", "paper"], ["exact"], [0.25, 0.5])]
    for batch in range(2):
        scores.begin([f"{batch}a", f"{batch}b"])
        for model in models:
            subject.output(model, images)
        assert len(calls) == batch + 1


def test_exact_importance_is_that_of_the_metric(subject):
    from pullback.geometry.scores import exact_importance
    from pullback.pruning import run_pruned

    images, seen = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(0)), {}
    probe = pb.ProbeMap(subject.backbone, subject.decoder, 4)
    (ours,), theirs = Scores(subject, rank=3).of("exact"), exact_importance(probe, 3)

    def both(tokens, context):
        seen.update(ours=ours(tokens, context), theirs=theirs(tokens, context))
        return seen["ours"]

    with torch.no_grad():
        run_pruned(subject.backbone, images, subject.plan(BEST), [both], layers=(11,))
    torch.testing.assert_close(seen["ours"], seen["theirs"], rtol=1e-4, atol=1e-6)


def test_a_random_score_belongs_to_its_image(subject):
    scores, images = Scores(subject, seed=1), torch.randn(3, 3, 56, 56)
    model = scores.pruned(OTHER)

    def removed(keys, which):
        scores.begin(keys)
        return subject.output(model, images[which])[1][0].removed

    together, alone = removed(["a", "b", "c"], [0, 1, 2]), removed(["b"], [1])
    assert torch.equal(together[1:2], alone) and not torch.equal(together[0], together[1])


def subject_of(name: str, decoder: str) -> Subject:
    backbone = load_backbone(model_of(name))
    return Subject(backbone, build_decoder(decoder, backbone), (1,))


@pytest.mark.parametrize(
    ("name", "decoder", "own"),
    [("dinov2", "cls", True), ("clip", "projection", True), ("depth-v2", "depth", True), ("depth-v2", "cls", False),
     ("siglip", "pool", True), ("siglip2", "pool", True), ("vit-classifier", "logits", True),
     ("timm-avg", "logits", True)],
)  # fmt: skip
def test_the_users_model_is_timed_against_its_pruned_copies(name, decoder, own, tmp_path, monkeypatch):
    """Where its output cannot be made of what a plan leaves, what the decoder reads is, and the summary says so."""
    subject, called, images = subject_of(name, decoder), [], images_for(name, (2, 3), batch=1)
    handle = subject.backbone.model.register_forward_hook(lambda *_: called.append(1))

    def clock(functions, device, rounds=20):
        for function in functions:
            function()
        return [Timing(2.0, 1.0, 3.0, rounds) for _ in functions]

    monkeypatch.setattr(compare, "race", clock)
    monkeypatch.setattr(compare, "milliseconds", lambda function, device, rounds: clock([function], device, rounds)[0])
    rule = Rule("drop", "norm", 0.5)
    costs, model = Costs(tmp_path / "cost.json", "here"), Scores(subject).pruned(rule, plain=True)
    try:
        notes = costs.complete(subject, {rule: model}, images, (1, 2), Progress())
    finally:
        handle.remove()
    assert bool(called) == model.has_output == own
    assert notes == [] if own else "the model's own output cannot be made of" in notes[0]
    assert costs.rules[rule]["flops"] < costs.unpruned_flops
    assert costs.rules[rule]["milliseconds"]["2"]["speedup"] == 1
    again = Costs(tmp_path / "cost.json", "here")
    assert again.rules == costs.rules and not Costs(tmp_path / "cost.json", "elsewhere").rules


def test_a_pruned_model_without_an_output_says_so():
    subject = subject_of("depth-v2", "cls")
    with pytest.raises(PullbackError, match=r"plan: the decoder of .* reads all patch tokens, so they must come back"):
        Scores(subject).pruned(Rule("drop", "norm", 0.5))(images_for("depth-v2", (3, 3)))
    with kept_tables():
        pb.register_backbone(replace(BACKBONES["siglip"], assemble=None))
        with pytest.raises(ModelError, match="siglip models cannot be pruned in place"):
            Scores(subject_of("siglip", "pool")).pruned(Rule("drop", "norm", 0.5))(images_for("siglip", (3, 3)))


def row(rule: Rule, image: str, value: float | None) -> dict:
    return {"preset": rule.preset, "score": rule.score, "ratio": rule.ratio, "image": image, "value": value}


def test_the_tests_of_a_summary_are_paired_and_over_common_images(tmp_path):
    store = RuleRows(tmp_path / "rows.jsonl")
    generator = np.random.default_rng(0)
    images = [f"{number}.png" for number in range(20)]
    values = {rule: generator.random(20) + shift for rule, shift in ((BEST, 0.0), (OTHER, 0.5), (OWN, 1.0))}
    for rule, own in values.items():
        store.add(row(rule, image, value) for image, value in zip(images, own.tolist(), strict=True))
    store.add([row(BEST, "only-here.png", 1.0), row(OTHER, "none.png", None)])
    wanted = [BEST, OTHER, OWN]
    assert images_of_all(store, wanted, [*images, "only-here.png", "none.png"]) == images
    best, other, own = summarise(store, wanted, images, ["norm", "random"], 0, {})
    assert best["tests"] == [] and best["images"] == 20
    assert other["tests"][0]["p_value"] == pytest.approx(stats.wilcoxon(values[OTHER], values[BEST]).pvalue)
    assert other["tests"][0]["factor"] == pytest.approx(values[OTHER].mean() / values[BEST].mean())
    assert (own["tests"][0]["preset"], own["tests"][0]["score"]) == ("best", "norm")
    low, high = other["tests"][0]["interval"]
    assert 0 < low < other["tests"][0]["difference"] < high


def test_rows_and_costs_by_former_names_are_those_of_the_rules_of_today(tmp_path):
    former = [("tome", "tome"), ("evit", "evit"), ("best", "evit")]
    now = [("bipartite", "bipartite"), ("attention-drop", "class-attention"), ("best", "class-attention")]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row(Rule(*names, 0.5), "a.png", float(value))) + "\n" for value, names in enumerate(former))
    )
    store = RuleRows(tmp_path / "rows.jsonl")
    assert [store.of(Rule(*names, 0.5))["a.png"]["value"] for names in now] == [0.0, 1.0, 2.0]
    stored = [{"preset": preset, "score": score, "ratio": 0.5, "flops": 7} for preset, score in former]
    (tmp_path / "cost.json").write_text(json.dumps({"machine": "m", "unpruned_flops": 9, "rules": stored}))
    costs = Costs(tmp_path / "cost.json", "m").rules
    assert list(costs) == [Rule(*names, 0.5) for names in now]
    assert [(cost["preset"], cost["score"]) for cost in costs.values()] == now


def test_rows_of_a_published_method_are_not_those_of_its_namesake():
    published = {"preset": "tome", "score": "keys", "ratio": 0.5}
    assert Rule.of(published) == Rule("tome", "keys", 0.5)


def test_the_reference_is_importance_or_the_first():
    assert reference_score(["random", "importance"]) == "importance" and reference_score(["random", "norm"]) == "random"


def test_a_damaged_line_inside_the_rows_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    RuleRows(path).add([row(BEST, "a", 1.0)])
    path.write_text("{nonsense\n" + path.read_text())
    with pytest.raises(PullbackError, match=r"out: line 1 of .*rows.jsonl is no JSON"):
        RuleRows(path)


def test_another_version_may_go_on_and_other_weights_may_not(tmp_path):
    path, settings = tmp_path / "settings.json", {"model": "m", "weights": "w", "seed": 0, "head": None}

    def keep(**changes):
        return keep_settings(path, {**settings, **changes}, holds="a comparison", ignore=NOT_COMPARED)

    keep(commit="a")
    keep(commit="b")
    with pytest.raises(PullbackError, match="weights: 'w' there, 'x' asked for"):
        keep(weights="x")
    assert json.loads(path.read_text())["commit"] == "b"


def test_the_commit_is_that_of_the_checkout_or_nothing():
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
