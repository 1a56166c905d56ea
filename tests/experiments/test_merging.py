"""Class tokens after a merge: against whole pruned models and dense modes, what seeds change, and how finished rows are
compared."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.finished import finished
from pullback.evaluation.fidelity import cosine_degradation
from pullback.evaluation.ranking import spearman
from pullback.experiments.cls_pruning import CLS_PRUNING
from pullback.experiments.merging import (
    CLIP,
    COLUMNS,
    COUNTS,
    DINOV2,
    DROPPED,
    EXACT,
    LEADS,
    OURS,
    RANK,
    RATIOS,
    RULES,
    SETTINGS,
    SKETCHES,
    TINY,
    TINY_EARLY,
    TINY_SHIFTED,
    Point,
    drawn,
    exactly,
    exceeds,
    factor,
    factors,
    heads_of,
    judged_on,
    lead_places,
    lead_rows,
    leads,
    measured,
    probe_of,
    range_in,
    rule_in,
    said,
    spn_of,
    trails,
    values_of,
)
from pullback.experiments.scales import SCALES, scale_of
from pullback.experiments.workshop import Workshop
from pullback.geometry.scores import exact_modes
from pullback.operators import JacobianOperator
from pullback.pruning.model import PrunedModel
from pullback.pruning.plan import preset
from pullback.pruning.rules import Subject
from pullback.runs.progress import Progress

FEW = {
    "images": 3, "train": 8, "early images": 2, "early train": 8, "seeds": 2, "steps": 4, "width": 16,
    "spn images": 8, "spn steps": 2, "spn batch": 2, "spn width": 16, "scene size": 56,
}  # fmt: skip
SMALL = replace(CLS_PRUNING, counts={"tiny": FEW})


def shop_in(out, scale=SCALES["tiny"]) -> Workshop:
    return Workshop(SMALL, scale, out, torch.device("cpu"), Progress())


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return shop_in(tmp_path_factory.mktemp("merging"))


@pytest.fixture(scope="module")
def point(shop) -> Point:
    return Point(probe_of(shop, TINY), shop.images("scenes", 3, model="tiny-scenes", size=56))


# A stage in the middle of a network that has run up to there


def test_nothing_merged_is_the_model_itself(shop, point) -> None:
    images = shop.images("scenes", 3, model="tiny-scenes", size=56)
    subject = Subject(point.backbone, point.probe.decoder, (10,))
    torch.testing.assert_close(point.full, subject.full(images).float())
    assert point.tokens.shape == (3, 17, 192)


@pytest.mark.parametrize(("rule", "ratio"), [("paper", 0.3), ("drop", 0.5), ("best", 0.2), ("best", 0.5)])
def test_an_output_is_that_of_the_whole_pruned_model(shop, point, rule: str, ratio: float) -> None:
    images = shop.images("scenes", 3, model="tiny-scenes", size=56)
    scores = torch.rand(3, 17, generator=torch.Generator().manual_seed(1))
    modes = exact_modes(point.probe, RANK)(point.tokens, point.context)
    plan = preset(rule, ratio, (10,), depth=point.backbone.depth)
    pruned = PrunedModel(
        point.backbone.model, plan, [lambda tokens, context: scores],
        (lambda tokens, context: modes) if rule == "paper" else None,
    )  # fmt: skip
    whole, _ = Subject(point.backbone, point.probe.decoder, (10,)).output(pruned, images)
    own = point.output(point.plan(rule, ratio), scores, modes=modes if rule == "paper" else None)
    torch.testing.assert_close(own, whole.float(), rtol=1e-4, atol=1e-5)
    assert (cosine_degradation(own, point.full) > 0).all()


def test_tokens_merge_under_d_task_of_the_dense_jacobian_with_the_weights_of_the_head(shop, point) -> None:
    """One token goes, into the nearest under Q_a; then the last block runs on what is left."""
    features = point.probe.features(shop.images("scenes", 3, model="tiny-scenes", size=56))
    dense = JacobianOperator(point.probe, features).dense().double()  # [B, M, N D]
    scores = torch.rand(3, 17, generator=torch.Generator().manual_seed(2)) + 1
    scores[:, 5] = 0.5  # goes at one sixteenth
    weights = torch.rand(3, 17, generator=torch.Generator().manual_seed(3)) + 0.1
    values = point.tokens.double()
    expected = []
    for number in range(3):
        _, sigma, right = torch.linalg.svd(dense[number], full_matrices=False)
        block = right[:RANK].unflatten(1, (17, 192))[:, 5] * sigma[:RANK, None]  # sigma_j v_j of token 5
        kept = [token for token in range(17) if token != 5]
        apart = [float((block @ (values[number, 5] - values[number, other])).norm()) for other in kept if other != 0]
        partner = kept[1:][int(np.argmin(apart))]
        merged = values[number].clone()
        share = weights[number, [5, partner]].double()
        merged[partner] = (share[0] * values[number, 5] + share[1] * values[number, partner]) / share.sum()
        expected.append(merged[kept].float())
    last = point.backbone.blocks[11](torch.stack(expected), None, None, None)
    truth = point.probe.decoder.output([last], point.layout, point.backbone.norm)
    modes = exact_modes(point.probe, RANK)(point.tokens, point.context)
    own = point.output(point.plan("paper", 1 / 16), scores, weights, modes)
    torch.testing.assert_close(own, truth, rtol=1e-4, atol=1e-5)


# What is measured


def test_rules_and_seeds_are_measured_image_by_image(shop, point) -> None:
    found = measured(shop, TINY, "exact")
    assert found["values"].shape == (len(RULES["exact"]), 2, len(RATIOS), 3)
    assert found["rho"].shape == found["rho-patches"].shape == (2, 3) and found["v1"].shape == (3,)
    exact = exact_modes(point.probe, RANK)(point.tokens, point.context)
    for seed, head in enumerate(heads_of(shop, TINY)):
        importance = head(point.tokens).detach()
        truth = torch.linalg.vector_norm(exact, dim=(1, 3))
        torch.testing.assert_close(found["rho"][seed], spearman(importance, truth))
        torch.testing.assert_close(found["rho-patches"][seed], spearman(importance[:, 1:], truth[:, 1:]))
        for rule, chosen, modes in (("Importance", importance, exact), (EXACT, truth, exact)):
            output = point.output(point.plan("paper", 0.3), chosen, importance, modes)
            own = values_of(shop, TINY, "exact", rule)[seed, RATIOS.index(0.3)]
            torch.testing.assert_close(own, cosine_degradation(output, point.full), rtol=1e-3, atol=1e-5)
        for rule, name in ((DROPPED, "drop"), (OURS, "best")):
            output = point.output(point.plan(name, 0.5), importance)
            own = values_of(shop, TINY, "exact", rule)[seed, RATIOS.index(0.5)]
            torch.testing.assert_close(own, cosine_degradation(output, point.full), rtol=1e-3, atol=1e-5)


def test_a_network_gives_d_task_of_its_own(shop) -> None:
    own, exact = (measured(shop, TINY, kind)["values"] for kind in ("spn", "exact"))
    assert own.shape == (6, 2, len(RATIOS), 3) and (own >= -1e-4).all()
    assert not torch.allclose(own, exact[:6])
    assert spn_of(shop, TINY).config.rank == RANK


def test_seeds_are_of_heads_and_draws(shop) -> None:
    first, second = heads_of(shop, TINY)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    dropped = values_of(shop, TINY, "exact", DROPPED)
    assert not torch.equal(dropped[0], dropped[1]), "another head"
    random = values_of(shop, TINY, "exact", "Random")
    assert not torch.equal(random[0], random[1])


def test_draws_belong_to_an_image_and_not_to_its_place_in_a_part(shop) -> None:
    whole = drawn(shop, 0, 0, 3, 17)
    assert torch.equal(drawn(shop, 0, 2, 1, 17)[0], whole[2])
    assert not torch.equal(whole[0], whole[1]) and not torch.equal(drawn(shop, 1, 0, 3, 17), whole)


def test_what_was_measured_is_found_again(shop, monkeypatch) -> None:
    before = measured(shop, TINY, "spn")["values"]

    def refuse(*arguments: object) -> None:
        raise AssertionError("measured anew")

    monkeypatch.setattr("pullback.experiments.merging._measure", refuse)
    again = shop_in(shop._out)
    assert torch.equal(measured(again, TINY, "spn")["values"], before)
    for other in (replace(TINY, data="scenes-shifted"), replace(TINY, train="scenes"), replace(TINY, layer=9)):
        with pytest.raises(AssertionError, match="measured anew"):
            measured(again, other, "spn")


def test_leads_are_differences_of_the_same_images(shop) -> None:
    found = {one.place: one for one in lead_rows(shop, TINY, ("Random", DROPPED))}
    assert list(found) == lead_places(TINY, ("Random", DROPPED))
    own = values_of(shop, TINY, "spn", "Importance").mean(0)
    for rule, kind in (("Random", "spn"), (DROPPED, "exact")):
        apart = own - values_of(shop, TINY, kind, rule).mean(0)
        for number, column in enumerate(COLUMNS):
            row = found[LEADS, f"{TINY.table}: {rule}", column]
            assert row.value == pytest.approx(float(apart[number].mean()), abs=1e-6)
            assert row.low <= row.value <= row.high and row.count == 3


def test_counts_are_those_of_the_folder_where_it_has_fewer(tmp_path) -> None:
    for number in range(2):
        Image.new("RGB", (20, 20)).save(tmp_path / f"{number}.png")
    scale = scale_of("tiny", {"dinov2": "tiny-scenes"}, {"photos": str(tmp_path), "photos-train": str(tmp_path)})
    shop = shop_in(tmp_path / "out", scale)
    assert (DINOV2.count(shop, "images"), DINOV2.count(shop, "train")) == (2, 8), "heads need all that they ask for"
    assert (TINY.count(shop, "images"), TINY_EARLY.count(shop, "images")) == (3, 2)
    assert (DINOV2.size(shop), TINY.size(shop)) == (None, 56)


def test_settings_differ_in_their_tables_and_tell_what_they_take() -> None:
    assert len({own.table for own in SETTINGS}) == len(SETTINGS)
    for own in SETTINGS:
        assert own.kinds[-1] == "exact" and ("spn" in own.kinds) != own.early
        few, many = ([own.forwards(SCALES[name], kind) for kind in own.kinds] for name in ("tiny", "paper"))
        assert all(0 < one < other for one, other in zip(few, many, strict=True))
    assert TINY_SHIFTED.forwards(SCALES["tiny"], "spn") < 0.2 * TINY.forwards(SCALES["tiny"], "spn"), (
        "it learns nothing"
    )
    assert (TINY.size_of(SCALES["tiny"]), DINOV2.size_of(SCALES["tiny"])) == (0.25, 1.0)
    assert {tuple(counts) for counts in COUNTS.values()} == {tuple(COUNTS["tiny"])}


# Finished rows


def test_the_papers_own_tables_decide_where_they_have_rows() -> None:
    ours = {(TINY.table, "Importance", "0.05"): 1.0}
    theirs = {(SKETCHES.table, "Importance", "0.05"): 1.0}
    assert judged_on(finished(ours | theirs), [DINOV2, SKETCHES], [TINY]) == [SKETCHES.table]
    assert judged_on(finished(ours), [DINOV2, SKETCHES], [TINY, TINY_EARLY]) == [TINY.table]
    assert judged_on(finished(ours), [CLIP]) == []


def test_a_rule_is_found_with_exact_distances_where_no_network_was_trained() -> None:
    found = finished({("t", "Importance", "0.05"): 1.0, ("t", exactly("ToMe score"), "0.05"): 1.0})
    assert rule_in(found, "t", "Importance") == "Importance"
    assert rule_in(found, "t", "ToMe score") == "ToMe score, exact d_task"
    assert exactly(OURS) == OURS and exactly(DROPPED) == DROPPED


def test_a_lead_lies_beyond_the_noise_where_its_interval_does() -> None:
    found = finished({(LEADS, "t: a", "0.05"): (-1, -2, -0.1), (LEADS, "t: b", "0.05"): (-1, -2, 0.1),
                      (LEADS, "t: c", "0.05"): (1, 0.1, 2)})  # fmt: skip
    assert [leads(found, "t", rule, "0.05") for rule in "abcd"] == [True, False, False, None]
    assert [trails(found, "t", rule, "0.05") for rule in "abcd"] == [False, False, True, None]


def test_factors_say_how_many_times_smaller_an_error_is() -> None:
    found = finished({("t", "a", "0.05"): 0.5, ("t", "b", "0.05"): 4.0, ("t", "zero", "0.05"): 0.0})
    assert factor(found, "t", "a", "b", "0.05") == 8 and factor(found, "t", "b", "a", "0.05") == 0.125
    assert factor(found, "t", "a", "c", "0.05") is None and factor(found, "t", "zero", "b", "0.05") > 1e9
    apart = finished({("t", "a", "0.05"): (1.0, 0.5, 2.0), ("t", "b", "0.05"): (12.0, 10.0, 16.0)})
    assert factors(apart, "t", "a", "b", "0.05") == (5.0, 32.0) and factors(apart, "t", "a", "c", "0.05") is None
    assert [exceeds((5.0, 32.0), least) for least in (4, 10, 32)] == [True, None, False] and exceeds(None, 1) is None
    assert factors(found, "t", "a", "b", "0.05") == (8, 8) and range_in(apart, "t", "a", "0.05") == (0.5, 2.0)
    assert (said(None), said(0.12345), said(1234.0)) == ("–", "0.123", "1.23e+03")
