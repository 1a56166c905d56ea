"""What the commands of the experiments share: rows that are found again, and errors in one line."""

import pytest
from typer import Exit

from pullback.errors import PullbackError
from pullback.experiments.command import RowFile, explained


def test_a_row_is_found_again_by_its_identity(tmp_path):
    first = RowFile(tmp_path / "new" / "rows.jsonl", ("name", "seed"))
    assert first.find({"name": "a", "seed": 0}) is None
    row = first.add({"name": "a", "seed": 0, "value": 1.5})
    again = RowFile(tmp_path / "new" / "rows.jsonl", ("name", "seed"))
    assert again.find({"name": "a", "seed": 0, "value": 2}) == row and again.find({"name": "a", "seed": 1}) is None


def test_a_file_that_is_written_anew_loses_its_rows_with_the_first_new_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"value": 1}\n')
    anew = RowFile(path, anew=True)
    assert anew.rows == [] and path.read_text() == '{"value": 1}\n'
    anew.add({"value": 2})
    anew.add({"value": 3})
    assert path.read_text() == '{"value": 2}\n{"value": 3}\n'


def test_without_a_file_rows_are_in_memory():
    rows = RowFile(None, ("name",))
    assert rows.add({"name": "a"}) is rows.find({"name": "a"})


@pytest.mark.parametrize("error", [PullbackError("rank: expected 1."), OSError(28, "No space left on device")])
def test_what_the_user_can_mend_is_one_line(error, capsys):
    with pytest.raises(Exit) as left, explained():
        raise error
    said = capsys.readouterr().err
    assert left.value.exit_code == 2 and said.startswith("error: ") and said.count("\n") == 1


def test_other_errors_keep_their_trace():
    with pytest.raises(ZeroDivisionError), explained():
        raise ZeroDivisionError
