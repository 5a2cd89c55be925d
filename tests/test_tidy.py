"""Keeps the tree tidy: sizes, layers, no left-over marks, no paths of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.passages import passages

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES = 400, 70
# Path: why the file may be longer. A file over the limit mostly holds two ideas.
LONGER_FILES: dict[str, str] = {
    "tests/helpers/engine_oracle.py": "the plain engine, one piece to read beside docs/policies.md",
}
SOURCES = ("*.py", "*.c", "*.h", "*.js", "*.css", "*.cu")
TEXTS = (*SOURCES, "*.md", "*.toml", "*.yaml", "*.yml", "*.html", "Makefile")
MARKS = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:work|root|home/\w+|Users/\w+|mnt/\w+)/")
# Words that a reader of one sentence would have to look up or guess. docs/writing.md says what to write instead.
REFUSED_WORDS = re.compile(
    r"\b(?:whoever|nobody|somebody|everybody|anybody|believ(?:e|es|ed)|signs? of life|the floor|heirs?|crews?|desks?"
    r"|turnstiles?|doors|(?<!office )door|rungs?|absorb(?:s|ed)?|thought|turn without an? end|fewer than none)\b",
    re.IGNORECASE,
)


def files(*patterns: str) -> list[Path]:
    """Files under version control (or about to be), by name."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    found = [ROOT / name for name in done.stdout.splitlines()]
    return [path for path in found if path.is_file()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_hold_one_idea() -> None:
    lengths = {name_of(path): len(path.read_text(errors="replace").splitlines()) for path in files(*SOURCES)}
    long = {name: n for name, n in lengths.items() if n > FILE_LINES and name not in LONGER_FILES}
    assert not long, f"longer than {FILE_LINES} lines: {long}"
    idle = [name for name in LONGER_FILES if lengths.get(name, 0) <= FILE_LINES]
    assert not idle, f"no longer longer, so no longer exceptions: {idle}"


def test_functions_hold_one_idea() -> None:
    """Bodies are counted, without the parameters: a command has one for every option."""
    long = {}
    for path in files("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
                if lines > FUNCTION_LINES:
                    long[f"{name_of(path)}:{node.name}"] = lines
    assert not long, f"longer than {FUNCTION_LINES} lines: {long}"


def test_imports_point_one_way() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_nothing_is_left_for_later() -> None:
    marked = [
        f"{name_of(path)}:{number}"
        for path in files(*TEXTS)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MARKS.search(line)
    ]
    assert not marked


def test_no_path_of_one_machine() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()[:80]}"
        for path in files(*TEXTS)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert not found


def test_every_module_says_what_it_is() -> None:
    silent = [
        name_of(path)
        for path in files("src/*.py")
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not silent


def test_no_file_is_large() -> None:
    large = {name_of(path): path.stat().st_size for path in files() if path.stat().st_size > 1_000_000}
    assert not large


def test_prose_has_no_refused_words() -> None:
    """In comments, docstrings, messages, help and docs; names in backticks are not prose."""
    found = [
        f"{p.path}:{p.line}: {', '.join(words)}"
        for p in passages("src", "native", "docs", "README.md")
        if (words := REFUSED_WORDS.findall(re.sub(r"`[^`]*`", "", p.text)))
    ]
    assert not found, "words that docs/writing.md refuses:\n" + "\n".join(found)
