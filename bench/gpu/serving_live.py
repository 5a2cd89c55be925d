"""Plans under live load: the project's dispatcher in this process, a worker process per gpulet, requests on a clock.

Open loop: request times are drawn beforehand, and latency counts from them. Without numba the dispatcher's source runs
uncompiled on plain objects, which takes about 20 us of this process's time per request.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import select
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from serving_workers import Clock, OutOfTimeError, WorkerProcess, Workers

PLANS = Path(__file__).resolve().parent / "serving_plans.json"
LIVE_S, TRIAL_S, WARM_S = 390.0, 5.0, 1.0
TARGET, STEP, CLOSE, OWN_MS = 0.99, 1.15, 1.05, 5.0
ORDER = ("temporal", "static", "mps", "plan", "cotenant")
BURST = 16  # after this many requests, the workers' answers are read
CAPTURED = (1, 2, 4, 8, 12, 16, 24, 32)


def load_dispatch() -> Any:
    """The dispatcher's module, with stand-ins for the compiler if it is not installed."""
    if "numba" not in sys.modules and importlib.util.find_spec("numba") is None:
        stand_in = types.ModuleType("numba")
        stand_in.__version__ = "0"  # type: ignore[attr-defined]
        stand_in.config = types.SimpleNamespace()  # type: ignore[attr-defined]

        def njit(*args: Any, **_: Any) -> Any:
            return args[0] if args else (lambda function: function)

        stand_in.njit = njit  # type: ignore[attr-defined]
        sys.modules["numba"] = stand_in
    from cotenant.policy.serving import dispatch

    return dispatch


class Row:
    """A record of a structured array as a plain object with attributes and keys, many times faster than numpy's
    records."""

    def __init__(self, names: tuple[str, ...], values: Any) -> None:
        self.__dict__.update(zip(names, values, strict=True))

    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]


class Grid:
    """A two-dimensional array as lists."""

    def __init__(self, rows: list[list[Any]]) -> None:
        self.rows, self.shape = rows, (len(rows), len(rows[0]))

    def __getitem__(self, at: tuple[int, int]) -> Any:
        return self.rows[at[0]][at[1]]


class PlainDesk:
    """The dispatcher's state as plain objects, for uncompiled source."""

    def __init__(self, desk: Any) -> None:
        def rows(array: np.ndarray) -> list[Row]:
            return [Row(array.dtype.names or (), x) for x in array.tolist()]

        self.seats, self.lets, self.queues = rows(desk.seats), rows(desk.lets), rows(desk.queues)
        self.ring, self.exec_ms = Grid([rows(x) for x in desk.ring]), Grid(desk.exec_ms.tolist())
        self.drops, self.ndrops, self.seats_of = rows(desk.drops), [0], desk.seats_of.tolist()


def profile_from(data: dict[str, Any]) -> Any:
    """A profile from our JSON form, which was checked when it was written."""
    from cotenant.profiles.serving.latency import BLIND, Interference, ModelProfile, Partition, ServingProfile

    def points(row: dict[str, float]) -> tuple[tuple[int, float], ...]:
        return tuple(sorted((int(b), v) for b, v in row.items()))

    models = {
        name: ModelProfile(
            name, round(m["memory_mb"] * 1e6), {p: points(x) for p, x in m["latency_ms"].items()},
            points(m["overhead_ms"]), points(m["l2"]), points(m["dram"]),
        )
        for name, m in data["models"].items()
    }  # fmt: skip
    inter = data["interference"]
    return ServingProfile(
        data["gpu"], data["source"], round(data["memory_mb"] * 1e6),
        tuple(sorted(Partition(f, label) for label, f in data["partitions"].items())), models,
        BLIND if inter is None else Interference(**inter), margin=data["margin"], max_gpulets=data["max_gpulets"],
    )  # fmt: skip


