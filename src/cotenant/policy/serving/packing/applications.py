"""Applications as services: each stage becomes a service with a part of the application's SLO."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.errors import InputError
from cotenant.core.serving import Application, Service
from cotenant.profiles.serving.latency import ServingProfile

REFERENCE_BATCH = 32


@dataclass(frozen=True)
class Stage:
    """A stage of an application, one of the models that its requests pass through: its service, the time in ms
    after a request's arrival at the application by which the stage should be done, the names of the stages that follow,
    and the number of those before it.
    """

    service: Service
    deadline_ms: float
    children: tuple[str, ...]
    parents: int


def stage_name(application: str, stage: str) -> str:
    """Return the name of the service that serves a stage of an application."""
    return f"{application}:{stage}"


def stages(app: Application, profile: ServingProfile) -> list[Stage]:
    """Return the stages of an application, each after the stages that it waits for.

    The SLO is divided among the stages. A stage's weight is the time that a batch of 32 requests (or the largest
    profiled one) takes on a whole GPU, and the stage gets `slo * weight / (weight of the heaviest path through it)`. So
    no path of stages adds up to more than the SLO.
    """
    order = app.order()
    weight = {s: _weight(profile, s) for s in order}
    before: dict[str, float] = {}
    for s in order:
        before[s] = weight[s] + max((before[p] for p in app.parents(s)), default=0.0)
    after: dict[str, float] = {}
    for s in reversed(order):
        after[s] = weight[s] + max((after[c] for c in app.graph.get(s, ())), default=0.0)
    budget = {s: app.slo_ms * weight[s] / (before[s] + after[s] - weight[s]) for s in order}
    due: dict[str, float] = {}
    for s in order:
        due[s] = budget[s] + max((due[p] for p in app.parents(s)), default=0.0)
    return [
        Stage(
            Service(stage_name(app.name, s), s, app.rate_rps, budget[s], app.priority),
            due[s],
            tuple(stage_name(app.name, c) for c in app.graph.get(s, ())),
            len(app.parents(s)),
        )
        for s in order
    ]


def _weight(profile: ServingProfile, model: str) -> float:
    known = profile.model(model).latency_ms
    labels = [p.label for p in profile.partitions if p.fraction > 1 - 1e-9 and p.label in known]
    if not labels:
        raise InputError(f"{model} has no latency on a whole {profile.gpu}, which splitting an SLO needs")
    batch = min(REFERENCE_BATCH, profile.max_batch(model, labels[0]))
    return profile.effective_ms(model, batch, labels[0])
