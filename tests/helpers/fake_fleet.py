"""Simulated nodes in virtual time for the controller. They answer orders as NodeJobs and runners do, without processes,
and can have every kind of fault.

A job's command is ("work", seconds, exit code). Jobs with ATTACHED in their environment save their progress when they
are stopped; the others start over. `World.check` tests the conditions that hold at any moment, whatever was killed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from cotenant.fleet.executors.base import Executor
from cotenant.fleet.noderuntime import attempt as pages
from cotenant.fleet.nodes import NodeSpec


class Killed(BaseException):
    """Raised to simulate a kill -9 of the controller at this point."""


@dataclass
class FakeAttempt:
    """One attempt on one node; times in the node's own nanoseconds."""

    order: dict[str, Any]
    until_ns: int
    phase: int = pages.RUNNING
    started_ns: int = 0
    stop_ns: int = 0
    stopping_ns: int = 0
    ended_ns: int = 0
    exit: dict[str, Any] | None = None
    limits: tuple[float, int] = (0.0, 0)
    done_s: float = 0.0
    parked: bool = False

    @property
    def alive(self) -> bool:
        return self.phase in (pages.RUNNING, pages.STOPPING)


@dataclass
class World:
    """All nodes, and the simulated clock from which their clocks are derived. `saved`: work in checkpoints, by job;
    `stuck`: probability that a job cannot be parked or resumed; `mute`: nodes that obey orders but whose answers are
    lost; `full`: nodes with a full disk."""

    nodes: tuple[NodeSpec, ...]
    seed: int = 0
    now_ns: int = 10**12
    attempts: dict[str, dict[str, FakeAttempt]] = field(default_factory=dict)
    fences: dict[str, tuple[int, int]] = field(default_factory=dict)
    offsets_ns: dict[str, int] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)
    late: list[tuple[str, int, int, list[dict[str, Any]]]] = field(default_factory=list)
    saved: dict[str, float] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    number: int = 0
    stuck: float = 0.0
    mute: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for i, node in enumerate(self.nodes):
            self.attempts[node.name] = {}
            self.fences[node.name] = (0, 0)
            self.offsets_ns[node.name] = i * 7 * 10**11  # the clocks of the machines begin at different times

    def clock(self, node: str) -> int:
        """The node's monotonic clock."""
        return self.now_ns + self.offsets_ns[node]

    def advance(self, seconds: float) -> None:
        """Let time pass, in steps small enough for every lease."""
        while seconds > 1e-9:
            step = min(0.05, seconds)
            seconds -= step
            self.now_ns += round(step * 1e9)
            for node in self.attempts:
                for attempt in self.attempts[node].values():
                    self._pass(node, attempt, step)
            self.check()

    def _pass(self, node: str, attempt: FakeAttempt, step_s: float) -> None:
        if not attempt.alive:
            return
        now_ns, order = self.clock(node), attempt.order
        _, work_s, code = order["command"]
        attempt.done_s += 0.0 if attempt.parked else step_s
        job = order["job"]
        asked = "stop" if attempt.stop_ns else ""
        if attempt.phase == pages.RUNNING and not attempt.stop_ns and now_ns >= attempt.until_ns:
            attempt.stop_ns, asked = now_ns, "lease"
            attempt.exit = {"asked": "lease"}
        if attempt.phase == pages.RUNNING and attempt.done_s >= float(work_s):
            # A job without progress reports that ends after a stop request may have obeyed it, so it does not count as
            # finished.
            counts = not attempt.stop_ns or "ATTACHED" in order["environment"]
            if order["ranks"][0]["rank"] == 0 and int(code) == 0 and counts:
                self.finished.append(job)
            self._end(attempt, now_ns, int(code), "" if not attempt.stop_ns else "stop")
            return
        if attempt.stop_ns and attempt.phase == pages.RUNNING:
            attempt.phase, attempt.stopping_ns = pages.STOPPING, now_ns
        if attempt.phase == pages.STOPPING:
            leaves_s = 0.2 if "STUBBORN" not in order["environment"] else order["grace_s"]
            if now_ns >= attempt.stopping_ns + round(leaves_s * 1e9):
                why = (attempt.exit or {}).get("asked") or asked or "stop"
                if "ATTACHED" in order["environment"]:
                    self.saved[job] = attempt.done_s
                    self._end(attempt, now_ns, 75, why)
                elif "STUBBORN" in order["environment"]:
                    self._end(attempt, now_ns, 137, why)
                    assert attempt.exit is not None
                    attempt.exit["killed"] = True
                else:
                    self._end(attempt, now_ns, 143, why)

    @staticmethod
    def _end(attempt: FakeAttempt, now_ns: int, code: int, asked: str) -> None:
        attempt.phase, attempt.ended_ns = pages.ENDED, now_ns
        attempt.exit = {"code": code, "asked": asked, "oom": False, "error": "", "started": True}

    def kill_runner(self, node: str, name: str) -> None:
        """Kill a job and its runner. The node then reports that."""
        attempt = self.attempts[node][name]
        if attempt.alive:
            self._end(attempt, self.clock(node), 1, "")
            assert attempt.exit is not None
            attempt.exit |= {"lost": True, "error": "the job's runner was killed"}

    def exchange(self, node: str, epoch: int, number: int, orders: list[dict[str, Any]]) -> dict[str, Any]:
        """NodeJobs.exchange."""
        if (epoch, number) <= self.fences[node]:
            return {"refused": self.fences[node][0], "now_ns": self.clock(node), "results": [], "reports": []}
        self.fences[node] = (epoch, number)
        results = [self._carry_out(node, order) for order in orders]
        self.check()
        reports = [self._report(node, name, a) for name, a in self.attempts[node].items()]
        return {"refused": None, "now_ns": self.clock(node), "results": results, "reports": reports}

    def _carry_out(self, node: str, order: dict[str, Any]) -> dict[str, Any]:
        here = self.attempts[node]
        if order["do"] == "start" and order["attempt"] not in here:
            if self.clock(node) >= order["until_ns"]:
                return {"error": "the order to start arrived after the end of the lease"}
            if node in self.full:
                return {"error": "no space left on device"}
            attempt = FakeAttempt(order, order["until_ns"], started_ns=self.clock(node))
            attempt.limits = (order["cpus"], order["memory_bytes"])
            attempt.done_s = self.saved.get(order["job"], 0.0)
            here[order["attempt"]] = attempt
            self.starts.append(order["attempt"])
        elif order["do"] == "stop" and order["attempt"] in here and here[order["attempt"]].alive:
            attempt = here[order["attempt"]]
            attempt.stop_ns = attempt.stop_ns or self.clock(node)
            attempt.order = attempt.order | {"grace_s": order.get("grace_s", attempt.order["grace_s"])}
        elif order["do"] == "extend":
            for name in order["attempts"]:
                if name in here and here[name].alive and not here[name].stop_ns:
                    here[name].until_ns = order["until_ns"]
        elif order["do"] == "resize" and order["attempt"] in here:
            here[order["attempt"]].limits = (order["cpus"], order["memory_bytes"])
        elif order["do"] == "forget":
            for name in order["attempts"]:
                if name in here and not here[name].alive:
                    del here[name]
        elif order["do"] in ("park", "resume"):
            attempt = here[order["attempt"]]
            if not attempt.alive or attempt.stop_ns or self.random.random() < self.stuck:
                return {"error": "it cannot be moved now"}
            attempt.parked = order["do"] == "park"
        elif order["do"] == "port":
            return {"port": 12345}
        return {}

    def _report(self, node: str, name: str, attempt: FakeAttempt) -> dict[str, Any]:
        order = attempt.order
        progress = None
        if "ATTACHED" in order["environment"] and order["ranks"][0]["rank"] == 0:
            total = float(order["command"][1])
            step = int(1000 * min(1.0, attempt.done_s / total))
            saved = int(1000 * min(1.0, self.saved.get(order["job"], 0.0) / total))
            progress = {"attempt": order["n"], "fraction": step / 1000, "step": step, "total_steps": 1000,
                        "checkpoint_step": saved}  # fmt: skip
        return {
            "attempt": name, "phase": attempt.phase, "started_ns": attempt.started_ns,
            "stopping_ns": attempt.stopping_ns, "ended_ns": attempt.ended_ns, "until_ns": attempt.until_ns,
            "stop": int(bool(attempt.stop_ns)), "cpus": attempt.limits[0], "memory_bytes": attempt.limits[1],
            "parked": attempt.parked, "progress": progress,
            "exit": attempt.exit if attempt.phase == pages.ENDED else None,
        }  # fmt: skip

    # -- conditions ------------------------------------------------------------------------------------------------

    def running(self) -> list[tuple[str, FakeAttempt]]:
        """All running attempts, as (node, attempt)."""
        return [(node, a) for node, here in self.attempts.items() for a in here.values() if a.alive and not a.parked]

    def check(self) -> None:
        """Check that no GPU is held twice, no job runs twice at once, and no node gives more CPU or memory than it
        has."""
        gpus: dict[str, float] = {}
        attempts: dict[str, set[int]] = {}
        used: dict[str, list[float]] = {}
        for node, attempt in self.running():
            for gpu in attempt.order["gpus"]:
                gpus[gpu["uuid"]] = gpus.get(gpu["uuid"], 0.0) + gpu["fraction"]
            attempts.setdefault(attempt.order["job"], set()).add(attempt.order["n"])
            total = used.setdefault(node, [0.0, 0.0])
            total[0] += attempt.limits[0]
            total[1] += attempt.limits[1]
        assert all(held <= 1 + 1e-6 for held in gpus.values()), f"a GPU is held twice: {gpus}"
        assert all(len(numbers) == 1 for numbers in attempts.values()), f"a job runs twice at once: {attempts}"
        specs = {node.name: node for node in self.nodes}
        for node, (cpus, memory) in used.items():
            assert cpus <= specs[node].cpus + 1e-6, f"{node} gives {cpus} cores"
            assert memory <= specs[node].memory_bytes * (1 + 1e-6), f"{node} gives {memory} bytes"


