"""Applies the decisions of partition policies to simulated GPUs, and charges the time that they cost."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cotenant.core.events import Kind, Reason
from cotenant.core.mig import Geometry, Placement
from cotenant.policy.mig.decide import PartitionRules, Tenancy, cost_table, fit_mask, replan
from cotenant.policy.mig.optimizer import PartitionPlan
from cotenant.profiles.mig.speeds import mps_speed
from cotenant.sim.mig.state import Clock, Entry, GpuState, Mode, Work, share_of

# returns the predicted speeds of a job by kind of instance, from (job, number of jobs that were measured together)
Predict = Callable[[int, int], np.ndarray]


@dataclass
class PartitionInput:
    """Input of a run of a partition policy. Arrays by job: arrival, GPUs (whole numbers), work in seconds of the whole
    GPU, launch time. `speeds`: true speeds (jobs, kinds of instance), 0 if the job may not run there. `qos_floor`:
    lowest allowed speed, 0 to 1. `nodes`: node of every GPU. `predict`: the prediction that miso uses after a
    measurement; None: exact speeds.
    """

    geo: Geometry
    nodes: list[int]
    arrival_s: np.ndarray
    gpus: np.ndarray
    work_s: np.ndarray
    launch_s: np.ndarray
    speeds: np.ndarray
    qos_floor: np.ndarray
    predict: Predict | None = None


class Enforcer:
    """Applies decisions to simulated GPUs: it stops, starts and measures jobs and changes layouts. Each action takes
    its time in the simulation and is logged."""

    def __init__(self, data: PartitionInput, rules: PartitionRules) -> None:
        self.data, self.rules, self.geo = data, rules, data.geo
        on = 1.0 if rules.overheads else 0.0
        self.reconfigure_s, self.profile_s = rules.reconfigure_s * on, rules.profile_s * on
        self.checkpoint_s, self.launch_s = rules.checkpoint_s * on, data.launch_s * on
        self.downtime_s = self.reconfigure_s + self.checkpoint_s + self.launch_s
        self.clock, self.work = Clock(), Work(data.work_s)
        first = set(rules.layout) if rules.policy == "static" and rules.layout else set(self.geo.whole)
        mode = Mode.SHARED if rules.policy == "mps" else Mode.MIG
        self.gpus = [GpuState(i, node, set(first), mode=mode) for i, node in enumerate(data.nodes)]
        # Under the policy static: the free MIG instances in ascending order of size. Among equally large ones, those on
        # a GPU with a lower number come later, because instances are taken from the end.
        self.free = sorted((self.slice_size(p), -g.index, p) for g in self.gpus for p in g.instances)
        self.queue: deque[int] = deque()
        # GPUs that a waiting gang (a job of several GPUs) reserves, which jobs behind the gang in the queue may not use
        self.claimed: list[GpuState] = []
        self.known = np.full(len(data.arrival_s), not rules.profiles)
        believed = _prior(self.geo, data.speeds) if rules.profiles else data.speeds
        self.believed = np.where(believed >= data.qos_floor[:, None], believed, 0.0)
        self.masks = fit_mask(self.believed)
        self.cost = cost_table(self.geo, rules, self.believed)
        self.log: list[Entry] = []
        self._started: set[int] = set()
        self.steps = self.reconfigurations = self.profilings = 0

    def slice_size(self, place: Placement) -> float:
        profile = self.geo.profiles[place.kind]
        return profile.compute + profile.memory_slots / 100

    def drop(self, gpu: GpuState, job: int) -> None:
        gpu.jobs.remove(job)
        place = gpu.place.pop(job, None)
        if gpu.mode is Mode.GANG:
            gpu.mode = Mode.SHARED if self.rules.policy == "mps" else Mode.MIG
            if self.rules.layout is not None:
                self.reshape(gpu, set(self.rules.layout))
        elif place is not None and self.rules.policy == "static":
            insort(self.free, (self.slice_size(place), -gpu.index, place))
        if gpu.mode is Mode.SHARED:
            self.share(gpu, None)
        if gpu.mode is Mode.PROFILE and not gpu.jobs:
            gpu.mode, gpu.version = Mode.MIG, gpu.version + 1

    def tenancy(self, gpu: GpuState) -> Tenancy:
        return Tenancy(tuple(gpu.jobs), tuple(gpu.place.get(j) for j in gpu.jobs))

    def apply(self, gpu: GpuState, jobs: list[int], plan: PartitionPlan) -> None:
        """Give each job of the GPU the MIG instance that the plan chose: stop jobs whose instance changes, change the
        GPU's layout, and start the jobs again.
        """
        now = self.clock.now
        target = dict(zip(jobs, plan.placements, strict=True))
        change = any(p not in gpu.instances for p in target.values())
        everyone = self.rules.disturb == "all" and change
        moving = [j for j in jobs if everyone or gpu.place.get(j) != target[j]]
        for job in moving:
            self.work.stop(job, now)
        gpu.jobs, gpu.place = list(jobs), target
        delay = self.reshape(gpu, set(target.values())) if change else 0.0
        gpu.version += 1
        for job in moving:
            saved = self.checkpoint_s if job in self._started else 0.0
            self.seat(gpu, job, now + saved + delay + float(self.launch_s[job]))

    def reshape(self, gpu: GpuState, wanted: set[Placement]) -> float:
        """Create the wanted MIG instances on a GPU, and keep idle ones if they fit. Returns the time in seconds that
        this takes.
        """
        kept = set(wanted)
        for place in sorted(gpu.instances - wanted):
            if self.geo.fits(kept | {place}):
                kept.add(place)
        gpu.instances = kept
        gpu.version += 1
        self.reconfigurations += 1
        gpu.busy_until = self.clock.now + self.reconfigure_s
        if self.reconfigure_s > 0:
            self.clock.at(gpu.busy_until, "free", gpu.index)
        return self.reconfigure_s

    def seat(self, gpu: GpuState, job: int, ready: float) -> None:
        place = gpu.place[job]
        speed = float(self.data.speeds[job, self.geo.kinds.index(place.kind)])
        self.begin(job, (gpu.index,), ready, speed, share_of(self.geo, place))

    def sit(self, gpu: GpuState, job: int, place: Placement) -> None:
        """Start a job on a MIG instance that already exists."""
        gpu.jobs.append(job)
        gpu.place[job] = place
        gpu.version += 1
        self.seat(gpu, job, self.clock.now + float(self.launch_s[job]))

    def begin(
        self,
        job: int,
        gpus: tuple[int, ...],
        ready: float,
        speed: float,
        share: float,
        why: Reason = Reason.NEW_LAYOUT,
    ) -> None:
        first = job not in self._started
        if first:
            self._started.add(job)
            self.work.start[job] = self.clock.now
        else:
            self.work.restarts[job] += 1
        waited = not first and not self.work.gpu[job]
        kind = Kind.START if first else Kind.RESUME if waited else Kind.MOVE
        self.work.gpu[job] = gpus
        self.work.run(job, self.clock.now, ready, speed, self.clock)
        self.note(job, kind, Reason.IN_ORDER if first or waited else why, speed, share)

    def share(self, gpu: GpuState, newcomer: int | None) -> None:
        """Run the GPU's jobs under MPS without partitions: their speeds depend on how many share the GPU; only the new
        job has to launch.
        """
        now = self.clock.now
        gpu.version += 1
        if not gpu.jobs:
            return
        for job, speed in zip(gpu.jobs, self.shared_speeds(gpu.jobs), strict=True):
            if job == newcomer:
                self.begin(job, (gpu.index,), now + float(self.launch_s[job]), float(speed), 1.0 / len(gpu.jobs))
            else:
                self.work.run(job, now, max(now, self.work.since[job]), float(speed), self.clock)
                self.note(job, Kind.RESIZE, Reason.REPLACED, float(speed), 1.0 / len(gpu.jobs))

    def shared_speeds(self, jobs: list[int]) -> np.ndarray:
        """Return the speeds of jobs on one GPU under MPS. A job that needs more than its equal part of the SMs for its
        lowest allowed speed runs alone on the GPU, with all SMs."""
        level = 1.0 / self.rules.mps_jobs
        speeds = mps_speed(self.data.speeds[jobs], self.geo, len(jobs), level)
        if len(jobs) == 1 and speeds[0] < self.data.qos_floor[jobs[0]]:
            return mps_speed(self.data.speeds[jobs], self.geo, 1, 1.0)
        return speeds

    def promote(self) -> None:
        """Under the policy static, when no job waits: move jobs from small MIG instances to larger free ones, beginning
        with the job on the smallest instance.
        """
        if self.queue:
            return
        seated = sorted(
            (self.slice_size(p), g.index, j) for g in self.gpus if g.mode is Mode.MIG for j, p in g.place.items()
        )
        for size, source, job in seated:
            for slot in reversed(self.free):
                gpu = self.gpus[-slot[1]]
                if slot[0] <= size:
                    break
                old = self.gpus[source].place[job]
                if self.usable(gpu) and self.gains(job, old, slot[2]):
                    self.work.stop(job, self.clock.now)
                    self.drop(self.gpus[source], job)
                    self.free.remove(slot)
                    self.sit(gpu, job, slot[2])
                    break

    def usable(self, gpu: GpuState) -> bool:
        """Whether a job may be placed on one of the GPU's instances now."""
        return gpu.mode is Mode.MIG and self.clock.now >= gpu.busy_until and not gpu.draining

    def gains(self, job: int, old: Placement, new: Placement) -> bool:
        """Whether a job does more work in the next `horizon_s` seconds (a layout's expected life) if it moves to the
        new instance, although it does none while it restarts.
        """
        kinds = self.geo.kinds
        before, after = (float(self.believed[job, kinds.index(p.kind)]) for p in (old, new))
        return after * (1.0 - min(float(self.launch_s[job]) / self.rules.horizon_s, 1.0)) > before

    # ---- profiling under MPS

    def begin_profile(self, gpu: GpuState, job: int) -> None:
        """Begin to measure the speeds of the GPU's jobs: stop all jobs, switch the GPU to one instance with MPS, run
        all jobs together and measure them.
        """
        now = self.clock.now
        for other in gpu.jobs:
            self.work.stop(other, now)
        gpu.jobs.append(job)
        gpu.place = {}
        gpu.mode = Mode.PROFILE
        gpu.instances = set(self.geo.whole)
        gpu.version += 1
        self.profilings += 1
        speeds = mps_speed(self.data.speeds[gpu.jobs], self.geo, len(gpu.jobs), 0.5)
        saved = self.checkpoint_s if len(gpu.jobs) > 1 else 0.0
        ready = now + saved + self.reconfigure_s
        for other, speed in zip(gpu.jobs, speeds, strict=True):
            share = 1.0 / len(gpu.jobs)
            launched = ready + float(self.launch_s[other])
            self.begin(other, (gpu.index,), launched, float(speed), share, Reason.MEASURED)
            self.note(other, Kind.PROFILE, Reason.MEASURED, float(speed), share)
        end = ready + max(float(self.launch_s[j]) for j in gpu.jobs) + self.profile_s
        self.clock.at(end, "measured", gpu.index, gpu.version)

    def measured(self, gpu: GpuState) -> None:
        """End a measurement of jobs under MPS: choose the GPU's layout by the speeds that the measurement predicts. A
        job that no longer fits returns to the queue.
        """
        gpu.mode = Mode.MIG
        for job in gpu.jobs:
            speeds = self.data.speeds[job]
            if self.data.predict is not None:
                speeds = np.where(speeds > 0, self.data.predict(job, len(gpu.jobs)), 0.0)
            believed = np.where(speeds >= self.data.qos_floor[job], speeds, 0.0)
            # predictions must not say that the job does not fit on a whole GPU, since it would then wait for ever
            if believed[0] <= 0:
                believed[0] = self.data.speeds[job, 0]
            self.believed[job] = believed
            self.known[job] = True
            self.masks[job] = fit_mask(self.believed[[job]])[0]
            self.cost[job] = cost_table(self.geo, self.rules, self.believed[[job]])[0]
        while True:
            open_place = Tenancy(tuple(gpu.jobs), (None,) * len(gpu.jobs))
            plan = replan(self.geo, self.rules, self.believed, open_place, self.downtime_s)
            if plan is not None:
                break
            self.evict(gpu, gpu.jobs[-1])
        gpu.instances = set()
        self.apply(gpu, gpu.jobs, plan)

    def evict(self, gpu: GpuState, job: int) -> None:
        """Put a job back at the head of the queue: by its predicted speeds it does not fit on this GPU."""
        self.work.stop(job, self.clock.now)
        self.work.gpu[job] = ()
        gpu.jobs.remove(job)
        self.queue.appendleft(job)
        self.note(job, Kind.PREEMPT, Reason.BELOW_FLOOR)

    def note(self, job: int, kind: Kind, reason: Reason, speed: float = 0.0, share: float = 0.0) -> None:
        self.log.append(Entry(self.clock.now, job, kind, reason, speed, self.work.gpu[job], share))


def _prior(geo: Geometry, speeds: np.ndarray) -> np.ndarray:
    """Return the predicted speeds of a job that was not measured: the square root of the compute share, on instances
    where the job fits."""
    share = np.array([p.compute / geo.compute_slices for p in geo.profiles.values()])
    return np.where(speeds > 0, np.sqrt(share), 0.0)
