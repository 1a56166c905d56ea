"""Tuned beside frozen: what was asked for against what was reached, who is ahead, seeds, neighbours, a dense map."""

import json

import pytest

from measured import common, frontier_tuned

RECORD = {"images": 900, "held_out_images": 100, "steps": 700, "size": [224, 224], "best_step": 600}


def entry(method: str, point: str, mean: float, **more) -> dict:
    interval = [0.9 * mean, 1.1 * mean]
    return {"method": method, "point": point, "mean": mean, "interval": interval, "operations": 0.7, **more}


def against(method: str, point: str, mean: float, low: float, high: float) -> dict:
    return entry(method, point, mean) | {"difference": (low + high) / 2, "interval of it": [low, high], "p": 1e-4}


def contest(budget: float, tuned: bool, mean: float, rivals: list[dict]) -> dict:
    point = f"planned {budget:g}" + (" seed 0" if tuned else "")
    return {"budget": budget, "tuned": tuned, **entry("planned", point, mean), "against": rivals}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def document(folder) -> dict:
    origin = {"machine": "a GPU", "date": "2026-11-20"}
    contests = [
        contest(0.715, False, 1.2, []),
        contest(0.7, False, 1.5, [against("tome", "tome 0.7", 4.0, -3.0, -2.0)]),
        contest(0.715, True, 0.6, []),
        contest(
            0.7,
            True,
            0.8,
            [
                against("tome", "tome 0.7 seed 0", 2.0, -1.5, -1.0),
                against("resize", "resize 0.7 seed 0", 0.7, -0.1, 0.3),
            ],
        ),
    ]
    plan = {"plan": {"size": None, "stages": [5], "shares": [0.5]}, "tuned": True, "ours": True}
    points = [entry("planned", found["point"], found["mean"], **plan) for found in contests]
    content = {**origin, "budgets": [0.715, 0.7], "images_compared": 200, "points": points, "contests": contests}
    content["tuning"] = {"planned 0.7 seed 0": RECORD, "tome 0.7 seed 0": RECORD}
    (folder / frontier_tuned.HELD_OUT).write_text(json.dumps(content))
    return content


def test_what_was_asked_for_is_reached_missed_or_not_measured(document):
    text = frontier_tuned.goals()
    assert "| 0.715 | frozen | 50 % after 5 | 1.20 [1.08, 1.32] | at most 1.4 | yes |" in text
    assert "| 0.715 | tuned | 50 % after 5 | 0.600 [0.540, 0.660] | at most 0.55 | no, within the noise |" in text
    assert "| 0.7 | tuned | 50 % after 5 | 0.800 [0.720, 0.880] | below 0.700, resize | no, within the noise |" in text
    assert "- Reached: 0.715 frozen." in text and "- Not reached: 0.715 tuned and 0.7 tuned." in text
    assert "- Not measured: 0.76 frozen, 0.61 frozen," in text


def test_frozen_and_tuned_stand_beside_one_another_where_rivals_were_tuned(document):
    text = frontier_tuned.cls()
    assert "| operations, at most | 0.7 |" in text  # at 0.715 ours alone was tuned
    assert "| **ours** | **1.50** → 0.800 |" in text
    assert "| resize | – → **0.700** |" in text and "| tome | 4.00 → 2.00 |" in text
    assert "900 photographs, 100 others that judged, 700 steps, crops of 224 pixels" in text
    assert "- Frozen, ours is ahead of the best rival at 0.7 (0.38 of tome, p = 1e-4)." in text
    assert "- Tuned, ours is not to be told from the best rival at 0.7 (1.14 of resize, p = 1e-4)." in text


def test_a_page_does_not_say_alike_of_what_was_tuned_otherwise(document, folder):
    document["tuning"]["tome 0.7 seed 0"] = RECORD | {"steps": 350}
    (folder / frontier_tuned.HELD_OUT).write_text(json.dumps(document))
    with pytest.raises(common.WrongClaim, match="tuned alike"):
        frontier_tuned.cls()


def test_seeds_have_their_spread(document, folder):
    others = {**document, "points": [entry("planned, seed 1", "planned 0.7 seed 1", 1.0)]}
    (folder / frontier_tuned.SEEDS).write_text(json.dumps(others))
    assert "| planned 0.7 | 0.800 | 1.00 | 0.900 ± 0.14 |" in frontier_tuned.seeds()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([-0.003, -0.004, -0.002], "it loses at most 0.5 points."),
        ([-0.003, -0.006, 0.001], "it loses at most 0.5 points, though the interval reaches beyond."),
        ([-0.009, -0.015, -0.006], "it loses **more than** 0.5 points."),
    ],
)
def test_what_neighbours_lose(folder, more, sentence):
    found = {"accuracy": 0.7, "more": more[0], "more interval": more[1:], "p_value": 0.03}
    rows = [{"name": name, "k": k, **found} for name in ("unpruned", "planned 0.7 tuned") for k in (10, 20)]
    content = {"machine": {"device": "a GPU", "date": "2026-11-20", "steps": 350}, "rows": rows}
    (folder / frontier_tuned.NEIGHBOURS).write_text(json.dumps(content))
    text = frontier_tuned.neighbours()
    assert sentence in text and "| unpruned | 70.0 | – | – | – | – |" in text
    assert "| planned 0.7 tuned | 70.0 | −0." in text


def test_trust_is_chosen_on_training_pictures(folder):
    def point(trust: float, mean: float) -> dict:
        return entry(f"best, trust {trust:g}", f"block 3, trust {trust:g}", mean, ours=True)

    origin = {"machine": "a GPU", "date": "2026-11-20", "budgets": [0.8, 0.6]}
    chosen = {**origin, "images_compared": 64, "points": [point(0.3, 2.0), point(0.7, 3.0)]}
    rival = entry("resize", "182 px", 1.5, ours=False)
    here = {**origin, "images_compared": 200, "points": [point(0.3, 1.4), point(0.7, 1.0), rival]}
    (folder / frontier_tuned.DENSE_CHOSEN).write_text(json.dumps(chosen))
    (folder / frontier_tuned.DENSE).write_text(json.dumps(here))
    text = frontier_tuned.dense()
    assert "| **best, trust 0.3** | **1.40** | – |" in text  # though 0.7 looks better here
    assert "- Best at 0.8 of the operations." in text and "at 0.6." in text
    assert "64 training photographs, trust out of 0.3, 0.7" in text
