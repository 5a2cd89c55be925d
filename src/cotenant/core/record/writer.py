"""Writes a run's record, in memory or into a folder. The folder gets its name, and is complete, only when the writer is
closed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from cotenant.core.errors import WorkError
from cotenant.core.files import AtomicFolder
from cotenant.core.record.reader import read_record
from cotenant.core.record.record import Events, Placements, Record
from cotenant.core.record.schema import (
    EVENTS,
    EVENTS_FILE,
    JOBS,
    JOBS_FILE,
    ROUNDS,
    ROUNDS_FILE,
    RUN_FILE,
    RunInfo,
)

ROW_GROUP = 1 << 18
_SPILL_ROWS = 1 << 19  # number of events that are kept in memory before they are written to disk; they take about 40 MB
_NUMPY: dict[str, Any] = {
    "time_s": np.float64, "job": np.int32, "kind": np.int8, "reason": np.int8,
    "cpu_milli": np.int64, "memory_mb": np.int64, "speed": np.float64,
    "running": np.int32, "waiting": np.int32, "gpus_held": np.float64, "gpus_wanted": np.float64,
    "gpus_free_whole_nodes": np.float64, "cpu_milli_held": np.int64, "memory_mb_held": np.int64,
}  # fmt: skip
_EVENT_COLUMNS = tuple(name for name in EVENTS if name not in ("nodes", "node_gpus"))

Columns = dict[str, NDArray[Any]]


class RecordWriter:
    """Takes a run's events and rounds chunk by chunk.

    `path` is the folder to write (an earlier run there is replaced), or None to keep the record in memory. `jobs` is
    the jobs table (see record.jobs_table), whole or in pieces. `info` may be changed until close(). Data go to disk
    piece by piece, so memory does not grow with the run. The same calls with the same data write the same bytes.

    Use it as a context manager: it is closed when the block ends, and discarded if the block raises. Raises InputError
    at once if the folder cannot be written, WorkError if the disk fails later.
    """

    def __init__(self, path: str | Path | None, info: RunInfo, jobs: pl.DataFrame | Iterable[pl.DataFrame]) -> None:
        self.info = info
        self._folder = None if path is None else AtomicFolder(path, replaceable=RUN_FILE)
        #: files of each table that are on disk already
        self._pieces: dict[str, list[Path]] = {JOBS_FILE: [], EVENTS_FILE: [], ROUNDS_FILE: []}
        self._events: list[Columns] = []
        self._rounds: list[Columns] = []
        self._last_s = -np.inf
        self._record: Record | None = None
        self._height = 0
        self._jobs = _frame({}, JOBS)  #: rows of the jobs table that are not on disk yet
        try:
            self._take_jobs((jobs,) if isinstance(jobs, pl.DataFrame) else jobs)
        except BaseException:
            self.discard()
            raise

    def _take_jobs(self, frames: Iterable[pl.DataFrame]) -> None:
        for frame in frames:
            if self._folder is not None and self._height:
                self._put(JOBS_FILE, self._jobs)
                self._jobs = _frame({}, JOBS)
            self._jobs = pl.concat([self._jobs, frame.select(list(JOBS)).cast(JOBS)])  # type: ignore[arg-type]
            self._height += frame.height

    def append_events(
        self,
        *,
        time_s: ArrayLike,
        job: ArrayLike,
        kind: ArrayLike,
        reason: ArrayLike,
        cpu_milli: ArrayLike,
        memory_mb: ArrayLike,
        speed: ArrayLike,
        node_offset: ArrayLike | None = None,
        node_ids: ArrayLike | None = None,
        node_gpus: ArrayLike | None = None,
    ) -> None:
        """Append n events; arrays of length n, units as in schema.EVENTS. They are copied: buffers may be reused.

        With placements, event i holds node_ids[node_offset[i]:node_offset[i+1]] and as many node_gpus; node_offset has
        length n + 1 and may start anywhere. If info.placements is False, leave these three arrays out. Times must not
        decrease, within the chunk and from earlier chunks (ValueError).
        """
        given = {
            "time_s": time_s, "job": job, "kind": kind, "reason": reason,
            "cpu_milli": cpu_milli, "memory_mb": memory_mb, "speed": speed,
        }  # fmt: skip
        chunk = _copied(given)
        n = len(chunk["time_s"])
        if n == 0:
            return
        self._check_events(chunk)
        if self.info.placements:
            if node_offset is None or node_ids is None or node_gpus is None:
                raise ValueError("a record with placements needs node_offset, node_ids and node_gpus")
            offset = np.array(node_offset, dtype=np.int64)
            if len(offset) != n + 1:
                raise ValueError(f"node_offset has length {len(offset)}, not {n + 1}")
            flat = slice(int(offset[0]), int(offset[-1]))
            chunk["offset"] = offset - offset[0]
            chunk["nodes"] = np.array(np.asarray(node_ids)[flat], dtype=np.int32)
            chunk["node_gpus"] = np.array(np.asarray(node_gpus)[flat], dtype=np.float32)
        self._events.append(chunk)
        if self._folder is not None and _rows(self._events) >= _SPILL_ROWS:
            self._put(EVENTS_FILE, _events_frame(*self._take_events()))

    def append_rounds(
        self,
        *,
        time_s: ArrayLike,
        running: ArrayLike,
        waiting: ArrayLike,
        gpus_held: ArrayLike,
        gpus_wanted: ArrayLike,
        gpus_free_whole_nodes: ArrayLike,
        cpu_milli_held: ArrayLike,
        memory_mb_held: ArrayLike,
    ) -> None:
        """Append n rounds (decisions of the policy): the state of the cluster after each; arrays of length n as in
        schema.ROUNDS.
        """
        given = {
            "time_s": time_s, "running": running, "waiting": waiting, "gpus_held": gpus_held,
            "gpus_wanted": gpus_wanted, "gpus_free_whole_nodes": gpus_free_whole_nodes,
            "cpu_milli_held": cpu_milli_held, "memory_mb_held": memory_mb_held,
        }  # fmt: skip
        self._rounds.append(_copied(given))
        if self._folder is not None and _rows(self._rounds) >= _SPILL_ROWS:
            self._put(ROUNDS_FILE, self._take_rounds())

    def close(self) -> Record:
        """Finish the record and return it. If the record is written to disk, its complete folder then lies at its
        destination. Further calls return the same record."""
        if self._record is not None:
            return self._record
        if self._folder is None:
            self._record = self._in_memory()
        else:
            self._write()
            self._jobs = _frame({}, JOBS)
            self._record = read_record(self._folder.path)
        return self._record

    def discard(self) -> None:
        """Discard the whole record; no folder appears on disk."""
        self._events = []
        self._rounds = []
        if self._folder is not None:
            self._folder.discard()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif self._record is None:
            self.discard()

    def _check_events(self, chunk: Columns) -> None:
        times, jobs = chunk["time_s"], chunk["job"]
        if not (np.isfinite(times[-1]) and times[0] >= self._last_s and bool(np.all(times[1:] >= times[:-1]))):
            raise ValueError("event times must be finite and must not run backwards")
        if int(jobs.min()) < 0 or int(jobs.max()) >= self._height:
            raise ValueError(f"an event names a job outside 0..{self._height - 1}")
        self._last_s = float(times[-1])

    def _take_events(self) -> tuple[Columns, Placements | None]:
        chunks, self._events = self._events, []
        columns = _joined(chunks, _EVENT_COLUMNS)
        return columns, _joined_placements(chunks) if self.info.placements else None

    def _take_rounds(self) -> pl.DataFrame:
        chunks, self._rounds = self._rounds, []
        return _frame(_joined(chunks, tuple(ROUNDS)), ROUNDS)

    def _in_memory(self) -> Record:
        columns, placements = self._take_events()
        return Record(self.info, self._jobs, Events(**columns), self._take_rounds(), None, lambda: placements)

    def _put(self, file: str, frame: pl.DataFrame) -> None:
        """Write the next piece of a table of the record to disk."""
        assert self._folder is not None
        pieces = self._pieces[file]
        piece = self._folder.part / f"{file}-{len(pieces):06d}.arrow"
        try:
            frame.write_ipc(piece, compression="lz4")
        except (OSError, pl.exceptions.PolarsError) as error:
            self.discard()
            raise _failed(self._folder.path, error) from error
        pieces.append(piece)

    def _finish(self, file: str, rest: pl.DataFrame) -> None:
        """Write a table of the record from its pieces on disk and its remaining rows in memory."""
        assert self._folder is not None
        pieces = self._pieces[file]
        if pieces and rest.height:
            self._put(file, rest)
        _sink(pl.scan_ipc(pieces) if pieces else rest.lazy(), self._folder.part / file)
        for piece in pieces:
            piece.unlink()

    def _write(self) -> None:
        assert self._folder is not None
        try:
            text = json.dumps(self.info.to_dict(), indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
            self._finish(EVENTS_FILE, _events_frame(*self._take_events()))
            self._finish(JOBS_FILE, self._jobs)
            self._finish(ROUNDS_FILE, self._take_rounds())
            (self._folder.part / RUN_FILE).write_text(text + "\n", encoding="utf-8")
        except (OSError, pl.exceptions.PolarsError) as error:
            self.discard()
            raise _failed(self._folder.path, error) from error
        except BaseException:
            self.discard()
            raise
        self._folder.commit()


def _rows(chunks: list[Columns]) -> int:
    return sum(len(chunk["time_s"]) for chunk in chunks)


def _copied(given: dict[str, ArrayLike]) -> Columns:
    chunk = {name: np.atleast_1d(np.array(values, dtype=_NUMPY[name])) for name, values in given.items()}
    if len({len(values) for values in chunk.values()}) != 1:
        raise ValueError(f"columns of unlike length: { {name: len(v) for name, v in chunk.items()} }")
    return chunk


def _joined(chunks: list[Columns], names: tuple[str, ...]) -> Columns:
    """Concatenate the chunks; each column is removed from the chunks once joined, to limit the peak memory."""
    whole: Columns = {}
    for name in names:
        pieces = [chunk.pop(name) for chunk in chunks]
        whole[name] = np.concatenate(pieces) if pieces else np.empty(0, dtype=_NUMPY[name])
    return whole


def _joined_placements(chunks: list[Columns]) -> Placements:
    base = 0
    offsets = [np.zeros(1, dtype=np.int64)]
    for chunk in chunks:
        offset = chunk.pop("offset")
        offsets.append(offset[1:] + base)
        base += int(offset[-1])
    nodes = [chunk.pop("nodes") for chunk in chunks] or [np.empty(0, np.int32)]
    gpus = [chunk.pop("node_gpus") for chunk in chunks] or [np.empty(0, np.float32)]
    return Placements(np.concatenate(offsets), np.concatenate(nodes), np.concatenate(gpus))


def _frame(columns: Columns, schema: dict[str, pl.DataType]) -> pl.DataFrame:
    return pl.DataFrame(columns, schema=None if columns else schema).cast(schema)  # type: ignore[arg-type]


def _events_frame(columns: Columns, placements: Placements | None) -> pl.DataFrame:
    frame = pl.DataFrame(columns)
    if placements is None or frame.is_empty():
        lists = [pl.lit(None, dtype=EVENTS[name]).alias(name) for name in ("nodes", "node_gpus")]
        return frame.with_columns(lists).cast(EVENTS)  # type: ignore[arg-type]
    low = pl.lit(pl.Series(placements.offset[:-1]))
    length = pl.lit(pl.Series(np.diff(placements.offset)))
    return frame.with_columns(
        pl.lit(pl.Series(placements.nodes)).implode().list.slice(low, length).alias("nodes"),
        pl.lit(pl.Series(placements.gpus)).implode().list.slice(low, length).alias("node_gpus"),
    ).cast(EVENTS)  # type: ignore[arg-type]


def _sink(frame: pl.LazyFrame, path: Path) -> None:
    frame.sink_parquet(path, compression="zstd", compression_level=3, row_group_size=ROW_GROUP, maintain_order=True)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot be stored in {RUN_FILE}")


def _failed(path: Path, error: Exception) -> WorkError:
    return WorkError(f"{path}: the record could not be written: {error}")
