"""Settings must be the same when a run goes on, and the error names every difference."""

import pytest

from pullback.errors import PullbackError
from pullback.runs.files import read_json
from pullback.runs.settings import check_settings, keep_settings


def test_settings_are_written_once_and_accepted_again(tmp_path):
    path = tmp_path / "settings.json"
    assert keep_settings(path, {"seed": 0, "size": [2, 3]}, holds="rows") == {"seed": 0, "size": [2, 3]}
    assert keep_settings(path, {"seed": 0, "size": [2, 3]}, holds="rows") == read_json(path)


def test_every_difference_is_named_with_both_values(tmp_path):
    path = tmp_path / "settings.json"
    keep_settings(path, {"seed": 0, "rank": 20, "model": "a"}, holds="a comparison")
    with pytest.raises(PullbackError, match=r"holds a comparison with other settings \(seed: 0 there, 1 asked for; ra"):
        keep_settings(path, {"seed": 1, "rank": 10, "model": "a"}, holds="a comparison")
    assert read_json(path)["seed"] == 0, "what is stored stays"


def test_a_setting_that_is_missing_on_one_side_is_a_difference():
    with pytest.raises(PullbackError, match=r"crops: None there, 2 asked for"):
        check_settings({}, {"crops": 2}, "folder", holds="targets")
    with pytest.raises(PullbackError, match=r"crops: 2 there, None asked for"):
        check_settings({"crops": 2}, {}, "folder", holds="targets")


def test_some_settings_do_not_matter_and_some_may_be_added_later(tmp_path):
    path = tmp_path / "settings.json"
    keep_settings(path, {"commit": "a", "head": None}, holds="rows", ignore=["commit"], may_be_added=["head"])
    options = {"holds": "rows", "ignore": ["commit"], "may_be_added": ["head"]}
    assert keep_settings(path, {"commit": "b", "head": "h"}, **options) == {"commit": "b", "head": "h"}
    assert keep_settings(path, {"commit": "c", "head": None}, **options) == {"commit": "c", "head": "h"}
    with pytest.raises(PullbackError, match="head: 'h' there, 'other' asked for"):
        keep_settings(path, {"commit": "c", "head": "other"}, **options)


@pytest.mark.parametrize("content", ["", "[1]", "{", "\xff"])
def test_a_damaged_settings_file_is_named(tmp_path, content):
    path = tmp_path / "settings.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(PullbackError, match=r"out: .*settings.json"):
        keep_settings(path, {"seed": 0}, holds="rows")


def test_of_a_place_on_another_machine_the_name_is_compared(tmp_path):
    path, options = tmp_path / "settings.json", {"holds": "rows", "places": ["photos"]}
    keep_settings(path, {"photos": "…/heldout"}, **options)
    with pytest.raises(PullbackError, match="photos: '…/heldout' there, '/data/train' asked for"):
        keep_settings(path, {"photos": "/data/train"}, **options)
    assert keep_settings(path, {"photos": "/data/heldout"}, **options) == {"photos": "/data/heldout"}
    with pytest.raises(PullbackError, match="photos: '/data/heldout' there, '/other/heldout' asked for"):
        keep_settings(path, {"photos": "/other/heldout"}, **options)
