"""One randomised test on the machines of a lab: a controller, nodes and jobs as processes, with faults drawn from a
seed.

Conditions that are checked: no job has two attempts that run at the same time (each rank holds a file lock while any of
its processes lives), and every accepted job ends once, as finished.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from netlab import Lab, child_of

from cotenant.core.errors import WorkError
from cotenant.fleet.client import FleetClient
from cotenant.fleet.nodes import NodeSpec, pretend_nodes

HERE = Path(__file__).parent
NODES = ("n0", "n1", "n2")
KEEP_S = 4.0
FAULTS = ("cut", "deaf", "mute", "slow", "lossy", "controller", "server", "frozen", "runner", "disk")
JOB = """
exec 9>>"$D/$COTENANT_JOB-$RANK.lock"
flock -n 9 || echo "$COTENANT_JOB $COTENANT_ATTEMPT" >> "$D/twice"
sleep "$S"
while [ -n "$GO" ] && [ ! -e "$D/go" ]; do sleep 0.1; done
echo "$COTENANT_JOB $COTENANT_ATTEMPT $RANK" >> "$D/done"
"""


class Drill:
    """A fleet in a lab. `url`: URL of its store; None: the store is in its folder."""

    def __init__(self, lab: Lab, folder: Path, seed: int, *, url: str | None = None, keep_s: float = KEEP_S) -> None:
        self.lab, self.folder, self.draw, self.url, self.keep_s = lab, folder, random.Random(seed), url, keep_s
        self.faults: list[str] = []
        self.controllers: dict[str, subprocess.Popen[bytes]] = {}
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        (folder / "f").mkdir(parents=True)
        (folder / "out").mkdir()
        self.specs: dict[str, NodeSpec] = {}
        for name, spec in zip(NODES, pretend_nodes(len(NODES), 2, "A100-40GB", 40 << 30, 6.0, 10**11), strict=True):
            machine = lab.machines[name]
            machine.offset_s = self.draw.choice((-1500, -600, 0, 900, 5400))
            values = spec.to_dict() | {"name": name, "address": machine.address, "gpus": spec.gpus}
            self.specs[name] = NodeSpec(**values)
            disk = folder / "f" / "nodes" / name
            disk.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "drill", disk], check=True)
            (folder / f"{name}.json").write_text(json.dumps(self.specs[name].to_dict()))
            self.serve(name)
        self.control("c0")

    def _start(self, where: str, log: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            command = (sys.executable, str(HERE / "tcp_fleet.py"), *words)
            return self.lab.machines[where].start(*command, stdout=out, stderr=out, env=self.environment)

    def serve(self, name: str) -> None:
        """Start the process of a node."""
        place = str(self.folder / "f" / "nodes" / name)
        self.servers[name] = self._start(name, f"{name}.log", "node", place, str(self.folder / f"{name}.json"))

    def control(self, name: str) -> None:
        """A controller."""
        config = self.folder / f"{name}.json"
        nodes = [spec.to_dict() for spec in self.specs.values()]
        settings = {"folder": str(self.folder / "f"), "nodes": nodes, "store": self.url, "keep_s": self.keep_s}
        config.write_text(json.dumps(settings))
        self.controllers[name] = self._start(name, f"{name}.log", "controller", str(config))

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self, op: str, within_s: float = 60.0, **order: Any) -> dict[str, Any]:
        """Send an order to the controller that leads, waiting until one answers."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                with FleetClient(self.folder / "f", 20.0) as client:
                    return client.call(op, **order)
            except WorkError:
                for name, process in list(self.controllers.items()):
                    if process.poll() is not None:  # restart the controller, as its service manager would
                        self.control(name)
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def said(self, name: str, word: str, within_s: float = 120.0) -> None:
        """Wait until a controller has written a word."""
        deadline = time.monotonic() + within_s
        while word not in (self.folder / f"{name}.log").read_text():
            assert time.monotonic() < deadline, (self.folder / f"{name}.log").read_text()
            time.sleep(0.05)

    def submit(self, count: int) -> list[str]:
        """Submit jobs of one to four GPUs that take 1 to 4 s."""
        jobs = [
            {"name": f"j{i}", "command": ["sh", "-c", JOB], "gpus": self.draw.choice((1.0, 1.0, 2.0, 4.0)),
             "env": {"S": f"{self.draw.uniform(1, 4):.1f}", "D": str(self.folder / "out")}}
            for i in range(count)
        ]  # fmt: skip
        # the long timeout is for the first start, which compiles
        return list(self.ask("submit", 300.0, jobs=jobs)["ids"])

    def submit_waiting(self) -> list[str]:
        """Submit jobs that run until a file `go` exists; returns when all run."""
        env = {"S": "0", "GO": "1", "D": str(self.folder / "out")}
        jobs = [{"name": f"w{i}", "command": ["sh", "-c", JOB], "gpus": gpus, "env": env}
                for i, gpus in enumerate((1.0, 1.0, 2.0, 2.0))]  # fmt: skip
        ids = list(self.ask("submit", 300.0, jobs=jobs)["ids"])
        while {row["state"] for row in self.ask("queue")["jobs"]} != {"running"}:
            time.sleep(0.1)
        return ids

    # -- faults ----------------------------------------------------------------------------------------------------

    def fault(self, kind: str) -> None:
        """Cause one fault. Changed links stay changed until `heal`."""
        node = self.draw.choice(NODES)
        self.faults.append(f"{kind} {node}")
        to, back = self.lab.both("c0", node)
        if kind == "cut":
            self.lab.isolate(node)
        elif kind == "deaf":
            to.cut = True
        elif kind == "mute":
            back.cut = True
        elif kind == "slow":
            to.delay_s = back.delay_s = self.draw.uniform(0.05, 0.6)
        elif kind == "lossy":
            to.loss = back.loss = self.draw.uniform(0.02, 0.3)
        elif kind == "controller":
            os.kill(child_of(self.controllers["c0"]), signal.SIGKILL)
        elif kind == "server":
            self.servers[node].kill()
            self.servers[node].wait()
            self.serve(node)
        elif kind == "frozen":
            os.kill(child_of(self.servers[node]), signal.SIGSTOP)
        elif kind == "runner":
            self._kill_runner(node)
        elif kind == "disk":
            self._fill(node)

    def _kill_runner(self, node: str) -> None:
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                words = (proc / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if any(f"{self.folder}/f/nodes/{node}/attempts/" in word for word in words):
                os.kill(int(proc.name), signal.SIGKILL)
                return

    def _fill(self, node: str) -> None:
        try:
            with (self.folder / "f" / "nodes" / node / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        except OSError:
            return

    def heal(self) -> None:
        """Repair all links, continue stopped processes, and free the disks."""
        self.lab.heal()
        for name, server in self.servers.items():
            os.kill(child_of(server), signal.SIGCONT)
            (self.folder / "f" / "nodes" / name / "filler").unlink(missing_ok=True)

    # -- conditions ------------------------------------------------------------------------------------------------

    def finish(self, jobs: list[str], within_s: float = 120.0) -> None:
        """Wait until all jobs have ended, then check them. AssertionError names the violations."""
        deadline = time.monotonic() + within_s
        while True:
            rows = {row["id"]: row for row in self.ask("queue", all=True)["jobs"]}
            states = {job: rows[job]["state"] if job in rows else "lost" for job in jobs}
            if all(state == "finished" for state in states.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert set(states.values()) == {"finished"}, (states, self.faults)
        assert not (self.folder / "out" / "twice").exists(), ((self.folder / "out" / "twice").read_text(), self.faults)
        told = (self.folder / "out" / "done").read_text()
        assert {line.split()[0] for line in told.splitlines()} == set(jobs), self.faults
        ends = [self.ask("explain", id=job)["events"] for job in jobs]
        assert all([e["kind"] for e in events].count("finish") == 1 for events in ends), self.faults

    def end(self) -> None:
        """End every process and unmount."""
        for process in (*self.controllers.values(), *self.servers.values()):
            process.kill()
            process.wait()
        for name in NODES:
            for pid in _within(self.lab.machines[name].space):
                os.kill(pid, signal.SIGKILL)
        for name in NODES:
            disk = self.folder / "f" / "nodes" / name
            subprocess.run(["umount", "--lazy", str(disk)], check=False)


def _within(space: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def run(lab: Lab, folder: Path, seed: int) -> list[str]:
    """Run the whole test; returns the violations found."""
    drill = Drill(lab, folder, seed)
    try:
        jobs = drill.submit(6)
        for _ in range(drill.draw.randint(2, 5)):
            time.sleep(drill.draw.uniform(0.3, 2.0))
            drill.fault(drill.draw.choice(FAULTS))
            if drill.draw.random() < 0.4:
                time.sleep(drill.draw.choice((0.5, 3.0, 8.0)))
                drill.heal()
        time.sleep(drill.draw.choice((0.5, 3.0, 8.0)))
        drill.heal()
        drill.finish(jobs)
        return drill.faults
    finally:
        drill.heal()
        drill.end()
        lab.heal()


def fail_over(lab: Lab, folder: Path, seed: int, url: str, fail: Callable[[], None]) -> tuple[float, dict[str, int]]:
    """The server of the store fails, and another one replaces it. Returns the seconds until a controller leads again,
    and the number of attempts by job."""
    drill = Drill(lab, folder, seed, url=url, keep_s=60.0)
    try:
        drill.said("c0", "leads")
        drill.control("c1")
        drill.said("c1", "waits")
        ids = drill.submit_waiting()
        began = time.monotonic()
        fail()
        drill.controllers["c0"].wait(120)  # a controller that leads must end when it loses its store
        drill.said("c1", "leads")
        took_s = time.monotonic() - began
        more = drill.submit(2)
        lab.heal()
        (folder / "out" / "go").touch()
        drill.finish(ids + more)
        return took_s, {row["id"]: row["attempts"] for row in drill.ask("queue", all=True)["jobs"]}
    finally:
        drill.heal()
        drill.end()
        lab.heal()


def take_over(lab: Lab, folder: Path, seed: int, how: str, url: str) -> tuple[float, dict[str, int]]:
    """A controller that leads is killed, frozen, or cut off from the store. In the last case (split) it still reaches
    the nodes, and its successor does not reach one of them. Returns the seconds until the successor leads, and the
    number of attempts by job."""
    split = how == "split"
    drill = Drill(lab, folder, seed, url=url, keep_s=8.0 if split else 60.0)
    try:
        drill.said("c0", "leads")
        drill.control("c1")
        drill.said("c1", "waits")
        ids = drill.submit_waiting()
        began = time.monotonic()
        if how in ("killed", "frozen"):
            number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
            os.kill(child_of(drill.controllers["c0"]), number)
        else:
            for link in (*lab.both("c0", "db"), *(lab.both("c1", "n0") if split else ())):
                link.cut = True
        drill.said("c1", "leads")
        took_s = time.monotonic() - began
        if split:
            time.sleep(drill.keep_s + 6.0)  # wait until the jobs of n0 are started elsewhere
        lab.heal()
        if how == "frozen":
            os.kill(child_of(drill.controllers["c0"]), signal.SIGCONT)
        if how != "killed":
            assert drill.controllers["c0"].wait(60) != 0
        (folder / "out" / "go").touch()
        drill.finish(ids)
        rows = {row["id"]: row["attempts"] for row in drill.ask("queue", all=True)["jobs"]}
        return took_s, rows
    finally:
        drill.heal()
        drill.end()
        lab.heal()
