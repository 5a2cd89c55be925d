"""YAML as it is read everywhere: repeated keys, lines, documents."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal

import pytest

from cotenant.core.checked import Strict, check
from cotenant.core.errors import InputError
from cotenant.core.yamlfile import parse_documents, parse_yaml, read_yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a is already given on line 1"),
        ("jobs:\n  - x: 1\n    'x': 2\n", 3, "x is already given on line 2"),
        ("deep: {in: {side: [1, {k: 1, k: 2}]}}\n", 1, "k is already given on line 1"),
        ("a: 1\n---\nb: 1\n", None, "several documents"),
        ("a: [\n", 2, "not valid YAML"),
        ("a: 'x\n", 2, "not valid YAML"),
        ("a: !!python/object:os.system {}\n", 1, "not valid YAML"),
        ("? [1, 2]\n: 3\n? {a: 1}\n: 4\n", 1, "not valid YAML"),
        ("a: *nobody\n", 1, "not valid YAML: found undefined alias 'nobody'"),
        ("day: 2024-13-45\n", None, "not valid YAML: month must be in 1..12"),
        ("a: \x07\n", None, "not valid YAML: unacceptable character"),
        ("[" * 5000, None, "nested too deeply"),
    ],
)
def test_what_is_refused(text: str, line: int | None, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "f.yaml")
    assert words in caught.value.message
    assert (caught.value.line, caught.value.file) == (line, "f.yaml")
    assert "\n" not in str(caught.value)


def test_merges_and_aliases_repeat_nothing() -> None:
    text = "base: &b {x: 1, y: 2}\none: {<<: *b, y: 3}\ntwo: {<<: [*b, {z: 4}], x: 5}\nthree: *b\n"
    found = parse_yaml(text).content
    assert found["one"] == {"x": 1, "y": 3}
    assert found["two"] == {"x": 5, "y": 2, "z": 4}
    assert found["three"] == {"x": 1, "y": 2}


def test_documents_may_repeat_what_another_has() -> None:
    assert [d.content for d in parse_documents("a: 1\n---\na: 2\n---\n")] == [{"a": 1}, {"a": 2}, None]
    assert parse_yaml("").content is None


def test_a_colon_between_digits_is_text() -> None:
    """YAML 1.1 has numbers of base 60: a port mapping of 22:22 would become 1342."""
    text = "ports: [22:22, '80:80', 8080]\nrate: 1:30\nexact: 1:30.5\n"
    assert parse_yaml(text).content == {"ports": ["22:22", "80:80", 8080], "rate": "1:30", "exact": "1:30.5"}


def test_a_switch_is_no_number() -> None:
    class Limits(Strict):
        rate: float
        most: int | None = None
        on: bool = False
        gpus: Literal["all"] | list[int] = "all"

    for row in ({"rate": True}, {"rate": 1.0, "most": False}):
        with pytest.raises(InputError, match=r"^field (rate|most): (true|false) is not a number$"):
            check(Limits, row)
    assert check(Limits, {"rate": 2, "on": True}).on


def test_lines_of_fields() -> None:
    read = parse_yaml("a: 1\n\nlist:\n  - x: 1\n  - x: 2\n    y:\n      z: 3\n", "f.yaml")
    assert read.line("list[1].y.z") == read.line("list.1.y.z") == read.line(("list", 1, "y", "z")) == 7
    assert read.line("list[1].w") == 5  # the line of the deepest part that exists
    assert read.line("list[7]") == 3
    assert read.line("nothing.of.it") is None
    assert read.line(None) == 1
    assert parse_yaml("").line("a") is None


def test_complaints_get_their_line() -> None:
    read = parse_yaml("a: 1\nb: 2\n", "f.yaml")
    with pytest.raises(InputError, match=r"f\.yaml, line 2, field b: too small"), read.located():
        raise InputError("too small", field="b")
    with pytest.raises(InputError, match=r"^other\.csv, field b: x$"), read.located():
        raise InputError("x", file="other.csv", field="b")
    with pytest.raises(InputError, match=r"^f\.yaml, line 7: x$"), read.located():
        raise InputError("x", file="f.yaml", line=7)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read: no such file or directory"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(InputError, match=r"is not text in UTF-8 \(byte 9\)"):
        read_yaml(tmp_path / "latin.yaml")
    (tmp_path / "marked.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(tmp_path / "marked.yaml").content == {"a": 1}


def test_nothing_reads_yaml_past_it() -> None:
    """Every file that people write goes through the one reader: a key given twice would be taken silently elsewhere."""
    found = subprocess.run(
        ["grep", "-rlE", r"yaml\.(safe_load|load|full_load|compose|SafeLoader|CSafeLoader)", "src/cotenant"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.stdout.split() == ["src/cotenant/core/yamlfile.py"]
