"""Measures gangs under the hardware's time slices: torchrun jobs on two GPUs (NCCL), together with each other and with
tenants on one GPU.

    CUDA_VISIBLE_DEVICES=UUID,UUID PYTHONPATH=src python bench/gpu/gangs.py OUT.jsonl STEP,STEP,... [SECONDS]

Every tenant is a program that `cotenant run` starts. Each result is one line of JSON, also in OUT.jsonl. A share is the
number of steps per second divided by that of the same program alone. It is computed from the time stamps of the slower
rank, while all programs run: the mean, and the smallest and largest of all windows of 2 s that begin 0.1 s apart.
`time` is the GPU time of each rank from the driver's log of context switches (needs root). At the end, all programs are
stopped, 0.5 s apart, and `ended` has their exit codes. A program that has not ended 60 s after its measurement began is
killed, which the result states. No measurement begins after SECONDS (150).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from gangs_tenants import Busy, Gang, Node, Tenant
from slices import MECHANISM, SOFT, STEP_S, WINDOW_S, Recorder

from cotenant.bench.harness import Bench, with_source
from cotenant.core.errors import InputError, WorkError

ROW_S, ALONE_S, APART_S = 8.0, 4.0, 0.5
ROW_AT_MOST_S = 60.0
BUSY_REQUEST, SAID = 0.4, 1500
# NVLink's multicast is switched off, because it needs a fabric manager that may not be reachable; the ranks of one host
# communicate by loopback
NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "2"}


class HungError(WorkError):
    """Raised if a program did not start, step or end in time."""


class Gangs:
    """The agent, its two GPUs, and the rates of programs alone on them."""

    def __init__(self, bench: Bench, folder: Path, out: Any) -> None:
        self.bench, self._out = bench, out
        self.environment = with_source(bench.environment) | NCCL | {"PYTHONUNBUFFERED": "1"}
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)  # the agent sets the variable for each tenant
        self.node = Node(bench.folder, folder, self.environment, MECHANISM, bench.backend)
        self.uuids = [str(gpu["uuid"]) for gpu in self.ps()["agent"]["gpus"]]
        if len(self.uuids) != 2:
            raise InputError(f"two GPUs are needed, here are {len(self.uuids)}: name two in CUDA_VISIBLE_DEVICES")
        self.recorders = [Recorder(uuid) for uuid in self.uuids]
        self.alone: dict[str, float] = {}
        self._deadline_s = 0.0
        self._count = 0

    def say(self, **row: Any) -> None:
        """Print a line for the reader."""
        print(json.dumps(row), flush=True)
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()

    def ps(self) -> dict[str, Any]:
        """The output of `cotenant ps --json`."""
        command = [sys.executable, "-m", "cotenant", "ps", "--json", "--dir", str(self.bench.folder)]
        try:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=20)
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            return {"agent": {"gpus": []}, "tenants": [], "fault": str(error)}

    def until(self, tenants: list[Tenant], what: str, true: Callable[[Tenant], bool]) -> None:
        """Wait until `true` holds for each tenant. HungError if the row's time is over, WorkError if a program ends too
        early."""
        while True:
            for tenant in tenants:
                tenant.look()
            ended = [f"{t.name} ({t.process.returncode})" for t in tenants if t.process.poll() is not None]
            if ended and what != "end":
                raise WorkError(f"ended before it was to {what}: {', '.join(ended)}")
            late = [tenant.name for tenant in tenants if not true(tenant)]
            if not late:
                return
            if time.monotonic() > self._deadline_s:
                raise HungError(f"did not {what} within {ROW_AT_MOST_S:g} s of the row's start: {', '.join(late)}")
            time.sleep(0.05)

    def name(self, short: str) -> str:
        """A name that no tenant has had yet."""
        self._count += 1
        return f"{short}{self._count}"

    def row(self, row: str, gangs: Mapping[str, float], *, beside: bool = False, seconds: float = ROW_S) -> None:
        """Run gangs with these requests at the same time. `beside`: also a busy tenant on each GPU."""
        began_s = time.monotonic()
        self._deadline_s = began_s + ROW_AT_MOST_S
        busy: list[Busy] = []
        tenants: list[Tenant] = []
        found: dict[str, Any] = {}
        try:
            self.after_tenants()
            if beside:
                busy = [Busy(self.node, self.name("busy-"), uuid, BUSY_REQUEST) for uuid in self.uuids]
                tenants += busy
                self.until(tenants, "start", lambda tenant: tenant.is_going())
                self._blocks(busy, 2.0)
                for one in busy:
                    marks = one.marks[0]
                    self.alone[one.name] = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
            tenants += [Gang(self.node, self.name(f"{name}-"), request) for name, request in gangs.items()]
            self.until(tenants, "start", lambda tenant: tenant.is_going())
            found["started_s"] = round(time.monotonic() - began_s, 1)
            begin_s = time.monotonic() + 1.0  # by this time, the time slices are those of the tenants that have work
            for one in busy:
                one.block(seconds + 1.5)
            while time.monotonic() < begin_s + seconds:
                self.until(tenants, "run", lambda _: True)
                if "agent" not in found and time.monotonic() > begin_s + seconds / 2:
                    found["agent"] = self._seen()
                time.sleep(0.05)
            self._measure(found, row, tenants, begin_s, begin_s + seconds, busy)
            for each in reversed(tenants):
                each.stop()
                time.sleep(APART_S)
            self.until(tenants, "end", lambda tenant: tenant.process.poll() is not None)
        except HungError as error:
            found |= {"hung": str(error), "last": self._last(tenants, began_s), "ps": self.ps()}
            found["log"] = (self.bench.folder / "agent.log").read_text(errors="replace")[-SAID:]
        except WorkError as error:
            found |= {"fault": str(error), "last": self._last(tenants, began_s)}
        finally:
            left = [each for each in tenants if each.process.poll() is None]
            if left:
                found["killed"] = {each.name: each.kill() for each in left}
        codes = {each.name: each.process.returncode for each in tenants}
        if any(codes.values()):
            found["said"] = {each.name: "\n".join(each.said)[-SAID:] for each in tenants if each.process.returncode}
        self.say(row=row, ended=codes, all_ended=not any(codes.values()), **found)

    def after_tenants(self) -> dict[str, Any]:
        """Rows of `ps` after the previous row's tenants have ended."""
        until_s = time.monotonic() + 15
        while (found := self.ps())["tenants"] and time.monotonic() < until_s:
            time.sleep(0.2)
        return found

    def _blocks(self, busy: list[Busy], seconds: float) -> None:
        for each in busy:
            each.block(seconds)
        self.until(list(busy), "answer", lambda tenant: bool(tenant.marks.get(0)))

    def _last(self, tenants: list[Tenant], began_s: float) -> dict[str, Any]:
        """The last reported progress by tenant and rank: time in the row in seconds, and number of steps."""
        return {
            each.name: {rank: [round(marks[-1][0] - began_s, 2), marks[-1][1]] for rank, marks in each.marks.items()}
            for each in tenants
        }

    def _seen(self) -> dict[str, Any]:
        """Return what the agent reports about each tenant at this moment: its state, its warnings, and its time on each
        GPU."""
        return {
            row["name"]: {key: row[key] for key in ("state", "warnings")} | {"got": [g["got"] for g in row["gpus"]]}
            for row in self.ps()["tenants"]
        }

    def _measure(
        self, found: dict[str, Any], row: str, tenants: list[Tenant], begin_s: float, end_s: float, busy: list[Busy]
    ) -> None:
        self.until(list(busy), "answer", lambda tenant: bool(tenant.marks.get(0)))
        whole = sum(t.request for t in tenants if isinstance(t, Gang)) + (BUSY_REQUEST if busy else 0)
        if row == "alone":
            gang = tenants[0]
            self.alone["gang"] = (gang.steps_at(end_s) - gang.steps_at(begin_s)) / (end_s - begin_s)
            found["steps_per_s"] = round(self.alone["gang"], 2)
        shares: dict[str, dict[str, Any]] = {}
        errors: list[float] = []
        for each in tenants:
            alone = self.alone.get("gang" if isinstance(each, Gang) else each.name)
            if not alone:
                continue
            count = max(1, int((end_s - begin_s - WINDOW_S) / STEP_S) + 1)
            starts = [begin_s + STEP_S * k for k in range(count)]
            parts = [(each.steps_at(at + WINDOW_S) - each.steps_at(at)) / WINDOW_S / alone for at in starts]
            mean = (each.steps_at(end_s) - each.steps_at(begin_s)) / (end_s - begin_s) / alone
            promised = each.request / whole
            errors += [min(parts) - promised, max(parts) - promised]
            shares[each.name] = {"promised": round(promised, 4), "least": round(min(parts), 4),
                                 "most": round(max(parts), 4), "mean": round(mean, 4),
                                 "longest_pause_s": each.pause_s(begin_s, end_s)}  # fmt: skip
            times = [self.recorders[r].windows(pid, begin_s, end_s) for r, pid in sorted(each.pids.items())]
            if all(times):
                shares[each.name]["time"] = [{"least": min(parts), "most": max(parts)} for parts in times]
        found["shares"] = shares
        if row != "alone" and errors:
            found["worst_window_error"] = round(max(map(abs, errors)), 4)
            gangs = sum(float(shares[each.name]["mean"]) for each in tenants if isinstance(each, Gang))
            per_gpu = [gangs + shares[one.name]["mean"] for one in busy] or [gangs] * 2
            found["together"] = [round(part, 4) for part in per_gpu]

    def close(self) -> None:
        """Stop recording."""
        for recorder in self.recorders:
            recorder.close()