def plan_from(gpulets: list[dict[str, Any]]) -> Any:
    from cotenant.core.serving import Gpulet, Seat, ServingPlan

    lets = tuple(Gpulet(**{**x, "seats": tuple(Seat(**s) for s in x["seats"])}) for x in gpulets)
    return ServingPlan("given", 1, lets)


class Site:
    """A plan in operation: workers with their models, and a new dispatcher for every trial."""

    def __init__(self, workers: Workers, content: dict[str, Any], scheme: str, blind: bool) -> None:
        self.dispatch = load_dispatch()
        from cotenant.core.serving import Service

        self.services = [Service(**{**s, "rate_rps": 1.0}) for s in content["services"]]
        self.shares = {s["name"]: s["rate_rps"] for s in content["services"]}
        self.profile = profile_from(content["profile"])
        self.plan = plan_from(content["schemes"][scheme]["gpulets"])
        self.blind = blind
        self.workers: list[WorkerProcess] = workers.start_all(
            [(let.name.replace("/", "-"), let.percent / 100) for let in self.plan.gpulets]
        )
        pairs = list(zip(self.workers, self.plan.gpulets, strict=True))
        touched = [worker.ask("touch") for worker in self.workers]
        self.device = touched[0].get("name", "")
        for k in range(max(len(let.seats) for let in self.plan.gpulets)):  # all workers load at once
            loading = [(worker, let.seats[k]) for worker, let in pairs if k < len(let.seats)]
            for worker, seat in loading:
                sizes = sorted({*(b for b in CAPTURED if b <= seat.batch), seat.batch})
                worker.begin("load", model=seat.model, batches=sizes)
            for worker, _ in loading:
                worker.answer(120.0)

    def dispatcher(self) -> Any:
        profiles = {let.gpu_model: self.profile for let in self.plan.gpulets}
        made = self.dispatch.Dispatcher(self.plan, self.services, profiles)
        desk = made.desk
        pairs = [(let, seat) for let in self.plan.gpulets for seat in let.seats]
        for k, (let, seat) in enumerate(pairs):  # a batch for which no graph was captured runs in the next larger one
            sizes = sorted({*(b for b in CAPTURED if b <= seat.batch), seat.batch})
            for b in range(1, seat.batch + 1):
                size = next(x for x in sizes if x >= b)
                desk.exec_ms[k, b] = (
                    self.profile.latency_ms(seat.model, size, let.partition) if self.blind else desk.exec_ms[k, size]
                )
        if sys.modules["numba"].__version__ == "0":
            made.desk = PlainDesk(desk)
        return made

    def trial(self, factor: float, seconds: float, seed: int) -> dict[str, Any]:
        """Send Poisson requests at `factor` times the mix; returns latencies and outcomes of those after the first
        second."""
        rng = np.random.default_rng(seed)
        names = [s.name for s in self.services]
        times, which = [], []
        for s, name in enumerate(names):
            count = rng.poisson(self.shares[name] * factor * (seconds + WARM_S))
            times.append(np.sort(rng.random(count)) * (seconds + WARM_S) * 1e3)
            which.append(np.full(count, s))
        at, svc = np.concatenate(times), np.concatenate(which)
        order = np.argsort(at, kind="stable")
        run = Run(self, at[order].tolist(), svc[order].tolist(), names)
        gc.collect()
        gc.disable()  # a garbage collection in this process would count as latency
        try:
            run.go()
        finally:
            gc.enable()
        return run.summary(WARM_S * 1e3)


