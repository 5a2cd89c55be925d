"""Measures shares, limits and services by the hardware's time slices, through the agent. Each tenant is an ordinary
program.

CUDA_VISIBLE_DEVICES=UUID PYTHONPATH=src:bench/gpu python bench/gpu/slices.py OUT.jsonl STEP,STEP,... [SECONDS]
MECHANISM=time or MECHANISM=mps before it measures the same under another mechanism.

Each row is one line of JSON, also in OUT.jsonl. The GPU time of a tenant's process is taken from the driver's log of
context switches (needs root), in all windows of 2 s that begin 0.1 s apart, including the first. No step begins after
SECONDS (380).
"""

from __future__ import annotations

import bisect
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from cotenant.agent.config.files import TenantSpec
from cotenant.bench.colocation import rate_between
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program
from cotenant.core.errors import WorkError
from cotenant.devices.meters import Meter
from cotenant.devices.registry import device

SOFT = os.environ.get("CUDA_VISIBLE_DEVICES") == "soft"
if SOFT:
    del os.environ["CUDA_VISIBLE_DEVICES"]
GPU = "soft" if SOFT else os.environ.get("CUDA_VISIBLE_DEVICES", "all")
MECHANISM = os.environ.get("MECHANISM", "slices")
WINDOW_S, STEP_S = 2.0, 0.1
ROW_S = 6.0
REQUESTS = 60 if SOFT else 1500  # of the service, in a row
PRODUCTS, TRAINING = "mm8192", "train-resnet50:96"
SPIN_NS = 10_000_000
SHARES = ((0.5, 0.5), (0.3, 0.7), (0.2, 0.3, 0.5), (0.1, 0.9))


class Recorder:
    """Records the GPU time of processes over time from the driver's log; records nothing if there is no log."""

    def __init__(self, uuid: str) -> None:
        self._samples: list[tuple[float, dict[int, int]]] = []
        self._end = threading.Event()
        self._meter: Meter | None = None
        self.fault = ""
        if not SOFT:
            try:
                kind = device("nvidia")
                self._meter = kind.meter(uuid, kind.channel_controls())
            except WorkError as error:
                self.fault = str(error)
        if self._meter is not None:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        assert self._meter is not None
        while not self._end.wait(0.02):
            now = time.monotonic()
            read = self._meter.read(())
            self._samples.append((now, {pid: had.busy_ns for pid, had in read.items()}))

    def windows(self, pid: int, begin_s: float, end_s: float) -> list[float]:
        """Fraction of GPU time that the process had in each window within [begin, end)."""
        times = [at for at, _ in self._samples]
        if not times:
            return []

        def had(at_s: float) -> float:
            i = max(1, min(bisect.bisect_left(times, at_s), len(times) - 1))
            (t0, a), (t1, b) = self._samples[i - 1], self._samples[i]
            x, y = a.get(pid, 0) / 1e9, b.get(pid, 0) / 1e9
            return x + (y - x) * (at_s - t0) / max(1e-9, t1 - t0)

        count = max(1, int((end_s - begin_s - WINDOW_S) / STEP_S) + 1)
        starts = [begin_s + STEP_S * k for k in range(count)]
        return [round((had(at + WINDOW_S) - had(at)) / WINDOW_S, 4) for at in starts]

    def close(self) -> None:
        self._end.set()