def alone(rig: Gangs) -> None:
    """Measure the steps per second of a gang that is alone."""
    rig.row("alone", {"solo": 1.0}, seconds=ALONE_S)


def two(rig: Gangs) -> None:
    """Measure two gangs with half of the GPU time each."""
    rig.row("two", {"a": 0.5, "b": 0.5})


def three(rig: Gangs) -> None:
    """Measure three gangs with 20, 30 and 50 %."""
    rig.row("three", {"a": 0.2, "b": 0.3, "c": 0.5})


def beside(rig: Gangs) -> None:
    """Measure two gangs with 30 % each, and a busy tenant with 40 % on each GPU."""
    rig.row("beside", {"a": 0.3, "b": 0.3}, beside=True)


def hold(rig: Gangs) -> None:
    """Check that the agent has no tenant, no process and no promised share after all rows."""
    found = rig.after_tenants()
    gpus = found["agent"]["gpus"]
    promised, charged = ([gpu[key] for gpu in gpus] for key in ("promised", "memory_charged_bytes"))
    rig.say(row="hold", tenants=found["tenants"], unseen=found["agent"].get("unseen"), promised=promised,
            charged=charged, fault=found.get("fault"))  # fmt: skip


STEPS: dict[str, Callable[[Gangs], None]] = {
    "alone": alone,
    "two": two,
    "three": three,
    "beside": beside,
    "hold": hold,
}


