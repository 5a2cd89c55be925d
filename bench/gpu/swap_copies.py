"""Finds out why copies in both directions at once are slower than each alone, by adding the other parts of a move to
copies one by one.

Every case moves BYTES out in one process and BYTES in in another (or both in one), from a common start, through the
driver API (swap_copier.py). Cases are interleaved, so that other work of the machine affects all of them.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COPIER = Path(__file__).resolve().parent / "swap_copier.py"
LEAD_NS = 60_000_000  # time from the order until the copies start, in which the processes create their memory

# unit: size of a copy and of a piece of memory, in spans of registered host memory.
# out: what happens to device memory after a copy out of it. "free": it is freed after each copy, as the shim does;
#      "late": it is freed after the last copy; "keep": it is only unmapped; "give": it is sent to the other process;
#      "plain": nothing.
# in:  where device memory for a copy into it comes from. "create": it is created before each copy, as the shim does;
#      "map": it was created before the start and is mapped; "take": it comes from the other process and is mapped;
#      "plain": it is there already.
# paced: no more bytes are copied in than have been copied out so far.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, one process": {"processes": 1},
    "out frees": {"out": "free"},
    "out keeps": {"out": "keep"},
    "in creates": {"in": "create"},
    "in maps": {"in": "map"},
    "as the shim": {"out": "free", "in": "create"},
    "as the shim, one process": {"out": "free", "in": "create", "processes": 1},
    "out keeps, in maps": {"out": "keep", "in": "map"},
    "pieces of a quarter": {"out": "free", "in": "create", "unit": 0.25},
    "pieces of four": {"out": "free", "in": "create", "unit": 4},
    "copies in quarters": {"out": "free", "in": "create", "copy": 0.25},
    "priority in": {"out": "free", "in": "create", "priority": ["in"]},
    "priority both": {"out": "free", "in": "create", "priority": ["in", "out"]},
    "mapping thread": {"out": "free", "in": "create", "thread": True},
    "free at the end": {"out": "late", "in": "create"},
    "plain, other engine in": {"engine": "other"},
    "out frees, other engine in": {"out": "free", "engine": "other"},
    "paced": {"out": "free", "in": "create", "paced": True},
    "handed over": {"out": "give", "in": "take"},
    "handed over, quarter": {"out": "give", "in": "take", "unit": 0.25},
    "registered file, plain": {"host": "huge"},
    "registered file, as the shim": {"host": "huge", "out": "free", "in": "create"},
}
ALONE = ("plain", "as the shim")


class Worker:
    """The controller's end of a worker."""

    def __init__(self, size: int, span: int, link: socket.socket, environment: dict[str, str]) -> None:
        words = [str(size), str(span), str(link.fileno())]
        self.process = subprocess.Popen(
            [sys.executable, str(COPIER), *words],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[link.fileno()],
        )
        self.gpu = self.answer()["gpu"]

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a copying process ended ({self.process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def one_round(workers: list[Worker], case: dict[str, Any], ways: tuple[str, ...]) -> dict[str, float]:
    """Run a case: GB/s in each direction and together, and mapping time in ms. RuntimeError with the failed call."""
    order = case | {"start_ns": time.monotonic_ns() + LEAD_NS}
    one = case.get("processes") == 1
    asked = [(workers[0], ways)] if one else [(workers[0 if way == "out" else 1], (way,)) for way in ways]
    for process, parts in asked:
        process.tell("run " + json.dumps(order | {"ways": parts}))
    answers = [process.answer() for process, _ in asked]
    faults = [answer["error"] for answer in answers if "error" in answer]
    if faults:
        raise ValueError("; ".join(faults))
    found = {"late_ms": max(answer["late_ns"] / 1e6 for answer in answers)}
    seconds = []
    for answer in answers:
        for way, took in answer["ways"].items():
            seconds.append(took["seconds"])
            found[f"{way}_gbps"] = case["bytes"] / took["seconds"] / 1e9
            found[f"{way}_mapping_ms"] = took["mapping_s"] * 1e3
            if "handed_on" in took:
                found["handed_on"] = took["handed_on"]
    found["gbps"] = case["bytes"] / max(seconds) / 1e9
    return found


def table(workers: list[Worker], cases: dict[str, dict[str, Any]], size: int, until: float) -> dict[str, Any]:
    """Medians per case over interleaved rounds. A failed case is reported and left out from then on."""
    rows: dict[str, list[dict[str, float]]] = {}
    faults: dict[str, Any] = {}
    rounds = 0
    while rounds < 2 or (rounds < 15 and time.monotonic() < until):
        for name, case in cases.items():
            todo: list[tuple[str, tuple[str, ...]]] = [(name, ("out", "in"))]
            todo += [(f"{name}: {way} alone", (way,)) for way in ("out", "in")] if name in ALONE else []
            for label, ways in todo:
                if label in faults:
                    continue
                try:
                    rows.setdefault(label, []).append(one_round(workers, case | {"bytes": size}, ways))
                except ValueError as error:
                    faults[label] = {"error": str(error)}
                    rows.pop(label, None)
        rounds += 1
    return faults | {
        name: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
        | {"rounds": len(runs), "all": [round(run["gbps"], 2) for run in runs]}
        for name, runs in rows.items()
    }


@contextmanager
def pair(size: int, span: int, environment: dict[str, str], kinds: list[str]) -> Iterator[tuple[list[Worker], Any]]:
    """Run two workers with memory of these kinds; yields them and their answers about it."""
    workers: list[Worker] = []
    links = socket.socketpair()
    try:
        for link in links:
            workers.append(Worker(size, span, link, environment))
        made = {}
        for kind in kinds:
            for each in workers:
                each.tell(f"make {kind}")
            made[kind] = [each.answer() for each in workers]
        yield workers, made
    finally:
        for each in workers:
            each.close()
        for link in links:
            link.close()


def machine() -> dict[str, str]:
    """Properties of the machine that may affect the results."""
    facts = {"kernel": os.uname().release, "nodes": str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))}
    for name in ("enabled", "shmem_enabled"):
        path = Path("/sys/kernel/mm/transparent_hugepage") / name
        facts[name] = path.read_text().strip() if path.exists() else "none"
    return facts


def experiment(size: int, span: int, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run all cases within about that many seconds; GB/s are 1e9 bytes/s in each direction."""
    found: dict[str, Any] = {"bytes": size, "span": span, "machine": machine()}
    with pair(size, span, environment, ["pinned", "huge"]) as (workers, made):
        found["gpu"] = workers[0].gpu
        found["memory"] = made
        found["cases"] = table(workers, CASES, size, time.monotonic() + seconds)
    return found
