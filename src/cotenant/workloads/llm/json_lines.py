"""Reads JSON lines, plain or compressed by gzip, from a file or from all such files below a folder."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from cotenant.core.errors import InputError
from cotenant.workloads.downloads import check_text

SUFFIXES = (".jsonl", ".jsonl.gz")


def files_of(path: str) -> list[Path]:
    """Return the file `path`, or the sorted files below a folder. InputError if there are none."""
    where = Path(path)
    if not where.is_dir():
        return [where]
    found = sorted(p for p in where.rglob("*") if p.name.endswith(SUFFIXES))
    if not found:
        raise InputError("has no .jsonl or .jsonl.gz files", file=path)
    return found


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Produce (line number, object) for every line that is not empty."""
    number = 0
    if not path.name.endswith(".gz"):
        check_text(path)
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    content = orjson.loads(line)
                    if not isinstance(content, dict):
                        raise InputError("is not a JSON object", file=path, line=number)
                    yield number, content
    except orjson.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error}", file=path, line=number) from None
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read: {getattr(error, 'strerror', None) or error}", file=path) from None


def whole(content: dict[str, Any], name: str, path: Path, line: int) -> int:
    """Return the field `name` as an integer. InputError unless it is a number of at least 0."""
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise InputError(f"{value!r} is not a count of at least 0", file=path, line=line, field=name)
    return int(value)