def main() -> None:
    """Run the requested steps. The rate of a gang alone is measured in any case."""
    path, steps = Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    until_s = time.monotonic() + float(sys.argv[3] if len(sys.argv) > 3 else 150)
    steps = ["alone", *(step for step in steps if step != "alone")]
    named = os.environ.pop("CUDA_VISIBLE_DEVICES", "")
    if SOFT:
        os.environ["COTENANT_SOFTGPU_COUNT"] = "2"
    gpus = "soft" if SOFT else named if named.startswith("GPU-") else "all"
    with open(path, "a") as out, tempfile.TemporaryDirectory() as folder, Bench(gpus, {}) as bench:
        rig = Gangs(bench, Path(folder), out)
        log = [recorder.fault or "driver's log" for recorder in rig.recorders]
        rig.say(row="start", gpus=rig.uuids, mechanism=MECHANISM, log=log)
        for step in steps:
            if time.monotonic() > until_s and step != "hold":
                continue
            began_s = time.monotonic()
            try:
                STEPS[step](rig)
            except (WorkError, KeyError, IndexError, OSError, subprocess.TimeoutExpired) as error:
                rig.say(row="fault", step=step, error=repr(error)[:2000])
            rig.say(row="step", step=step, seconds=round(time.monotonic() - began_s, 1))
        rig.say(row="end", agent=(bench.folder / "agent.log").read_text(errors="replace")[-SAID:])
        rig.close()


if __name__ == "__main__":
    main()
