"""`cotenant profile kernels`: duration, number of SMs and work class of each kernel of an unmodified program.

Hardware counters need privileges that users seldom have, so the class comes from timing. The program runs on a larger
and a smaller fraction of the SMs, and on the larger one together with a program that saturates memory bandwidth from
the other SMs. A kernel that is slower with that program is of class memory; one that is slower on fewer SMs is of class
compute; for others the class is unknown.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, register
from cotenant.bench.colocation_rig import Rig
from cotenant.core.errors import WorkError

WIDE, NARROW = 0.75, 0.25  # fractions of the SMs: the memory load runs on NARROW while the program runs on WIDE
NEEDS_MEMORY, NEEDS_SMS = 1.2, 2.0
# The software GPU computes contention from the work that is enqueued when a kernel starts, so its memory load must
# consist of long kernels.
HOG, SOFT_HOG = "add256", "add2048"
VARIABLE = "COTENANT_KERNELS"


@dataclass(frozen=True)
class Timed:
    """One kind of launch: a kernel with its grid and block. Times are in nanoseconds. `sms` is 0 if unknown."""

    name: str
    grid: str
    block: str
    shared_bytes: int
    count: int
    mean_ns: float
    least_ns: float
    sms: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return the key of a launch; launches with the same key are of the same kind."""
        return (self.name, self.grid, self.block, self.shared_bytes)


def parse_times(text: str) -> tuple[list[Timed], int]:
    """Return the rows of kernel times that the shim wrote, and the number of launches that it could not time."""
    rows, missed = [], 0
    for line in text.splitlines():
        parts = line.split("\t")
        if parts[0] == "missed":
            missed = int(parts[1])
        elif len(parts) >= 8:
            count, mean, least, sms, grid, block, shared = parts[:7]
            rows.append(
                Timed("\t".join(parts[7:]), grid, block, int(shared), int(count), float(mean), float(least), int(sms))
            )
    return rows, missed


def classify(narrow: float, beside: float) -> str:
    """Return the work class of a kernel from two ratios: its time on NARROW divided by its time on WIDE, and its time
    on WIDE with the memory load divided by that without.
    """
    if beside >= NEEDS_MEMORY:
        return "memory"
    return "compute" if narrow >= NEEDS_SMS else "unknown"


Times = dict[tuple[str, str, str, int], Timed]


def same_kind(times: Times, timed: Timed) -> Timed | None:
    """Return the same kernel in another run: with the same key, else the only one with the same name and block, because
    a grid may depend on the number of SMs. None if there is none, or more than one.
    """
    if timed.key in times:
        return times[timed.key]
    near = [other for other in times.values() if (other.name, other.block) == (timed.name, timed.block)]
    return near[0] if len(near) == 1 else None


class Input:
    """Standard input of the program. It is passed on to the first run and repeated for the others, so that all runs do
    the same work. If it is a terminal, every run reads it directly."""

    def __init__(self) -> None:
        self._terminal = os.isatty(0)
        self._seen: list[bytes] = []
        self._first = True

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the program; its standard input gets the same bytes as that of all other runs."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=None if self._terminal else subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        if process.stdin is not None:
            threading.Thread(target=self._feed, args=(process.stdin, self._first), daemon=True).start()
            process.stdin = None  # a thread writes to the program's standard input, so `communicate` must not close it
        self._first = False
        return process

    def _feed(self, to: IO[bytes], first: bool) -> None:
        with contextlib.suppress(OSError, ValueError), to:  # the program may end without reading its input
            for piece in self._read() if first else list(self._seen):
                to.write(piece)
                to.flush()

    def _read(self) -> Iterator[bytes]:
        while piece := os.read(0, 1 << 16):
            self._seen.append(piece)
            yield piece


