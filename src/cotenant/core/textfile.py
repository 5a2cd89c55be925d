"""Reading of text and CSV files that people write. Every error is an InputError that names file, line and column."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.core.units import number_or_nan


def read_text(path: str | Path, field: str | None = None) -> str:
    """Return the content of a file in UTF-8, without its byte order mark if it has one. `field`: for messages, the
    option by which the user gave the path.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot be read: {(error.strerror or str(error)).lower()}", file=path, field=field) from None
    except UnicodeDecodeError as error:
        raise InputError(f"is not text in UTF-8 (byte {error.start})", file=path, field=field) from None


def csv_rows(path: str | Path, least: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Produce line number and cells of each row of a CSV file, without empty rows. A row needs `least` cells or more.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if len(cells) < least:
                what = f"has {len(cells)} cells; at least {least} are needed"
                raise InputError(what, file=path, line=reader.line_num)
            yield reader.line_num, cells
    except csv.Error as error:
        raise InputError(f"is not CSV: {error}", file=path, line=reader.line_num) from None


def csv_columns(path: str | Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Produce line number and cells by column of each row below the header, which must name all of `columns`."""
    rows = csv_rows(path)
    line, header = next(rows, (1, []))
    missing = [name for name in columns if name not in header]
    if missing:
        raise InputError(f"has no column {', '.join(missing)}", file=path, line=line)
    for line, cells in rows:
        yield line, dict(zip(header, [*cells, *[""] * len(header)], strict=False))


def cell_number(
    text: str, path: str | Path, line: int, field: str, *, least: float = -math.inf, above: float = -math.inf
) -> float:
    """Return the finite number in a cell, which must be above `above` and at least `least`."""
    value = number_or_nan(text)
    if not math.isfinite(value) or value <= above or value < least:
        bound = f" above {above:g}" if above > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        raise InputError(f"{text!r} is not a finite number{bound}", file=path, line=line, field=field)
    return value
