"""Whether a serving plan holds: every promise recomputed from the profile, apart from the planners' own arithmetic.

A plan holds when, on every GPU, the gpulets fit (fraction, number, MIG slots, memory, network) and, on every gpulet,
the work of one cycle fits the cycle and cycle plus work stay within every SLO, under the interference of the
neighbours' worst models; and when every service's capacity reaches its rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cotenant.core.serving import Gpulet, Service, ServingPlan
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency import ServingProfile

ROUNDING = 1 + 1e-9


def worst_pressure(profile: ServingProfile, let: Gpulet) -> float:
    """The alpha share that a gpulet's worst model adds to a neighbour."""
    return max((profile.pressure(s.model, s.batch, let.partition) for s in let.seats), default=0.0)


def work_ms(profile: ServingProfile, let: Gpulet, neighbours: Sequence[Gpulet]) -> float:
    """Milliseconds of one cycle of a gpulet beside its neighbours."""
    pressure = sum(max(0.0, worst_pressure(profile, n)) for n in neighbours) if neighbours else None
    return sum(profile.effective_ms(s.model, s.batch, let.partition, pressure) for s in let.seats)


def problems(plan: ServingPlan, services: Sequence[Service], gpus: Gpus, slack: float = 1.0) -> list[str]:
    """What does not hold in a plan, one sentence each; empty when it holds. `slack` multiplies every SLO."""
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
            work = work_ms(gpus.profile_of(gpu), let, [n for n in lets if n is not let])
            if work > let.duty_ms * ROUNDING:
                out.append(f"gpulet {let.name}: {work:.3f} ms of work in a cycle of {let.duty_ms:.3f} ms")
            for seat in let.seats:
                limit = by_name[seat.service].slo_ms * slack
                if let.duty_ms + work > limit * ROUNDING:
                    took = let.duty_ms + work
                    out.append(f"{seat.service} on {let.name}: {took:.2f} ms against an SLO of {limit:g} ms")
    capacity = plan.capacities()
    left = {x.service: x.missing_rps for x in plan.left_out}
    for s in services:
        promised = s.rate_rps - left.get(s.name, 0.0)
        if capacity.get(s.name, 0.0) < promised * (1 - 1e-6):
            out.append(f"{s.name}: capacity {capacity.get(s.name, 0.0):.1f} under {promised:.1f} requests/s")
    return out


def _gpu_problems(
    gpu: int, lets: Sequence[Gpulet], services: Mapping[str, Service], profile: ServingProfile
) -> list[str]:
    out = []
    sizes = [profile.partition(let.partition) for let in lets]
    if sum(p.fraction for p in sizes) > 1 + 1e-9:
        out.append(f"GPU {gpu}: partitions of {sum(p.percent for p in sizes):g} %")
    if len(lets) > profile.max_gpulets:
        out.append(f"GPU {gpu}: {len(lets)} gpulets, {profile.max_gpulets} allowed")
    if profile.slots and sum(p.slots for p in sizes) > profile.slots:
        out.append(f"GPU {gpu}: {sum(p.slots for p in sizes)} memory slots of {profile.slots}")
    memory = traffic = 0.0
    for let in lets:
        memory += profile.per_gpulet_bytes
        for seat in let.seats:
            service = services[seat.service]
            own = service.memory_bytes
            memory += profile.model(service.model).memory_bytes if own is None else own
            traffic += seat.rate_rps * service.input_bytes * 8
    if memory > profile.planned_memory_bytes():
        out.append(f"GPU {gpu}: {memory / 1e6:.0f} MB of {profile.planned_memory_bytes() / 1e6:.0f} MB")
    if profile.network_bps is not None and traffic > profile.network_bps * (1 + 1e-6):
        out.append(f"GPU {gpu}: {traffic / 1e9:.2f} Gbit/s of {profile.network_bps / 1e9:g} Gbit/s")
    return out
