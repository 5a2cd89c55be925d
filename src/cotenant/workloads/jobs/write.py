"""Writes jobs in the native format of traces. Reading the written file gives exactly the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import polars as pl

from cotenant.core.errors import InputError
from cotenant.core.files import atomic_file
from cotenant.core.work import Jobs
from cotenant.workloads.jobs.native import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

ALWAYS = ("id", "arrival_s", "gpus")
TEXTS = ("id", "model", "tenant", "gpu_models")


def check_native_name(path: str | Path) -> str:
    """Return the suffix of a native file's name, .csv or .parquet. InputError for any other."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise InputError("the name of a native trace ends in .csv or .parquet", file=path, field="out")
    return suffix


def native_frame(jobs: Jobs) -> pl.DataFrame:
    """Return the jobs as a table of the native columns, without optional columns that are empty. Whole numbers become
    integers.
    """
    columns: dict[str, pl.Series] = {}
    for name in COLUMNS:
        values = getattr(jobs, name)
        if name in TEXTS:
            series = pl.Series(name, values.tolist(), dtype=pl.String).replace("", None)
        elif name == "priority":
            series = pl.Series(name, values) if values.any() else pl.Series(name, [None] * len(jobs), dtype=pl.Int64)
        else:
            series = _numbers(name, values)
        if name in ALWAYS or series.null_count() < len(series):
            columns[name] = series
    return pl.DataFrame(columns)


def _numbers(name: str, values: np.ndarray) -> pl.Series:
    stated = values[~np.isnan(values)]
    series = pl.Series(name, values).fill_nan(None)
    # floats above 2^53 are not converted, because they do not represent every integer
    if len(stated) and (stated == np.floor(stated)).all() and np.abs(stated).max() <= 2.0**53:
        return series.cast(pl.Int64)
    return series


def write_native(path: str | Path, make: Callable[[], Jobs]) -> Jobs:
    """Write the jobs that `make` returns to a .csv or .parquet file, atomically.

    The file is opened before `make` runs, so that a path that is not writable fails before the work.
    """
    suffix = check_native_name(path)
    with atomic_file(path) as handle:
        jobs = make()
        out = cast("IO[bytes]", getattr(handle, "buffer"))  # noqa: B009 - the bytes below the text file
        if suffix == ".csv":
            native_frame(jobs).write_csv(out)
        else:
            native_frame(jobs).write_parquet(out, compression="zstd", statistics=True)
    return jobs
