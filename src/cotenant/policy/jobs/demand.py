"""Builds the demand tables of compiled policies from jobs, profiles and a cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core import work
from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import unknown_name
from cotenant.core.gpus import Gpu, find_gpu
from cotenant.policy.jobs.arrays import AMOUNT, DOWN, IDEAL, NODE, PROPORTIONAL, TYPE, Array, Demand
from cotenant.profiles.training.tables import ModelProfile, Profiles

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MB = 10**6


@dataclass(frozen=True)
class Workload:
    """Jobs in the form that the compiled functions of a policy take: `type[J]`, an index into `demand`, and
    `iterations[J]`, the amount of work.
    """

    demand: Demand
    nodes: Array
    type: NDArray[np.int32]
    iterations: Floats


@dataclass(frozen=True)
class Need:
    """The needs of one demand type before they become rows of a table: CPU in cores and memory in bytes for the whole
    job; NaN: the profile of the job's model decides.
    """

    profile: ModelProfile
    gpus: float
    cpus: float
    memory_bytes: float
    gpu_models: str


def build_nodes(cluster: Cluster) -> tuple[Array, list[NodeGroup]]:
    """Return the nodes as NODE[N], and the distinct kinds of node that have GPUs. Nodes without GPUs are left out."""
    kinds: dict[tuple[str, int, float, int], int] = {}
    groups: list[NodeGroup] = []
    columns: list[tuple[int, int, int, int, int]] = []
    for group in cluster.groups:
        if not group.gpus:
            continue
        signature = (group.gpu.name, group.gpus, group.cpus, group.memory_bytes)
        if signature not in kinds:
            kinds[signature] = len(groups)
            groups.append(group)
        columns.append((group.count, group.gpus, int(group.cpus * 1000), group.memory_bytes // MB, kinds[signature]))
    count = [c[0] for c in columns]
    nodes = np.zeros(sum(count), NODE)
    for i, name in enumerate(("gpus", "cpu", "memory", "kind")):
        nodes[name] = np.repeat([c[i + 1] for c in columns], count)
    return nodes, groups


def _share(group: NodeGroup) -> tuple[int, int]:
    """Return the CPU in thousandths of a core and the memory in MB that are the proportional share of one GPU on a node
    of this kind.
    """
    return int(group.cpus * 1000) // group.gpus, group.memory_bytes // MB // group.gpus


def build_workload(
    jobs: work.Jobs,
    profiles: Profiles,
    cluster: Cluster,
    *,
    two_speed: bool = False,
    proportional_keys: bool = False,
    whole_iterations: bool = False,
    grid: bool = False,
    default_profile: str | None = None,
    trace_gpu: str | None = None,
    trace: work.Trace | None = None,
) -> Workload:
    """Build the demand tables for the jobs on the cluster.

    `two_speed`: use only two speeds, proportional and ideal, as the public Synergy simulator does; otherwise
    interpolate the profile's whole table of speeds by CPU and memory. `proportional_keys`: orderings assume the
    proportional speed, otherwise the ideal one. `grid`: add the levels among which the optimal allotment chooses.
    `trace_gpu`: the GPU model to which the trace's run times and the profiles' iteration times refer (default: that of
    the cluster's first node). `trace`: the source of the jobs, for error messages.

    Errors (InputError): a model without a profile, a job larger than the cluster, a GPU model that is unknown, a job
    that would get no CPU.
    """
    trace = trace or work.Trace(jobs, "")
    nodes, kinds = build_nodes(cluster)
    needs, types = _needs(jobs, profiles, default_profile, trace)
    _check_sizes(jobs, needs, types, nodes, kinds, trace)
    tables = _Tables(nodes, kinds, two_speed, grid, find_gpu(trace_gpu, "trace-gpu") if trace_gpu else None)
    for need in needs:
        tables.add(need)
    demand = tables.finish(proportional_keys)
    _check_paces(jobs, demand, types, trace)
    from_duration = jobs.duration_s / np.array(tables.trace_s)[types]
    iterations = np.where(np.isnan(jobs.duration_s), jobs.iterations, from_duration)
    if whole_iterations:
        iterations = np.maximum(np.floor(iterations), 1.0)
    return Workload(demand, nodes, types, iterations)


def _needs(
    jobs: work.Jobs, profiles: Profiles, default_profile: str | None, trace: work.Trace
) -> tuple[list[Need], NDArray[np.int32]]:
    if default_profile is not None and default_profile not in profiles.models:
        raise unknown_name("profile", default_profile, profiles.models, "default-profile")
    models, model_of = _distinct_texts(jobs.model)
    for i, name in enumerate(models):
        if name not in profiles.models and default_profile is None:
            row = int(np.flatnonzero(model_of == i)[0])
            what = f"model {str(name)!r} has no profile" if name else "the trace names no models"
            raise trace.wrong(
                jobs.id[row],
                "model",
                f"{what} (first at job {jobs.id[row]}); known: {', '.join(profiles.models)}; "
                "or give --default-profile NAME",
            )
    accepts, accepts_of = _distinct_texts(jobs.gpu_models)
    known = [
        np.unique(np.nan_to_num(c, nan=-1.0), return_inverse=True) for c in (jobs.gpus, jobs.cpus, jobs.memory_bytes)
    ]
    columns = [(np.arange(len(models)), model_of), *known, (np.arange(len(accepts)), accepts_of)]
    # each combination of a job's needs gets a number, and the numbers sort as the columns would
    code = np.zeros(len(jobs), np.int64)
    for values, which in columns:
        if int(code.max(initial=0)) >= 2**62 // max(len(values), 1):
            code = np.unique(code, return_inverse=True)[1]
        code = code * len(values) + which
    _, first, types = np.unique(code, return_index=True, return_inverse=True)
    rows = [[values[which[row]] for values, which in columns] for row in first]
    needs = []
    for model, gpus, cpus, memory, accept in rows:
        name = str(models[int(model)])
        profile = profiles.models[name if name in profiles.models else str(default_profile)]
        needs.append(
            Need(
                profile,
                float(gpus),
                float(cpus) if cpus >= 0 else np.nan,
                float(memory) if memory >= 0 else np.nan,
                str(accepts[int(accept)]),
            )
        )
    return needs, types.astype(np.int32).reshape(-1)


def _distinct_texts(texts: work.Names) -> tuple[list[str], Ints]:
    """Return the distinct texts, sorted, and for each text its index among them. A trace has few distinct texts."""
    listed = texts.tolist()
    names = sorted(set(listed))
    code = {name: i for i, name in enumerate(names)}
    return names, np.fromiter((code[text] for text in listed), np.int64, len(listed))


def _accepted(need: Need, kinds: list[NodeGroup]) -> NDArray[np.bool_]:
    if not need.gpu_models:
        return np.ones(len(kinds), np.bool_)
    names = {find_gpu(name, "gpu_models").name for name in need.gpu_models.split("|") if name}
    return np.array([group.gpu.name in names for group in kinds])


def _check_sizes(
    jobs: work.Jobs, needs: list[Need], types: NDArray[np.int32], nodes: Array, kinds: list[NodeGroup],
    trace: work.Trace,
) -> None:  # fmt: skip
    per_kind = np.bincount(nodes["kind"], weights=nodes["gpus"], minlength=len(kinds))
    for i, need in enumerate(needs):
        usable = per_kind[_accepted(need, kinds)].sum()
        if need.gpus <= usable:
            continue
        row = int(np.flatnonzero(types == i)[0])
        what = f" of model {need.gpu_models}" if need.gpu_models else ""
        raise trace.wrong(
            jobs.id[row],
            "gpus",
            f"job {jobs.id[row]} asks for {need.gpus:g} GPUs{what} and the cluster has {usable:g}; "
            "use a larger --cluster, or leave such jobs out with --skip-too-large",
        )


def _check_paces(jobs: work.Jobs, demand: Demand, types: NDArray[np.int32], trace: work.Trace) -> None:
    """Check that no job's amount of CPU rounds down to 0: amounts are whole thousandths of a core, and such a job would
    never end.
    """
    stuck = (np.isinf(demand.amount["iteration_s"]).any(axis=0) & demand.allowed).any(axis=1)
    if stuck.any():
        job = jobs.id[int(np.flatnonzero(stuck[types])[0])]
        raise trace.wrong(
            job, "cpus", f"job {job} would get less than 0.001 CPU cores per GPU; request more, or use nodes with more"
        )


def _per_gpu(group: NodeGroup) -> tuple[float, float]:
    """Return the cores and GB that are the proportional share of one GPU on a node of this kind."""
    cpu, memory = _share(group)
    return cpu / 1000, memory / 1000


def runnable_jobs(jobs: work.Jobs, cluster: Cluster) -> NDArray[np.bool_]:
    """Return the mask of the jobs that the cluster could hold if it were empty, by number of GPUs and GPU model."""
    have: dict[str, int] = {}
    for group in cluster.groups:
        have[group.gpu.name] = have.get(group.gpu.name, 0) + group.count * group.gpus
    usable = {"": cluster.total_gpus}
    for accept in set(jobs.gpu_models.tolist()) - {""}:
        names = {find_gpu(name, "gpu_models").name for name in accept.split("|") if name}
        usable[accept] = sum(n for name, n in have.items() if name in names)
    return np.asarray(jobs.gpus <= np.array([usable[accept] for accept in jobs.gpu_models.tolist()]))


class _Tables:
    """Builds the rows of the demand tables, one demand type at a time."""

    def __init__(
        self, nodes: Array, kinds: list[NodeGroup], two_speed: bool, grid: bool, trace_gpu: Gpu | None
    ) -> None:
        self.nodes, self.kinds, self.two_speed = nodes, kinds, two_speed
        self.trace_gpu = trace_gpu
        self.grid = grid and not two_speed
        self.rows: list[tuple[Ints, Ints, Floats]] = []
        self.scalars: list[tuple[int, int, NDArray[np.bool_], float, float]] = []
        self.ideal_totals: list[tuple[float, float, float]] = []
        self.trace_s: list[float] = []  # seconds per iteration on the GPU to which the trace's durations refer

    def add(self, need: Need) -> None:
        allowed = _accepted(need, self.kinds)
        part = round(need.gpus * 1000) if need.gpus < 1 else 0
        gpus = 1 if part else round(need.gpus)
        cpu, memory, clipped = self._ideal(need, gpus, part, allowed)
        levels = [self._level(need, part, k, cpu, memory, clipped) for k in range(len(self.kinds))]
        table = [np.array([levels[k][i] for k in range(len(self.kinds))]).T for i in range(3)]
        self.rows.append((table[0].astype(np.int64), table[1].astype(np.int64), table[2].astype(np.float64)))
        reference = int(np.flatnonzero(allowed)[0])
        isolated_s = table[2][PROPORTIONAL, reference]
        self.trace_s.append(isolated_s)
        if self.trace_gpu is not None:
            self.trace_s[-1] *= self._gpu_factor(need.profile, reference)
        self.scalars.append((gpus, part, allowed, need.profile.multi_node_factor, isolated_s))
        self.ideal_totals.append((need.gpus, cpu * gpus, memory * gpus))

    def _ideal(self, need: Need, gpus: int, part: int, allowed: NDArray[np.bool_]) -> tuple[int, int, float]:
        """Return the ideal CPU (thousandths of a core) and MB per GPU, limited to one node; and the fraction of the
        ideal speed that the job keeps when its CPU and memory are limited to those of one node.
        """
        on = [k for k in range(len(self.kinds)) if allowed[k]]
        big = max(on, key=lambda k: (self.kinds[k].gpus, self.kinds[k].cpus))
        most_cpu = max(int(self.kinds[k].cpus * 1000) for k in on)
        most_memory = max(self.kinds[k].memory_bytes // MB for k in on)
        p = need.profile
        profile_cpu = self._stated_cpus(p, big)
        want_cpu = need.cpus if not np.isnan(need.cpus) else profile_cpu * need.gpus
        stated = not np.isnan(need.memory_bytes)
        want_memory_gb = need.memory_bytes / 1e9 if stated else p.ideal_memory_gb_per_gpu * need.gpus
        cpu, memory = round(want_cpu * 1000), round(want_memory_gb * 1000)
        share_cpu, share_memory = _share(self.kinds[big])
        if gpus <= self.kinds[big].gpus:
            clipped_cpu, clipped_memory = min(cpu, most_cpu), min(memory, most_memory)
            clipped = False
        else:
            clipped_cpu = cpu if cpu <= most_cpu else share_cpu * gpus
            clipped_memory = memory if memory <= most_memory else share_memory * gpus
            clipped = (clipped_cpu, clipped_memory) != (cpu, memory)
        fraction = 0.0 if clipped else 1.0
        share = share_cpu * gpus if not part else share_cpu * part // 1000
        full = profile_cpu * 1000 * need.gpus
        if not clipped and share < full and clipped_cpu < full:
            # as in Synergy, if the job's CPU is limited, its speed is estimated to be a linear function of the amount
            # of CPU between the proportional and the ideal amount
            fraction = max(0.0, (clipped_cpu - share) / (full - share))
        return clipped_cpu // gpus, clipped_memory // gpus, fraction

    def _stated_cpus(self, profile: ModelProfile, kind: int) -> float:
        if not self.two_speed:
            return profile.ideal_cpus_per_gpu
        return profile.two_speed_at(*_per_gpu(self.kinds[kind])).cpus_per_gpu

    def _level(
        self, need: Need, part: int, kind: int, cpu: int, memory: int, fraction: float
    ) -> tuple[list[int], list[int], list[float]]:
        """Return CPU, memory and seconds per iteration of a job at every level of allotment on one kind of node."""
        share_cpu, share_memory = _share(self.kinds[kind])
        if part:
            share_cpu, share_memory = share_cpu * part // 1000, share_memory * part // 1000
        cpus = [share_cpu, cpu, min(cpu, share_cpu)]
        memories = [share_memory, memory, min(memory, share_memory)]
        factor = self._gpu_factor(need.profile, kind)
        if self.two_speed:
            two = need.profile.two_speed_at(*_per_gpu(self.kinds[kind]))
            slow = two.iteration_s / factor
            return cpus, memories, [slow, slow / (1 + (two.speedup - 1) * fraction), slow]
        if self.grid:
            for c, m in _grid(need.profile, cpu, memory, part):
                cpus.append(c)
                memories.append(m)
        scale = part / 1000 if part else 1.0
        speeds = [need.profile.speed(c / 1000 / scale, m / 1000 / scale) for c, m in zip(cpus, memories, strict=True)]
        return cpus, memories, [need.profile.iteration_s / s / factor if s > 0 else np.inf for s in speeds]

    def _gpu_factor(self, profile: ModelProfile, kind: int) -> float:
        """Return the training speed of the GPU of a kind of node relative to the GPU to which the trace refers, by
        default the cluster's first.
        """
        own, reference = self.kinds[kind].gpu, self.trace_gpu or self.kinds[0].gpu
        if own.name == reference.name:
            return 1.0
        if own.name in profile.gpu_speed and reference.name in profile.gpu_speed:
            return profile.gpu_speed[own.name] / profile.gpu_speed[reference.name]
        return own.relative_speed / reference.relative_speed

    def finish(self, proportional_keys: bool) -> Demand:
        levels = max(row[0].shape[0] for row in self.rows)
        amount = np.zeros((levels, len(self.rows), len(self.kinds)), AMOUNT)
        for i, name in enumerate(("cpu", "memory", "iteration_s")):
            amount[name] = np.stack([_pad(row[i], levels) for row in self.rows], axis=1)
        allowed = np.array([s[2] for s in self.scalars])
        reference = np.argmax(allowed, axis=1)
        totals = np.array([self.nodes[name].sum() for name in ("gpus", "cpu", "memory")], dtype=np.float64)
        shares = np.array(self.ideal_totals) / totals
        types = np.zeros(len(self.rows), TYPE)
        for name, i in (("gpus", 0), ("part_milli", 1), ("multi_node_factor", 3), ("isolated_s", 4)):
            types[name] = [s[i] for s in self.scalars]
        key_level = PROPORTIONAL if proportional_keys else IDEAL
        types["key_s"] = amount["iteration_s"][key_level, np.arange(len(types)), reference]
        types["dominant"] = shares.max(axis=1)
        types["size"] = shares.sum(axis=1)
        excess = [(amount[name][IDEAL] > amount[name][DOWN]).any(axis=1) for name in ("cpu", "memory")]
        types["can_shrink"] = excess[0] | excess[1]
        return Demand(types, allowed, amount)


def _pad(table: NDArray[np.generic], levels: int) -> NDArray[np.generic]:
    """Append copies of level DOWN (the least CPU and memory), so that the tables of all demand types have the same
    number of levels.
    """
    if table.shape[0] == levels:
        return table
    return np.concatenate([table, np.repeat(table[DOWN : DOWN + 1], levels - table.shape[0], axis=0)])


def _grid(profile: ModelProfile, cpu: int, memory: int, part: int) -> list[tuple[int, int]]:
    """Return the amounts of CPU and memory (thousandths of a core, MB) per GPU, at most the ideal demand, among which
    the optimal allotment chooses.
    """
    scale = part / 1000 if part else 1.0
    cpus, memories = profile.cpus_per_gpu.tolist(), profile.memory_gb_per_gpu.tolist()
    # one row or one column says nothing about what less CPU or less memory would cost
    less_cpu = {min(cpu, max(1, round(c * 1000 * scale))) for c in cpus if len(cpus) > 1}
    less_memory = {min(memory, round(m * 1000 * scale)) for m in memories if len(memories) > 1}
    return [(c, m) for c in sorted(less_cpu | {cpu}) for m in sorted(less_memory | {memory})]
