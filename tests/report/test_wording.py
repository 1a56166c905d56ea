"""Numbers as people read them."""

import pytest

from pullback.report.wording import lower_bound, plain, plus_minus, share, short_name, times


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (37.214, 0.31, "37.2 ± 0.3"),
        (18.663, 0.142, "18.66 ± 0.14"),
        (173.8, 2.6, "174 ± 3"),
        (173.8, 26.0, "174 ± 26"),
        (0.0514, 0.00042, "0.0514 ± 0.0004"),
        (100.0, 1e-7, "100.0 ± <0.1"),
        (0.5, 0.095, "0.50 ± 0.10"),
        (0.0, 0.2, "0.0 ± 0.2"),
        (3.14159, 0.0, "3.142"),
        (3.14159, None, "3.142"),
        (None, None, "–"),
    ],
)
def test_the_error_decides_how_many_digits_are_shown(value, se, text):
    assert plus_minus(value, se) == text


def test_small_wordings():
    assert (share(0.0), share(0.004), share(0.5), share(0.996), share(1.0)) == (
        "0 %",
        "< 1 %",
        "50 %",
        "> 99 %",
        "100 %",
    )
    assert lower_bound({"value": 21, "is_lower_bound": True}) == "≥ 21"
    assert lower_bound({"value": 21, "is_lower_bound": False}) == "21"
    assert (times(0.8321), times(4251.0), times(None)) == ("0.832×", "4,251×", "–")
    assert plain(None) == "–"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("facebook/dinov2-base", "facebook/dinov2-base"),
        ("tiny-scenes", "tiny-scenes"),
        ("/data/models/dinov2-small/", "dinov2-small"),
        ("../shared/models/dinov2-small", "dinov2-small"),
        ("…/dinov2-small", "dinov2-small"),
    ],
)
def test_folders_go_by_their_last_part(model, name):
    assert short_name(model) == name