class Card:
    """The agent, the programs, and their rates alone."""

    def __init__(self, rig: Rig, out: Any, until_s: float) -> None:
        self.rig, self._out, self.until_s = rig, out, until_s
        self.recorder = Recorder(rig.uuid)
        self.rates: dict[tuple[str, str], float] = {}
        self.backend = rig.bench.backend
        self.programs: dict[str, Program] = {}
        self._kinds: dict[str, str] = {}  # program -> the kind of work that it has loaded

    def say(self, raw: object = None, **row: Any) -> None:
        """Print a line for the reader; `raw` is only written to the file."""
        print(json.dumps(row), flush=True)
        self._out.write(json.dumps(row if raw is None else row | {"raw": raw}) + "\n")
        self._out.flush()

    def add(self, name: str, arguments: list[str], **promise: Any) -> Program:
        """Start a tenant without waiting for it."""
        self.programs[name] = self.rig.tenant(TenantSpec(name, mechanism=MECHANISM, **promise), arguments)
        return self.programs[name]

    def load(self, name: str, **promise: Any) -> Program:
        return self.add(name, ["cotenant.bench.be_loads", self.backend], **promise)

    def fill(self, name: str, kind: str) -> None:
        """Load a kind of work into a program, unless it has already loaded it."""
        if self._kinds.get(name) != kind:
            self.programs[name].ask(f"load {kind}", 90)
            self._kinds[name] = kind

    def spin(self, name: str, **promise: Any) -> Program:
        return self.add(name, ["cotenant.bench.workload", "busy", "driver", str(SPIN_NS)], **promise)

    def launches(self, name: str, **promise: Any) -> Program:
        return self.add(name, ["cotenant.bench.workload", "launch", self.backend], **promise)

    def promise(self, name: str, **changes: float) -> None:
        self.rig.bench.clients[0].call("set", name=name, **changes)

    def drop(self, *names: str) -> None:
        """End tenants, so that the agent no longer promises them a share."""
        for name in names:
            self.programs.pop(name).close()
            self._kinds.pop(name, None)
        deadline = time.monotonic() + 15
        while set(names) & set(self.rig.tenants()) and time.monotonic() < deadline:
            time.sleep(0.1)

    def alone(self, name: str, what: str) -> float:
        """A program's rate alone, in units per second: the better of two runs, because a host can hold one up."""
        if (name, what) not in self.rates:
            self.programs[name].ask("run 1.3", 30)  # after this time without work, the other tenants count as idle
            blocks = [self.programs[name].ask("run 1.2", 30) for _ in range(2)]
            rates = [block["count"] / ((block["end_ns"] - block["begin_ns"]) / 1e9) for block in blocks]
            self.rates[name, what] = max(rates)
        return self.rates[name, what]

    def together(self, names: dict[str, str], seconds: float = ROW_S) -> dict[str, dict[str, Any]]:
        """Run all programs at the same time. Returns GPU time in windows, and work relative to each program alone."""
        alone = {name: self.alone(name, what) for name, what in names.items()}
        for name in names:
            self.programs[name].tell(f"run {seconds}")
        blocks = {name: self.programs[name].answer(seconds + 40) for name in names}
        begin_s = max(block["begin_ns"] for block in blocks.values()) / 1e9
        end_s = min(block["end_ns"] for block in blocks.values()) / 1e9
        found = {}
        for name, block in blocks.items():
            length_s = (block["end_ns"] - block["begin_ns"]) / 1e9
            windows = self.recorder.windows(self.programs[name].process.pid, begin_s + 0.02, end_s - 0.02)
            found[name] = {"time": windows, "work": round(block["count"] / length_s / alone[name], 4),
                           "got": round(self.rig.tenants()[name]["gpus"][0]["got"], 4)}  # fmt: skip
        return found


def shares(card: Card) -> None:
    """Measure received and promised shares with products, training and kernels of 10 ms."""
    names = ["a", "b", "c"]
    spins = {"s1": "spin", "s2": "spin", "s3": "spin"}
    for name in names:
        card.load(name)
    for name in spins:
        card.spin(name)
    for program in card.programs.values():
        program.wait_ready()
    for kind in (PRODUCTS, TRAINING):
        for name in names:
            card.fill(name, kind)
        for promise in SHARES:
            _row(card, kind, dict(zip(names, promise, strict=False)), dict.fromkeys(names, kind))
    for promise in SHARES:
        _row(card, "10 ms kernels", dict(zip(spins, promise, strict=False)), spins)
    card.drop(*list(card.programs))


