"""Rows that survive a run being killed while it writes."""

import resource

import pytest

from pullback.errors import FileError, PullbackError
from pullback.runs.rows import Rows, finite


def test_rows_come_back_in_the_order_in_which_they_were_added(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    assert rows.read() == []
    rows.add([{"a": 1}, {"a": "κ"}])
    rows.add([])
    rows.add({"a": number} for number in (3, 4))
    assert [row["a"] for row in rows.read()] == [1, "κ", 3, 4]


@pytest.mark.parametrize("keep", range(1, 12))
def test_a_half_written_last_line_is_cut_off_and_rows_go_on_behind_it(tmp_path, keep):
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add([{"a": 1}])
    whole = rows.path.read_bytes()
    rows.path.write_bytes(whole + '{"b": "κλ"}\n'.encode()[:keep])
    assert rows.read() == [{"a": 1}]
    assert rows.path.read_bytes() == whole
    rows.add([{"a": 2}])
    assert rows.read() == [{"a": 1}, {"a": 2}]


def test_who_reads_while_another_writes_leaves_a_half_written_line_where_it_is(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add([{"a": 1}], durable=True)
    written = rows.path.read_bytes() + b'{"a": '
    rows.path.write_bytes(written)
    assert rows.read(cut=False) == [{"a": 1}]
    assert rows.path.read_bytes() == written


def test_a_line_in_the_middle_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(PullbackError, match=r"line 2 of .*rows.jsonl is no JSON .* Choose another folder"):
        Rows(path).read()


def test_numbers_that_json_does_not_have_are_refused_and_nothing_is_written(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.add([{"a": 1.0}, {"a": float("nan")}])
    assert rows.read() == []


def test_rows_after_a_checkpoint_can_be_left_out(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    rows.keep(lambda row: False)  # no file yet: nothing to do
    rows.add({"step": step} for step in range(5))
    rows.keep(lambda row: row["step"] <= 2)
    assert [row["step"] for row in rows.read()] == [0, 1, 2]


def test_what_json_has_no_word_for_is_none():
    assert finite(0.25) == 0.25
    assert [finite(value) for value in (float("nan"), float("inf"), -float("inf"))] == [None] * 3


def test_a_full_disk_keeps_the_rows_of_before_and_no_half_of_the_new_ones(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add([{"a": 1}])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(FileError, match=r"rows\.jsonl: cannot be written \(File too large\)\. Raise the limit"):
            rows.add({"a": number} for number in range(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert rows.path.read_text() == '{"a": 1}\n'