def run_once(
    rig: Rig, command: Sequence[str], part: float, timeout_s: float, number: int, given: Input
) -> tuple[Times, int]:
    """Run the program to its end on a fraction `part` of the SMs. Returns its kernels by key, and the number of
    launches that were not timed. WorkError if the program fails, or takes longer than `timeout_s`.
    """
    folder = rig.bench.folder / f"kernels{number}"
    folder.mkdir()
    spec = TenantSpec(f"profiled{number}", limit=part, mechanism=rig.mechanism)
    with ControlClient(rig.bench.folder) as client:
        answer = register(client, Launch(rig.bench.folder, spec, list(command)))
        environment = rig.bench.with_shim(answer) | {VARIABLE: str(folder / "times")}
        process = given.start(command, environment)
        client.call("started", name=spec.name, pid=process.pid)
        try:
            _, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise WorkError(f"the program did not end within {timeout_s:g} s: give it less work") from None
    if process.returncode != 0:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise WorkError(": ".join([f"the program failed with code {process.returncode}", *last]))
    found: Times = {}
    missed = 0
    for path in sorted(folder.iterdir()):
        rows, lost = parse_times(path.read_text(errors="replace"))
        missed += lost
        # if several processes launched the kernel, the row of the process that launched it most often is used
        for row in rows:
            if row.key not in found or found[row.key].count < row.count:
                found[row.key] = row
    if not found:
        raise WorkError("no kernel was seen: does the program use the GPU? Kernels of CUDA graphs are not timed")
    return found, missed


def measure(
    gpus: str,
    command: Sequence[str],
    *,
    classes: bool = True,
    timeout_s: float = 600.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the kernels of `command`, in descending order of total time. With `classes` the program runs four times;
    without, it runs once and every class is unknown.
    """
    given = Input()
    with Rig(gpus, together=True) as rig:
        progress("on the whole GPU")
        whole, missed = run_once(rig, command, 1.0, timeout_s, 0, given)
        wide = narrow = beside = whole
        if classes:
            progress(f"on {WIDE:.0%} of the SMs")
            wide, _ = run_once(rig, command, WIDE, timeout_s, 1, given)
            progress(f"on {NARROW:.0%}")
            narrow, _ = run_once(rig, command, NARROW, timeout_s, 2, given)
            progress(f"on {WIDE:.0%}, with memory traffic from the other SMs")
            hog = rig.be_native("mover", sms=NARROW).wait_ready()
            hog.ask(f"load {SOFT_HOG if rig.bench.device.simulated else HOG}", 60)
            hog.tell(f"run {timeout_s + 60}")
            beside, _ = run_once(rig, command, WIDE, timeout_s, 3, given)
            hog.process.kill()
        gpu = rig.name
    rows = []
    for timed in sorted(whole.values(), key=lambda timed: -timed.count * timed.mean_ns):
        row: dict[str, Any] = {
            "name": timed.name,
            "grid": [int(n) for n in timed.grid.split(",")],
            "block": [int(n) for n in timed.block.split(",")],
            "shared_bytes": timed.shared_bytes,
            "count": timed.count,
            "duration_ns": max(1, round(timed.mean_ns)),
            "least_ns": round(timed.least_ns),
            "sms": max(1, timed.sms),
            "work_class": "unknown",
        }
        others = [same_kind(times, timed) for times in (wide, narrow, beside)]
        if classes and all(others):
            on_wide, on_narrow, with_memory = (other for other in others if other is not None)
            row["narrow_over_wide"] = on_narrow.least_ns / on_wide.least_ns
            row["beside_memory_over_alone"] = with_memory.mean_ns / on_wide.mean_ns
            row["work_class"] = classify(row["narrow_over_wide"], row["beside_memory_over_alone"])
        rows.append(row)
    return {"gpu": gpu, "command": list(command), "missed": missed, "kernels": rows}


def path_of(command: str) -> str | None:
    """Return the path of a program as a shell finds it, or None."""
    if os.sep in command:
        return command if Path(command).exists() else None
    return next((str(Path(place) / command) for place in os.get_exec_path() if (Path(place) / command).exists()), None)
