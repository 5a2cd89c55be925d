"""Reading of services.yaml: models, GPUs and defaults, for planning, simulation and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Capabilities, Use
from cotenant.core.checked import Memory, Seconds, Strict, check
from cotenant.core.errors import InputError, unknown_name
from cotenant.core.gpus import find_gpu
from cotenant.core.serving import APPLICATIONS, MOST_MODELS, Application, Service
from cotenant.core.units import parse_fraction
from cotenant.core.yamlfile import YamlFile, read_yaml

MAX_GPUS = 100_000
MOST_PRIORITY = 10**9


class GpusEntry(Strict):
    """The setting `gpus`: number and model of the GPUs."""

    count: int = Field(ge=1, le=MAX_GPUS)
    """Number of GPUs."""
    model: str
    """Model of the GPUs, by its name in the catalog or the profile; `cpu` with the mechanism `cores`."""


class ReplanEntry(Strict):
    """The setting `replan`: how often a server makes a new plan, and the factor on the rates to plan for."""

    period: Seconds = 20.0
    """Interval at which a server makes a new plan from the measured rates."""
    headroom: float = Field(default=1.2, ge=1.0, le=100.0)
    """Factor on the rates to plan for."""


class ServiceEntry(Strict):
    """One entry of `services`. A service without a rate is planned for 1 request/s until its rate is measured."""

    name: str = Field(min_length=1, max_length=200)
    """The service's name in requests."""
    model: str | None = None
    """Folder of the model in a repository, or a model of the profile; by default the service's name."""
    rate_rps: float = Field(default=1.0, allow_inf_nan=False, gt=0)
    """Requests per second to plan for."""
    slo_ms: float = Field(allow_inf_nan=False, gt=0)
    """Time within which an answer must arrive."""
    class_: Literal["latency-sensitive", "best-effort"] = Field(default="latency-sensitive", alias="class")
    """A best-effort service has no deadlines and, under a co-location scheme, yields to latency-sensitive services."""
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    """If the GPUs do not suffice for all services, services with a larger priority are planned first."""
    memory: Memory | None = None
    """GPU memory reserved for the service's worker under a co-location scheme."""
    input_bytes: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Size of a request; determines how long its copy to the GPU takes in plans and simulations."""
    copy_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weight by which the worker of this service shares the PCIe link with other processes, for copies between host and
    GPU memory."""
    work_class: Literal["unknown", "memory", "compute"] = "unknown"
    """Resource that limits the speed of the service's kernels. Only the co-location scheme orion uses this setting."""
    max_queue: int = Field(default=1000, ge=1, le=1_000_000)
    """Largest number of requests that may wait; further requests are refused."""
    arrivals: str | None = None
    """Arrival process in simulations: poisson, constant, gamma:CV, mmpp:..., trace:FORMAT:FILE."""
    backend: str | None = None
    """Backend of the service's model; by default the `backend` of the whole file."""
    version: int | None = Field(default=None, ge=1)
    """Version of the model; by default the one with the largest number."""
    max_concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    """Largest number of the service's requests that may be in the server at once."""
    sample: str | None = None
    """File with an inference request in JSON to measure the model with."""

    @property
    def profile_model(self) -> str:
        """The name in the profile: the last part of a model repository path, or the service's own name."""
        return (self.model or self.name).rstrip("/").rsplit("/", 1)[-1]


class ApplicationEntry(Strict):
    """One entry of `applications`. `graph`: maps each stage to the stages that follow it, or is the name of a known
    graph (game, traffic)."""

    name: str = Field(min_length=1, max_length=200)
    """The application's name in requests."""
    graph: dict[str, list[str]] | str
    """Each stage with the stages that follow it, or the name of a known graph."""
    rate_rps: float = Field(allow_inf_nan=False, gt=0)
    """Requests per second to plan for."""
    slo_ms: float = Field(allow_inf_nan=False, gt=0)
    """Time within which the last stage must have answered."""
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    """If the GPUs do not suffice for all services, those with a larger priority are planned first."""
    arrivals: str | None = None
    """Arrival process in simulations, as for services."""
    inputs: dict[str, dict[str, str]] = Field(default_factory=dict)
    """For each stage and input: the output (`STAGE.OUTPUT`) from which the input is taken."""


