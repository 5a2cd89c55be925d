"""Explains why a service is not in a serving plan, by the limit (such as memory, SMs or SLO) that excludes it."""

from __future__ import annotations

import numpy as np

from cotenant.core.serving import Service
from cotenant.policy.serving.packing.kernel import State, Tables
from cotenant.policy.serving.packing.tables import Gpus


def left_out(T: Tables, state: State, service: int) -> str:
    """Explain why a service's rate was not placed completely on the GPUs there are."""
    lets, rows = state["part"] >= 0, T.gpu[T.gpu_type]
    used = np.where(np.arange(state["svc"].shape[2]) < state["count"][..., None], state["svc"], -1)
    memory = np.where(used >= 0, T.svc["mem"][used], 0.0).sum(axis=(1, 2))
    free = float((rows["mem_gpu"] - memory - lets.sum(axis=1) * rows["mem_let"]).max()) / 1e6
    needed = float(T.svc["mem"][service]) / 1e6
    if needed > free:
        most = max(0.0, free)
        return f"the service needs {needed:.0f} MB of GPU memory, and no GPU has more than {most:.0f} MB left"
    if (state["count"][lets] >= T.seats).all():
        models = "its one model" if T.seats == 1 else f"{T.seats} models, the most that it may (max_models)"
        return f"every gpulet has {models}, and there is no room for another gpulet"
    return "no gpulet, existing or new, would keep both the service's SLO and its neighbours' SLOs"


def too_slow(service: Service, gpus: Gpus, *, whole_only: bool) -> str:
    """Explain why a service's SLO cannot be kept on any partition (part of a GPU that one model can have)."""
    best = np.inf
    for profile in gpus.profiles:
        model = profile.model(service.model)
        for size in profile.partitions:
            points = model.latency_ms.get(size.label)
            if points and (size.fraction > 1 - 1e-9 or not whole_only):
                best = min(best, profile.effective_ms(service.model, points[0][0], size.label))
    if not np.isfinite(best):
        return f"service {service.name}: {service.model} has no latency on any partition that may be used"
    return (
        f"service {service.name}: an SLO of {service.slo_ms:g} ms is below {2 * best:.3g} ms, the fastest that "
        f"{service.model} can reach (twice its shortest batch of {best:.3g} ms)"
    )
