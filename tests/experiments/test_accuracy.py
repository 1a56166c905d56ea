"""Classes after pruning: embeddings and votes against their definition, verdicts on rows made by hand, and one small
run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.finished import Known, cut_down, finished, judged, rows_file, run
from pullback.evaluation.statistics import mcnemar_p
from pullback.experiments.accuracy import ACCURACY, CENSUSES, UNPRUNED, WHOLE, Census, embedded
from pullback.experiments.experiment import Place
from pullback.experiments.merging import COLUMNS, DINOV2, OURS, TINY, TINY_EARLY, Point, drawn, heads_of, probe_of
from pullback.experiments.scales import SCALES, scale_of
from pullback.experiments.workshop import Workshop
from pullback.runs.progress import Progress

PHOTOS, SCENES, EARLY = CENSUSES
FEW = {
    "images": 3, "train": 8, "early images": 2, "early train": 8, "seeds": 1, "steps": 4, "width": 16,
    "spn images": 8, "spn steps": 2, "spn batch": 2, "spn width": 16, "scene size": 56, "scenes": 24, "photos": 4,
}  # fmt: skip


# One small run


@pytest.fixture(scope="module", autouse=True)
def parts():
    """Pictures come ten at a time, so that there are several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pullback.experiments.accuracy._PART", 10)
        yield


@pytest.fixture(scope="module")
def cut():
    return cut_down(ACCURACY, lambda cell: cell.key.startswith(SCENES.table + ": "), **FEW)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("accuracy")


@pytest.fixture(scope="module")
def rows(cut, out) -> dict[Place, dict]:
    return {Place(row["table"], row["row"], row["column"]): row for row in run(cut, out)}


@pytest.fixture(scope="module")
def shop(cut, out) -> Workshop:
    return Workshop(cut, SCALES["tiny"], out, torch.device("cpu"), Progress())


@pytest.fixture(scope="module")
def tokens(shop, rows) -> tuple[dict, np.ndarray]:
    """Normalised class tokens by place, and the classes."""
    found, labels, _ = embedded(SCENES, shop)
    unit = {place: torch.nn.functional.normalize(value.double(), dim=1).numpy() for place, value in found.items()}
    return unit, labels.numpy()


def voted(bank: np.ndarray, classes: np.ndarray, query: np.ndarray) -> int:
    """The class with most weight among the 20 nearest."""
    cosines = bank @ query
    nearest = np.argsort(-cosines)[:20]
    weights = np.exp(cosines[nearest] / 0.07)
    return max(set(classes[nearest].tolist()), key=lambda own: weights[classes[nearest] == own].sum())


def alone(bank: np.ndarray, classes: np.ndarray, queries: np.ndarray) -> np.ndarray:
    others = [np.arange(len(classes)) != at for at in range(len(classes))]
    return np.array([
        voted(bank[rest], classes[rest], queries[at]) == classes[at] for at, rest in enumerate(others)
    ])  # fmt: skip


def test_shares_are_votes_of_the_nearest_with_three_banks(rows, tokens) -> None:
    unit, classes = tokens
    whole, tables = unit[UNPRUNED, WHOLE], SCENES.tables()
    for place in ((UNPRUNED, WHOLE), ("Importance", "0.20"), ("Random", "0.50"), (OURS, "0.50")):
        queries = unit[place]
        one, alike = rows[Place(tables["one"], *place)], rows[Place(tables["alike"], *place)]
        assert one["value"] == pytest.approx(alone(whole, classes, queries).mean()) and one["count"] == 24
        assert alike["value"] == pytest.approx(alone(queries, classes, queries).mean())
        banked = rows[Place(tables["bank"], *place)]
        hits = [voted(whole[6:], classes[6:], queries[at]) == classes[at] for at in range(6)]
        assert banked["value"] == pytest.approx(np.mean(hits)) and banked["count"] == 6, "a quarter asks the rest"
        assert one["low"] <= one["value"] <= one["high"]


def test_a_bank_is_of_unpruned_pictures_or_pruned_alike(shop, monkeypatch) -> None:
    """On embeddings that differ so much that every other bank gives another share."""
    draws = np.random.default_rng(0)
    places = [(UNPRUNED, WHOLE), *((rule, column) for rule in SCENES.rules for column in SCENES.columns)]
    classes, centres = draws.integers(0, 4, 120), draws.normal(size=(4, 8))
    found = {place: torch.tensor(centres[classes] + 2 * draws.normal(size=(120, 8))) for place in places}
    split = torch.arange(60), torch.arange(60, 120)
    monkeypatch.setattr("pullback.experiments.accuracy.embedded", lambda *of: (found, torch.tensor(classes), split))
    unit = {place: torch.nn.functional.normalize(value, dim=1).numpy() for place, value in found.items()}
    whole, tables = unit[UNPRUNED, WHOLE], SCENES.tables()
    for cell in ACCURACY.cells(SCALES["tiny"]):
        name = cell.key.removeprefix(f"{SCENES.table}: ")
        if name not in ("one", "alike", "bank"):
            continue
        assert cell.run is not None
        rows = {(one.row, one.column): one.value for one in cell.run(shop) if one.table == tables[name]}
        for place in places[::7]:
            if name == "bank":
                asks = [voted(whole[60:], classes[60:], unit[place][at]) == classes[at] for at in range(60)]
                assert rows[place] == pytest.approx(np.mean(asks)), (name, place)
            else:
                bank = whole if name == "one" else unit[place]
                assert rows[place] == pytest.approx(alone(bank, classes, unit[place]).mean()), (name, place)