class ServicesFile(BaseModel):
    """The whole of services.yaml. `backends`, `listen` and other keys of serving are kept for the server."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    gpus: GpusEntry | None = None
    """The GPUs to plan for; alternative to `cluster`."""
    cluster: str | None = None
    """A cluster in the notation of simulations (16x8, a file); alternative to `gpus`."""
    mechanism: str = "mps"
    """Mechanism that enforces a part of a GPU: time, mps, green, mig, cores."""
    partitions: list[str | float] | None = None
    """Sizes of gpulets, by their labels in the profile; by default all sizes of the profile."""
    max_gpulets: int | None = Field(default=None, ge=1, le=64)
    """Largest number of gpulets on one GPU; by default the profile's."""
    max_models: int = Field(default=MOST_MODELS, ge=1, le=MOST_MODELS)
    """Largest number of models in one gpulet."""
    colocation: str | None = None
    """Scheme under which latency-sensitive and best-effort services share GPUs."""
    profile: str | dict[str, str] | None = None
    """Profile of the models, relative to this file; or one for each GPU model."""
    replan: ReplanEntry = ReplanEntry()
    """When and how a running server changes its plan."""
    services: list[ServiceEntry] = Field(default_factory=list)
    """Models that answer requests."""
    applications: list[ApplicationEntry] = Field(default_factory=list)
    """Graphs of models that answer a request together."""


@dataclass(frozen=True)
class Deployment:
    """services.yaml, validated: the model name of each GPU, services, applications, planning settings. `raw`: the
    file's content, with the server's keys; `source`: the line of each setting in the file, for errors. `colocation`:
    the scheme under which latency-sensitive and best-effort services share GPUs; None: both classes are treated alike.
    """

    file: str
    gpu_models: tuple[str, ...]
    services: tuple[Service, ...]
    applications: tuple[Application, ...]
    mechanism: str
    partitions: tuple[str, ...] | None
    profiles: Mapping[str, str]
    headroom: float
    period_s: float
    max_gpulets: int | None = None
    max_models: int = MOST_MODELS
    arrivals: Mapping[str, str] = field(default_factory=dict)
    colocation: str | None = None
    raw: ServicesFile | None = None
    source: YamlFile | None = field(default=None, repr=False, compare=False)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the deployment's mechanism."""
        return mechanisms.find(self.mechanism).capabilities

    def located(self) -> AbstractContextManager[None]:
        """Context that adds the file and line to InputErrors that lack them."""
        return nullcontext() if self.source is None else self.source.located()


def read_services(path: str | Path) -> Deployment:
    """Read services.yaml; InputError names line and field."""
    read = read_yaml(path)
    if not isinstance(read.content, dict):
        raise InputError(
            "is empty; write gpus and services" if read.content is None else "needs gpus and services", file=path
        )
    with read.located():
        return replace(parse_services(read.content, path), source=read)


def with_scheme(deployment: Deployment, scheme: str | None) -> Deployment:
    """The deployment with the co-location scheme that an option names (`none`: no scheme). If the option is not given,
    the deployment keeps the scheme of its file."""
    return deployment if scheme is None else replace(deployment, colocation=_scheme(scheme))


def _scheme(name: str | None) -> str | None:
    if name is None or name == "none":
        return None
    from cotenant.policy.colocation import scheme_named

    return scheme_named(name).name


def parse_services(data: Mapping[str, Any], path: str | Path = "services") -> Deployment:
    """Validate the content of services.yaml."""
    raw = check(ServicesFile, data, path)
    try:
        return _deployment(raw, path)
    except InputError as error:
        if error.file is None:
            raise InputError(error.message, file=path, field=error.field) from None
        raise


