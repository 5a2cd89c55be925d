"""Runs experiments from files: start a server, send load, stop both, and compare the results with the simulation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from cotenant.core.checked import Strict, check
from cotenant.core.errors import InputError, WorkError, nearest
from cotenant.core.files import atomic_file
from cotenant.core.serving import Application, Service, ServingPlan
from cotenant.core.units import parse_seconds
from cotenant.core.yamlfile import parse_yaml, read_yaml
from cotenant.loadgen.options import parse_factor, parse_load_arrivals
from cotenant.loadgen.result import LoadResult
from cotenant.loadgen.run import LoadTest, Progress, run_load
from cotenant.loadgen.schedule import LoadService
from cotenant.loadgen.target import parse_target
from cotenant.serving.config.planning import Problem, build_problem
from cotenant.serving.config.services import Deployment, parse_services, read_services

BOOT_WITHIN_S, STOP_WITHIN_S = 300.0, 60.0
PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")


class LoadEntry(Strict):
    """The setting `load`: which requests are sent. By default each service gets the rate of the services file, for
    which the server's plan is made."""

    rate: str = "x1"
    """Factor on the planned rates."""
    arrivals: str = "poisson"
    """Arrival process."""
    rates: dict[str, list[float]] = Field(default_factory=dict)
    """For each service, its rate in each step."""
    step: str = "20s"
    """Duration of a step."""
    senders: int = Field(default=1, ge=1, le=64)
    """Number of sending processes."""
    grpc: bool = False
    """Send over gRPC instead of HTTP."""


class ExperimentFile(Strict):
    """The content of an experiment file."""

    title: str = "Experiment"
    """Title of the page."""
    services: dict[str, Any] | str
    """A services file, or its content."""
    load: LoadEntry = LoadEntry()
    """The requests that are sent."""
    duration: str = "30s"
    """Duration of the load."""
    seed: int = Field(default=0, ge=0)
    """Seed of the requests."""
    replan: bool = False
    """Whether the server may adapt its plan to the rates."""


@dataclass(frozen=True)
class Experiment:
    """A validated experiment file. `content`: content of its services file. Relative paths in `content` start from the
    folder of `path`.
    """

    name: str
    raw: ExperimentFile
    content: dict[str, Any]
    path: Path
    deployment: Deployment

    @property
    def duration_s(self) -> float:
        """Return the duration of the load in seconds."""
        return parse_seconds(self.raw.duration, field="duration")


def shipped() -> dict[str, str]:
    """Return the experiments that come with the package, as name -> title."""
    found = {}
    for entry in sorted(resources.files("cotenant.loadgen").joinpath("mixes").iterdir(), key=lambda x: x.name):
        if entry.name.endswith(".yaml"):
            title = parse_yaml(entry.read_text(encoding="utf-8")).content["title"]
            found[entry.name.removesuffix(".yaml")] = str(title)
    return found


def read_experiment(name: str, changes: Mapping[str, Any], rate: str = "x1") -> Experiment:
    """Read an experiment file, or a shipped one by name. `changes`: values that replace keys of the file; `rate`: a
    factor on the planned and sent rates.
    """
    factor = parse_factor(rate)
    if "duration" in changes:
        _check_time(changes["duration"], "duration")
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        if name not in shipped():
            near, known = nearest(name, shipped()), ", ".join(shipped())
            hint = f"; {near} shipped: {known}" if near else f"; shipped: {known}"
            raise InputError(f"{name!r} is neither a file nor a shipped experiment{hint}", field="EXPERIMENT")
        path = Path(str(resources.files("cotenant.loadgen").joinpath("mixes", f"{name}.yaml")))
    read = read_yaml(path)
    if not isinstance(read.content, dict):
        raise InputError("needs services", file=path)
    with read.located():
        raw = check(ExperimentFile, {**read.content, **changes})
        parse_load_arrivals(raw.load.arrivals)
        if "duration" not in changes:
            _check_time(raw.duration, "duration")
        _check_time(raw.load.step, "load.step")
        return _checked(path, raw, factor)