def mixed(card: Card) -> None:
    """Measure products, training, kernels of 10 ms and a launch-bound loop at the same time."""
    card.load("a"), card.load("b"), card.load("c"), card.spin("s1"), card.launches("l")
    for program in card.programs.values():
        program.wait_ready()
    what = {"a": TRAINING, "b": PRODUCTS, "c": TRAINING, "s1": "spin", "l": "launches"}
    for name in ("a", "b", "c"):
        card.fill(name, what[name])
    rows = ({"s1": 0.3, "l": 0.6}, {"l": 0.5, "b": 0.5}, {"a": 0.1, "c": 0.9}, {"a": 0.3, "b": 0.7},
            {"a": 0.2, "b": 0.3, "s1": 0.5})  # fmt: skip
    for promised in rows:
        _row(card, "mixed", promised, what)
    card.drop(*list(card.programs))


def _row(card: Card, kind: str, promised: dict[str, float], what: dict[str, str]) -> None:
    if time.monotonic() > card.until_s:
        return
    for name in card.programs:  # all requests are set to 0 first, since their sum must never exceed 1
        card.promise(name, request=0.0)
    for name, request in promised.items():
        card.promise(name, request=request)
    found = card.together({name: what[name] for name in promised})
    whole = sum(promised.values())
    windows = {name: row.pop("time") for name, row in found.items()}
    errors = [abs(part - promised[name] / whole) for name, parts in windows.items() for part in parts]
    worst = round(max(errors), 4) if errors else None
    for name, parts in windows.items():
        found[name] |= {"least": min(parts), "most": max(parts)} if parts else {}
    card.say(windows, row="shares", kind=kind, promised=promised, found=found, worst_window_error=worst,
             together=round(sum(r["work"] for r in found.values()), 4))  # fmt: skip


def limits(card: Card) -> None:
    """Measure a tenant with a limit of 25 % that is alone."""
    for name in ("lim", "lspin"):
        (card.load if name == "lim" else card.spin)(name)
    for program in card.programs.values():
        program.wait_ready()
    for name, kind in (("lspin", "spin"), ("lim", PRODUCTS), ("lim", TRAINING)):
        if name == "lim":
            card.fill(name, kind)
        card.rates.pop((name, kind), None)
        card.promise(name, limit=1.0)
        card.alone(name, kind)
        card.promise(name, limit=0.25)
        time.sleep(0.3)
        found = card.together({name: kind}, 5.0)[name]
        parts = found.pop("time") or [0.0]
        card.say(parts, row="limit", kind=kind, limit=0.25, found=found | {"least": min(parts), "most": max(parts)})
    card.drop("lim", "lspin")


def _quantiles(latency_ms: list[float]) -> dict[str, float]:
    ordered = sorted(latency_ms)
    return {q: round(ordered[min(len(ordered) - 1, int(len(ordered) * float(q)))], 3) for q in ("0.5", "0.99")}


def services(card: Card) -> None:
    """Measure a service with each load and with two loads, relative to the service alone, which is measured first and
    last; rows with the same rate have the same arrivals."""
    ls = card.add("ls", ["cotenant.bench.ls_client", card.backend, "4"], latency_sensitive=True)
    card.load("be", best_effort=True)
    card.spin("bespin", best_effort=True)
    for program in card.programs.values():
        program.wait_ready()

    raw: list[list[float]] = []

    def serve(rate: float) -> dict[str, Any]:
        found = ls.ask(f"run {REQUESTS / rate:.2f} {rate:g} 7 0 0", 60)
        raw.append(found["latency_ms"])
        return _quantiles(found["latency_ms"]) | {
            "active": round(found["active_s"] / (REQUESTS / rate), 4),
            "interval_ns": (found["begin_ns"], found["end_ns"]),
        }

    alone = {rate: serve(rate) for rate in (100, 300)}
    card.say(raw, row="service", beside=None, found=alone)
    kinds = [PRODUCTS, "spin", TRAINING, "mm4096", "mm2048", "add64", f"{PRODUCTS}+spin", "copy2048",
             "train-transformer:48"]  # fmt: skip
    for kind in kinds:
        for rate in (100, 300):
            if time.monotonic() > card.until_s:
                return
            names = {"be": kind.partition("+")[0]} if kind != "spin" else {}
            names |= {"bespin": "spin"} if kind.endswith("spin") else {}
            if "be" in names:
                card.fill("be", names["be"])
            rates = {name: card.alone(name, what) for name, what in names.items()}
            for name in names:
                card.programs[name].tell(f"run {REQUESTS / rate + 1:.2f}")
            time.sleep(0.4)
            found = serve(rate)
            begin_ns, end_ns = found.pop("interval_ns")
            blocks = {name: card.programs[name].answer(60) for name in names}
            kept = sum(
                rate_between(block | {"marks": [mark[:2] for mark in block["marks"]]}, begin_ns, end_ns) / rates[name]
                for name, block in blocks.items()
            )
            over = {q: round(found[q] - alone[rate][q], 3) for q in ("0.5", "0.99")}
            card.say(raw[-1], row="service", beside=kind, rate=rate, over_ms=over, found=found,
                     be_over_alone=round(kept, 4), be_of_left=round(kept / (1 - alone[rate]["active"]), 4))  # fmt: skip
    card.drop("be", "bespin")
    raw.clear()
    again = {rate: serve(rate) for rate in (100, 300)}
    card.say(raw, row="service", beside=None, found=again)
    card.drop("ls")