class Run:
    """The loop of one trial. `finished[i]`: time at which request i was answered, inf if it was dropped."""

    def __init__(self, site: Site, at: list[float], svc: list[int], names: list[str]) -> None:
        self.site, self.at, self.svc, self.names = site, at, svc, names
        self.desk = site.dispatcher()
        self.finished = [np.inf] * len(at)
        # service -> the index of each of its requests
        self.numbers: dict[str, list[int]] = {name: [] for name in names}
        self.running: dict[int, tuple[str, int, int, float, float]] = {}
        # per service, in ms: planned time of the batches, their time in the worker, and the time until their answers
        # arrived
        self.took: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name in names}
        self.cpu_s = 0.0
        self.batches: list[int] = []
        self.models = {s.service: s.model for let in site.plan.gpulets for s in let.seats}
        self.late_ms = 0.0

    def act(self, instructions: list[Any]) -> None:
        for x in instructions:
            if hasattr(x, "gpulet"):
                self.running[x.gpulet] = (x.service, x.requests[0], len(x.requests), x.expected_ms, time.perf_counter())
                self.batches.append(x.count)
                self.site.workers[x.gpulet].begin("run", model=self.models[x.service], batch=x.count)

    def go(self) -> None:
        at, svc, names, desk = self.at, self.svc, self.names, self.desk
        sockets = {w.socket: i for i, w in enumerate(self.site.workers)}
        nxt, count = 0, len(at)
        cpu = time.process_time()
        began = time.perf_counter()
        while nxt < count or self.running:
            now = (time.perf_counter() - began) * 1e3
            burst = 0
            while nxt < count and at[nxt] <= now and burst < BURST:
                self.late_ms = max(self.late_ms, now - at[nxt])
                name = names[svc[nxt]]
                number, todo = desk.request(name, now, at[nxt] + self.site.services[svc[nxt]].slo_ms)
                if number >= 0:
                    self.numbers[name].append(nxt)
                nxt, burst = nxt + 1, burst + 1
                self.act(todo)
                now = (time.perf_counter() - began) * 1e3
            wait = 0.5
            if nxt < count:
                wait = max(0.0, (at[nxt] - now) / 1e3 - 2e-4)
            for ready in select.select(list(sockets), [], [], wait)[0]:
                i = sockets[ready]
                ran_ms = self.site.workers[i].answer(1.0)["ms"]
                now = (time.perf_counter() - began) * 1e3
                name, first, n, expected_ms, sent_at = self.running.pop(i)
                took = self.took[name]
                took[0] += expected_ms
                took[1] += ran_ms
                took[2] += (time.perf_counter() - sent_at) * 1e3
                for number in range(first, first + n):
                    self.finished[self.numbers[name][number]] = now
                self.act(desk.done(i, now))
        self.cpu_s = time.process_time() - cpu

    def summary(self, from_ms: float) -> dict[str, Any]:
        at, svc = np.array(self.at), np.array(self.svc)
        latency = np.array(self.finished) - at
        kept = at >= from_ms
        out: dict[str, Any] = {"services": {}, "max_late_ms": self.late_ms, "mean_batch": float(np.mean(self.batches))}
        for s, name in enumerate(self.names):
            mine = latency[kept & (svc == s)]
            answered = mine[np.isfinite(mine)]
            slo = self.site.services[s].slo_ms
            p50, p99 = np.percentile(answered, (50, 99)) if len(answered) else (None, None)
            out["services"][name] = {
                "sent": len(mine), "dropped": int(len(mine) - len(answered)), "p50_ms": p50, "p99_ms": p99,
                "slo_ms": slo, "slo_attainment": float((mine <= slo).mean()) if len(mine) else 1.0,
            }  # fmt: skip
        out["driver_busy"] = self.cpu_s / (max(at) / 1e3)
        for name, (expected, ran, answered) in self.took.items():
            if expected:
                out["services"][name] |= {
                    "ran_over_expected": ran / expected,
                    "answered_over_expected": answered / expected,
                }
        out["least_attainment"] = min(x["slo_attainment"] for x in out["services"].values())
        out["rps"] = float(kept.sum() / ((max(at) - from_ms) / 1e3)) if kept.any() else 0.0
        return out