def test_tests_are_of_the_same_pictures(rows, tokens) -> None:
    unit, classes = tokens
    hits = {place: alone(unit[UNPRUNED, WHOLE], classes, queries) for place, queries in unit.items()}
    tables = SCENES.tables()
    for column in ("0.05", "0.50"):
        for rule in SCENES.rules:
            row = rows[Place(tables["p"], rule, f"p {column}")]
            assert row["value"] == pytest.approx(mcnemar_p(hits[rule, column], hits[UNPRUNED, WHOLE]))
        for rule in SCENES.rules[1:]:
            row = rows[Place(tables["chosen"], rule, f"p {column}")]
            assert row["value"] == pytest.approx(mcnemar_p(hits[rule, column], hits["Importance", column]))


def test_embeddings_are_class_tokens_of_the_pruned_model_whatever_part_they_are_in(shop, rows) -> None:
    found, labels, (asks, answers) = embedded(SCENES, shop)
    pixels = shop.images("scenes", 24, model="tiny-scenes", size=56)[20:]
    point = Point(probe_of(shop, TINY), pixels)
    torch.testing.assert_close(found[UNPRUNED, WHOLE][20:], point.full, rtol=1e-4, atol=1e-5)
    (head,) = heads_of(shop, TINY, 1)
    best = point.output(point.plan("best", 0.5), head(point.tokens).detach())
    torch.testing.assert_close(found[OURS, "0.50"][20:], best, rtol=1e-4, atol=1e-5)
    names = shop.classes("scenes", 24)
    assert [sorted(set(names))[label] for label in labels.tolist()] == names
    assert (asks.tolist(), answers.tolist()) == (list(range(6)), list(range(6, 24)))


def test_early_tokens_are_dropped_by_each_rule(shop) -> None:
    own = replace(EARLY, setting=replace(TINY_EARLY, layer=10))  # as far as this is concerned, and faster
    found, _, _ = embedded(own, shop)
    point = Point(probe_of(shop, own.setting), shop.images("scenes", 24, model="tiny-scenes", size=56)[10:20])
    random = point.output(point.plan("drop", 0.5), drawn(shop, 0, 10, 10, 17))
    torch.testing.assert_close(found["Random, dropped", "0.50"][10:20], random, rtol=1e-4, atol=1e-5)
    assert list(found) == [
        (UNPRUNED, WHOLE), *((rule, column) for rule in EARLY.rules for column in ("0.20", "0.50"))
    ]  # fmt: skip


def test_a_second_run_gives_the_same_bytes(cut, rows, out, tmp_path) -> None:
    part = cut_down(cut, lambda cell: cell.key.endswith((": one", ": tests")))
    run(part, tmp_path)
    again = rows_file(part, tmp_path).read_text().splitlines()
    assert set(again) <= set(rows_file(cut, out).read_text().splitlines()) and len(again) > 29


def test_photographs_of_three_roles_have_the_classes_of_their_table(tmp_path) -> None:
    for role in PHOTOS.roles:
        for number in range(3):
            file = tmp_path / "photos" / role / f"class-{number}" / "0.png"
            file.parent.mkdir(parents=True)
            Image.fromarray(np.full((60, 60, 3), 40 * number, np.uint8)).save(file)
    data = {role: str(tmp_path / "photos" / role) for role in PHOTOS.roles}
    scale = scale_of("tiny", {"dinov2": "tiny-scenes"}, data)
    few = {**FEW, "train": 2, "spn images": 2, "steps": 2}
    shop = Workshop(replace(ACCURACY, counts={"tiny": few}), scale, tmp_path / "out", torch.device("cpu"), Progress())
    own = replace(PHOTOS, setting=replace(DINOV2, early=True), rules=(OURS,), columns=("0.50",))
    with pytest.MonkeyPatch.context() as patch:  # the head is not what this is about
        patch.setattr("pullback.experiments.accuracy.heads_of", lambda *of: [lambda tokens: tokens[..., 0].exp()])
        found, labels, (asks, answers) = embedded(own, shop)
    assert labels.tolist() == [0, 1, 2] * 3 and found[OURS, "0.50"].shape == (9, 192)
    assert asks.tolist() == [3, 4, 5] and answers.tolist() == [6, 7, 8], "photos ask photos-bank"


# Verdicts


