"""Tenants under time slices that are parked, resumed and killed at random, while the agent is killed, too."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from swap_node import CONTEXT, MIB, Node, Program, nodes_in
from waiting import wait_for

from cotenant.core.errors import InputError, WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
NAMES = ("a", "b", "c")
SIZE = 96  # MiB of each process
PROCESSES = {"a": 2, "b": 1, "c": 1}
LEAST_GAP_S = 0.3
# A tenant that is not parked may stand still for a second. The rest is for a machine whose cores all are busy.
LONGEST_S = 1.0 + 1.0


def files(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class Soak:
    """Random faults and orders on a GPU with room for two of three tenants."""

    def __init__(self, here: Node, seed: int, seconds: float) -> None:
        self.here, self.chance = here, random.Random(seed)
        self.end_s = time.monotonic() + seconds
        self.programs: dict[str, list[Program]] = {}
        # tenant -> times in which it need not run, each as [begin, end]; an end is infinite as long as it goes on
        self.excused: dict[str, list[list[float]]] = {name: [] for name in NAMES}
        self.done: Counter[str] = Counter()
        self.longest_s = 0.0
        self.kills = False  # whether the agent may be killed in the middle of an order
        for name in NAMES:
            self.begin(name)
            if name == "a":
                self.park(name)
        self.files_before = {name: [files(p.process.pid) for p in self.programs[name]] for name in NAMES}

    def begin(self, name: str) -> None:
        """Start a tenant's programs, which work until the end."""
        memory = PROCESSES[name] * (CONTEXT + SIZE * MIB)
        first = self.here.program(name, memory=memory, mechanism="slices", request=0.1)
        self.programs[name] = [first, *(self.here.joined(name) for _ in range(PROCESSES[name] - 1))]
        for each in self.programs[name]:
            assert each.ask(f"take({SIZE})") == "0", self.here.said()
        for each in self.programs[name]:
            each.tell(f"steady({self.end_s}, {LEAST_GAP_S})")

    def is_parked(self, name: str) -> bool:
        return bool(self.here.tenant(name)["state"] == "parked")

    def runs(self, name: str) -> None:
        for each in self.excused[name]:
            each[1] = min(each[1], time.monotonic())

    def excuse(self, name: str) -> None:
        self.excused[name].append([time.monotonic(), float("inf")])

    def order(self, op: str, *stops: str, **order: Any) -> None:
        for name in stops:
            self.excuse(name)
        try:
            with ThreadPoolExecutor() as pool:
                given = pool.submit(self.here.call, op, **order)
                if self.kills and self.chance.random() < 0.2:
                    time.sleep(self.chance.random() * 0.1)
                    self.kill_agent()
                given.result()
            self.done[op] += 1
        except (InputError, WorkError) as error:
            self.done[f"{op}: {error}"] += 1
        for name in self.programs:
            if not self.is_parked(name):
                self.runs(name)

    def park(self, name: str) -> None:
        self.order("park", name, name=name)

    def resume(self, name: str) -> None:
        running = [each for each in NAMES if each != name and not self.is_parked(each)]
        leave = self.chance.sample(running, max(0, len(running) - 1))
        self.order("resume", *leave, name=name, instead_of=leave)

    def kill_agent(self) -> None:
        self.here.agent.send_signal(signal.SIGKILL)
        self.here.agent.wait()
        self.here.start()
        self.done["agent killed"] += 1

    def stop_agent(self) -> None:
        """For longer than the keeper waits."""
        self.here.agent.send_signal(signal.SIGSTOP)
        time.sleep(0.8)
        self.here.agent.send_signal(signal.SIGCONT)
        self.done["agent stopped"] += 1

    def replace(self, name: str) -> None:
        """Kill a tenant's programs, and start others of the same name."""
        if self.is_parked(name):
            return
        for each in self.programs[name]:
            each.process.kill()
            each.process.communicate()
        wait_for(lambda: name not in {row["name"] for row in self.here.call("list")["tenants"]}, what="its end")
        self.begin(name)
        self.done["programs killed"] += 1

    def step(self) -> None:
        kinds: list[Callable[[], None]] = [self.kill_agent, self.stop_agent]
        kinds += [lambda: self.replace(self.chance.choice(NAMES))]
        kinds += [lambda: self.park(self.chance.choice(NAMES))] * 3
        kinds += [lambda: self.resume(self.chance.choice(NAMES))] * 5
        self.chance.choice(kinds)()
        time.sleep(self.chance.choice((0.0, 0.1, 0.6)))

    def run(self) -> None:
        self.kills = True
        while time.monotonic() < self.end_s:
            self.step()
        self.kills = False
        for name in NAMES:
            others = [each for each in NAMES if each != name]
            self.order("resume", *others, name=name, instead_of=others)
            assert not self.is_parked(name)
            for each in self.programs[name]:
                self.judge(name, json.loads(each.answer()))

    def judge(self, name: str, told: dict[str, Any]) -> None:
        assert told["contents"] == "intact"
        for begin, end in told["gaps"]:
            excused = sum(max(0.0, min(end, e) - max(begin, b)) for b, e in merged(self.excused[name]))
            self.longest_s = max(self.longest_s, end - begin - excused)
            assert end - begin - excused < LONGEST_S, (name, begin, end, self.excused[name], self.here.said()[-2000:])

    def leaks(self) -> None:
        """Nothing is left of what has ended, and no process has more files open than at first."""
        for name in NAMES:
            now = [files(p.process.pid) for p in self.programs[name]]
            assert max(now) <= max(self.files_before[name]) + 2, (name, self.files_before[name], now)
        agent = files(self.here.agent.pid)
        for name in NAMES:
            for each in self.programs[name]:
                each.process.kill()
        wait_for(lambda: not self.here.call("list")["tenants"], what="the end of all")
        assert files(self.here.agent.pid) < agent
        stranger = Program(self.here, "stranger", None)
        total = (2 * CONTEXT * 2) + 3 * SIZE * MIB
        assert stranger.ask(f"take({(total - CONTEXT) // MIB - 16})") == "0", "memory of the GPU is still in use"


def merged(times: list[list[float]]) -> list[tuple[float, float]]:
    """Times without overlaps."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(map(tuple, times)):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_orders_and_kills_at_random(node: Callable[..., Node], seed: int) -> None:
    seconds = float(os.environ.get("COTENANT_SOAK_SECONDS", "30"))
    soak = Soak(node(4 * CONTEXT + 3 * SIZE * MIB), seed, seconds)
    with contextlib.ExitStack() as said:
        said.callback(lambda: print(dict(soak.done), f"longest pause {soak.longest_s:.2f} s"))
        soak.run()
        soak.leaks()
