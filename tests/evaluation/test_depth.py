"""Depth errors against hand computations."""

import pytest
import torch

from pullback.errors import ShapeError
from pullback.evaluation import depth_errors

TRUTH = torch.tensor([[[1.0, 2.0], [4.0, 8.0]]])
ALL = torch.ones_like(TRUTH, dtype=torch.bool)


def test_a_perfect_prediction_has_no_error():
    errors = depth_errors(TRUTH, TRUTH, ALL, median_scaling=False)
    assert errors.abs_rel.item() == 0
    assert errors.delta1.item() == 1


def test_a_wrong_scale_counts_unless_it_is_divided_out():
    raw = depth_errors(3 * TRUTH, TRUTH, ALL, median_scaling=False)
    scaled = depth_errors(3 * TRUTH, TRUTH, ALL, median_scaling=True)
    assert raw.abs_rel.item() == pytest.approx(2.0)
    assert raw.delta1.item() == 0
    assert scaled.abs_rel.item() == pytest.approx(0.0)
    assert scaled.delta1.item() == 1


def test_delta1_counts_pixels_within_a_quarter_either_way():
    prediction = TRUTH * torch.tensor([[[1.2, 1.3], [0.85, 0.7]]])
    assert depth_errors(prediction, TRUTH, ALL, median_scaling=False).delta1.item() == pytest.approx(0.5)


def test_masked_pixels_do_not_count_and_an_empty_image_has_nan():
    prediction = TRUTH.clone()
    prediction[0, 0, 0] = 100.0
    valid = ALL.clone()
    valid[0, 0, 0] = False
    assert depth_errors(prediction, TRUTH, valid, median_scaling=True).abs_rel.item() == 0
    assert depth_errors(prediction, TRUTH, ~ALL, median_scaling=False).abs_rel.isnan().all()


def test_shapes_must_agree():
    with pytest.raises(ShapeError, match="expected one shape"):
        depth_errors(TRUTH, TRUTH[:, :1], ALL, median_scaling=False)
