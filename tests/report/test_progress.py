"""What people see of a run while it goes on."""

from rich.console import Console

from pullback.report.progress import ProgressDisplay
from pullback.runs.progress import Progress

LAYER = {
    "layer": 4, "num_images": 2, "rank_used": 3, "kappa": {"mean": 0.4, "se": 0.01}, "regime": "iii",
    "regime_title": "marginal rank", "seconds": 1,
}  # fmt: skip


def test_finished_layers_are_said_in_a_line_and_kept_by_name():
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture, ProgressDisplay(console) as display:
        progress: Progress = display
        progress.stage("loading")
        progress.work("", 4, "scenes")
        progress.describe("L04")
        assert display.current == "L04" and display.done == []
        progress.advance(2)
        progress.stage("alignment of the layers")
        display.layer_done(LAYER)
        assert display.current is None and display.done == ["L04"]
        progress.describe("hooks")
        display.layer_done(LAYER | {"layer": "hooks", "num_images": 1})
        progress.finished("the rest", "nothing more")
    assert display.done == ["L04", "hooks", "the rest"]
    assert capture.get().splitlines() == [
        "loading",
        "alignment of the layers",
        "L04: κ(3) = 40.0 ± 1.0 %, regime (iii) marginal rank, 2 scenes in 1.0 s",
        "hooks: κ(3) = 40.0 ± 1.0 %, regime (iii) marginal rank, 1 scene in 1.0 s",
        "nothing more",
    ]


def test_a_terminal_sees_what_is_done_of_how_much():
    console = Console(width=100, force_terminal=True, color_system=None)
    with console.capture() as capture, ProgressDisplay(console) as display:
        display.work("L04", 4, "images")
        display.describe("L05")
        display.advance(3)
        display._bar.refresh()
    assert "L05" in capture.get() and "3/4 images" in capture.get()


def test_without_a_terminal_plain_lines_come_now_and_then(monkeypatch):
    """A line for every stage; of the work one every 5 seconds, and later one for every 2 % of the time."""
    now = [0.0]
    monkeypatch.setattr("pullback.runs.progress.time.perf_counter", lambda: now[0])
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture, ProgressDisplay(console) as display:
        display.stage("loading")
        display.note("L02: about 2.0 s an image")
        display.work("L02", 1000, "images")
        for _ in range(1000):
            now[0] += 2.0
            display.advance(1)
        display.work("L10", None, "rows")
        now[0] += 7.0
        display.advance(1200)
        display.work("short", 2, "rows")
        display.advance(2)
    lines = capture.get().splitlines()
    assert lines[:3] == ["loading", "L02: about 2.0 s an image", "L02: 3/1,000 images, 6.0 s, about 33 min left"]
    assert lines[-2:] == ["L02: 1,000/1,000 images, 33 min, about 0.0 s left", "L10: 1,200 rows, 7.0 s"]
    assert 100 < len(lines) < 200


def test_a_terminal_has_the_bar_alone():
    console = Console(width=100, force_terminal=True, color_system=None)
    with console.capture() as capture, ProgressDisplay(console) as display:
        display.work("L04", None, "rows")
        display.advance(1200)
        display.note("worth a line")
        display._bar.refresh()
    assert "1,200 rows" in capture.get() and "worth a line\n" in capture.get() and "1,200 rows," not in capture.get()
