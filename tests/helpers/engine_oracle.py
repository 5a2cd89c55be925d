"""The training engine again in plain Python: lists, dictionaries and sorted(), a round at a time, nothing remembered.

Written from docs/policies.md, so that the compiled engine and this file are unlikely to have the same error.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cotenant.core.cluster import Cluster
from cotenant.core.gpus import find_gpu
from cotenant.core.work import Trace
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.profiles.training.tables import ModelProfile, Profiles
from cotenant.sim.jobs.engine import EngineOptions

Level = str | tuple[int, int]  # proportional | ideal | down | a point (CPU milli, MB) per GPU


@dataclass
class Node:
    """One node. `shared[i]`: free thousandths of the i-th GPU that is used in fractions; None: the slot is not in
    use."""

    number: int
    kind: int
    gpu: str
    relative_speed: float
    gpus: int
    cpu: int
    memory: int
    shared: list[int | None] = field(default_factory=list)
    free_gpus: int = 0
    free_cpu: int = 0
    free_memory: int = 0

    @property
    def share(self) -> tuple[int, int]:
        return self.cpu // self.gpus, self.memory // self.gpus

    def with_room(self, part: int) -> list[int]:
        """GPUs that are used in fractions and have space for one more fraction."""
        return [i for i, left in enumerate(self.shared) if left is not None and left >= part]


@dataclass
class Job:
    """One job; `part`: thousandths of a GPU, 0 for a gang of `gpus` whole ones. `held`: node -> its
    GPUs there: for each the index among the GPUs in parts, or -1 for a whole one."""

    number: int
    profile: ModelProfile
    need: tuple[Any, ...]  # jobs with equal needs are placed in the same way
    arrival_s: float
    priority: int
    gpus: int
    part: int
    accepts: set[str]
    last_run_s: float
    ideal: tuple[int, int] = (0, 0)
    kept_speedup: float = 1.0  # fraction of the ideal speedup that is left after clipping
    total: float = 0.0
    isolated_s: float = 0.0  # seconds per iteration
    key_s: float = 0.0
    shares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    done: float = 0.0
    attained_s: float = 0.0
    owed_s: float = 0.0
    started: bool = False
    reserved: bool = False  # the job started by a reservation
    level: Level | None = None
    wanted: Level = "ideal"
    held: dict[int, list[int]] = field(default_factory=dict)
    finish_s: float | None = None
    log: list[tuple[float, int, int, tuple[tuple[int, float], ...]]] = field(default_factory=list)

    @property
    def g(self) -> float:
        return self.part / 1000.0 if self.part else float(self.gpus)


Wants = Callable[["Oracle", list[Job]], None]  # sets `wanted` of the selected jobs, for the allotment optimal


class Oracle:
    """One simulated run. After `run()`, jobs have finish times and a log of changes (time, CPU, MB, nodes)."""

    def __init__(
        self,
        trace: Trace,
        cluster: Cluster,
        profiles: Profiles,
        policy: JobPolicy,
        options: EngineOptions,
        wants: Wants | None = None,
    ) -> None:
        self.policy, self.options, self.wants = policy, options, wants
        self.nodes = _nodes(cluster)
        self.jobs = [self._job(trace, i, profiles) for i in range(len(trace.jobs))]
        self.cluster_gpus = sum(n.gpus for n in self.nodes)
        self.active: list[Job] = []
        self.waits_reserved: list[Job] = []
        self.rounds = 0
        self.rounds_jobs = 0
        self.gittins: tuple[list[float], list[float]] = ([], [])
        if policy.ordering == "gittins":
            times = [j.g * j.isolated_s * j.total for j in self.jobs]
            self.gittins = gittins_index(list(policy.gittins_sample_gpu_s) or times)

    # -- demands and speeds of jobs

    def _job(self, trace: Trace, i: int, profiles: Profiles) -> Job:
        t = trace.jobs
        name = t.model[i] if t.model[i] in profiles.models else self.options.default_profile
        gpus = float(t.gpus[i])
        accepts = {find_gpu(g).name for g in t.gpu_models[i].split("|") if g} or {n.gpu for n in self.nodes}
        need = (name, gpus, _stated(t.cpus[i]), _stated(t.memory_bytes[i]), t.gpu_models[i])
        job = Job(
            number=i,
            profile=profiles.models[str(name)],
            need=need,
            arrival_s=float(t.arrival_s[i]),
            priority=int(t.priority[i]),
            gpus=max(1, math.ceil(gpus)),
            part=round(gpus * 1000) if gpus < 1 else 0,
            accepts=accepts,
            last_run_s=float(t.arrival_s[i]),
        )
        self._set_ideal(job, gpus, need[2], need[3])
        reference = self._accepted(job)[0]
        job.isolated_s = self.iteration_s(job, "proportional", reference)
        job.key_s = self.iteration_s(
            job, "proportional" if self.policy.allotment == "proportional" else "ideal", reference
        )
        job.total = float(t.iterations[i]) if math.isnan(t.duration_s[i]) else float(t.duration_s[i]) / job.isolated_s
        if self.options.speeds == "two-speed" and self.options.finish == "lease-end":
            job.total = max(1.0, float(math.floor(job.total)))
        totals = [float(sum(getattr(n, axis) for n in self.nodes)) for axis in ("gpus", "cpu", "memory")]
        asked = (gpus, job.ideal[0] * job.gpus, job.ideal[1] * job.gpus)
        job.shares = (asked[0] / totals[0], asked[1] / totals[1], asked[2] / totals[2])
        return job

    def _accepted(self, job: Job) -> list[Node]:
        return [n for n in self.nodes if n.gpu in job.accepts]

    def _set_ideal(self, job: Job, gpus: float, cpus: float | None, memory_bytes: float | None) -> None:
        nodes = self._accepted(job)
        largest = max(nodes, key=lambda n: (n.gpus, n.cpu))
        profile_cpu = job.profile.ideal_cpus_per_gpu
        if self.options.speeds == "two-speed":
            profile_cpu = job.profile.two_speed_at(*_cores_and_gb(largest)).cpus_per_gpu
        full = profile_cpu * gpus * 1000
        cpu = round(full if cpus is None else cpus * 1000)
        gb = job.profile.ideal_memory_gb_per_gpu * gpus if memory_bytes is None else memory_bytes / 1e9
        memory = round(gb * 1000)
        most_cpu, most_memory = max(n.cpu for n in nodes), max(n.memory for n in nodes)
        share_cpu, share_memory = (self._part(job, x) * job.gpus for x in largest.share)
        f = 1.0
        if job.gpus <= largest.gpus:
            cpu, memory = min(cpu, most_cpu), min(memory, most_memory)
        else:
            if cpu > most_cpu or memory > most_memory:
                f = 0.0
            cpu = share_cpu if cpu > most_cpu else cpu
            memory = share_memory if memory > most_memory else memory
        if f and cpu < full:
            f = max(0.0, (cpu - share_cpu) / (full - share_cpu)) if full > share_cpu else 1.0
        job.ideal, job.kept_speedup = (cpu // job.gpus, memory // job.gpus), f

    def _part(self, job: Job, amount: int) -> int:
        return amount * job.part // 1000 if job.part else amount

    def amount(self, job: Job, level: Level, node: Node) -> tuple[int, int]:
        """Thousandths of a core and MB per GPU (in total for a fraction of a GPU) at a level on a node."""
        share = (self._part(job, node.share[0]), self._part(job, node.share[1]))
        if level == "proportional":
            return share
        if level == "ideal":
            return job.ideal
        if level == "down":
            return min(job.ideal[0], share[0]), min(job.ideal[1], share[1])
        assert isinstance(level, tuple)
        return level

    def iteration_s(self, job: Job, level: Level, node: Node) -> float:
        """Seconds per iteration of the job with all its GPUs on the node."""
        p = job.profile
        factor = 1.0
        first = self.nodes[0]
        if node.gpu != first.gpu:
            if node.gpu in p.gpu_speed and first.gpu in p.gpu_speed:
                factor = p.gpu_speed[node.gpu] / p.gpu_speed[first.gpu]
            else:
                factor = node.relative_speed / first.relative_speed
        if self.options.speeds == "two-speed":
            two = p.two_speed_at(*_cores_and_gb(node))
            slow = two.iteration_s / factor
            return slow / (1 + (two.speedup - 1) * job.kept_speedup) if level == "ideal" else slow
        cpu, memory = self.amount(job, level, node)
        scale = job.part / 1000 if job.part else 1.0
        cores, gb = cpu / 1000 / scale, memory / 1000 / scale
        speed = p.speed(cores, gb)
        assert math.isclose(speed, interpolate(p, cores, gb), rel_tol=1e-12)
        return p.iteration_s / speed / factor

    # -- order of jobs

    def _rem(self, job: Job) -> float:
        return job.key_s * (job.total - job.done)

    def key(self, job: Job, now: float) -> float:
        name = self.policy.ordering
        service = job.attained_s * job.g
        if name == "fifo":
            return 0.0
        if name == "sjf":
            return job.key_s * job.total
        if name == "srtf":
            return self._rem(job)
        if name == "srsf":
            return self._rem(job) * job.g
        if name == "las":
            return service
        if name == "las-queues":
            return bisect_right(list(self.policy.queue_limits_gpu_s), service)
        if name == "gittins":
            return -self.gittins[1][max(0, bisect_right(self.gittins[0], service) - 1)]
        isolated = job.isolated_s * job.total
        if name == "ftf":
            fair = isolated * max(1.0, job.g * len(self.active) / self.cluster_gpus)
            return -(now - job.arrival_s + self._rem(job)) / fair
        if name == "ftf-public":
            return (now - job.arrival_s + self._rem(job)) / isolated
        if name == "drf":
            return max(job.shares)
        if name == "smallest-gang":
            return job.g
        assert name == "tetris"
        gpu, cpu, memory = job.shares
        return (gpu + cpu + memory) * self._rem(job)

    def rank(self, job: Job, now: float) -> tuple[int, int]:
        """Rank of a job, larger first: jobs that run by a reservation, then jobs that wait with one, then the others by
        priority."""
        if job.reserved:
            return 2, 0
        return (1, 0) if now - job.last_run_s > self.policy.reserve_after_s else (0, job.priority)

    def order(self, now: float) -> list[Job]:
        ranks = {j.number: self.rank(j, now) for j in self.active}
        self.waits_reserved = [j for j in self.active if ranks[j.number] == (1, 0)]
        return sorted(
            sorted(self.active, key=lambda j: (self.key(j, now), j.number)),
            key=lambda j: ranks[j.number],
            reverse=True,
        )

    # -- free resources

    def most(self, job: Job, level: Level, node: Node, at_most: int) -> int:
        """How many of the job's GPUs the node can take."""
        if node.gpu not in job.accepts:
            return 0
        cpu, memory = self.amount(job, level, node)
        k = min(at_most, node.free_gpus)
        if job.part:
            k = 1 if node.free_gpus or node.with_room(job.part) else 0
        while k and (k * cpu > node.free_cpu or k * memory > node.free_memory):
            k -= 1
        return k

    def take(self, job: Job, level: Level, node: Node, k: int) -> None:
        gpus = [-1] * k
        if job.part:
            among = node.with_room(job.part)
            gpus = [min(among, key=lambda i: node.shared[i] or 0) if among else node.shared.index(None)]
        self.hold(job, node, gpus)
        self.charge(job, level, node, k)
        job.held.setdefault(node.number, []).extend(gpus)
        job.level = level

    def hold(self, job: Job, node: Node, gpus: list[int]) -> None:
        for i in gpus:
            left = node.shared[i] if i >= 0 else None
            if left is None:
                node.free_gpus -= 1
                left = 1000
            if i >= 0:
                node.shared[i] = left - job.part
            assert node.free_gpus >= 0
            assert left >= job.part

    def charge(self, job: Job, level: Level, node: Node, k: int) -> None:
        cpu, memory = self.amount(job, level, node)
        node.free_cpu -= k * cpu
        node.free_memory -= k * memory
        assert node.free_cpu >= 0
        assert node.free_memory >= 0

    def clear(self) -> None:
        for n in self.nodes:
            n.shared, n.free_gpus, n.free_cpu, n.free_memory = [None] * n.gpus, n.gpus, n.cpu, n.memory

    # -- placements

    def place(self, job: Job, level: Level) -> bool:
        left = job.gpus
        taken: list[tuple[Node, int]] = []
        if self.policy.placement == "spread":
            taken = self._spread(job, level)
            left -= sum(k for _, k in taken)
        else:
            walk = self.nodes
            if self.policy.placement == "consolidate":
                walk = sorted(self.nodes, key=lambda n: (n.free_gpus, n.number))
                if job.gpus > 1:
                    walk = [n for n in walk if self.most(job, level, n, job.gpus) == job.gpus][:1] or walk
            for node in walk:
                k = self.most(job, level, node, left)
                if k:
                    taken.append((node, k))
                    left -= k
                if not left:
                    break
        if left:
            return False
        for node, k in taken:
            self.take(job, level, node, k)
        return True

    def _spread(self, job: Job, level: Level) -> list[tuple[Node, int]]:
        count: dict[int, int] = {}
        for _ in range(job.gpus):
            fitting = [
                n
                for n in self.nodes
                if self.most(job, level, n, count.get(n.number, 0) + 1) == count.get(n.number, 0) + 1
            ]
            if not fitting:
                break
            best = max(fitting, key=lambda n: (n.free_gpus - count.get(n.number, 0), -n.number))
            count[best.number] = count.get(best.number, 0) + 1
        return [(self.nodes[number], k) for number, k in count.items()]

    # -- allotments

    def allot(self, job: Job) -> bool:
        allotment = self.policy.allotment
        if allotment == "proportional":
            return self.place(job, "proportional")
        if self.place(job, job.wanted if allotment == "optimal" else "ideal"):
            return True
        if allotment == "greedy":
            return False
        if self.place(job, "down"):
            return True
        self.make_room(job)
        return self.place(job, "down")

    def make_room(self, job: Job) -> None:
        for node, k in self._room_on(job):
            cpu, memory = self.amount(job, "down", node)
            need = [k * cpu - node.free_cpu, k * memory - node.free_memory]
            while max(need) > 0:
                held_more = [v for v in self.placed if any(
                    x > 0 and n > 0 for x, n in zip(self.excess(v, node), need, strict=True)
                )]  # fmt: skip
                if not held_more:
                    break
                victim = min(held_more, key=lambda v: self._gives_way(v, node))
                need = [n - x for n, x in zip(need, self.excess(victim, node), strict=True)]
                self.relevel(victim, "down")

    def _room_on(self, job: Job) -> list[tuple[Node, int]]:
        nodes = self._accepted(job)
        if job.part:
            walk = sorted(nodes, key=lambda n: (n.free_gpus, n.number))
            return [(n, 1) for n in walk if n.free_gpus or n.with_room(job.part)][:1]
        if job.gpus > 1:
            for n in nodes:
                if n.free_gpus >= job.gpus:
                    return [(n, job.gpus)]
        chosen, left = [], job.gpus
        for n in sorted(nodes, key=lambda n: (n.free_gpus, n.number)):
            k = min(left, n.free_gpus)
            if k:
                chosen.append((n, k))
                left -= k
        return chosen if not left else []

    def excess(self, job: Job, node: Node) -> tuple[int, int]:
        """CPU and memory that a job holds on the node above level down; none if the job holds less than level down on
        any of its nodes."""
        k = len(job.held.get(node.number, []))
        if not k or job.level == "down" or job.level is None:
            return 0, 0
        for n in (self.nodes[number] for number in job.held):
            if any(h < d for h, d in zip(self.amount(job, job.level, n), self.amount(job, "down", n), strict=True)):
                return 0, 0
        has, down = self.amount(job, job.level, node), self.amount(job, "down", node)
        return k * (has[0] - down[0]), k * (has[1] - down[1])

    def _gives_way(self, job: Job, node: Node) -> tuple[int, int, int, int]:
        assert job.level is not None
        cpu, memory = self.amount(job, job.level, node)
        return len(job.held), -cpu, -memory, self.placed.index(job)

    def relevel(self, job: Job, level: Level) -> None:
        """Change a job to another level on its GPUs, if all its nodes have the CPU and memory for it."""
        assert job.level is not None
        changes = []
        for number, gpus in job.held.items():
            node, k = self.nodes[number], len(gpus)
            old, new = self.amount(job, job.level, node), self.amount(job, level, node)
            changes.append((node, k * (new[0] - old[0]), k * (new[1] - old[1])))
        if any(c > node.free_cpu or m > node.free_memory for node, c, m in changes):
            return
        for node, c, m in changes:
            node.free_cpu -= c
            node.free_memory -= m
        job.level = level

    # -- a round

    def prefix(self, order: list[Job]) -> list[Job]:
        """The jobs, in order, whose GPUs fit into the cluster by number alone."""
        left, chosen = self.cluster_gpus * 1000, []
        for job in order:
            wants = job.part or job.gpus * 1000
            if wants <= left:
                left -= wants
                chosen.append(job)
        return chosen

    def decide(self, order: list[Job]) -> None:
        chosen = self.prefix(order)
        by_reservation = [j for j in order if j.reserved]
        self.walk(order, [j for j in chosen if j.held] if self.policy.sticky else by_reservation)
        if self.policy.sticky and any(j in self.waits_reserved and not j.held for j in chosen):
            self.walk(order, by_reservation)
        for job in self.waits_reserved:
            job.reserved = bool(job.held)

    def walk(self, order: list[Job], kept: list[Job]) -> None:
        self.clear()
        self.placed: list[Job] = []
        for job in order:
            if job not in kept:
                job.held, job.level = {}, None
        for job in kept:
            assert job.level is not None
            for number, gpus in job.held.items():
                self.hold(job, self.nodes[number], gpus)
                self.charge(job, job.level, self.nodes[number], len(gpus))
            self.placed.append(job)
        no_room: set[tuple[Any, ...]] = set()
        for job in order:
            if job in kept:
                if self.policy.allotment in ("tune", "optimal"):
                    self.relevel(job, job.wanted if self.policy.allotment == "optimal" else "ideal")
                continue
            free = sum(n.free_gpus for n in self._accepted(job))
            if job.need in no_room or (not job.part and free < job.gpus):
                continue
            if self.allot(job):
                self.placed.append(job)
            else:
                no_room.add(job.need)

    def serve(self, job: Job, now: float) -> None:
        """Credit one lease to a running job."""
        o = self.options
        assert job.level is not None
        pace = max(self.iteration_s(job, job.level, self.nodes[n]) for n in job.held)
        if len(job.held) > 1:
            pace /= job.profile.multi_node_factor
        delay = min(job.owed_s, o.lease_s)
        job.owed_s -= delay
        time = o.lease_s - delay
        steps = time / pace
        if o.speeds == "two-speed" and o.finish == "lease-end" and steps >= 1:
            steps = math.floor(steps)
        left = job.total - job.done
        used = o.lease_s
        if steps >= left * (1 - 1e-12):
            if o.finish == "exact":
                used = delay + min(left * pace, time)
            job.finish_s = now + used
            steps = left
        job.done += steps
        job.attained_s += used
        job.last_run_s = now + o.lease_s

    def run(self) -> Oracle:
        waiting = list(self.jobs)
        lease, tick = self.options.lease_s, 0
        while waiting or self.active:
            now = tick * lease
            while waiting and waiting[0].arrival_s <= now:
                self.active.append(waiting.pop(0))
            if not self.active:
                tick = max(tick, math.ceil(waiting[0].arrival_s / lease))
                continue
            order = self.order(now)
            before = {j.number: j.held for j in order}
            if self.wants is not None:
                self.wants(self, order)
            for j in order:
                j.held = dict(before[j.number])
            self.decide(order)
            for j in order:
                was, has = _counts(before[j.number]), _counts(j.held)
                if j.held and j.started and was != has:
                    j.owed_s += self.options.restart_cost_s + self.options.checkpoint_cost_s
                j.started = j.started or bool(j.held)
                self._log(j, now)
            if not any(j.held for j in order) and not waiting:
                return self  # no job runs, and no waiting job will ever run
            for j in order:
                if j.held:
                    self.serve(j, now)
            self.active = [j for j in self.active if j.finish_s is None]
            self.rounds += 1
            self.rounds_jobs += len(order)
            tick += 1
        return self

    def _log(self, job: Job, now: float) -> None:
        if not job.held and not job.log:
            return
        cpu = memory = 0
        for number, gpus in job.held.items():
            assert job.level is not None
            c, m = self.amount(job, job.level, self.nodes[number])
            cpu, memory = cpu + c * len(gpus), memory + m * len(gpus)
        where = tuple(sorted((n, job.part / 1000 if job.part else float(len(g))) for n, g in job.held.items()))
        if not job.log or job.log[-1][1:] != (cpu, memory, where):
            job.log.append((now, cpu, memory, where))


