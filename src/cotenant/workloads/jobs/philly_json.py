"""Reads the original job log of Microsoft's Philly trace of 2017: a JSON list of {jobid, vc, user, status,
submitted_time, attempts}. An attempt is {start_time, end_time, detail: [{ip, gpus: [...]}]}. Times are local; a time
zone that a time states is ignored. "None" is an unknown time.

The option --attempts (sum, last, longest) says whether a job's duration is the sum of the durations of its attempts,
that of the last attempt, or the longest. Its GPU count is that of the first attempt with GPUs in `detail`. Jobs that
never ran, or whose times or GPUs are unknown, are left out.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any, NoReturn

import numpy as np
import orjson

from cotenant.core.errors import InputError
from cotenant.core.units import counted
from cotenant.core.work import Trace
from cotenant.workloads.downloads import check_text
from cotenant.workloads.table import MAX_GPUS_PER_JOB, Table, check_path
from cotenant.workloads.trace_options import ATTEMPTS, TraceOptions

EPOCH = datetime(1970, 1, 1)


def read(path: str, options: TraceOptions) -> Trace:
    """Read the jobs of the log. The virtual cluster is the tenant. The earliest submission is time 0."""
    import polars as pl

    if options.attempts not in ATTEMPTS:
        raise InputError(f"{options.attempts!r} is not one of {', '.join(ATTEMPTS)}", field="attempts")
    entries = _load(path)
    kept: dict[str, list[Any]] = {name: [] for name in ("id", "arrival_s", "gpus", "duration_s", "tenant")}
    left_out: Counter[str] = Counter()
    status: Counter[str] = Counter()
    uneven = 0
    for index, entry in enumerate(entries):
        job = _job(path, index, entry, options.attempts)
        if isinstance(job, str):
            left_out[job] += 1
            continue
        status[str(entry.get("status", "unknown"))] += 1
        uneven += job.pop("uneven")
        for name, value in job.items():
            kept[name].append(value)
    table = Table(path, pl.DataFrame({"jobid": kept["id"]}, schema={"jobid": pl.String}), header=False, text=False)
    table.left_out = dict(left_out)
    if status:
        table.remarks.append("kept by status: " + ", ".join(f"{n:,} {name}" for name, n in status.most_common()))
    if uneven:
        changed = f"the GPU count of {counted(uneven, 'job')} changed between attempts"
        table.remarks.append(f"{changed}; that of the first attempt is used")
    columns: dict[str, Any] = {name: np.array(values, dtype=object) for name, values in kept.items()}
    arrival_s = np.array(kept["arrival_s"], dtype=np.float64)
    columns["arrival_s"] = arrival_s - arrival_s.min() if len(arrival_s) else arrival_s
    return table.trace(f"philly-json:{path}", **columns)


def _load(path: str) -> list[Any]:
    found = check_path(path)
    check_text(found)
    data = found.read_bytes()
    try:
        entries = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InputError(f"is not JSON or is truncated: {error.msg}", file=path, line=error.lineno) from None
    if not isinstance(entries, list):
        raise InputError("is not a JSON list of jobs", file=path)
    return entries


def _job(path: str, index: int, entry: Any, attempts_rule: str) -> dict[str, Any] | str:
    """Return the columns of one job, or the reason for leaving it out. InputError if the log is malformed."""
    if not isinstance(entry, dict):
        _fail(path, index, "jobs", "is not an object")
    for name in ("jobid", "submitted_time", "attempts"):
        if name not in entry:
            _fail(path, index, name, "is missing")
    attempts = entry["attempts"]
    if not isinstance(attempts, list) or not all(isinstance(a, dict) for a in attempts):
        _fail(path, index, "attempts", "is not a list of objects")
    submitted = _time(path, index, "submitted_time", entry["submitted_time"])
    if submitted is None:
        return "without submitted_time"
    if not attempts:
        return "without attempts"
    lengths = []
    for attempt in attempts:
        start = _time(path, index, "start_time", attempt.get("start_time"))
        end = _time(path, index, "end_time", attempt.get("end_time"))
        if start is None or end is None:
            return "with an attempt without start or end time"
        if end < start:
            _fail(path, index, "end_time", f"{attempt['end_time']!r} is before start_time; the duration is negative")
        lengths.append(end - start)
    duration = {"sum": sum(lengths), "last": lengths[-1], "longest": max(lengths)}[attempts_rule]
    if duration == 0:
        return "without duration"
    counts = [n for n in (_gpus(path, index, attempt) for attempt in attempts) if n]
    if not counts:
        return "without GPUs in any attempt"
    return {
        "id": str(entry["jobid"]),
        "arrival_s": submitted,
        "gpus": counts[0],
        "duration_s": duration,
        "tenant": str(entry.get("vc") or ""),
        "uneven": len(set(counts)) > 1,
    }


def _gpus(path: str, index: int, attempt: dict[str, Any]) -> int:
    try:
        count = sum(len(node["gpus"]) for node in attempt.get("detail") or [])
    except (TypeError, KeyError):
        _fail(path, index, "detail", "is not a list of {ip, gpus: [...]}")
    if count > MAX_GPUS_PER_JOB:
        _fail(path, index, "detail", f"{count} GPUs is above the maximum of {MAX_GPUS_PER_JOB}")
    return count


def _time(path: str, index: int, field: str, value: Any) -> float | None:
    if value in (None, "", "None"):
        return None
    # some times of the log have a time zone, which is ignored, since all its times are local
    written = str(value)[:19]
    try:
        if len(written) < 19:
            raise ValueError
        # `fromisoformat` is ten times as fast as strptime
        return (datetime.fromisoformat(written) - EPOCH).total_seconds()
    except (ValueError, TypeError):
        _fail(path, index, field, f"{value!r} is not a time like 2017-10-09 07:01:55")


def _fail(path: str, index: int, field: str, message: str) -> NoReturn:
    raise InputError(f"{message} (job {index + 1} of the list)", file=path, field=field)
