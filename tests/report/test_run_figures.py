"""Figures of a training run: which curves there are, and in which panel."""

import pytest

pytest.importorskip("matplotlib")

from pullback.report import run_figures

OTHERS = [f"unexplained_L{layer:02d}" for layer in range(6)] + ["delta1"]


@pytest.fixture
def drawn(monkeypatch):
    """training_png, which returns the figure itself: {label of a panel: its curves, and its legend}."""
    monkeypatch.setattr(run_figures, "png", lambda figure, dpi: figure)

    def panels(*names: str, narrow: bool = False):
        rows = [{"step": step, **dict.fromkeys(names, 1.0 / step)} for step in (1, 2)]
        figure = run_figures.training_png(rows, narrow=narrow)
        return {axes.get_ylabel(): axes for axes in figure.axes}

    return panels


@pytest.mark.parametrize("narrow", [False, True])
def test_a_posterior_has_a_panel_of_its_own(drawn, narrow):
    panels = drawn("loss", "kl_loss", "score", *OTHERS, "kl", "log10_concentration", narrow=narrow)
    curves = {label: [line.get_label() for line in axes.lines] for label, axes in panels.items()}
    assert curves == {
        "training loss": ["loss", "kl loss"],
        "on held-out images": [name.replace("_", " ") for name in OTHERS],
        "posterior on held-out images": ["kl", "log10 concentration"],
    }


def test_no_two_curves_look_alike(drawn):
    lines = drawn("loss", *OTHERS)["on held-out images"].lines
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
    assert len(set(looks)) == len(looks) == 7


@pytest.mark.parametrize(("names", "kept"), [(("score",), ["score"]), (("score", "rho"), ["rho"])])
def test_the_score_is_drawn_where_there_is_no_other(drawn, names, kept):
    assert [line.get_label() for line in drawn("loss", *names)["on held-out images"].lines] == kept
