"""The tenants of bench/gpu/gangs.py, programs under `cotenant run`: gangs on two GPUs and busy ones on one."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "gangs_program.py"


@dataclass(frozen=True)
class Node:
    """Where tenants are started: the agent's folder, a folder for files, and the environment and prefix of each
    program."""

    agent: Path
    folder: Path
    environment: dict[str, str]
    mechanism: str
    backend: str


def free_port() -> int:
    """A port of the loopback interface that is currently free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def born(pid: int) -> str:
    """Start time of a process in ticks; "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def descendants(pid: int) -> dict[int, str]:
    """A process and its descendants with their start times, since a pid may be reused."""
    found, left = {}, [pid]
    while left:
        each = left.pop()
        found[each] = born(each)
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                left += map(int, task.read_text().split())
    return found


def standing(pid: int) -> str:
    """Name, state and kernel wait channel of a process."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        rows = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return f"{rows['Name']} {rows['State']} {Path(f'/proc/{pid}/wchan').read_text()}"
    return "gone"


class Tenant:
    """A program under `cotenant run`, its output, and the progress of its ranks over time."""

    ranks = 1

    def __init__(self, node: Node, name: str, gpus: str, request: float, program: list[str]) -> None:
        self.name, self.request = name, request
        self.pids: dict[int, int] = {}  # rank -> pid
        self.marks: dict[int, list[tuple[float, int]]] = {}  # rank -> (time in s, number of steps that had ended)
        self.said: list[str] = []
        self._known: dict[int, str] = {}
        command = ["-m", "cotenant", "run", "--dir", str(node.agent), "--name", name, "--gpus", gpus]
        command += ["--request", f"{100 * request:g}%", "--mechanism", node.mechanism, "--", sys.executable, *program]
        self.process = subprocess.Popen(
            [sys.executable, *command], env=node.environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard(line)

    def heard(self, line: str) -> None:
        """Parse a line that the program printed."""
        words = line.split()
        if words[:1] == ["at"] and len(words) == 4:
            self.marks.setdefault(int(words[1]), []).append((float(words[2]), int(words[3])))
            return
        if words[:1] == ["rank"] and words[2:3] == ["pid"]:
            self.pids[int(words[1])] = int(words[3])
        self.said.append(line.rstrip()[:300])

    def is_going(self) -> bool:
        """Whether every rank has made a step."""
        return len(self.marks) == self.ranks

    def stop(self) -> None:
        """Request that the program ends."""

    def look(self) -> None:
        """Record the tenant's processes, which may outlive the one that started them."""
        if self.process.poll() is None:
            self._known |= descendants(self.process.pid)

    def kill(self) -> dict[str, str]:
        """Kill all processes of the tenant; returns the state that each had."""
        self.look()
        mine = [pid for pid, began in sorted(self._known.items()) if began and born(pid) == began]
        found = {str(pid): standing(pid) for pid in mine}
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        return found

    def steps_at(self, at_s: float) -> float:
        """Number of steps that all ranks of the tenant had made by then."""
        found = []
        for marks in self.marks.values():
            i = bisect.bisect_left(marks, (at_s, 0))
            if i in (0, len(marks)):  # the time is before the rank's first report, or after its last one
                found.append(float(marks[max(0, i - 1)][1]))
                continue
            (t0, a), (t1, b) = marks[i - 1], marks[i]
            found.append(a + (b - a) * (at_s - t0) / (t1 - t0))
        return min(found)

    def pause_s(self, begin_s: float, end_s: float) -> float:
        """Longest time in that interval in which a rank of the tenant made no step."""
        longest = 0.0
        for marks in self.marks.values():
            times = [begin_s, *(at for at, _ in marks if begin_s < at < end_s), end_s]
            longest = max(longest, *(b - a for a, b in itertools.pairwise(times)))
        return round(longest, 3)


class Gang(Tenant):
    """A data-parallel job on two GPUs."""

    ranks = 2

    def __init__(self, node: Node, name: str, request: float) -> None:
        self._stop = node.folder / f"stop-{name}"
        program = [str(PROGRAM), "torch" if node.backend == "torch" else "soft", str(self._stop)]
        if node.backend == "torch":
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
            meet = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
            program = [*launcher, *meet, *program]
        super().__init__(node, name, "2", request, program)

    def stop(self) -> None:
        """Request that the job ends."""
        self._stop.touch()


class Busy(Tenant):
    """A program that multiplies 8192^3 matrices on one GPU, in blocks on request."""

    def __init__(self, node: Node, name: str, gpu: str, request: float) -> None:
        super().__init__(node, name, gpu, request, ["-m", "cotenant.bench.workload", "busy", node.backend])

    def heard(self, line: str) -> None:
        """Parse a line that the program printed."""
        if not line.startswith("{"):
            super().heard(line)
            return
        block = json.loads(line)
        self.marks[0] = [(ns / 1e9, count) for ns, count, _ in block["marks"]]

    def is_going(self) -> bool:
        """Whether the program is set up."""
        return any(line.startswith("ready ") for line in self.said)

    def block(self, seconds: float) -> None:
        """Start a block; its time stamps are printed at its end."""
        assert self.process.stdin is not None
        self.marks.clear()
        with contextlib.suppress(OSError):  # if the program has ended, its exit code says why
            self.process.stdin.write(f"run {seconds}\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """Request that the program ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
