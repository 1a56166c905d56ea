"""Figures drawn by a process of their own."""

import pytest

from pullback.errors import FileError
from pullback.report.drawing import Drawing


def test_what_goes_wrong_over_there_is_reported_here(tmp_path):
    with Drawing() as drawing, pytest.raises(FileError, match=r"the figures could not be drawn: .*diagnosis\.json"):
        drawing.draw(tmp_path)


def test_a_process_that_ended_early_is_reported(tmp_path):
    with Drawing() as drawing:
        drawing._process.kill()
        drawing._process.wait()
        with pytest.raises(FileError, match="the drawing process ended early"):
            drawing.draw(tmp_path)