def _deployment(raw: ServicesFile, path: str | Path) -> Deployment:
    if not raw.services and not raw.applications:
        raise InputError("declares neither services nor applications", field="services")
    names = [s.name for s in raw.services] + [a.name for a in raw.applications]
    if len(set(names)) < len(names):
        twice = next(n for i, n in enumerate(names) if n in names[:i])
        raise InputError(f"{twice} is declared twice", field="services")
    services = tuple(
        Service(
            s.name, s.profile_model, s.rate_rps, s.slo_ms, s.priority, s.class_ == "latency-sensitive", s.memory,
            s.input_bytes, s.max_queue,
        )
        for s in raw.services
    )  # fmt: skip
    partitions = None if raw.partitions is None else tuple(_label(p, i) for i, p in enumerate(raw.partitions))
    parts = mechanisms.find(raw.mechanism, Use.SERVICE).capabilities.worker_parts
    if not parts:
        partitions = ("100%",)
    profiles = raw.profile if isinstance(raw.profile, dict) else {"": raw.profile} if raw.profile else {}
    base = Path(path).parent
    return Deployment(
        file=str(path),
        gpu_models=_gpu_models(raw),
        services=services,
        applications=tuple(_application(a, i) for i, a in enumerate(raw.applications)),
        mechanism=raw.mechanism,
        partitions=partitions,
        profiles={gpu: str(p if Path(p).is_absolute() else base / p) for gpu, p in profiles.items()},
        headroom=raw.replan.headroom,
        period_s=raw.replan.period,
        max_gpulets=raw.max_gpulets if parts else 1,
        max_models=raw.max_models,
        arrivals={
            **{s.name: s.arrivals for s in raw.services if s.arrivals},
            **{a.name: a.arrivals for a in raw.applications if a.arrivals},
        },
        colocation=_scheme(raw.colocation),
        raw=raw,
    )


def _gpu_models(raw: ServicesFile) -> tuple[str, ...]:
    if (raw.gpus is None) == (raw.cluster is None):
        raise InputError(
            "give gpus or cluster, and not both: gpus for equal GPUs, cluster for nodes such as 16x8",
            field="gpus",
        )
    if raw.gpus is not None:
        return (gpu_name(raw.gpus.model),) * raw.gpus.count
    from cotenant.workloads.clusters.forms import parse_cluster

    assert raw.cluster is not None
    cluster = parse_cluster(raw.cluster)
    if cluster.total_gpus > MAX_GPUS:
        raise InputError(f"the cluster has {cluster.total_gpus} GPUs, more than {MAX_GPUS}", field="cluster")
    return tuple(g.gpu.name for g in cluster.groups for _ in range(g.count * g.gpus))


def gpu_name(name: str) -> str:
    """Name of a GPU model in the catalog. A name that the catalog does not have is returned as it is: `cpu`, or a name
    that only the profile knows."""
    try:
        return find_gpu(name).name
    except InputError:
        return name


def _label(value: str | float, i: int) -> str:
    """A partition's label as written in profiles: 40%, 1g, 16sm."""
    if isinstance(value, str) and not value.strip().replace(".", "", 1).rstrip("%").isdigit():
        return value.strip()
    fraction = parse_fraction(value, field=f"partitions[{i}]")
    if fraction <= 0:
        raise InputError(f"a partition must be above 0 %, not {value}", field=f"partitions[{i}]")
    return f"{round(fraction * 100, 4):g}%"


def _application(raw: ApplicationEntry, i: int) -> Application:
    graph: Mapping[str, Sequence[str]]
    if isinstance(raw.graph, str):
        if raw.graph not in APPLICATIONS:
            raise unknown_name("graph", raw.graph, APPLICATIONS, f"applications[{i}].graph")
        graph = APPLICATIONS[raw.graph]
    else:
        graph = raw.graph
    return Application(raw.name, {k: tuple(v) for k, v in graph.items()}, raw.rate_rps, raw.slo_ms, raw.priority)
