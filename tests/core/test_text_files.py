"""Text and CSV files that people write: rows as they are written, and one sentence for everything else."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cotenant.core.errors import InputError
from cotenant.core.textfile import cell_number, csv_columns, csv_rows, read_text


def test_rows_keep_their_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbfname, rate\r\n\r\n"a, b",1\n,\n"two\nlines",2\n')
    assert list(csv_rows(file)) == [(1, ["name", "rate"]), (3, ["a, b", "1"]), (6, ["two\nlines", "2"])]
    assert list(csv_columns(file, ("rate",))) == [
        (3, {"name": "a, b", "rate": "1"}),
        (6, {"name": "two\nlines", "rate": "2"}),
    ]


def test_a_short_row_has_empty_cells(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b,c\n1\n")
    assert list(csv_columns(file, ("a", "c"))) == [(2, {"a": "1", "b": "", "c": ""})]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"a\.csv, field --file: cannot be read: no such file or directory"),
        (b"a\xff\n", r"field --file: is not text in UTF-8 \(byte 1\)"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "a.csv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_text(file, "--file")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "line 1: has no column a, b"),
        ("a\n1\n", "line 1: has no column b"),
        ("a,b\n" + "x" * 2000 + ",1\n", "line 2: is not CSV"),
    ],
)
def test_wrong_columns_are_one_sentence(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(content)
    before = csv.field_size_limit(1000)  # of a cell; readers of traces raise this limit of the whole process
    try:
        with pytest.raises(InputError, match=says):
            list(csv_columns(file, ("a", "b")))
    finally:
        csv.field_size_limit(before)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "'x' is not a finite number above 0"),
        ("nan", "'nan' is not"),
        ("inf", "'inf' is not"),
        ("0", "'0' is not a finite number above 0"),
    ],
)
def test_a_cell_that_is_no_such_number_is_named(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        cell_number(text, "a.csv", 3, "rate", above=0)
    assert (caught.value.file, caught.value.line, caught.value.field) == ("a.csv", 3, "rate")


def test_bounds_of_a_cell() -> None:
    assert cell_number(" 2.5", "a.csv", 1, "x") == 2.5
    assert cell_number("0", "a.csv", 1, "x", least=0) == 0.0
    with pytest.raises(InputError, match="'-1' is not a finite number of at least 0"):
        cell_number("-1", "a.csv", 1, "x", least=0)
