"""A table read from a file. Columns are validated when they are read; every error names line and field."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cotenant.core.errors import InputError
from cotenant.core.extras import needs
from cotenant.core.units import counted
from cotenant.core.work import Floats, Jobs, Names, Trace

with needs("sim"):
    import numpy as np
    import polars as pl
    from numpy.typing import NDArray

# Python's csv module, which finds the line of a job for error messages (_line_of_row), raises an error for a cell above
# a limit, by default 131,072 characters. Polars, which reads the tables, accepts such cells, so the limit is raised.
csv.field_size_limit(2**31 - 1)
MAX_GPUS_PER_JOB = 100_000
LEAST_PART = 0.001  # smallest share of a GPU, since policies count GPUs in thousandths
MAX_SECONDS = 1e11  # three thousand years; a larger number has a wrong unit or is damaged
Mask = NDArray[np.bool_]


class OtherFormatError(InputError):
    """Raised if the file is not in the given format. `header`: cells of the file's first line."""

    header: tuple[str, ...] = ()


class MissingColumnError(OtherFormatError):
    """Raised if the header lacks a required column."""


class Table:
    """The rows of one file. `left_out` counts removed rows by reason; `remarks` collects sentences for the user."""

    def __init__(self, path: str | Path, frame: pl.DataFrame, *, header: bool, text: bool = True) -> None:
        self.path = str(path)
        self.columns = tuple(frame.columns)
        self.header = self.columns  #: all columns of the file, also those that were not read
        self.left_out: dict[str, int] = {}
        self.remarks: list[str] = []
        self._text = text
        self._header = header
        #: for each row of the table, the index of its row in the file
        self.rows: NDArray[np.int64] = np.arange(frame.height)
        self._frame = frame
        if text and frame.width:
            blank = frame.select(pl.all_horizontal(pl.all().is_null())).to_series().to_numpy()
            if blank.any():  # empty lines of a text file are dropped here, but counted for line numbers
                self._keep(~blank)

    def __len__(self) -> int:
        return len(self.rows)

    # -- errors

    def line(self, row: int) -> int | None:
        """Return the line of the file, from 1, where row `row` starts; None for a file without lines."""
        if not self._text:
            return None
        return _line_of_row(self.path, int(self.rows[row]) + (1 if self._header else 0))

    def fail(self, row: int, field: str, message: str) -> NoReturn:
        """Raise InputError about one row of the table."""
        if not self._text:
            message = f"{message} (row {int(self.rows[row]) + 1})"
        raise InputError(message, file=self.path, line=self.line(row), field=field)

    def refuse(self, wrong: Mask, field: str, message: str) -> None:
        """Raise InputError about the first row that is marked as wrong, if any. `{}` in the message is replaced by the
        row's cell of that field.
        """
        if wrong.any():
            row = int(np.argmax(wrong))
            cell = self._frame[field][row] if field in self.columns else ""
            self.fail(row, field, message.format(repr(cell) if isinstance(cell, str) else f"{cell}"))

    def require(self, *names: str) -> None:
        """Raise MissingColumnError, which names every absent column, if any is absent."""
        absent = [name for name in names if name not in self.columns]
        if absent:
            shown = ", ".join(self.header[:12]) + (", ..." if len(self.header) > 12 else "")
            missing = MissingColumnError(
                f"the file has no column {' and no column '.join(map(repr, absent))}; it has {shown or 'none'}"
                f"{hint_of_header(self.header)}",
                file=self.path,
                line=1 if self._text else None,
                field=absent[0],
            )
            missing.header = self.header
            raise missing

    def leave_out(self, rows: Mask, reason: str) -> None:
        """Remove rows from the table, and count them in `left_out` under `reason`."""
        count = int(rows.sum())
        if count:
            self.left_out[reason] = self.left_out.get(reason, 0) + count
            self._keep(~rows)

    def _keep(self, rows: Mask) -> None:
        self._frame = self._frame.filter(pl.Series(rows))
        self.rows = self.rows[rows]

    # -- columns

    def empty(self, name: str) -> Mask:
        """Return a mask of the rows whose cell in this column is empty."""
        series = self._frame[name]
        if series.dtype == pl.String:
            return (series.is_null() | (series.str.strip_chars() == "")).to_numpy()
        return series.is_null().to_numpy()

    def numbers(
        self,
        name: str,
        *,
        optional: bool = False,
        least: float | None = None,
        above: float | None = None,
        most: float = math.inf,
        whole: bool = False,
    ) -> Floats:
        """Return a column as floats. If `optional`, empty cells and a missing column are NaN. InputError if a cell is
        not a finite number, or out of bounds (`least` and `most` are inclusive, `above` is not).
        """
        if name not in self.columns and optional:
            return np.full(len(self), np.nan)
        self.require(name)
        empty = self.empty(name)
        if not optional:
            self.refuse(empty, name, "the cell is empty; a number is needed")
        series = self._frame[name]
        if series.dtype == pl.String:
            series = series.str.strip_chars()
        # a cast would turn some types, such as dates, into numbers, so columns of such types are refused
        if series.dtype.is_nested() or series.dtype.is_temporal():
            raise InputError(f"the column holds {series.dtype}, not numbers", file=self.path, field=name)
        try:
            values = series.cast(pl.Float64, strict=False).to_numpy().copy()
        except pl.exceptions.PolarsError:
            raise InputError(f"the column holds {series.dtype}, not numbers", file=self.path, field=name) from None
        if values.dtype != np.float64:
            values = values.astype(np.float64)
        self.refuse(~np.isfinite(values) & ~empty, name, "{} is not a finite number")
        stated = ~empty
        with np.errstate(invalid="ignore"):
            if least is not None:
                self.refuse(stated & (values < least), name, f"{{}} must be at least {least:g}")
            if above is not None:
                self.refuse(stated & (values <= above), name, f"{{}} must be above {above:g}")
            self.refuse(stated & (values > most), name, f"{{}} is above the maximum of {most:g}")
            if whole:
                self.refuse(stated & (values != np.floor(values)), name, "{} is not a whole number")
        values[empty] = np.nan
        return values

    def texts(self, name: str, *, optional: bool = False) -> Names:
        """Return a column as str objects; equal texts share one object. If `optional`, empty cells and a missing column
        are "".
        """
        if name not in self.columns and optional:
            return np.full(len(self), "", dtype=object)
        self.require(name)
        if not optional:
            self.refuse(self.empty(name), name, "the cell is empty")
        series = self._frame[name]
        if series.dtype != pl.String:
            if series.dtype.is_nested() or series.dtype == pl.Binary:
                raise InputError(f"the column holds {series.dtype}, not text", file=self.path, field=name)
            series = series.cast(pl.String, strict=False)
        elif self._text:
            series = series.str.strip_chars()
        series = series.fill_null("")
        distinct = series.unique(maintain_order=True)
        if not len(series) or len(distinct) * 2 > len(series):
            return np.array(series.to_list(), dtype=object).reshape(len(series))
        codes = series.replace_strict(distinct, np.arange(len(distinct)), return_dtype=pl.Int64).to_numpy()
        shared: Names = np.array(distinct.to_list(), dtype=object)[codes]
        return shared

    def gpu_counts(self, name: str) -> Floats:
        """Return a column of GPU counts: whole numbers, or a fraction of one GPU. 0 is accepted; callers may refuse it.
        """
        values = self.numbers(name, least=0, most=MAX_GPUS_PER_JOB)
        part = (values > 1) & (values != np.floor(values))
        self.refuse(part, name, "{} GPUs is neither a whole number nor a fraction of one GPU")
        tiny = (values > 0) & (values < LEAST_PART)
        self.refuse(tiny, name, f"{{}} GPUs is less than {LEAST_PART:g}, the smallest part of a GPU")
        return values

    # -- the result

    def trace(self, source: str, **columns: Any) -> Trace:
        """Return a trace of jobs with these columns, each as long as the table. Jobs are sorted by arrival; equal times
        keep the order of the file.

        `id` must be among the columns, and unique. If rows change their order, a remark says so.
        """
        n = len(self)
        self._unique(columns["id"])
        jobs = Jobs.build(n, **columns)
        late = int((np.diff(jobs.arrival_s) < 0).sum()) if n else 0
        if late:
            behind = int((jobs.arrival_s < np.maximum.accumulate(jobs.arrival_s)).sum())
            jobs = jobs.take(np.argsort(jobs.arrival_s, kind="stable"))
            early = counted(behind, "row arrives", "rows arrive")
            self.remarks.append(f"{early} before a row above; the rows were sorted by time")
        equal = int((np.diff(jobs.arrival_s) == 0).sum()) if n else 0
        if equal:
            again = counted(equal, "row arrives", "rows arrive")
            self.remarks.append(f"{again} at the same time as another row; the order of the file is kept")
        trace = Trace(jobs=jobs, source=source, left_out=dict(self.left_out), remarks=list(self.remarks))
        if self._text:
            trace.line_of = _Lines(self.path, columns["id"], self.rows + (1 if self._header else 0))
        if not n and not self.left_out:
            raise InputError("the trace is empty", file=self.path)
        return trace

    def _unique(self, ids: Names) -> None:
        series = pl.Series(ids.tolist(), dtype=pl.String)
        again = ~series.is_first_distinct().to_numpy()
        if again.any():
            row = int(np.argmax(again))
            first = int(np.argmax(ids == ids[row]))
            where = f"line {self.line(first)}" if self._text else f"row {int(self.rows[first]) + 1}"
            field = next((c for c in ("id", "job_id", "jobid", "name") if c in self.columns), "id")
            self.fail(row, field, f"the id {ids[row]!r} is already on {where}; ids must be unique")


@dataclass(frozen=True)
class _Lines:
    """Finds the line of a trace's job in a text file. `rows[i]`: row of the file, from 0, of job `ids[i]`."""

    path: str
    ids: Names
    rows: NDArray[np.int64]

    def __call__(self, job: str) -> int | None:
        found = np.flatnonzero(self.ids == job)
        return _line_of_row(self.path, int(self.rows[found[0]])) if len(found) else None


def _line_of_row(path: str, row: int) -> int:
    """Return the line, from 1, where a row (from 0, a header included) of a CSV file starts."""
    start = 1
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        for index, _ in enumerate(reader):
            if index == row:
                return start
            start = reader.line_num + 1
    return start


def hint_of_header(header: Sequence[str]) -> str:
    """Return what the user can do if a file's first line has only numbers, and so is no header; otherwise empty."""
    try:
        numbers = [float(name) for name in header if name]
    except ValueError:
        return ""
    return "; the file seems to have no header: write the names of its columns above the first line" if numbers else ""


def check_path(path: str | Path) -> Path:
    """Return the path as a Path. InputError if it is not a readable file."""
    if not str(path):
        raise InputError("a file is needed, but its name is empty")
    found = Path(path)
    try:
        with found.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror or error}", file=path) from None
    return found