def _check_time(text: str, field: str) -> None:
    """Refuse a time of 0 before anything is planned or started for it."""
    if parse_seconds(text, field=field) <= 0:
        raise InputError(f"{text!r} is not above 0 s", field=field)


def _checked(path: Path, raw: ExperimentFile, factor: float) -> Experiment:
    if isinstance(raw.services, str):
        path_of_services = path.parent / raw.services
        read_services(path_of_services)
        content = read_yaml(path_of_services).content
        base = path_of_services
    else:
        content, base = raw.services, path
    for kind in ("services", "applications"):
        for row in content.get(kind) or ():
            if isinstance(row, dict) and isinstance(row.get("rate_rps"), int | float):
                row["rate_rps"] *= factor
    deployment = parse_services(content, base)
    names = [s.name for s in deployment.services] + [a.name for a in deployment.applications]
    unknown = next((n for n in raw.load.rates if n not in names), None)
    if unknown is not None:
        raise InputError(f"{unknown!r} is not a service; known: {', '.join(names)}", file=path, field="load.rates")
    return Experiment(path.stem, raw, content, base, deployment)


def load_services(experiment: Experiment) -> tuple[LoadService, ...]:
    """Return the services that get requests in the experiment, with their arrival processes."""
    load, deployment = experiment.raw.load, experiment.deployment
    factor = parse_factor(load.rate)
    made = []
    known: list[Service | Application] = [*deployment.services, *deployment.applications]
    for x in known:
        rates = tuple(load.rates.get(x.name) or (x.rate_rps,))
        process = parse_load_arrivals(deployment.arrivals.get(x.name) or load.arrivals)
        made.append(LoadService(x.name, rates, process, x.slo_ms).scaled(factor))
    return tuple(made)


class ServerProcess:
    """`cotenant serve` as a process, from its start to its end."""

    def __init__(self, services: Path, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "cotenant.cli.main", "serve", str(services), "--json", *arguments]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, start_new_session=True)
        self.addresses: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Wait until the server prints its address. Raises WorkError with the end of its log if it does not."""
        import select

        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], BOOT_WITHIN_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.stop()
            raise WorkError(f"the server did not start: {self.last_words()}")
        self.addresses = json.loads(line)

    def last_words(self) -> str:
        """Return the last line that the server wrote to standard error."""
        lines = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()]
        return lines[-1].removeprefix("cotenant: ") if lines else f"server ended with code {self.process.returncode}"

    def stop(self) -> int:
        """Ask the server to end, and kill it if it does not. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def make_plan(problem: Problem, seed: int) -> ServingPlan:
    """Return the serving plan for a run without replanning, verified by simulation."""
    from cotenant.policy.serving.packing.planners import Packer
    from cotenant.sim.serving.verify import plan_verified

    packer = Packer(problem.planner(), problem.gpus, problem.services)
    plan = packer.plan([s.rate_rps * problem.headroom for s in problem.services])
    if plan.feasible:
        plan = plan_verified(
            packer, problem.profiles, problem.headroom, 0.99, problem.applications, seed + 1_000_003
        ).plan
    return plan


@dataclass(frozen=True)
class Outcome:
    """Result of an experiment. `simulated` is None if the server replanned or the rates changed in steps, since neither
    can be simulated."""

    experiment: Experiment
    plan: ServingPlan | None
    result: LoadResult
    simulated: dict[str, Any] | None
    server_code: int

    def summary(self) -> dict[str, Any]:
        """Return the experiment's result for JSON: the live run as `cotenant load` reports it, the simulated run, and
        the ratios of the live latency percentiles to the simulated ones."""
        live = self.result.summary()
        out: dict[str, Any] = {"title": self.experiment.raw.title, **live, "server_exit_code": self.server_code}
        if self.plan is not None:
            out["gpus_used"] = self.plan.gpus_used
        if self.simulated is not None:
            rows = {**self.simulated["services"], **self.simulated["applications"]}
            out["simulated"] = {name: rows[name] for name in live["services"]}
            out["live_over_simulated"] = {
                name: {p: None if row[p] is None or not rows[name][p] else row[p] / rows[name][p] for p in PERCENTILES}
                for name, row in live["services"].items()
            }
        return out


