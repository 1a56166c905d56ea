"""Messages: whom they blame, and how they count."""

import pytest

from pullback.errors import FileError, ImageError, PullbackError, counted, naming


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("path='x': no such file: y", "bank='x': no such file: y"),
        ("path: expected a folder", "bank: expected a folder"),
        ("width, heads: expected more", "bank: expected more"),
        ("/tmp/a: cannot be written", "/tmp/a: cannot be written"),
        ("Something else", "Something else"),
    ],
)
def test_errors_name_the_argument_that_was_given(message, expected):
    with pytest.raises(ImageError) as caught, naming("bank"):
        raise ImageError(message)
    assert str(caught.value) == expected


def test_damaged_files_are_errors_of_the_package_and_of_the_system():
    assert issubclass(FileError, PullbackError) and issubclass(FileError, OSError)


def test_numbers_have_their_plural():
    assert [counted(count, "row") for count in (0, 1, 2, 1200)] == ["0 rows", "1 row", "2 rows", "1,200 rows"]
