"""Verifies a serving plan: computes all times and capacities again from the profile, independently of the planners'
arithmetic.

A plan is valid if all of this holds:

- On every GPU, MIG allows the instances together, there are not too many gpulets (parts of the GPU), their shares add
  up to at most 1, and memory and network suffice.
- A gpulet runs one batch of each of its models in every cycle, whose length the plan states (`duty_ms`). Under the
  interference of the neighbours' worst models, these batches together take no longer than the cycle. The cycle plus
  this time stays within the SLO of every service there, because a request may wait for one cycle before its batch.
- Every service's capacity reaches its rate, less the requests that the plan says it leaves out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from cotenant.core.serving import Gpulet, Service, ServingPlan
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.profiles.serving.mig_layout import fits

ROUNDING = 1 + 1e-9


def planned_pressure(profile: ServingProfile, others: Sequence[Gpulet]) -> float | None:
    """Return the interference that the planned batches of the neighbours (the other gpulets on the GPU) can cause on a
    gpulet: the sum over the neighbours of that of their worst models; None without neighbours.
    """
    if not others:
        return None
    return sum(max([0.0, *(profile.pressure(s.model, s.batch, x.partition) for s in x.seats)]) for x in others)


def neighbours(profile: ServingProfile, let: Gpulet, lets: Iterable[Gpulet]) -> list[Gpulet]:
    """Return the neighbours that slow a gpulet (part of a GPU) down: the other gpulets in its MIG instance, unless
    their times were measured together with its own.
    """
    if profile.partition(let.partition).processes > 1:
        return []
    return [x for x in lets if x is not let and x.gpu == let.gpu and x.instance == let.instance]


def work_ms(profile: ServingProfile, let: Gpulet, beside: Sequence[Gpulet]) -> float:
    """Return how many milliseconds one cycle of a gpulet (one batch of each of its models) takes beside its neighbours.
    """
    pressure = planned_pressure(profile, beside)
    return sum(profile.effective_ms(s.model, s.batch, let.partition, pressure) for s in let.seats)


def problems(plan: ServingPlan, services: Sequence[Service], gpus: Gpus) -> list[str]:
    """Return what is wrong with a serving plan, one sentence for each fault; empty if it is valid."""
    by_name = {s.name: s for s in services}
    by_gpu: dict[int, list[Gpulet]] = defaultdict(list)
    for let in plan.gpulets:
        by_gpu[let.gpu].append(let)
    out = []
    for gpu, lets in by_gpu.items():
        if not 0 <= gpu < len(gpus):
            out.append(f"GPU {gpu} does not exist: there are {len(gpus)}")
            continue
        out += _gpu_problems(gpu, lets, by_name, gpus.profile_of(gpu))
        for let in lets:
            profile = gpus.profile_of(gpu)
            work = work_ms(profile, let, neighbours(profile, let, lets))
            if work > let.duty_ms * ROUNDING:
                out.append(f"gpulet {let.name}: {work:.3f} ms of work do not fit in a cycle of {let.duty_ms:.3f} ms")
            for seat in let.seats:
                limit = by_name[seat.service].slo_ms
                if let.duty_ms + work > limit * ROUNDING:
                    took = let.duty_ms + work
                    out.append(f"{seat.service} on {let.name}: {took:.2f} ms exceed the SLO of {limit:g} ms")
    capacity = plan.capacities()
    left = {x.service: x.missing_rps for x in plan.left_out}
    for s in services:
        promised = s.rate_rps - left.get(s.name, 0.0)
        if capacity.get(s.name, 0.0) < promised * (1 - 1e-6):
            out.append(f"{s.name}: the capacity of {capacity.get(s.name, 0.0):.1f} is below {promised:.1f} requests/s")
    return out


def _gpu_problems(
    gpu: int, lets: Sequence[Gpulet], services: Mapping[str, Service], profile: ServingProfile
) -> list[str]:
    out = []
    instances: dict[tuple[int, str], list[Gpulet]] = defaultdict(list)
    for let in lets:
        instances[let.instance, profile.partition(let.partition).instance].append(let)
    if len(lets) > profile.max_gpulets:
        out.append(f"GPU {gpu}: has {len(lets)} gpulets, but may have {profile.max_gpulets}")
    if len({kind == "" for _, kind in instances}) > 1 or ("" in {kind for _, kind in instances} and len(instances) > 1):
        out.append(f"GPU {gpu}: has both MIG instances and partitions without MIG")
    elif all(kind for _, kind in instances) and not fits(profile, instances):
        named = ", ".join(f"{kind}@{start}" for start, kind in sorted(instances))
        out.append(f"GPU {gpu}: MIG does not allow {named} together")
    for (start, kind), own in instances.items():
        where = f"GPU {gpu} {kind}@{start}" if kind else f"GPU {gpu}"
        out += [f"{where}: {x}" for x in _instance_problems(own, services, profile)]
    traffic = sum(s.rate_rps * services[s.service].input_bytes * 8 for let in lets for s in let.seats)
    if profile.network_bps is not None and traffic > profile.network_bps * (1 + 1e-6):
        out.append(f"GPU {gpu}: needs {traffic / 1e9:.2f} Gbit/s of {profile.network_bps / 1e9:g} Gbit/s")
    return out


def _instance_problems(lets: Sequence[Gpulet], services: Mapping[str, Service], profile: ServingProfile) -> list[str]:
    """Return what is wrong with the gpulets (parts of a GPU) of one MIG instance, or of a GPU without MIG."""
    out = []
    sizes = [profile.partition(let.partition) for let in lets]
    if sum(p.share for p in sizes) > 1 + 1e-9:
        out.append(f"the partitions add up to {sum(100 * p.share for p in sizes):g} %, but at most 100 % is possible")
    for size in dict.fromkeys(p for p in sizes if p.processes > 1):
        held = [tuple(s.service for s in let.seats) for let in lets if let.partition == size.label]
        if len(held) != size.processes or len(set(held)) > 1 or len(held[0]) > 1:
            out.append(f"{size.label} is for {size.processes} processes of one service")
    memory = 0.0
    for let in lets:
        memory += profile.per_gpulet_bytes
        for seat in let.seats:
            service = services[seat.service]
            own = service.memory_bytes
            memory += profile.model(service.model).memory_bytes if own is None else own
    limit = profile.planned_memory_bytes() * (sizes[0].slots / profile.slots if sizes[0].slots else 1.0)
    if memory > limit:
        out.append(f"the services need {memory / 1e6:.0f} MB of memory, but only {limit / 1e6:.0f} MB can be used")
    return out
