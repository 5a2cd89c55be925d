"""Kills agent, keeper and tenants at random under the hardware's time slices, and records how long a tenant did
no work.

    CUDA_VISIBLE_DEVICES=UUID PYTHONPATH=src python bench/gpu/slices_kills.py OUT.jsonl [KILLS] [SECONDS]

The watched tenant is limited to half of the GPU's time and has kernels of 1 to 10 ms in flight all the time. It records
when each ends, so the longest time without an end of a kernel is known. Two other tenants work beside it: best-effort
programs, latency-sensitive services and limited programs, which are replaced when they are killed. KILLS (200) times,
at random moments (drawn with a fixed seed), one of these is killed by SIGKILL:

- `agent`: the agent, which is started again at once in the same folder. Further kills may come before it answers.
- `keeper`: the process that lets all tenants run when the agent dies. The agent starts another.
- `both`: keeper and agent in the same moment. Nothing is then left that could let a stopped tenant run, so a tenant
  that was stopped in that moment waits until a new agent has started. `agent_back_s` says after what time the agent
  answered; then the tenant's process has to connect to it.
- `best-effort`, `service`, `limited`: another tenant.

Each row is one line of JSON, also in OUT.jsonl: one for each ten kills, and at the end what is left. A gap is a time
without an end of a kernel. It counts for the first kill during it, else for the last kill before it. `gap_s` is the
longest gap of a kill, and `also` has the kinds of later kills during that gap. No kill comes later than SECONDS (240).
No program uses PyTorch.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from slices import GPU, SOFT, Recorder

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.bench.harness import Bench, Program, with_source
from cotenant.core.errors import InputError, WorkError

SEED, ROUND, LIMIT = 17, 10, 0.5
BESIDE, SPARES = 2, 3  # other tenants that work at a time; started programs that wait to replace killed ones
STARTERS = 2  # threads that start programs
KINDS = ("best-effort", "service", "limited")
WEIGHTS = {"agent": 4, "keeper": 4, "both": 2, "tenant": 10}
PAUSE_S = (0.05, 0.9)  # time between two kills, at least and at most
KERNEL_NS = 4_000_000
MARK = "SLICES_KILLS_FOLDER"  # variable in the environment of all processes that this script starts
SHARE_S, SETTLE_S = 6.0, 15.0
FAILED = (InputError, WorkError, OSError)


class Node(Bench):
    """An agent that can be killed and started again in the same folder."""

    uuid = ""
    free_bytes = 0  # of the GPU, before the first tenant

    def restart(self) -> None:
        """Start the agent again, without waiting for it."""
        command = [sys.executable, "-m", "cotenant.agent", "--dir", str(self.folder), "--gpus", self.gpus]
        self.agent = subprocess.Popen(
            [*command, "--config", str(self.folder / "agent.json")],
            stderr=self.log, stdout=self.log, env=with_source(self.environment), start_new_session=True,
        )  # fmt: skip

    def answers(self) -> bool:
        """Whether the agent accepts commands now."""
        try:
            ControlClient(self.folder).close()
        except WorkError:
            return False
        return True

    def processes(self) -> dict[int, str]:
        """All processes that this script has started and that live: pid -> command line."""
        found = {}
        mark = f"{MARK}={os.environ[MARK]}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
        return found

    def keepers(self) -> list[int]:
        """The keeper processes."""
        return [pid for pid, command in self.processes().items() if "slices.keeper" in command]


def open_files(pid: int) -> Counter[str]:
    """The open files of a process: kind or name -> number."""
    return Counter(os.readlink(f).split(":[")[0] for f in Path(f"/proc/{pid}/fd").iterdir())


@dataclass
class Other:
    """A tenant beside the watched one, with its connection to the agent."""

    kind: str
    program: Program
    client: ControlClient

    def end(self) -> None:
        """Kill the tenant, and close its connection, as `cotenant run` does when its program has ended."""
        self.program.process.kill()
        self.program.close()
        self.client.close()


class Spares:
    """Starts tenants in the background, so that a killed one is replaced at once."""

    def __init__(self, node: Node, draw: random.Random) -> None:
        self._node, self._draw = node, draw
        self._ready: deque[Other] = deque()
        self._end, self._lock = threading.Event(), threading.Lock()
        self._number = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(STARTERS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            if len(self._ready) < SPARES and self._node.answers():
                try:
                    self._ready.append(self._start())
                except FAILED as error:
                    # expected if the agent is killed meanwhile; the last row has the messages
                    self.failed.append(str(error).replace(str(self._node.folder), "")[:300])

    def _start(self) -> Other:
        promise: dict[str, dict[str, Any]] = {
            "best-effort": {"best_effort": True}, "service": {"latency_sensitive": True}, "limited": {"limit": 0.4}
        }  # fmt: skip
        with self._lock:
            self._number += 1
            kind, before = self._draw.choice(KINDS), len(self._node.clients)
            arguments = ["cotenant.bench.workload", "busy", "driver", str(KERNEL_NS)]
            if kind == "service":
                arguments = ["cotenant.bench.ls_client", "driver", "4"]
            spec = TenantSpec(f"{kind}-{self._number}", mechanism="slices", **promise[kind])
            try:
                program = self._node.tenant(spec.name, spec, program=arguments)
            except FAILED:
                for started in [each for each in self._node.programs if each.name == spec.name]:
                    started.process.kill()
                for client in self._node.clients[before:]:
                    client.close()
                raise
            other = Other(kind, program, self._node.clients[-1])
        try:
            program.wait_ready()
        except FAILED:
            other.end()
            raise
        return other

    def take(self) -> Other | None:
        """A tenant that works from now on; None if none is ready."""
        if not self._ready:
            return None
        other = self._ready.popleft()
        other.program.tell("run 3600 50 7 0 0" if other.kind == "service" else "run 3600")
        return other

    def close(self) -> None:
        """Start no more tenants, and kill those that wait."""
        self._end.set()
        for thread in self._threads:
            thread.join(100)
        for other in self._ready:
            other.end()


class Drill:
    """The watched tenant, the tenants beside it, and the kills."""

    def __init__(self, node: Node, out: Any) -> None:
        self.node, self._out = node, out
        self.draw = random.Random(SEED)
        self.times = node.folder / "watched.times"
        self.kills: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.others: list[Other] = []
        self._waits_since: tuple[float, dict[str, Any]] | None = None
        spec = TenantSpec("watched", mechanism="slices", limit=LIMIT)
        self.watched = node.tenant("watched", spec, program=["slices_kills_watched", str(self.times)]).wait_ready()
        self._clients = [node.clients[-1]]

    def say(self, **row: Any) -> None:
        """Print a row, and write it to the file."""
        print(json.dumps(row), flush=True)
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()

    def ends_s(self, since_s: float = 0.0) -> list[float]:
        """When kernels of the watched tenant ended, from a time on, in s of the monotonic clock."""
        data = self.times.read_bytes()
        ends = struct.unpack(f"={len(data) // 8}q", data[: len(data) // 8 * 8])
        return [end / 1e9 for end in ends if end / 1e9 >= since_s]

    def rounds(self, kills: int, until_s: float, spares: Spares) -> None:
        """Kill at random, and write a row after each ROUND kills."""
        done = 0
        while done < kills and time.monotonic() < until_s:
            mine = self.round_of(min(ROUND, kills - done), until_s, spares)
            self.kills += mine
            done += len(mine)
            self.say(
                row="round", kills=Counter(kill["kind"] for kill in mine), done=done,
                longest=max(mine, key=lambda kill: float(kill["gap_s"]), default={}),
                both=[kill for kill in mine if kill["kind"] == "both"],
                watched_runs=self.watched.process.poll() is None,
            )  # fmt: skip

    def round_of(self, count: int, until_s: float, spares: Spares) -> list[dict[str, Any]]:
        """Kill `count` times. Returns the kills, each with the watched tenant's longest gap."""
        mine: list[dict[str, Any]] = []
        while len(mine) < count and time.monotonic() < until_s:
            next_s = time.monotonic() + self.draw.uniform(*PAUSE_S)
            while time.monotonic() < next_s:
                time.sleep(min(0.02, max(0.0, next_s - time.monotonic())))
                self._look()
                while len(self.others) < BESIDE and (other := spares.take()) is not None:
                    self.others.append(other)
            kill = self._kill()
            if kill is not None:
                mine.append(kill)
        end_s = time.monotonic() + 1.0  # a gap that the last kill caused may still last
        while time.monotonic() < end_s or (self._waits_since is not None and time.monotonic() < end_s + SETTLE_S):
            time.sleep(0.02)
            self._look()
        at = [kill["at_s"] for kill in mine]
        for a, b in itertools.pairwise([*self.ends_s(at[0] - 2 if at else 0.0), time.monotonic()]):
            first, after = bisect.bisect_left(at, a), bisect.bisect_right(at, b)
            cause = first if first < after else first - 1
            if cause >= 0 and b - a > mine[cause]["gap_s"]:
                mine[cause] |= {"gap_s": round(b - a, 3), "also": [kill["kind"] for kill in mine[cause + 1 : after]]}
        for kill in mine:
            del kill["at_s"]
        return mine

    def _look(self) -> None:
        """Note when an agent that was started again answers."""
        if self._waits_since is not None and self.node.answers():
            since_s, kill = self._waits_since
            kill["agent_back_s"] = round(time.monotonic() - since_s, 3)
            self._waits_since = None

    def _kill(self) -> dict[str, Any] | None:
        """Kill what is drawn. Returns None if that is not there now: the keeper starts with the first channel group."""
        victim = self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if self._waits_since is not None:
            victim = "tenant"  # no agent answers, so only tenants are left to kill
        keepers = self.node.keepers() if victim in ("keeper", "both") else []
        if (victim in ("keeper", "both") and not keepers) or (victim == "tenant" and not self.others):
            return None
        kill: dict[str, Any] = {"kind": victim, "at_s": time.monotonic(), "gap_s": 0.0}
        for pid in keepers:
            os.kill(pid, signal.SIGKILL)
        if victim in ("agent", "both"):
            assert self.node.agent is not None
            self.node.agent.kill()
            self.node.agent.wait()
            self._waits_since = time.monotonic(), kill
            self.node.restart()
        elif victim == "tenant":
            other = self.others.pop(self.draw.randrange(len(self.others)))
            kill |= {"kind": other.kind, "without_agent": self._waits_since is not None}
            other.end()
        return kill

    def settle(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until something holds; a sentence in `errors` says what did not."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            try:
                if holds():
                    return
            except FAILED:
                pass
            time.sleep(0.1)
        self.errors.append(f"not within {SETTLE_S:g} s: {what}")

    def alone(self) -> dict[str, Any]:
        """What there is while only the watched tenant works."""
        assert self.node.agent is not None
        listed = [row["name"] for row in self.node.tenants()]
        time.sleep(0.5)  # by then the agent has closed its end of that connection
        keepers = self.node.keepers()
        return {
            "listed": listed,
            "keepers": len(keepers),
            "processes": len(self.node.processes()),
            "agent_files": open_files(self.node.agent.pid),
            "keeper_files": [sum(open_files(pid).values()) for pid in keepers],
        }

    def share(self, recorder: Recorder) -> dict[str, Any]:
        """The watched tenant's fraction of GPU time alone: in windows by the driver's log, and by the agent."""
        begin_s = time.monotonic()
        time.sleep(SHARE_S)
        parts = recorder.windows(self.watched.process.pid, begin_s, time.monotonic() - 0.1)
        row = next(row for row in self.node.tenants() if row["name"] == "watched")
        ends = self.ends_s(begin_s)
        return {"windows": [min(parts), max(parts)] if parts else None, "agent_says": row["gpus"][0]["got"],
                "kernels_s": round(len(ends) / SHARE_S, 1), "warnings": row["warnings"]}  # fmt: skip

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """Kills, the median and the longest gap, and how many gaps were longer than a second, by kind of kill."""
        found = {}
        for kind in sorted({kill["kind"] for kill in self.kills}):
            gaps = sorted(kill["gap_s"] for kill in self.kills if kill["kind"] == kind)
            back = [kill["agent_back_s"] for kill in self.kills if kill["kind"] == kind and "agent_back_s" in kill]
            found[kind] = {"kills": len(gaps), "median_gap_s": gaps[len(gaps) // 2], "longest_gap_s": gaps[-1],
                           "over_1_s": sum(gap > 1.0 for gap in gaps)}  # fmt: skip
            found[kind] |= {"agent_back_s": [min(back), max(back)]} if back else {}
        return found


def free_bytes(node: Node, uuid: str) -> int:
    """Free memory of the GPU by NVML; 0 on the software GPU, or if NVML does not answer."""
    return 0 if SOFT else node.device.free_bytes(uuid) or 0


def measure(node: Node, out: Any, kills: int, until_s: float) -> Drill:
    """Run the drill with a running agent, and write its rows."""
    with ControlClient(node.folder) as client:
        gpu = client.call("status")["gpus"][0]
    node.uuid = str(gpu["uuid"])
    node.free_bytes = free_bytes(node, node.uuid)
    drill, recorder = Drill(node, out), Recorder(node.uuid)
    time.sleep(2)
    before, free_before = drill.alone(), free_bytes(node, node.uuid)
    drill.say(row="start", gpu=gpu["name"], log=recorder.fault or ("none" if SOFT else "driver's log"), alone=before,
              share=drill.share(recorder))  # fmt: skip
    began_s, spares = time.monotonic(), Spares(node, random.Random(SEED + 1))
    try:
        drill.rounds(kills, until_s, spares)
    finally:
        spares.close()
        for other in drill.others:
            other.end()
        drill.others.clear()
    seconds = time.monotonic() - began_s
    drill.settle("the agent answers", node.answers)
    drill.settle("the agent lists only the watched tenant", lambda: [r["name"] for r in node.tenants()] == ["watched"])
    drill.settle("there is one keeper", lambda: len(node.keepers()) == 1)
    drill.settle("three processes are left", lambda: len(node.processes()) == 3)
    time.sleep(2.5)  # one window of the agent
    after, free_after = drill.alone(), free_bytes(node, node.uuid)
    said = (node.folder / "agent.log").read_text(errors="replace").splitlines()
    drill.say(
        row="end", kills=len(drill.kills), seconds=round(seconds, 1), by_kind=drill.by_kind(),
        longest_gap_s=round(max(b - a for a, b in itertools.pairwise(drill.ends_s(began_s))), 3), alone=after,
        alone_before=before, memory_more_bytes=free_before - free_after, share=drill.share(recorder),
        watched_exit=drill.watched.process.poll(), watched_said=drill.watched.said()[-500:],
        not_started=Counter(spares.failed), errors=drill.errors,
        tracebacks=sum("Traceback" in line for line in said), agent_log=said[-8:],
    )  # fmt: skip
    recorder.close()
    return drill


def main() -> None:
    """Run the drill, and look at what is left when all has ended."""
    path, kills = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    until_s = time.monotonic() + (float(sys.argv[3]) if len(sys.argv) > 3 else 240.0)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ[MARK] = f"{os.getpid()}"
    node = Node(GPU, {})
    with open(path, "a") as out:
        with node:
            drill = measure(node, out, kills, until_s)
        time.sleep(2)
        # compared with before the first tenant
        more = node.free_bytes - free_bytes(node, node.uuid)
        drill.say(row="closed", processes=list(node.processes().values()), memory_more_bytes=more)


if __name__ == "__main__":
    main()
