"""A packing problem as arrays: the profiles of the GPU types, and the models and SLOs of the services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.serving import MOST_MODELS, Service
from cotenant.policy.serving.packing.kernel import CELL, GPU, SIZE, SVC, State, Tables, let_rows
from cotenant.profiles.serving.latency import BLIND, ServingProfile, interpolate
from cotenant.profiles.serving.mig_layout import mig_geometry

MAX_BATCH = 256
# if a batch is slower on a partition than on the whole GPU by less than this factor, more SMs would not help it
FULL_SPEED = 1.05


@dataclass(frozen=True)
class Gpus:
    """The GPUs for which a planner makes serving plans: a profile for each type, and the type of each GPU."""

    profiles: tuple[ServingProfile, ...]
    types: tuple[int, ...]

    @classmethod
    def uniform(cls, profile: ServingProfile, count: int) -> Gpus:
        return cls((profile,), (0,) * count)

    def __len__(self) -> int:
        return len(self.types)

    def profile_of(self, gpu: int) -> ServingProfile:
        return self.profiles[self.types[gpu]]

    def first(self, count: int) -> Gpus:
        """Return a Gpus of the first `count` GPUs."""
        return Gpus(self.profiles, self.types[:count])


@dataclass(frozen=True)
class Rules:
    """What a serving planner may do. `whole_only`: GPUs are not divided; `seats`: how many models share a gpulet;
    `crowd`: how many share one if fewer do not serve all services; `interference`: plans consider the interference
    between gpulets; `apart`: only services of one class (latency-sensitive or best-effort) share a gpulet; `full`: a
    batch runs only on as many SMs as it can use.
    """

    whole_only: bool = False
    seats: int = 3
    crowd: int = MOST_MODELS
    interference: bool = True
    apart: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        assert 1 <= self.seats <= MOST_MODELS


def build_tables(gpus: Gpus, services: Sequence[Service], rules: Rules) -> Tables:
    """Build the arrays for these services on these GPUs. They do not depend on the services' rates."""
    models = list(dict.fromkeys(s.model for s in services))
    T, M, P = len(gpus.profiles), len(models), max(len(p.partitions) for p in gpus.profiles)
    top = max(p.max_batch(m, x.label) for p in gpus.profiles for m in models for x in p.partitions)
    B = min(MAX_BATCH, top)
    if B < 1:
        raise InputError("the profile has no latency of any model on a partition of these GPUs")
    lat = np.full((T, M, P, B + 1), np.inf)
    over, own, other = (np.zeros((T, M, B + 1)) for _ in range(3))
    sizes = np.zeros((T, P), SIZE)
    sizes["procs"] = 1
    for t, profile in enumerate(gpus.profiles):
        inter = profile.interference if rules.interference else BLIND
        _size_rows(sizes[t], profile, rules)
        for m, name in enumerate(models):
            model = profile.model(name)
            for p, size in enumerate(profile.partitions):
                points = model.latency_ms.get(size.label, ())
                for b in range(points[0][0], min(points[-1][0], B) + 1) if points else ():
                    lat[t, m, p, b] = interpolate(points, b, name)
            last = max(profile.max_batch(name, size.label) for size in profile.partitions)
            for b in range(1, min(last, B) + 1):
                over[t, m, b] = profile.overhead_ms(name, b)
                if inter is not BLIND:
                    l2, dram = profile.utilisation(name, b)
                    own[t, m, b], other[t, m, b] = inter.own(l2, dram), max(0.0, inter.other(l2, dram))
    if rules.full:
        on_all = np.take_along_axis(lat, sizes["frac"].argmax(axis=1)[:, None, None, None], axis=2)
        lat[lat > on_all * FULL_SPEED] = np.inf
    index = {name: i for i, name in enumerate(models)}
    model_of = np.array([index[s.model] for s in services], np.int64)
    slo = np.array([s.slo_ms for s in services])
    margin = np.array([p.margin for p in gpus.profiles])
    cap = solo_capacity(lat, over, margin, model_of, slo) * sizes["procs"][:, None, :]
    cap[~np.broadcast_to(sizes["allowed"][:, None, :] > 0, cap.shape)] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):  # a partition that this GPU type does not have is 0 / 0
        per_rps = np.where(cap > 0, sizes["frac"][:, None, :] / cap, np.inf)
    cell = np.zeros((T, M, B + 1), CELL)
    cell["over"], cell["own"], cell["other"] = over, own, other
    svc = np.zeros(len(services), SVC)
    svc["slo"], svc["model"] = slo, model_of
    svc["mem"] = [_memory(s, gpus) for s in services]
    svc["bits"] = [s.input_bytes * 8.0 for s in services]
    svc["group"] = [rules.apart and s.latency_sensitive for s in services]
    svc["cost"] = per_rps[sorted(set(gpus.types))].min(axis=(0, 2))
    return Tables(
        lat=lat, cell=cell, gpu=_gpu_rows(gpus, rules), size=sizes, svc=svc, cap=cap,
        gpu_type=np.array(gpus.types, np.int64), seats=rules.seats,
        rising=bool((np.diff(other[:, :, 1:], axis=2) >= 0).all()),
    )  # fmt: skip