def search(site: Site, first: float, clock: Clock, note: Callable[[float, dict[str, Any]], None]) -> None:
    """Find the largest factor at which every service reaches TARGET: search outwards until one passed and one failed,
    then bisect."""
    best, worst, factor = 0.0, np.inf, first
    for n in range(12):
        for again in range(3):
            clock.check(TRIAL_S + WARM_S + 2)
            found = site.trial(factor, TRIAL_S, seed=100 * again + n)
            note(factor, found)
            # if this process itself was late, the trial says nothing about the scheme
            if found["least_attainment"] >= TARGET or found["max_late_ms"] < OWN_MS:
                break
        if found["least_attainment"] >= TARGET:
            best = max(best, factor)
        else:
            worst = min(worst, factor)
        if best and np.isfinite(worst):
            if worst / best < CLOSE:
                break
            factor = float(np.sqrt(best * worst))
        else:
            step = STEP if n == 0 else STEP**2
            factor = factor * step if best else factor / step


def run_schemes(report: Callable[[Any], None], small: bool) -> dict[str, Any]:
    """Measure every scheme of the plans file in turn; results are kept if the time runs out."""
    content = json.loads(PLANS.read_text()) if not small else small_plans()
    clock = Clock(LIVE_S if not small else 120.0)
    found: dict[str, Any] = {"schemes": {}, "numba": importlib.util.find_spec("numba") is not None}
    for scheme, entry in sorted(content["schemes"].items(), key=lambda x: ORDER.index(x[0])):
        row: dict[str, Any] = {"trials": [], "largest_factor": None}
        found["schemes"][scheme] = row
        try:
            with Workers() as workers:
                began = time.monotonic()
                site = Site(workers, content, scheme, entry.get("blind", False))
                row |= {"start_s": time.monotonic() - began, "device": site.device}
                site.trial(entry["first_factor"] * 0.3, 1.0, seed=99)
                if "planned_factor" in entry:
                    row["planned"] = {"factor": entry["planned_factor"]}
                    row["planned"] |= site.trial(entry["planned_factor"], 2 * TRIAL_S, seed=50)
                    report(found)

                def note(factor: float, result: dict[str, Any], row: dict[str, Any] = row) -> None:
                    row["trials"].append({"factor": factor, **result})
                    if result["least_attainment"] >= TARGET:
                        row["largest_factor"] = max(row["largest_factor"] or 0.0, factor)
                    report(found)

                search(site, entry["first_factor"], clock, note)
        except OutOfTimeError as error:
            row["stopped"] = str(error)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        report(found)
    return found


def small_plans() -> dict[str, Any]:
    """Plans for two models on the CPU, only to test the code."""

    def model(ms: float) -> dict[str, Any]:
        cells = {"1": ms, "2": 2 * ms}
        latency = {"50%": cells, "100%": cells}
        return {"memory_mb": 10, "latency_ms": latency, "overhead_ms": {}, "l2": {}, "dram": {}}

    models = {"mobilenet_v2": model(25.0), "resnet50": model(125.0)}
    profile = {
        "gpu": "CPU", "source": "none", "memory_mb": 1000, "partitions": {"50%": 0.5, "100%": 1.0}, "margin": 1.0,
        "max_gpulets": 2, "interference": None, "models": models,
    }  # fmt: skip
    seats = [{"service": f"s-{m}", "model": m, "batch": 2, "rate_rps": 4.0} for m in models]
    half = {"gpu": 0, "gpu_model": "CPU", "partition": "50%", "percent": 50.0, "duty_ms": 100.0}
    whole = {**half, "partition": "100%", "percent": 100.0}
    plan = [{**half, "slot": i, "seats": [x]} for i, x in enumerate(seats)]
    return {
        "profile": profile,
        "services": [{"name": x["service"], "model": x["model"], "rate_rps": 2.0, "slo_ms": 900.0} for x in seats],
        "schemes": {
            "plan": {"first_factor": 0.5, "planned_factor": 0.4, "gpulets": plan},
            "temporal": {"first_factor": 0.5, "blind": True, "gpulets": [{**whole, "slot": 0, "seats": seats}]},
        },
    }
