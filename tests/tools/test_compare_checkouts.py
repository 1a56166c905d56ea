"""The comparison of two checkouts notices what it should, and nothing else."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import compare_jobs
from compare_checkouts import compare
from compare_jobs import JOBS, NEEDS_WEIGHTS, TOLERANCE, flat, names_here, plain, with_newer_names

DOCUMENT = {
    "model": "tiny-scenes",
    "layers": [{"kappa": 0.5, "se": 1e-9, "count": 3}, {"kappa": 0.25, "se": 2e-9, "count": 3}],
    "values": [1.0, 2.0, float("nan")],
    "array": np.array([3.0, -4.0], dtype=np.float32),
}


def result(**changes) -> dict:
    return {"leaves": dict(flat({**DOCUMENT, **changes})), "seconds": 0.0}


def test_the_same_twice_is_equal():
    found = compare(result(), result())
    assert found.largest == 0 and found.leaves == 9 and not found.fails(0.0)


@pytest.mark.parametrize(
    ("change", "size", "where"),
    [
        ({"array": np.array([3.0, -4.004], dtype=np.float32)}, 1e-3, "array"),
        ({"values": [1.0, 2.002, float("nan")]}, 1e-3, "values"),
        ({"layers": [DOCUMENT["layers"][0], {**DOCUMENT["layers"][1], "kappa": 0.2505}]}, 1e-3, "layers[*]/kappa"),
        ({"values": [1.0, 2.0, 3.0]}, np.inf, "values"),
        ({"values": [1.0, float("nan"), float("nan")]}, np.inf, "values"),
    ],
)
def test_a_changed_number_is_measured_and_found(change, size, where):
    found = compare(result(), result(**change))
    assert found.largest == pytest.approx(size, rel=1e-3) and found.where == where
    assert found.fails(1e-4)


def test_numbers_that_are_round_off_themselves_do_not_count():
    layers = [{**layer, "se": 3 * layer["se"]} for layer in DOCUMENT["layers"]]
    assert not compare(result(), result(layers=layers)).fails(1e-4)


def test_half_precision_may_differ_in_the_last_place_alone():
    halves = np.array([1.0, 0.3], dtype=np.float16)
    near, far = halves + np.spacing(halves), halves + 3 * np.spacing(halves)
    assert compare(result(array=halves), result(array=near)).largest == 0
    assert compare(result(array=halves), result(array=far)).fails(1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"layers": [DOCUMENT["layers"][0], {**DOCUMENT["layers"][1], "count": 4}]},
        {"array": np.array([3.0], dtype=np.float32)},
        {"array": np.array([3.0, -4.0])},
        {"model": None},
        {"model": 3.0},
    ],
)
def test_a_changed_text_count_shape_or_type_is_found(change):
    found = compare(result(), result(**change))
    assert len(found.changed) == 1 and found.fails(1.0)


def test_what_is_missing_fails_and_what_is_added_does_not():
    assert compare(result(more=1.0), result()).missing == ["more"]
    assert compare(result(more=1.0), result()).fails(1.0)
    found = compare(result(), result(more=1.0))
    assert found.added == ["more"] and not found.fails(0.0)
    assert not compare(result(more=1.0), result(), ["mo*"]).fails(0.0)


def test_a_job_that_failed_or_gave_nothing_never_agrees():
    assert compare({"error": "no", "seconds": 0.0}, result()).fails(1.0)
    assert compare({"leaves": {}}, {"leaves": {}}).fails(1.0)


def test_times_and_machines_are_left_out():
    assert plain({"a": [{"seconds": 3.0, "value": 1.0}], "machine": "x"}) == {"a": [{"value": 1.0}]}


def test_every_job_has_a_tolerance():
    assert TOLERANCE.keys() == JOBS.keys() and set(JOBS) > NEEDS_WEIGHTS


@pytest.mark.parametrize("former", [True, False])
def test_scores_and_presets_have_one_name_in_both_checkouts(former, monkeypatch):
    monkeypatch.setattr(compare_jobs, "has_former_names", lambda: former)
    asked = names_here("presets", "best,bipartite,attention-drop"), names_here("scores", "norm,class-attention")
    known = ("best,tome,evit", "norm,evit"), ("best,bipartite,attention-drop", "norm,class-attention")
    assert asked == known[0 if former else 1]
    row = {"preset": asked[0].split(",")[2], "score": asked[1].split(",")[1], "image": "evit.png"}
    found = with_newer_names({"presets": asked[0].split(","), "rules": [row]})
    assert found == {
        "presets": ["best", "bipartite", "attention-drop"],
        "rules": [{"preset": "attention-drop", "score": "class-attention", "image": "evit.png"}],
    }
