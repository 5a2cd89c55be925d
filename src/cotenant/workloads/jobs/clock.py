"""Parses dates and times of logs: 2017-10-09 07:01:55, with or without a fraction and a zone (+08:00, Z)."""

from __future__ import annotations

import numpy as np
import polars as pl

from cotenant.core.work import Floats
from cotenant.workloads.table import Table

ZONE = r"(?:Z|([+-])(\d{2}):?(\d{2}))$"


def clock_seconds(table: Table, name: str) -> Floats:
    """Return a column of dates and times as seconds since 1970. Times without a zone are read as UTC, because only
    differences are used.
    """
    written = pl.Series(table.texts(name).tolist(), dtype=pl.String)
    plain = written.str.replace(ZONE, "").str.replace("T", " ", literal=True)
    parsed = plain.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False)
    table.refuse(parsed.is_null().to_numpy(), name, "{} is not a time like 2017-10-09 07:01:55")
    hours, minutes = (written.str.extract(ZONE, part).cast(pl.Float64).fill_null(0.0).to_numpy() for part in (2, 3))
    west = (written.str.extract(ZONE, 1) == "-").fill_null(False).to_numpy()
    east_s = np.where(west, -1.0, 1.0) * (hours * 3600 + minutes * 60)
    seconds: Floats = parsed.dt.epoch("us").to_numpy().astype(np.float64) / 1e6 - east_s
    return seconds
