"""Writes a run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: nodes as processes, GPUs as threads, jobs
as slices, and the cluster's jobs and GPUs as counters.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.files import atomic_file
from cotenant.core.metrics.timeline import HOLDING
from cotenant.core.record.record import Placements, Record

CLUSTER_PID = 1  # in the trace file, process 1 is the cluster, and process n + 2 is node n
_WHOLE = 0.999  # a share of a GPU below this is drawn as a part of the GPU


def write_perfetto(record: Record, path: str | Path) -> int:
    """Write the trace as Chrome's JSON; returns the number of slices.

    Raises InputError if the record has no placements or the file cannot be written.
    """
    if record.placements is None:
        raise InputError(
            "was recorded without placements, so there are no nodes and GPUs to draw; run it again with --record all "
            "(in a sweep file: record: all)",
            file=record.path,
        )
    slices = 0
    with atomic_file(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        for event in _events(record, record.placements):
            file.write(("" if first else ",\n") + json.dumps(event, ensure_ascii=False, separators=(",", ":")))
            first = False
            slices += event["ph"] == "X"
        file.write("\n]}\n")
    return slices


def _events(record: Record, placements: Placements) -> Iterator[dict[str, Any]]:
    yield _name("process_name", CLUSTER_PID, 0, f"cluster: {record.info.label}")
    lanes = [Lanes(int(gpus)) for gpus in record.info.cluster.get("node_gpus", [])]
    named: set[tuple[int, int]] = set()
    yield from _counters(record)
    for node, slice_ in _slices(record, placements, lanes):
        if (node, -1) not in named:
            named.add((node, -1))
            yield _name("process_name", node + 2, 0, f"node {node}")
        if (node, slice_["tid"]) not in named:
            named.add((node, slice_["tid"]))
            yield _name("thread_name", node + 2, slice_["tid"], lane_name(slice_["tid"]))
        yield slice_


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _counters(record: Record) -> Iterator[dict[str, Any]]:
    total = float(record.info.cluster.get("gpus") or 0)
    for row in record.rounds.iter_rows(named=True):
        ts = _microseconds(row["time_s"])
        jobs = {"running": row["running"], "waiting": row["waiting"]}
        gpus = {"held": row["gpus_held"], "free": total - row["gpus_held"]}
        yield {"ph": "C", "pid": CLUSTER_PID, "tid": 0, "ts": ts, "name": "jobs", "args": jobs}
        yield {"ph": "C", "pid": CLUSTER_PID, "tid": 0, "ts": ts, "name": "GPUs", "args": gpus}


class Lanes:
    """The GPUs of one node and which of them are free. A record says how many GPUs a job holds on a node, not which, so
    the free ones with the lowest numbers are drawn. Parts of a GPU are drawn as lanes below that GPU.
    """

    PER_GPU = 1000  # number of a lane: gpu * PER_GPU, and for parts of the GPU the numbers after it

    def __init__(self, gpus: int) -> None:
        self.free = list(range(gpus))
        # number of the next additional lane, for a record in which jobs hold more GPUs than the node has
        self.more = gpus
        self.parts: dict[int, dict[int, float]] = {}

    def take(self, amount: float) -> list[int]:
        """Return free lanes for a number of GPUs, or for a part of one GPU, and mark them as used."""
        if amount < _WHOLE:
            return [self._take_part(amount)]
        return [self._take_gpu() * self.PER_GPU for _ in range(round(amount))]

    def give(self, lanes: list[int]) -> None:
        for lane in lanes:
            gpu = lane // self.PER_GPU
            if gpu in self.parts:
                del self.parts[gpu][lane]
                if self.parts[gpu]:
                    continue
                del self.parts[gpu]
            heapq.heappush(self.free, gpu)

    def _take_gpu(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        self.more += 1
        return self.more - 1

    def _take_part(self, amount: float) -> int:
        room = [gpu for gpu, used in self.parts.items() if sum(used.values()) + amount <= 1.001]
        gpu = min(room) if room else self._take_gpu()
        used = self.parts.setdefault(gpu, {})
        lane = next(n for n in range(gpu * self.PER_GPU + 1, (gpu + 1) * self.PER_GPU) if n not in used)
        used[lane] = amount
        return lane


def lane_name(lane: int) -> str:
    """Return the name of a lane of the trace: "GPU 3", or "GPU 3 part 2"."""
    gpu, part = divmod(lane, Lanes.PER_GPU)
    return f"GPU {gpu} part {part}" if part else f"GPU {gpu}"


@dataclass
class _Stay:
    """The time that a job stays on a node, which begins with an event of the record."""

    gpus: float
    lanes: list[int]
    since_s: float
    event: int


def _slices(record: Record, placements: Placements, lanes: list[Lanes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (node, slice) whenever a job leaves a node or holds another number of GPUs there."""
    events = record.events
    holding = np.isin(events.kind, [int(kind) for kind in HOLDING])
    held: dict[int, dict[int, _Stay]] = {}  # job -> node -> the stay of the job on that node that has not ended
    drawn = _Drawer(record)
    for begin, end in _simultaneous(events.time_s):
        now = float(events.time_s[begin])
        # only the last of several events that a job has at one time counts
        last = {int(events.job[i]): i for i in range(begin, end)}
        wanted = {job: dict(placements.at(i)) if holding[i] else {} for job, i in last.items()}
        # stays that end at this time are ended first, so that their GPUs are free for the stays that begin at this time
        for job, places in wanted.items():
            for node in [n for n, stay in held.get(job, {}).items() if places.get(n) != stay.gpus]:
                stay = held[job].pop(node)
                lanes[node].give(stay.lanes)
                yield from drawn.slices(job, node, stay, now)
        for job, places in wanted.items():
            mine = held.setdefault(job, {})
            for node, gpus in places.items():
                while node >= len(lanes):
                    lanes.append(Lanes(0))
                if node not in mine:
                    mine[node] = _Stay(gpus, lanes[node].take(gpus), now, last[job])
            if not mine:
                del held[job]
    for job, stays in held.items():
        for node, stay in stays.items():
            yield from drawn.slices(job, node, stay, record.end_s)


class _Drawer:
    def __init__(self, record: Record) -> None:
        self.events = record.events
        self.ids, self.models, self.gpus = (record.job(name) for name in ("id", "model", "gpus"))

    def slices(self, job: int, node: int, stay: _Stay, until_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        args = {
            "gpus": float(self.gpus[job]),
            "cpus": float(self.events.cpu_milli[stay.event]) / 1000,
            "memory_gb": float(self.events.memory_mb[stay.event]) / 1000,
            "speed": round(float(self.events.speed[stay.event]), 4),
        }
        start = _microseconds(stay.since_s)
        base = {"ph": "X", "pid": node + 2, "ts": start, "dur": _microseconds(until_s) - start}
        for lane in stay.lanes:
            yield (
                node,
                {**base, "tid": lane, "name": str(self.ids[job]), "cat": self.models[job] or "job", "args": args},
            )


def _simultaneous(times: Any) -> Iterator[tuple[int, int]]:
    """Produce the ranges of events with the same time."""
    if len(times) == 0:
        return
    edges = np.flatnonzero(np.diff(times)) + 1
    yield from zip([0, *edges.tolist()], [*edges.tolist(), len(times)], strict=True)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
