"""Records with more events than fit into memory: their figures are those of the whole, read a part at a time."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sample_records import random_record

from cotenant.core.errors import InputError
from cotenant.core.metrics.cluster import Series
from cotenant.core.metrics.jobs import JobMetrics
from cotenant.core.metrics.summary import Analysis
from cotenant.core.record import reader, writer
from cotenant.core.record.reader import read_record
from cotenant.core.record.schema import EVENTS_FILE
from cotenant.core.record.writer import write_record


def in_parts(monkeypatch: pytest.MonkeyPatch, rows: int = 100, block: int = 4) -> None:
    monkeypatch.setattr(reader, "ROWS_AT_ONCE", rows)
    monkeypatch.setattr(reader, "_BLOCK", block)


@pytest.mark.parametrize("placements", [True, False])
@pytest.mark.parametrize("seed", [1, 4, 7])
def test_figures_do_not_depend_on_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, placements: bool
) -> None:
    monkeypatch.setattr(writer, "ROW_GROUP", 64)  # a part is gathered from several groups of rows
    made = random_record(seed, jobs=60)
    made.info.placements = placements
    whole = Analysis(write_record(made, tmp_path / "run"))
    in_parts(monkeypatch)
    record = read_record(tmp_path / "run")
    parts = list(record.parts())
    assert len(parts) > 2
    assert sum(part.jobs.height for part in parts) == 60
    assert sum(len(part.events) for part in parts) == len(whole.record.events)
    assert max(len(part.events) for part in parts) < 200
    pieces = Analysis(record)
    for metric in fields(JobMetrics):
        np.testing.assert_array_equal(getattr(whole.jobs, metric.name), getattr(pieces.jobs, metric.name))
    for name in (f.name for f in fields(Series)):
        mine, others = getattr(pieces.series(), name), getattr(whole.series(), name)
        np.testing.assert_allclose(mine, others, rtol=1e-9, atol=1e-9)
    assert "events" not in record.log.__dict__  # all events were never in memory at once
    ones, others = (pl.json_normalize(analysis.summary).row(0, named=True) for analysis in (pieces, whole))
    assert ones.keys() == others.keys()
    for name, value in ones.items():
        assert value == others[name] if value is None else value == pytest.approx(others[name], rel=1e-12)
    assert len(record.events) == len(whole.record.events)  # whoever asks for all has them


def test_a_part_of_a_damaged_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_record(1, jobs=60, path=tmp_path / "run")
    file = tmp_path / "run" / EVENTS_FILE
    events = pl.read_parquet(file)
    events.with_columns(pl.col("job") + pl.lit(100, pl.Int32)).write_parquet(file)
    in_parts(monkeypatch)
    with pytest.raises(InputError, match="names jobs that"):
        list(read_record(tmp_path / "run").parts())
