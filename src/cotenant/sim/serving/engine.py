"""Simulates a serving plan request by request: its input is arrivals, its output one row for each request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.metrics.serving import OUTCOMES, request_metrics
from cotenant.core.serving import Application, Service, ServingPlan
from cotenant.policy.serving.dispatch import build_desk
from cotenant.policy.serving.dispatch_kernel import Desk
from cotenant.policy.serving.packing.applications import Stage
from cotenant.policy.serving.packing.check import neighbours
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.sim.serving import kernel
from cotenant.workloads.requests.arrivals import Arrivals, draw, fit_to
from cotenant.workloads.requests.readers import Recorded, disb_client, read_requests

if TYPE_CHECKING:
    import polars as pl

INTERFERENCE = ("planned", "running")


@dataclass(frozen=True)
class Scenario:
    """Input of a simulation of a serving plan: services with their true rates, applications with their stages,
    arrivals, duration and seed.

    `arrivals`: by name of the service or application; "" stands for all others. `interference`: which batches slow a
    batch down: with "planned" those that the plan has for the other gpulets (parts) of the GPU, even while they do not
    run; with "running" those that run there when the batch starts. `as_recorded`: arrivals from a trace keep the
    trace's rate, and are not scaled to the rate of the service.
    """

    services: Sequence[Service]
    duration_s: float
    arrivals: Mapping[str, Arrivals]
    applications: Sequence[tuple[Application, Sequence[Stage]]] = ()
    seed: int = 0
    interference: str = "planned"
    hold: float = 0.0
    as_recorded: bool = False

    def all_services(self) -> list[Service]:
        """Return the independent services, then those of the applications' stages."""
        return [*self.services, *(stage.service for _, stages in self.applications for stage in stages)]


@dataclass(frozen=True)
class ServingResult:
    """The result of a simulation of a serving plan. `requests`: one row for each request to a service; `instances`: one
    row for each request to an application.
    """

    plan: ServingPlan
    scenario: Scenario
    requests: np.ndarray
    instances: np.ndarray
    end_ms: float

    def summary(self) -> dict[str, object]:
        """Return the metrics (result keys) of each service and application, and the seed."""
        out: dict[str, object] = {}
        latency = self.requests["finished"] - self.requests["arrived"]
        for s, service in enumerate(self.scenario.all_services()):
            mine = self.requests["svc"] == s
            out[service.name] = request_metrics(latency[mine], self.requests["outcome"][mine])
        apps: dict[str, object] = {}
        whole = self.instances["finished"] - self.instances["arrived"]
        for a, (app, _) in enumerate(self.scenario.applications):
            mine = self.instances["app"] == a
            apps[app.name] = request_metrics(whole[mine], self.instances["outcome"][mine])
        return {
            "seed": self.scenario.seed,
            "duration_s": self.scenario.duration_s,
            "requests": len(self.requests),
            "services": out,
            "applications": apps,
        }

    def table(self) -> pl.DataFrame:
        """Return the requests with the columns of a server's request log."""
        lets = [g.name for g in self.plan.gpulets]
        rows = self.requests
        return self._table({
            "received_s": rows["arrived"] / 1000,
            "queued_ms": np.where(rows["let"] >= 0, rows["started"], rows["finished"]) - rows["arrived"],
            "batch": rows["batch"],
            "gpulet": [lets[i] if i >= 0 else "" for i in rows["let"]],
            "executed_ms": self._executed_ms(),
        })  # fmt: skip

    def client_table(self) -> pl.DataFrame:
        """Return the requests with the columns of a client's log; a simulated client sends at the scheduled times."""
        rows = self.requests
        return self._table({
            "scheduled_s": rows["arrived"] / 1000,
            "sent_s": rows["arrived"] / 1000,
            "finished_s": rows["finished"] / 1000,
            "inference_ms": self._executed_ms(),
            "total_ms": rows["finished"] - rows["arrived"],
        })  # fmt: skip

    def _executed_ms(self) -> np.ndarray:
        return np.where(self.requests["let"] >= 0, self.requests["finished"] - self.requests["started"], 0.0)

    def _table(self, columns: Mapping[str, object]) -> pl.DataFrame:
        import polars as pl  # imported here, because servers import this module, and may lack the libraries for tables

        names = [s.name for s in self.scenario.all_services()]
        service, outcome = [names[s] for s in self.requests["svc"]], [OUTCOMES[o] for o in self.requests["outcome"]]
        return pl.DataFrame({"service": service, **columns, "outcome": outcome})


