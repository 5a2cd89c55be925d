"""Reads CSV and Parquet files as tables. A file that cannot be read is reported in one sentence."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cotenant.core.errors import InputError
from cotenant.core.extras import needs
from cotenant.workloads.downloads import check_text
from cotenant.workloads.table import OtherFormatError, Table, check_path, hint_of_header

with needs("sim"):
    import polars as pl


def read_csv(path: str | Path, columns: Sequence[str] | None = None, *, names: Sequence[str] | None = None) -> Table:
    """Read a CSV file as a table of texts.

    `columns`: read only these columns, if present, to save memory. `names`: names of all columns, for a file without a
    header.
    """
    found = check_path(path)
    check_text(found)
    first = _header(found, is_data=bool(names))
    _check_separator(found, first)
    header = list(names) if names else first
    if 0 < len(first) < len(header):
        raise InputError(f"the row has {len(first)} cells instead of {len(header)}", file=path, line=1)
    wanted = [c for c in header if columns is None or c in columns]
    try:
        if names:
            frame = pl.read_csv(found, has_header=False, schema=dict.fromkeys(header, pl.String))
        else:
            # columns are selected by position, because the parser keeps spaces around the names and this function
            # strips them
            positions = [header.index(name) for name in wanted] or [0]
            last = len(header) - 1
            frame = pl.read_csv(found, columns=sorted({*positions, last}), infer_schema=False)
            if frame[:, -1].null_count():  # empty cells at the end of a row, or a row without them
                _check_lengths(found, header)
            if last not in positions:
                frame = frame[:, :-1]
            frame.columns = wanted or ["-"]
    except pl.exceptions.NoDataError:
        raise InputError("the file is empty", file=path) from None
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        _explain(found, len(header), error)
    table = Table(path, frame, header=names is None)
    table.header = tuple(header)
    return table


def read_parquet(path: str | Path, columns: Sequence[str]) -> Table:
    """Read the given columns of a Parquet file, if present, as a table."""
    found = check_path(path)
    try:
        with found.open("rb") as file:
            # the file is checked before polars reads it, because polars prints a stack trace for a truncated file,
            # which has no footer
            head = file.read(4)
            file.seek(-min(4, found.stat().st_size), 2)
            tail = file.read(4)
        if head != b"PAR1" or tail != b"PAR1":
            raise InputError("the file is not Parquet or is truncated: it lacks the end mark", file=path)
        header = tuple(pl.read_parquet_schema(found))
        frame = pl.read_parquet(found, columns=[c for c in header if c in columns])
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        # polars may panic on a damaged page of a Parquet file
        raise InputError(f"the Parquet file is damaged: {str(error).splitlines()[0]}", file=path) from None
    table = Table(path, frame, header=False, text=False)
    table.header = header
    return table


# a comma that is not between digits, or the second one of a cell
NO_DECIMAL_COMMA = re.compile(rb"(?<![0-9]),|,(?![0-9])|,[0-9]+,")
# SWF, the Standard Workload Format, has 18 columns. Of these, 1 is the job, 2 when it was submitted, 4 how long it ran,
# 5 its processors.
SWF = """awk 'BEGIN{print "id,arrival_s,gpus,duration_s"} !/^;/&&$4>0&&$5>0{print $1","$2","$5","$4}' """


def _check_separator(path: Path, first: list[str]) -> None:
    """Raise OtherFormatError if the cells of the first row are not separated by commas. If a command can convert
    the file, the message contains it.
    """
    line = ",".join(first)
    source, target = shlex.quote(path.name), shlex.quote(f"{path.stem}-commas.csv")
    # a first line that begins with ";" and has no other is taken as a comment of SWF, the Standard Workload Format,
    # whose files begin with comments about the cluster
    if line.startswith(";") and line.count(";") == 1:
        _refuse_format(path, first, f"this is the Standard Workload Format; convert with: {SWF}{source} > {target}")
    if line.startswith("{"):
        _refuse_format(path, first, "the file is JSON, not CSV")
    for character, name, shown in (("\t", "tabs", "\\t"), (";", "semicolons", ";"), ("|", "bars", "|")):
        if len(first) != 1 or character not in line:
            continue
        # commas inside cells would divide the cells: decimal commas become points, all others spaces
        with path.open("rb") as file:
            data = file.read(1 << 20)
        decimal = character == ";" and not NO_DECIMAL_COMMA.search(data)
        command = f"tr ',{shown}' '{'.' if decimal else ' '},'" if b"," in data else f"tr '{shown}' ,"
        message = f"cells are separated by {name}, not commas; convert with: {command} < {source} > {target}"
        _refuse_format(path, first, message)
    if len(first) == 1 and len(line.split()) > 2:
        command = f"awk -v OFS=, '{{$1=$1}} 1' {source} > {target}"
        _refuse_format(path, first, f"cells are separated by spaces, not commas; convert with: {command}")


def _refuse_format(path: Path, first: list[str], message: str, field: str | None = None) -> NoReturn:
    error = OtherFormatError(message, file=path, line=1, field=field)
    error.header = tuple(first)
    raise error


def _header(path: Path, *, is_data: bool = False) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = [cell.strip() for cell in next(csv.reader(file), [])]
    except UnicodeDecodeError as error:
        _explain(path, 0, error)
    except csv.Error as error:
        raise InputError(f"the first line is not CSV: {error}", file=path, line=1) from None
    if not header and not is_data:
        raise InputError("the file is empty", file=path)
    for name in header:
        if not is_data and header.count(name) > 1:
            _refuse_format(path, header, f"the header names {name!r} twice{hint_of_header(header)}", name)
    return header


def _check_lengths(path: Path, header: list[str]) -> None:
    """Raise InputError about the first row that has fewer cells than the header. Empty lines are no rows."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, start = csv.reader(file), 1
        for row in reader:
            if 0 < len(row) < len(header):
                what = f"the cell is empty: the row has {len(row)} cells instead of {len(header)}"
                raise InputError(what, file=path, line=start, field=header[len(row)])
            start = reader.line_num + 1


def _explain(path: Path, width: int, error: Exception) -> NoReturn:
    """Raise InputError with the line at which the CSV parser failed, and the reason."""
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as wrong:
        line = data.count(b"\n", 0, wrong.start) + 1
        raise InputError("the file is not UTF-8 text", file=path, line=line) from None
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        lines = data.split(b"\n")
        start = 1
        try:
            for row in reader:
                if len(row) > width:
                    raise InputError(f"the row has {len(row)} cells instead of {width}", file=path, line=start)
                if b"".join(lines[start - 1 : reader.line_num]).count(b'"') % 2:
                    raise csv.Error("a quote inside a cell that does not start with one")
                start = reader.line_num + 1
        except csv.Error:
            raise InputError("the file is not CSV: the quotes of the row do not match", file=path, line=start) from None
    raise InputError(f"the file is not CSV: {str(error).splitlines()[0]}", file=path) from None