def run_experiment(
    experiment: Experiment, out: Path, tell: Callable[[Sequence[Progress]], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:  # fmt: skip
    """Run an experiment: start the server, send the load, stop the server, and simulate. Files in `out`: services.yaml,
    plan.json, logs of client and server, GPUs in use.
    """
    out.mkdir(parents=True, exist_ok=True)
    raw = experiment.raw
    services = _written(experiment, out)
    problem = build_problem(experiment.deployment, live=True)
    arguments = ["--http", "127.0.0.1:0", "--log", str(out / "server.csv"), "--gpus-log", str(out / "gpus.csv")]
    arguments += ["--grpc", "127.0.0.1:0" if raw.load.grpc else "none"]
    plan = None
    if not raw.replan:
        say("planning")
        plan = make_plan(problem, raw.seed)
        with atomic_file(out / "plan.json") as file:
            file.write(json.dumps(plan.to_dict(), indent=1))
        arguments += ["--plan", str(out / "plan.json")]
    say("starting the server")
    server = ServerProcess(services, arguments, out / "server.log")
    try:
        server.wait_ready()
        where = f"grpc://{server.addresses['grpc']}" if raw.load.grpc else server.addresses["http"]
        test = LoadTest(
            parse_target(where), load_services(experiment), experiment.duration_s, raw.seed,
            parse_seconds(raw.load.step, field="load.step"), senders=raw.load.senders,
        )  # fmt: skip
        say(f"sending for {experiment.duration_s:g} s")
        result = run_load(test, tell)
    finally:
        code = server.stop()
    with atomic_file(out / "client.csv") as file:
        file.write(result.csv())
    simulated = None if plan is None else simulate(experiment, problem, plan)
    return Outcome(experiment, plan, result, simulated, code)


def _written(experiment: Experiment, out: Path) -> Path:
    """Write the services file of the experiment's run, with absolute paths."""
    content = json.loads(json.dumps(experiment.content))
    base = experiment.path.parent.resolve()
    if isinstance(content.get("models"), str):
        content["models"] = str(base / content["models"])
    if isinstance(content.get("profile"), str):
        content["profile"] = str(base / content["profile"])
    for row in content.get("services") or ():
        if "/" in str(row.get("model", "")):
            row["model"] = str(base / row["model"])
    target = out / "services.yaml"
    with atomic_file(target) as file:
        yaml.safe_dump(content, file, sort_keys=False)
    return target


def simulate(experiment: Experiment, problem: Problem, plan: ServingPlan) -> dict[str, Any] | None:
    """Simulate the experiment's rates and arrivals on its plan; None if rates change in steps."""
    from cotenant.sim.serving.engine import Scenario, run

    load = experiment.raw.load
    if load.rates:
        return None
    factor = parse_factor(load.rate)
    sent = tuple(replace(s, rate_rps=s.rate_rps * factor) for s in problem.own_services)
    apps = tuple((replace(app, rate_rps=app.rate_rps * factor), stages) for app, stages in problem.applications)
    processes = {"": parse_load_arrivals(load.arrivals)}
    processes |= {name: parse_load_arrivals(text) for name, text in experiment.deployment.arrivals.items()}
    began = time.monotonic()
    scenario = Scenario(sent, max(experiment.duration_s, 30.0), processes, apps, experiment.raw.seed)
    found: dict[str, Any] = dict(run(plan, scenario, problem.profiles).summary())
    return {**found, "engine_s": time.monotonic() - began}