def run(plan: ServingPlan, scenario: Scenario, profiles: Mapping[str, ServingProfile]) -> ServingResult:
    """Simulate a scenario on a serving plan. `profiles`: by GPU model. The same input gives the same record, byte for
    byte.
    """
    if scenario.interference not in INTERFERENCE:
        raise InputError(f"interference {scenario.interference!r} is not one of {', '.join(INTERFERENCE)}")
    if scenario.seed < 0:
        raise InputError(f"the seed must be 0 or more, not {scenario.seed}", field="seed")
    services = scenario.all_services()
    times, what, clients = _arrivals(scenario)
    desk = build_desk(plan, services, profiles, scenario.hold)
    count = len(what)
    for a, (_, stages) in enumerate(scenario.applications):
        count += int((what == -1 - a).sum()) * (len(stages) - 1)
    state = _assemble(plan, scenario, profiles, desk, times, what, clients, count)
    end = kernel.run(state)
    if end < 0:
        raise AssertionError("the record was sized too small")  # this is an error of this module, not of the input
    return ServingResult(plan, scenario, state.rec[: state.cursor[0]], state.instances[: state.cursor[2]], end)


def _arrivals(scenario: Scenario) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays: the times of all arrivals in ms; what arrives at each time, a request to service s (value s)
    or to application a (value -1 - a); and the service of each closed-loop client. The requests of closed-loop clients
    are not among the arrivals.
    """
    times, what, clients = [np.zeros(0)], [np.zeros(0, np.int64)], []
    sources = [(s.name, s.model, s.rate_rps, i) for i, s in enumerate(scenario.services)]
    sources += [(app.name, app.name, app.rate_rps, -1 - a) for a, (app, _) in enumerate(scenario.applications)]
    recorded: dict[tuple[str, str, float | None], Recorded] = {}
    for n, (name, model, rate, code) in enumerate(sources):
        process = scenario.arrivals.get(name) or scenario.arrivals.get("") or Arrivals("poisson")
        if process.kind == "trace" and process.format == "disb":
            client = disb_client(process.path, name, model)
            process, rate = client.arrivals, client.rate_rps if scenario.as_recorded else rate
        if process.kind == "closed":
            if code < 0:
                raise InputError(f"application {name}: only services can have closed-loop clients", field="arrivals")
            clients += [code] * process.clients
            continue
        rng = np.random.default_rng([scenario.seed, n])
        if process.kind == "trace":
            asked = None if scenario.as_recorded else rate
            key = (process.format, process.path, asked if process.format == "servegen" else None)
            if key not in recorded:
                recorded[key] = read_requests(*key[:2], scenario.seed, asked, scenario.duration_s)
            found = recorded[key]
            own = fit_to(found.times_s, asked, scenario.duration_s, found.span_s, found.total)
        else:
            own = draw(process, rate, scenario.duration_s, rng)
        times.append(own * 1000.0)
        what.append(np.full(len(own), code, np.int64))
    all_times, all_what = np.concatenate(times), np.concatenate(what)
    order = np.argsort(all_times, kind="stable")
    return all_times[order], all_what[order], np.array(clients, np.int64)


def _assemble(
    plan: ServingPlan, scenario: Scenario, profiles: Mapping[str, ServingProfile], desk: Desk,
    times: np.ndarray, what: np.ndarray, clients: np.ndarray, count: int,
) -> kernel.Run:  # fmt: skip
    services = scenario.all_services()
    index = {s.name: i for i, s in enumerate(services)}
    stage = np.zeros(len(services), kernel.STAGE)
    stage["app"] = -1
    stage["budget"] = [s.slo_ms if s.latency_sensitive else math.inf for s in services]
    children: list[int] = []
    apps = scenario.applications
    roots = np.full((max(1, len(apps)), max([1, *(len(stages) for _, stages in apps)])), -1, np.int64)
    for a, (_, stages) in enumerate(apps):
        for local, x in enumerate(stages):
            i = index[x.service.name]
            stage[i] = (a, x.deadline_ms, x.parents, local, len(children), len(x.children))
            children += [index[c] for c in x.children]
        first = [index[x.service.name] for x in stages if x.parents == 0]
        roots[a, : len(first)] = first
    leaves = 1 << max(1, math.ceil(math.log2(max(2, len(plan.gpulets) + len(clients)))))
    tree = np.full(2 * leaves, np.inf)
    for c in range(len(clients)):
        kernel.set_leaf(tree, len(plan.gpulets) + c, 0.0)
    instances = np.zeros(int((what < 0).sum()), kernel.INSTANCE)
    room = count + len(clients) * 2 + _closed_room(scenario, desk, clients) + 64 + _reserve(desk, children, roots)
    mates, cost, scale = _interference(plan, profiles, desk)
    return kernel.Run(
        desk, tree, np.zeros(room, kernel.RECORD), np.zeros(3, np.int64), times, what, stage,
        np.array([*children, 0], np.int64), instances, np.zeros((len(instances), roots.shape[1]), np.int64), roots,
        np.array([len(stages) for _, stages in apps] or [0], np.int64),
        np.array([app.slo_ms for app, _ in apps] or [0.0]), clients, mates, cost, scale,
        np.zeros(desk.exec_ms.shape[1], np.int64),
        scenario.interference == "planned", scenario.duration_s * 1000.0,
    )  # fmt: skip


def _reserve(desk: Desk, children: Sequence[int], roots: np.ndarray) -> int:
    return len(children) + 1 + roots.shape[1] + desk.exec_ms.shape[1] * (2 + len(children))


def _closed_room(scenario: Scenario, desk: Desk, clients: np.ndarray) -> int:
    """Return an upper bound of the number of requests of closed-loop clients: all that the gpulets (parts of GPUs) can
    run in the simulated time, and the retries of dropped requests. A client retries at most once in the length of its
    service's SLO, or once in 1 ms if the service has no SLO.
    """
    if len(clients) == 0:
        return 0
    duration_ms = scenario.duration_s * 1000.0
    runs = np.arange(1, desk.exec_ms.shape[1])
    most = float(np.nansum((runs / desk.exec_ms[:, 1:]).max(axis=1))) * 1.2 * duration_ms
    services = scenario.all_services()
    waits = [services[c].slo_ms if services[c].latency_sensitive else 1.0 for c in clients]
    return int(most + sum(duration_ms / w for w in waits)) + 1024


def _interference(
    plan: ServingPlan, profiles: Mapping[str, ServingProfile], desk: Desk
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three tables about interference between gpulets (parts of GPUs) on one GPU. mates[i]: indices of the other
    gpulets that slow gpulet i down, filled up with -1. cost[k, n]: what the latency of a batch of n requests is
    computed from (COST in kernel.py), for seat k, a service's place on a gpulet. scale[k]: for seat k, the constant c0
    and the factor `margin` of the latency formula in profiles/serving/latency.py.
    """
    lets = plan.gpulets
    by_gpu: dict[int, list[int]] = {}
    for i, let in enumerate(lets):
        by_gpu.setdefault(let.gpu, []).append(i)
    widest = max([1, *(len(x) for x in by_gpu.values())])
    mates = np.full((len(lets), widest), -1, np.int64)
    for i, let in enumerate(lets):
        beside = {id(x) for x in neighbours(profiles[let.gpu_model], let, [lets[j] for j in by_gpu[let.gpu]])}
        others = [j for j in by_gpu[let.gpu] if id(lets[j]) in beside]
        mates[i, : len(others)] = others
    cost, scale = np.zeros(desk.exec_ms.shape, kernel.COST), np.ones((len(desk.seats), 2))
    pairs = [(let, seat) for let in lets for seat in let.seats]
    for k, (let, seat) in enumerate(pairs):
        p = profiles[let.gpu_model]
        scale[k] = p.interference.constant, p.margin
        for b in range(1, seat.batch + 1):
            l2, dram = p.utilisation(seat.model, b)
            own = p.interference.own(l2, dram) * p.partition(let.partition).share
            cost[k, b] = (
                p.latency_ms(seat.model, b, let.partition), p.overhead_ms(seat.model, b), own,
                max(0.0, p.pressure(seat.model, b, let.partition)),
            )  # fmt: skip
    return mates, cost, scale