def _counts(held: dict[int, list[int]]) -> dict[int, int]:
    return {n: len(g) for n, g in held.items()}


def _stated(x: float) -> float | None:
    return None if math.isnan(x) else float(x)


def _cores_and_gb(node: Node) -> tuple[float, float]:
    return node.share[0] / 1000, node.share[1] / 1000


def _nodes(cluster: Cluster) -> list[Node]:
    nodes: list[Node] = []
    kinds: list[tuple[Any, ...]] = []
    for group in cluster.groups:
        if not group.gpus:
            continue
        kind = (group.gpu.name, group.gpus, group.cpus, group.memory_bytes)
        if kind not in kinds:
            kinds.append(kind)
        for _ in range(group.count):
            nodes.append(
                Node(
                    len(nodes), kinds.index(kind), group.gpu.name, group.gpu.relative_speed, group.gpus,
                    int(group.cpus * 1000), group.memory_bytes // 10**6,
                )
            )  # fmt: skip
    return nodes


def interpolate(p: ModelProfile, cores: float, gb: float) -> float:
    """The table at (cores, GB) per GPU: bilinear, clamped at its edges, in proportion to cores below its first row."""

    def bracket(axis: list[float], x: float) -> tuple[int, int, float]:
        if x <= axis[0]:
            return 0, 0, 0.0
        for i in range(len(axis) - 1):
            if x < axis[i + 1]:
                return i, i + 1, (x - axis[i]) / (axis[i + 1] - axis[i])
        return len(axis) - 1, len(axis) - 1, 0.0

    c0, c1, u = bracket([float(x) for x in p.cpus_per_gpu], cores)
    m0, m1, v = bracket([float(x) for x in p.memory_gb_per_gpu], gb)
    t = p.throughput
    value = (1 - u) * (1 - v) * t[c0][m0] + (1 - u) * v * t[c0][m1] + u * (1 - v) * t[c1][m0] + u * v * t[c1][m1]
    return float(value * min(1.0, cores / float(p.cpus_per_gpu[0])))


def gittins_index(sample: list[float], points: int = 512) -> tuple[list[float], list[float]]:
    """Attained service and its Gittins index, by the definition in docs/policies.md: sums over jobs, no cumulation."""
    ranked = sorted(sample)
    ends = sorted({ranked[math.floor(q / (points - 1) * (len(ranked) - 1) + 1e-9)] for q in range(points)})
    attained = sorted({0.0, *ends})
    index = []
    for a in attained:
        alive = [x for x in ranked if x > a]
        gains = [
            sum(x <= end for x in alive) / math.fsum(min(x, end) - a for x in alive)
            for end in ends
            if alive and end > a
        ]
        index.append(max(gains, default=0.0))
    return attained, index