def shares(own: Census, whole: float, others: Known | list[float], name: str = "one") -> dict:
    places = [(rule, column) for rule in own.rules for column in own.columns]
    table = own.tables()[name]
    known = others if isinstance(others, list) else [others] * len(places)
    return {(table, UNPRUNED, WHOLE): whole} | {
        (table, *place): value for place, value in zip(places, known, strict=True)
    }


def compared(own: Census, p: float, name: str, **but: float) -> dict:
    """The same p of every rule and ratio, but for some rules at 0.50; "_" stands for a blank."""
    rules = own.rules if name == "p" else own.rules[1:]
    found = {(own.tables()[name], rule, f"p {column}"): p for rule in rules for column in own.columns}
    return found | {(own.tables()[name], rule.replace("_", " "), "p 0.50"): value for rule, value in but.items()}


def verdict(beginning: str, *parts: dict) -> tuple[str, str]:
    joined = {place: known for part in parts for place, known in part.items()}
    return judged(ACCURACY, finished(joined, count=400), beginning)


def test_top1_stays_where_no_rule_is_farther_than_14_points_with_either_bank() -> None:
    claim, some = "Top-1 stays", shares(PHOTOS, 0.674, 0.664, "bank")
    word, why = verdict(claim, shares(PHOTOS, 0.674, 0.670), some)
    assert word == "holds"
    assert f"{PHOTOS.table}: with a bank, 400 pictures: 0.674 unpruned, 0.664 to 0.664" in why
    word, why = verdict(claim, shares(PHOTOS, 0.674, [0.67] * 27 + [0.65]), some)
    assert word == "holds partly" and "farthest “Ours (best)” at 0.50 (-2.4 points)" in why
    assert verdict(claim, shares(PHOTOS, 0.674, 0.7), shares(PHOTOS, 0.674, 0.6, "bank"))[0] == "does not hold"
    assert verdict(claim, shares(EARLY, 0.7, 0.7))[0] == "not at this scale"


def test_pruning_is_safe_where_no_rule_is_told_from_the_unpruned_model() -> None:
    claim, seen = "Pruning is safe", shares(SCENES, 0.7, 0.7)
    assert verdict(claim, seen, compared(SCENES, 0.3, "p"))[0] == "holds"
    word, why = verdict(claim, seen, compared(SCENES, 0.3, "p", Random=0.003))
    assert word == "holds partly" and "“Random” p 0.003 at 0.50" in why and "“Importance” p 0.3 at 0.05" in why
    assert verdict(claim, seen, compared(SCENES, 0.003, "p"))[0] == "does not hold"
    photos = shares(PHOTOS, 0.7, 0.7), compared(PHOTOS, 0.3, "p")
    assert verdict(claim, seen, compared(SCENES, 0.003, "p"), *photos)[0] == "holds", "the paper's pictures decide"
    assert verdict(claim)[0] == "not at this scale"


def test_methods_are_separated_where_a_rule_differs_from_importance() -> None:
    claim, seen = "Top-1 cannot", shares(SCENES, 0.7, 0.7)
    assert verdict(claim, seen, compared(SCENES, 0.3, "chosen"))[0] == "holds"
    assert verdict(claim, seen, compared(SCENES, 0.3, "chosen", **{OURS: 0.001}))[0] == "holds", (
        "it is no rule of the paper"
    )
    assert verdict(claim, seen, compared(SCENES, 0.3, "chosen", Random=0.001))[0] == "holds partly"
    assert verdict(claim, seen, compared(SCENES, 0.001, "chosen"))[0] == "does not hold"
    early = shares(EARLY, 0.7, 0.7), compared(EARLY, 0.001, "chosen")
    word, why = verdict(claim, seen, compared(SCENES, 0.3, "chosen"), *early)
    theirs = shares(PHOTOS, 0.7, 0.7), compared(PHOTOS, 0.3, "chosen")
    assert verdict(claim, seen, *early, *theirs)[0] == "holds", "the paper's pictures decide alone"
    assert word == "holds partly" and EARLY.table in why and "“Random, dropped” p 0.001 at 0.20" in why


def test_the_papers_numbers_stand_at_their_places() -> None:
    """The unpruned model and three rules at half of the tokens, with a bank of other pictures."""
    table = f"{DINOV2.table}: with a bank"
    assert ACCURACY.paper == {
        Place(table, UNPRUNED, WHOLE): 0.674,
        Place(table, "Importance", "0.50"): 0.670,
        Place(table, "ToMe score", "0.50"): 0.668,
        Place(table, "Random", "0.50"): 0.664,
    }
    assert PHOTOS.columns == SCENES.columns == COLUMNS


def test_a_footnote_says_that_the_level_of_top1_is_that_of_the_bank() -> None:
    (note,) = ACCURACY.footnotes
    assert note(finished({})) is None
    found = finished({**shares(PHOTOS, 0.504, 0.5), **shares(PHOTOS, 0.35, 0.34, "bank")}, count=3950)
    assert "0.350 with the bank of this run, and 0.504 where each of 3,950 pictures asks" in (note(found) or "")