def hostile(card: Card) -> None:
    """Measure a service with a best-effort program that raises its own time slice."""
    ls = card.add("ls", ["cotenant.bench.ls_client", card.backend, "4"], latency_sensitive=True).wait_ready()

    def serve() -> dict[str, float]:
        return _quantiles(ls.ask(f"run {REQUESTS / 100:.2f} 100 7 0 0", 60)["latency_ms"])

    alone = serve()
    card.add("hostile", ["slices_hostile"], best_effort=True).wait_ready()
    found = serve()
    over = {q: round(found[q] - alone[q], 3) for q in ("0.5", "0.99")}
    card.say(row="hostile", over_ms=over, found=found, warnings=card.rig.tenants()["hostile"]["warnings"])
    card.drop("hostile", "ls")


def native(card: Card) -> None:
    """Measure a tenant alone relative to the same program without the shim, alternately."""
    for kind in ("launch", "training"):
        mine = card.add(f"n-{kind}", ["cotenant.bench.workload", kind, card.backend]).wait_ready()
        other = card.rig.plain(f"plain-{kind}", ["cotenant.bench.workload", kind, card.backend]).wait_ready()
        ratios = []
        for _ in range(6):
            rates = []
            for program in (mine, other):
                block = program.ask("run 1", 30)
                rates.append(block["count"] / ((block["end_ns"] - block["begin_ns"]) / 1e9))
            ratios.append(round(rates[0] / rates[1], 4))
        card.say(row="native", kind=kind, over_native=sorted(ratios)[len(ratios) // 2], each=ratios)
        other.close()
        card.drop(f"n-{kind}")


STEPS: dict[str, Callable[[Card], None]] = {
    "shares": shares,
    "mixed": mixed,
    "services": services,
    "hostile": hostile,
    "limits": limits,
    "native": native,
}


def main() -> None:
    """Run the requested steps, the most informative first."""
    path, steps = Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    until_s = time.monotonic() + float(sys.argv[3] if len(sys.argv) > 3 else 380)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with open(path, "a") as out, Rig(GPU, together=MECHANISM == "mps") as rig:
        card = Card(rig, out, until_s)
        card.say(row="start", gpu=rig.name, mechanism=MECHANISM, log=card.recorder.fault or "driver's log")
        for step in steps:
            if time.monotonic() > until_s:
                break
            began = time.monotonic()
            try:
                STEPS[step](card)
            except (WorkError, KeyError, OSError) as error:
                card.say(row="fault", step=step, error=str(error)[:2000])
                for name in list(card.programs):
                    card.drop(name)
            card.say(row="step", step=step, seconds=round(time.monotonic() - began, 1))
        said = (rig.bench.folder / "agent.log").read_text()[-6000:]
        card.say(row="end", agent=said)
        card.recorder.close()


if __name__ == "__main__":
    main()
