"""Carries out partition policies in virtual time: arrivals, measurements, changes of layout and departures are events.

The policy (policy.mig) decides on placements; the Enforcer applies them, charges their costs and logs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cotenant.core.events import Kind, Reason
from cotenant.policy.mig.decide import Tenancy, choose_gpu, replan
from cotenant.policy.mig.optimizer import PartitionPlan
from cotenant.sim.mig.enforce import Enforcer
from cotenant.sim.mig.state import Entry, GpuState, Mode


class PartitionEngine(Enforcer):
    """Simulates a run of a partition policy. `run()` returns the log; `work` then holds start and finish times by job.
    """

    # ---- the loop

    def run(self, progress: Callable[[int, int], None] | None = None) -> list[Entry]:
        """Process all events until all jobs are done. `progress(done, of)` is called about a thousand times."""
        done, of = 0, len(self.data.arrival_s)
        stride = max(1, of // 1000)
        for job, time_s in enumerate(self.data.arrival_s):
            self.clock.at(float(time_s), "arrive", job)
        while (event := self.clock.next()) is not None:
            what, subject, version = event
            if what == "arrive":
                self.note(subject, Kind.ARRIVE, Reason.NONE)
                self.queue.append(subject)
                self.schedule()
            elif what == "finish" and self.work.version[subject] == version:
                self.finish(subject)
                done += 1
                if progress is not None and (done % stride == 0 or done == of):
                    progress(done, of)
            elif what == "measured" and self.gpus[subject].version == version:
                self.measured(self.gpus[subject])
                self.schedule()
            elif what == "free":
                self.schedule()
                if self.gpus[subject].revisit:
                    self.after_departure(self.gpus[subject])
            self.steps += 1
        return self.log

    def finish(self, job: int) -> None:
        """End a job: free its resources, then admit waiting jobs, then check whether a new layout of its GPU pays off.
        """
        now = self.clock.now
        self.work.stop(job, now)
        self.work.left[job], self.work.finish[job] = 0.0, now
        held = [self.gpus[i] for i in self.work.gpu[job]]
        self.note(job, Kind.FINISH, Reason.DONE)
        self.work.gpu[job] = ()
        for gpu in held:
            self.drop(gpu, job)
        before = [gpu.version for gpu in held]
        self.schedule()
        for gpu, version in zip(held, before, strict=True):
            if gpu.version == version:
                self.after_departure(gpu)

    def after_departure(self, gpu: GpuState) -> None:
        """Give the freed part of a GPU to its remaining jobs if that pays off; an empty GPU becomes one whole instance
        again."""
        gpu.revisit = False
        if gpu.mode is not Mode.MIG:
            return
        if self.rules.policy == "static":
            gpu.revisit = self.clock.now < gpu.busy_until
            self.promote()
        elif self.rules.repartitions and not gpu.jobs:
            if gpu.instances != set(self.geo.whole):
                self.reshape(gpu, set(self.geo.whole))
        elif self.rules.repartitions and self.clock.now >= gpu.busy_until:
            plan = replan(self.geo, self.rules, self.believed, self.tenancy(gpu), self.downtime_s)
            if plan is not None and plan.moved:
                self.apply(gpu, gpu.jobs, plan)
        elif self.rules.repartitions:
            gpu.revisit = True  # the GPU's layout is changing, so whether to repartition is decided when that is done

    # ---- admission

    def schedule(self) -> None:
        """Admit waiting jobs, first come, first served, with two exceptions:

        - Under the policy static, later jobs overtake a job that fits on no free instance.
        - Later single-GPU jobs overtake a gang (a job of several GPUs) whose GPUs are not yet empty. They may not use
          the GPUs that the gang reserves.

        The gang's reservation is dropped at the next call, before the jobs ahead of the gang are admitted. If it were
        kept, a job that returns to the head of the queue would wait for the reserved GPUs, and the gang would wait
        behind that job for ever."""
        for gpu in self.claimed:
            gpu.draining = False
        self.claimed = []
        waiting: deque[int] = deque()
        gang_waits = False
        while self.queue:
            job = self.queue[0]
            gang = self.data.gpus[job] > 1
            if not (gang and gang_waits) and self.admit(job):
                self.queue.popleft()
                continue
            gang_waits = gang_waits or gang
            if not gang and (self.rules.policy != "static" or not self.free):
                break
            waiting.append(self.queue.popleft())
        waiting.extend(self.queue)
        self.queue = waiting

    def admit(self, job: int) -> bool:
        if self.data.gpus[job] > 1:
            return self.admit_gang(job)
        policy = self.rules.policy
        if policy == "static":
            return self.admit_static(job)
        if policy == "mps":
            return self.admit_shared(job)
        if policy == "whole":
            idle = next((g for g in self.gpus if not g.jobs and not g.draining), None)
            if idle is None:
                return False
            self.apply(idle, [job], PartitionPlan(self.geo.whole, 1.0, 0.0))
            return True
        return self.admit_partitioned(job)

    def admit_partitioned(self, job: int) -> bool:
        open_gpus = [(g.index, g.jobs) for g in self.gpus if self.usable(g)]
        index = choose_gpu(self.geo, self.rules, self.cost, self.masks, open_gpus, job)
        if index is None:
            return False
        gpu = self.gpus[index]
        sole = self.rules.profile_sole and not self.known[job]
        if self.rules.profiles and (self.must_measure([*gpu.jobs, job]) if gpu.jobs else sole):
            self.begin_profile(gpu, job)
            return True
        tenancy = self.tenancy(gpu)
        joined = Tenancy((*tenancy.jobs, job), (*tenancy.placements, None))
        plan = replan(self.geo, self.rules, self.believed, joined, self.downtime_s)
        if plan is None:
            return False
        self.apply(gpu, [*gpu.jobs, job], plan)
        return True

    def must_measure(self, jobs: list[int]) -> bool:
        """Whether one of these jobs must be measured under MPS: it was not measured, and it has run long enough for a
        measurement to pay off or has a lowest allowed speed.
        """
        late = self.rules.profile_after_s
        return any(not self.known[j] and (self.age(j) >= late or self.data.qos_floor[j] > 0) for j in jobs)

    def age(self, job: int) -> float:
        return self.clock.now - self.work.start[job] if job in self._started else 0.0

    def admit_static(self, job: int) -> bool:
        """Place a job on the largest free instance on which it may run. Before that, a GPU that a gang (a job of
        several GPUs) has left gets its static layout back.
        """
        for size, index, place in reversed(self.free):
            gpu = self.gpus[-index]
            if self.usable(gpu) and self.believed[job, self.geo.kinds.index(place.kind)] > 0:
                self.free.remove((size, index, place))
                self.sit(gpu, job, place)
                return True
        return False

    def admit_shared(self, job: int) -> bool:
        """Place a job under MPS without partitions: on the GPU with the fewest jobs where every job keeps its lowest
        allowed speed."""
        gpu = min(
            (
                g
                for g in self.gpus
                if g.mode is Mode.SHARED
                and len(g.jobs) < self.rules.mps_jobs
                and not g.draining
                and self.floors_hold([*g.jobs, job])
            ),
            key=lambda g: (len(g.jobs), g.index),
            default=None,
        )
        if gpu is None:
            return False
        gpu.jobs.append(job)
        self.share(gpu, job)
        return True

    def floors_hold(self, jobs: list[int]) -> bool:
        floors = self.data.qos_floor[jobs]
        return not floors.any() or bool((self.shared_speeds(jobs) >= floors).all())

    def admit_gang(self, job: int) -> bool:
        """Place a job of several GPUs on whole GPUs, on one node if possible. While the job waits for GPUs to become
        empty, these GPUs take no other job."""
        wanted = int(self.data.gpus[job])
        by_node: dict[int, list[GpuState]] = {}
        for gpu in self.gpus:
            if gpu.mode is not Mode.GANG:
                by_node.setdefault(gpu.node, []).append(gpu)
        one_node = [gpus for gpus in by_node.values() if len(gpus) >= wanted]
        pool = (
            min(one_node, key=lambda gs: sum(sorted(len(g.jobs) for g in gs)[:wanted]))
            if one_node
            else [g for gpus in by_node.values() for g in gpus]
        )
        chosen = sorted(pool, key=lambda g: (len(g.jobs), g.index))[:wanted]
        if len(chosen) < wanted or any(g.jobs or self.clock.now < g.busy_until for g in chosen):
            self.claimed = chosen
            for gpu in chosen:
                gpu.draining = True
            return False
        now = self.clock.now
        ready = now + float(self.launch_s[job])
        if any(g.instances != set(self.geo.whole) for g in chosen):
            ready += self.reconfigure_s
        for gpu in chosen:
            gpu.mode, gpu.instances, gpu.jobs = Mode.GANG, set(self.geo.whole), [job]
            gpu.version += 1
        self.begin(job, tuple(g.index for g in chosen), ready, 1.0, float(wanted))
        return True
