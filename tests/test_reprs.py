"""What `print` and a notebook show of the things that people hold: a line, not their weights; and a picture."""

import dataclasses
import re
import sys

import numpy as np
import pytest
import torch

import pullback as pb
from pullback.errors import PullbackError
from pullback.scenes.render import normalised, render


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return normalised(render([1, 2], size=56).rgb[:, 0])


@pytest.fixture(scope="module")
def probe() -> pb.ProbeMap:
    return pb.load_probe("tiny-scenes", decoder="depth-2x2", layer=8, device="cpu")


@pytest.fixture(scope="module")
def spectrum(probe, images) -> pb.Spectrum:
    return pb.spectrum(probe, images, rank=3)


@pytest.fixture(scope="module")
def report(probe, images) -> pb.Tractability:
    return pb.diagnose(probe, images, rank=3, convergence_samples=0)


def shown(thing: object, *words: str) -> str:
    text = repr(thing)
    assert "\n" not in text and len(text) <= 200, text
    for word in words:
        assert word in text, (word, text)
    return text


def test_probes_backbones_and_decoders_are_shown_in_a_line(probe):
    shown(probe, "ProbeMap", "tiny-scenes", "depth-2x2", "layer=8", "cpu")
    shown(probe.backbone, "Backbone", "tiny-scenes", "12 blocks", "192")
    shown(probe.decoder, "Decoder", "depth-2x2", "2, 5, 8, 11")
    shown(pb.multi_layer_probe("tiny-scenes", "depth-2x2", device="cpu"), "layer='hooks'")
    shown(pb.load_probe("tiny-views", device="cpu").backbone, "VGGTBackbone", "tiny-views")


def test_what_sets_a_probe_apart_is_in_its_line(probe):
    other = pb.load_probe("tiny-scenes", "cls", 10, device="cpu", distance="cosine")
    assert "distance" in shown(other) and "distance" not in shown(probe)
    assert "read_probe_layer=False" in shown(dataclasses.replace(probe, read_probe_layer=False))


def test_a_decoder_of_ones_own_is_shown_in_a_line_whatever_it_holds():
    head = torch.nn.Sequential(*(torch.nn.Linear(192, 192) for _ in range(40)))
    probe = pb.load_probe("tiny-scenes", decoder=lambda tokens: head(tokens[:, 0]), layer=10, device="cpu")
    shown(probe)
    shown(probe.decoder)


def test_operators_and_metrics_are_shown_in_a_line(probe, images, spectrum):
    operator = pb.JacobianOperator(probe, probe.features(images))
    shown(operator, "JacobianOperator", "2", "4 x 3264", "float32", "cpu")
    shown(operator.T, "3264 x 4")
    shown(operator.T @ operator, "3264 x 3264")
    shown(pb.DenseOperator(torch.zeros(2, 3)), "DenseOperator", "2 x 3")
    shown(spectrum.metric(), "LowRankMetric", "rank 3", "17 tokens")


def test_spectra_and_reports_are_shown_in_a_line(spectrum, report):
    shown(spectrum, "Spectrum", "tiny-scenes depth-2x2 L08", "2 images", "rank 3", "±")
    shown(report, "Tractability", "tiny-scenes depth-2x2 L08", "2 images", "κ(3)", report.regime.label)
    assert report.advice in str(report), "print still gives the advice"


def test_spectra_and_reports_are_plotted(spectrum, report):
    figure = pytest.importorskip("matplotlib.figure").Figure
    for thing in (spectrum, report):
        drawn = thing.plot()
        assert isinstance(drawn, figure)
        axes = drawn.get_axes()
        assert len(axes[0].lines) == 1, "one probe, one line"
        maps = [array for each in axes for array in each.images]
        assert len(maps) >= 2 and maps[0].get_array().shape == (4, 4), "a map for each image"
    line = spectrum.plot().get_axes()[0].lines[0].get_ydata()
    shares = spectrum.singular_values.square() / spectrum.total.value[:, None]
    np.testing.assert_allclose(line, 100 * shares.mean(0), rtol=1e-5)


def test_scenes_of_several_views_are_plotted_too():
    pytest.importorskip("matplotlib")
    probe = pb.load_probe("tiny-views", device="cpu")
    views = render([1], size=56, views=2).rgb
    drawn = pb.spectrum(probe, views, rank=2).plot()
    assert sum(bool(axes.images) for axes in drawn.get_axes()) >= 2, "a map for each view"


def test_without_matplotlib_plot_names_the_extra(spectrum, report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith(("pullback.report.", "matplotlib."))]:
        monkeypatch.delitem(sys.modules, name)
    for thing in (spectrum, report):
        with pytest.raises(PullbackError, match=r"plot: needs matplotlib.*pip install 'pullback\[plot\]'"):
            thing.plot()
        assert "pip install &#x27;pullback[plot]&#x27;" in thing._repr_html_()


def test_notebooks_show_a_picture(probe, spectrum, report):
    pytest.importorskip("matplotlib")
    for thing in (spectrum, report):
        html = thing._repr_html_()
        assert "data:image/png;base64," in html and "±" in html
        assert "http" not in html and "<script" not in html
    html = probe._repr_html_()
    assert "<svg" in html and "depth-2x2" in html
    assert len(re.findall("<rect", html)) == 12, "a box for each block"


def test_names_are_escaped_in_notebooks(probe):
    odd = dataclasses.replace(probe, decoder=dataclasses.replace(probe.decoder, name="<b>odd</b>"))
    assert "<b>odd" not in odd._repr_html_() and "&lt;b&gt;odd" in odd._repr_html_()
