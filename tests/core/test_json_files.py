"""JSON files that people write: one sentence for what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.core.errors import InputError
from cotenant.core.jsonfile import read_json


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b'{"a": 1,\n "a": 2}', None, "field a: is given twice in one object"),
        (b'[{"b": {"c": 1, "c": 1}}]', None, "field c: is given twice in one object"),
        (b'{"a": 1,\n', 2, "is not JSON: expecting property name enclosed in double quotes"),
        (b"", 1, "is not JSON: expecting value"),
        ('{"a": "\u00e9"}'.encode("latin-1"), None, "is not text in UTF-8 (byte 7)"),
        ("{}".encode("utf-16"), None, "is not text in UTF-8 (byte 0)"),
        (b"[" * 200_000, None, "is not JSON: nested too deeply"),
        (b"9" * 5000, None, "has a number of thousands of digits"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, line: int | None, words: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert words in str(caught.value)
    assert (caught.value.line, caught.value.file) == (line, str(path))
    assert "\n" not in str(caught.value)


def test_a_mark_at_the_beginning_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert read_json(path) == {"a": 1}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (("loop", "too many levels"), (".", "is a directory"), ("none", "no such file")):
        with pytest.raises(InputError, match=f"cannot be read: {words}"):
            read_json(tmp_path / name)
