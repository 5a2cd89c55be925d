"""Builds planning problems from files: profiles with the chosen partitions, GPUs, services, stages; what-if changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.serving import MOST_MODELS, Application, Service
from cotenant.core.units import number_or_nan
from cotenant.policy.serving.packing.applications import Stage, stages
from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER, Spec, find_planner
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.profiles.serving.latency_files import load_profile
from cotenant.serving.config.services import MAX_GPUS, Deployment


@dataclass(frozen=True)
class Problem:
    """A planning problem: `services` (the stages of applications come last), GPUs, profiles by GPU model, applications
    with their stages, and `headroom`, the factor by which rates are multiplied. `apart`: a gpulet must not hold both
    latency-sensitive and best-effort services; `max_models`: largest number of services in a gpulet.
    """

    gpus: Gpus
    services: tuple[Service, ...]
    profiles: Mapping[str, ServingProfile]
    applications: tuple[tuple[Application, tuple[Stage, ...]], ...]
    headroom: float
    apart: bool = False
    max_models: int = MOST_MODELS

    def planner(self, name: str | None = None) -> Spec:
        """The planner of that name (None: the default planner) for this problem. InputError lists the known names."""
        spec = find_planner(name or DEFAULT_PLANNER)
        rules = replace(spec.rules, seats=min(spec.rules.seats, self.max_models), crowd=self.max_models)
        spec = replace(spec, rules=rules)
        return spec.apart() if self.apart else spec

    @property
    def own_services(self) -> tuple[Service, ...]:
        """Services that are not stages of an application."""
        staged = {stage.service.name for _, found in self.applications for stage in found}
        return tuple(s for s in self.services if s.name not in staged)


def restrict(
    profile: ServingProfile, labels: Sequence[str] | None, max_gpulets: int | None, *, instances: bool
) -> ServingProfile:
    """Return a profile that has only the partitions `labels`, and at most `max_gpulets` gpulets on a GPU; None leaves
    the profile's value. The label 100% means the whole GPU without MIG. `instances`: partitions must be MIG slices, and
    if `labels` is None, only whole MIG instances remain. Raises InputError if a partition is not in the profile or,
    with `instances`, is not a MIG slice.
    """
    chosen = profile.partitions
    if labels is not None:
        known = {p.label: p for p in profile.partitions}
        whole = next((p for p in profile.partitions if p.fraction > 1 - 1e-9 and p.processes == 1), None)
        if whole is not None and not instances:  # a profile of MIG slices calls the whole GPU 7g
            known.setdefault("100%", replace(whole, slots=0, instance=""))
        missing = [label for label in labels if label not in known]
        if missing:
            raise InputError(
                f"the {profile.gpu} profile has no partition {', '.join(missing)}: it has {', '.join(known)}",
                field="partitions",
            )
        chosen = tuple(known[label] for label in dict.fromkeys(labels))
    elif instances:
        chosen = tuple(p for p in chosen if not p.slots or (p.share > 1 - 1e-9 and p.processes == 1))
    if instances and (not profile.slots or any(not p.slots for p in chosen)):
        raise InputError(f"the {profile.gpu} profile has no MIG slices (partitions with slots)", field="mechanism")
    if not chosen:
        raise InputError("no partition is left to choose from", field="partitions")
    return replace(
        profile, partitions=tuple(sorted(chosen)), max_gpulets=max_gpulets or profile.max_gpulets,
    )  # fmt: skip


def _enforceable(profile: ServingProfile, deployment: Deployment) -> ServingProfile:
    """Return a profile that has only the sizes that workers of the deployment's mechanism can be given: whole instances
    under MIG, and parts of a GPU without MIG under the other mechanisms.
    """
    instances = deployment.capabilities.instances
    chosen = tuple(
        p for p in profile.partitions
        if bool(p.slots) == instances and (not p.slots or (p.share > 1 - 1e-9 and p.processes == 1))
    )  # fmt: skip
    if not chosen:
        what = (
            f"no whole MIG instances, and mechanism {deployment.mechanism} gives workers nothing else"
            if instances
            else f"only MIG instances and parts of them, which mechanism {deployment.mechanism} cannot give to workers"
        )
        raise InputError(
            f"the {profile.gpu} profile has {what}: plans with this profile can only be simulated", field="mechanism"
        )
    return replace(profile, partitions=chosen)


def build_problem(
    deployment: Deployment, profile: str | Path | None = None, gpus: int | None = None, *, live: bool = False
) -> Problem:
    """Return the planning problem of a services file. `profile` replaces the file's profile, and `gpus` the file's
    number of GPUs: if `gpus` is larger, GPUs of the file's first GPU model are added. `live`: use only partition sizes
    that a server can give its workers."""
    models = deployment.gpu_models
    if gpus is not None:
        if gpus < 1:
            raise InputError(f"the number of GPUs must be at least 1, not {gpus}", field="gpus")
        if gpus > MAX_GPUS:
            raise InputError(f"the number of GPUs must be at most {MAX_GPUS}, not {gpus}", field="gpus")
        models = models[:gpus] if gpus <= len(models) else models + (models[0],) * (gpus - len(models))
    loaded: dict[str, ServingProfile] = {}
    for model in dict.fromkeys(models):
        path = profile or deployment.profiles.get(model) or deployment.profiles.get("")
        found = load_profile(model, path)
        with deployment.located():
            loaded[model] = restrict(
                replace(found, gpu=model), deployment.partitions, deployment.max_gpulets,
                instances=deployment.capabilities.instances,
            )  # fmt: skip
            if live:
                loaded[model] = _enforceable(loaded[model], deployment)
    types = {model: i for i, model in enumerate(loaded)}
    first = next(iter(loaded.values()))
    apps = tuple((app, tuple(stages(app, first))) for app in deployment.applications)
    services = (*deployment.services, *(stage.service for _, found in apps for stage in found))
    problem_gpus = Gpus(tuple(loaded.values()), tuple(types[m] for m in models))
    return Problem(
        problem_gpus, services, loaded, apps, deployment.headroom, deployment.colocation is not None,
        deployment.max_models,
    )  # fmt: skip


def what_if(deployment: Deployment, changes: Sequence[str]) -> Deployment:
    """A deployment with changes of the form KEY=x1.5 (factor) or KEY=120 (value); KEY: rate, slo, headroom,
    rate.SERVICE, slo.SERVICE.
    """
    for change in changes:
        key, equals, text = change.partition("=")
        kind, _, who = key.strip().partition(".")
        text = text.strip()
        number = number_or_nan(text.removeprefix("x"))
        if not equals or kind not in ("rate", "slo", "headroom") or not math.isfinite(number) or number <= 0:
            raise InputError(
                f"{change!r} is not a change such as rate=x1.5, slo=x0.8, rate.NAME=120 or headroom=1.5",
                field="what-if",
            )
        times = text.startswith("x")
        if kind == "headroom":
            new = deployment.headroom * number if times else number
            deployment = replace(deployment, headroom=max(1.0, new))
            continue
        names = [s.name for s in deployment.services] + [a.name for a in deployment.applications]
        if who and who not in names:
            raise InputError(f"{who!r} is not a service; the services are {', '.join(names)}", field="what-if")
        attribute = "rate_rps" if kind == "rate" else "slo_ms"
        deployment = replace(
            deployment,
            services=tuple(_changed(s, attribute, who, number, times) for s in deployment.services),
            applications=tuple(_changed(a, attribute, who, number, times) for a in deployment.applications),
        )
    return deployment


def _changed(item: Any, attribute: str, who: str, number: float, times: bool) -> Any:
    if who not in ("", item.name):
        return item
    value = getattr(item, attribute) * number if times else number
    return replace(item, **{attribute: value})