class FakeExecutor(Executor):
    """Executor for a World. `kill`: probability that the controller is killed at an exchange; `lag`: probability that
    orders to a node that does not answer still arrive later; `soon`: probability, at each exchange once the node can be
    reached, that they arrive then."""

    name = "fake"

    def __init__(self, world: World, *, kill: float = 0.0, lag: float = 0.0, soon: float = 0.3) -> None:
        self.world, self.kill, self.lag, self.soon = world, kill, lag, soon

    def members(self) -> dict[str, NodeSpec]:
        return {node.name: node for node in self.world.nodes if node.name not in self.world.unreachable}

    def exchange(self, epoch: int, orders: Any) -> dict[str, dict[str, Any] | None]:
        world = self.world
        self._deliver_late()
        answers: dict[str, dict[str, Any] | None] = {}
        for node, wanted in orders.items():
            world.number += 1
            if node in world.unreachable:
                answers[node] = None
                if wanted and world.random.random() < self.lag:
                    world.late.append((node, epoch, world.number, wanted))
                continue
            if world.random.random() < self.lag and wanted:
                world.late.append((node, epoch, world.number, wanted))
                answers[node] = None
                continue
            if world.random.random() < self.kill:
                raise Killed("before the orders went out")
            answer = world.exchange(node, epoch, world.number, wanted)
            answers[node] = None if node in world.mute else answer
            if world.random.random() < self.kill:
                raise Killed("before the answer was read")
        return answers

    def _deliver_late(self) -> None:
        world = self.world
        for item in list(world.late):
            if item[0] not in world.unreachable and world.random.random() < self.soon:
                world.late.remove(item)
                world.exchange(*item)

    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        return b"", offset