def _size_rows(rows: np.ndarray, profile: ServingProfile, rules: Rules) -> None:
    """Fill one row for each partition (part of a GPU that one model may have) of a GPU type. A GPU without MIG counts
    as one instance that takes all of it.
    """
    kinds = {"": 0}
    wholes = {p.instance: p.fraction / p.share for p in profile.partitions if p.instance}
    geo = mig_geometry(profile)
    for row, size in zip(rows, profile.partitions, strict=False):
        row["procs"] = size.processes
        row["share"], row["frac"] = size.share * size.processes, size.fraction * size.processes
        row["whole"] = wholes.get(size.instance, 1.0)
        row["kind"] = kinds.setdefault(size.instance, len(kinds))
        row["slots"] = size.slots or max(1, profile.slots)
        row["compute"] = geo.profiles[size.instance].compute if geo and size.instance else 0
        row["allowed"] = size.fraction > 1 - 1e-9 or not rules.whole_only


def _gpu_rows(gpus: Gpus, rules: Rules) -> np.ndarray:
    rows = np.zeros(len(gpus.profiles), GPU)
    for row, p in zip(rows, gpus.profiles, strict=True):
        row["alpha0"] = p.interference.constant if rules.interference else 1.0
        geo = mig_geometry(p)
        row["margin"], row["slots"] = p.margin, max(1, p.slots)
        row["compute"] = geo.compute_slices if geo else 0
        row["lets"] = 1 if rules.whole_only else p.max_gpulets
        row["mem_gpu"], row["mem_let"] = p.planned_memory_bytes(), p.per_gpulet_bytes
        row["net"] = np.inf if p.network_bps is None else p.network_bps
    return rows


def _memory(service: Service, gpus: Gpus) -> float:
    if service.memory_bytes is not None:
        return float(service.memory_bytes)
    return float(max(p.model(service.model).memory_bytes for p in gpus.profiles))


def solo_capacity(
    lat: np.ndarray, over: np.ndarray, margin: np.ndarray, model: np.ndarray, slo: np.ndarray
) -> np.ndarray:
    """Return (T, S, P): requests/s of each service alone on a partition: with e(b) the time of a batch of b requests,
    the best b / e(b) with 2 e(b) <= SLO; 0: no batch keeps the SLO."""
    effective = (lat + over[:, :, None, :]) * margin[:, None, None, None]
    per_s = np.arange(lat.shape[3]) * 1000.0 / np.maximum(effective, 1e-12)
    out = np.zeros((lat.shape[0], len(model), lat.shape[2]))
    for s, m in enumerate(model):
        ok = 2.0 * effective[:, m] <= slo[s]
        out[:, s] = np.where(ok, per_s[:, m], 0.0)[:, :, 1:].max(axis=2)
    return out


def most_rows(T: Tables) -> int:
    """Return how many rows a GPU needs in a packing state: one for each gpulet (part of a GPU); a partition with
    several processes is one gpulet.
    """
    fewest = np.where(T.size["allowed"] > 0, np.maximum(T.size["frac"], T.size["procs"] / T.gpu["lets"][:, None]), 1.0)
    return max(1, int((1.0 / fewest.clip(1e-6) + 1e-6).max()))


def new_state(gpus: int, lets: int, seats: int) -> State:
    """Create a packing state of `gpus` empty GPUs, each with up to `lets` gpulets of up to `seats` models."""
    state = np.zeros((gpus, lets), let_rows(seats))
    state["part"] = -1
    return state
