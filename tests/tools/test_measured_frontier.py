"""The page of pruning against its rivals says who is ahead where, and which goals are reached, as the files have it."""

import json

import pytest

from measured import common, frontier


def point(method: str, name: str, operations: float, mean: float, ours: bool = False, **plan) -> dict:
    interval = [0.9 * mean, 1.1 * mean]
    return {
        "method": method,
        "point": name,
        "tuned": False,
        "ours": ours,
        "plan": plan,
        "mean": mean,
        "interval": interval,
        "operations": operations,
    }


def test(budget: float, low: float, high: float) -> dict:
    return {
        "budget": budget,
        "tuned": False,
        "rival": {"method": "resize", "point": "182 px"},
        "difference": (low + high) / 2,
        "interval": [low, high],
        "factor": 0.5,
        "p_value": 1e-4,
    }


test.__test__ = False
POINTS = [
    point("planned", "a", 0.75, 0.6, ours=True, size=210, stages=[6], shares=[0.4]),
    point("planned", "b", 0.70, 1.5, ours=True, stages=[4, 7], shares=[0.3, 0.1]),
    point("planned", "c", 0.60, 3.0, ours=True, stages=[3], shares=[0.5]),
    point("planned", "d", 0.50, 9.0, ours=True, stages=[2], shares=[0.6]),
    point("best", "of many settings", 0.75, 0.1, ours=True, stages=[7], shares=[0.5]),  # decides no goal
    point("resize", "182 px", 0.59, 4.0),
    point("resize", "154 px", 0.42, 8.0),
]


@pytest.fixture
def document(tmp_path, monkeypatch) -> dict:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    budgets = [0.76, 0.715, 0.61, 0.6, 0.5]
    methods = {"planned": ["a", "b", "c", "c", "d"], "resize": [None, None, "182 px", "182 px", "154 px"]}
    content = {
        "machine": "a CPU",
        "date": "2026-11-19",
        "budgets": budgets,
        "images_compared": 200,
        "points": POINTS,
        "tests": [test(0.61, -0.3, -0.1), test(0.6, -0.2, 0.1), test(0.5, 0.2, 0.4)],
        "frontiers": [
            {"method": name, "tuned": False, "ours": name == "planned", "points": 9, "budgets": own}
            for name, own in methods.items()
        ],
    }
    (tmp_path / frontier.HELD_OUT).write_text(json.dumps(content))
    return content


def test_goals_are_reached_or_missed_by_the_best_point_within_each_budget(document):
    text = frontier.goals()
    assert "| 0.76 | 210 px, 40 % after 6 | 0.600 [0.540, 0.660] | at most 0.75 | yes |" in text
    assert (
        "| 0.715 | 30 % after 4, 10 % after 7 | 1.50 [1.35, 1.65] | at most 1.4 | no, the interval reaches below |"
        in text
    )
    assert "| 0.6 | 50 % after 3 | 3.00 [2.70, 3.30] | below 4.00, 182 px | yes, within the noise |" in text
    assert "| 0.5 | 60 % after 2 | 9.00 [8.10, 9.90] | below 8.00, 154 px | no |" in text
    assert "Reached at 0.76, 0.61 and 0.6 of the operations." in text and "Not reached at 0.715 and 0.5." in text


def test_the_least_error_within_a_budget_is_bold_and_a_method_without_a_point_has_none(document):
    lines = frontier.by_budget(document).splitlines()
    assert lines[2] == "| **planned** (9) | **0.600** | **1.50** | **3.00** | **3.00** | 9.00 |"
    assert lines[3] == "| resize (9) | – | – | 4.00 | 4.00 | **8.00** |"


def test_who_is_ahead_follows_from_the_intervals_of_the_differences(document):
    ahead, neither, behind = frontier.verdicts(document)
    assert ahead == "- Ours is ahead of the best rival at 0.61 (0.50 of 182 px, p = 1e-4)."
    assert "do not tell" in neither and "0.6 (" in neither
    assert "A rival is ahead" in behind and "0.5 (" in behind


def contested(budget: float, mean: float, *rivals: tuple[str, float, float, float]) -> dict:
    """A point of ours with rivals: name, error, and the interval of what ours loses more."""
    names = [(method, its, (low + high) / 2, [low, high]) for method, its, low, high in rivals]
    return {
        "budget": budget,
        "tuned": False,
        "method": "planned",
        "point": f"planned {budget:g}",
        "mean": mean,
        "interval": [0.9 * mean, 1.1 * mean],
        "operations": budget,
        "against": [
            {"method": method, "mean": its, "difference": more, "interval of it": interval, "p": 1e-4}
            for method, its, more, interval in names
        ],
    }


@pytest.fixture
def contests(document, tmp_path) -> dict:
    found = [
        contested(0.7, 1.0, ("resize", 2.0, -1.2, -0.8), ("tome", 3.0, -2.2, -1.8)),
        contested(0.61, 2.9, ("resize", 3.1, -0.3, 0.1), ("tome", 5.0, -2.2, -1.8)),
        contested(0.5, 4.0, ("resize", 3.0, 0.8, 1.2)),
    ]
    expected = {
        one["point"]: {"pictures": 32, "blocks": [3, 6], "stages": 2, "polished": 0.95 * one["mean"], "searched": 0.98}
        for one in found
    }
    points = [
        point("planned", one["point"], one["budget"], one["mean"], True, stages=[3], shares=[0.4]) for one in found
    ]
    return {**document, "points": points, "contests": found, "expected": expected}


def test_ours_is_below_every_rival_only_where_the_intervals_say_so(contests):
    every, some, no = frontier.who_is_ahead(contests)
    assert every.endswith(
        "0.7 of the operations ours is below every rival (0.50 of resize, the best of them, p = 1e-4)."
    )
    assert "below every rival, of which not all can be told from it (0.94 of resize" in some
    assert "**not below every rival** (1.33 of resize" in no
    assert "| **ours** | **1.00** | **2.90** | 4.00 |" in frontier.against(contests)
    assert "| tome | 3.00 | 5.00 | – |" in frontier.against(contests)


def test_what_clip_was_asked_for_is_judged_by_the_strongest_rival(contests, tmp_path):
    (tmp_path / frontier.CLIP).write_text(json.dumps(contests))
    text = frontier.clip()
    assert "| 0.7 | 40 % after 3 | 0.950 | 1.00 [0.900, 1.10] | below 2.00, resize | yes |" in text
    assert "| below 3.10, resize | yes, within the noise |" in text and "| below 3.00, resize | no |" in text
    assert "did not help everywhere on the half that did not choose: from 0.980 to 0.950 at 0.7" in text
    assert "32 training photographs" in text and "after blocks 3 and 6" in text


def test_polished_plans_stand_beside_those_of_before(contests, document, tmp_path):
    old = [
        point("planned", f"planned {budget}", budget, mean) for budget, mean in ((0.7, 1.1), (0.61, 3.2), (0.5, 4.1))
    ]
    (tmp_path / frontier.HELD_OUT).write_text(json.dumps(document | {"points": old}))
    (tmp_path / frontier.POLISHED).write_text(json.dumps(contests))
    text = frontier.polished()
    assert "2.90 [2.61, 3.19] | 3.20 [2.88, 3.52] | at most 3.3 | yes |" in text
    (tmp_path / frontier.HELD_OUT).write_text(json.dumps(document | {"points": [{**o, "mean": 0.5} for o in old]}))
    with pytest.raises(common.WrongClaim, match="plans of before"):
        frontier.polished()
