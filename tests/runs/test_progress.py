"""What a long job says of itself in plain text, and how long it expects to take."""

import math

import pytest

from pullback.runs.progress import Lines, expectation, in_words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (1, "1.0 s"), (9.96, "10 s"), (40.4, "40 s"), (99.4, "99 s"), (360, "6 min"), (9000, "2.5 h")],
)
def test_durations_have_two_digits(seconds, words):
    assert in_words(seconds) == words


def test_the_expectation_names_each_part_and_the_whole():
    line = expectation({"L02": 40.2, "L10": 1.04}, {"L02": 8, "L10": 8}, "image", "CPU")
    assert line == (
        "L02: about 40 s an image on this CPU; L10: 1.0 s; in all about 5 min. "
        "Ctrl-C is safe: the same command goes on from there."
    )
    assert "a scene on this GPU" in expectation({"hooks": 50.0}, {"hooks": 1}, "scene", "GPU")


@pytest.mark.parametrize(("seconds", "left"), [(4.0, 2), (400.0, 0), (math.nan, 100)])
def test_short_or_unknown_work_is_not_announced(seconds, left):
    assert expectation({"L02": seconds}, {"L02": left}, "image", "CPU") is None


def test_lines_of_a_script_go_to_standard_error(capsys):
    progress = Lines()
    progress.stage("loading")
    progress.note("worth a line")
    progress.work("L02", 3, "images")
    progress.advance(3)
    progress.finished("L02", "L02: done")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["loading", "worth a line"] and lines[3:] == ["L02: done"]
    assert lines[2].startswith("L02: 3/3 images"), "a script says when its work has ended, however quick it was"


def test_what_an_earlier_run_did_took_none_of_the_time(monkeypatch):
    now = iter([0.0, 0.0, 10.0, 10.0])
    monkeypatch.setattr("pullback.runs.progress.time.perf_counter", lambda: next(now))
    written = []
    progress = Lines(written.append)
    progress.work("training", 100, "steps", 50)
    progress.advance(10)
    assert written == ["training: 60/100 steps, 10 s, about 40 s left\n"]
