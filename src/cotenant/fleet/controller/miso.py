"""MISO for the fleet: partitions GPUs by speeds that are predicted from a measurement under MPS, as jobs come and go.

The decisions are those of the simulator (policy.mig): which GPU admits a job, which slices a GPU's jobs get, and
whether a move pays. This planner reads the jobs' training steps from their progress reports, stores the measured
speeds, and converts decisions to shares of GPUs. Where MIG is on, a slice is a MIG instance. Elsewhere a slice is the
same fraction of the GPU without an instance: an MPS percentage of the SMs or, on the software GPU, a share of the turns
(time slices that the agent grants). To move to another slice, a job saves a checkpoint and starts again; the training
program does that by calling `cotenant.loop`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.mps import Mps
from cotenant.core.errors import InputError
from cotenant.core.events import Reason
from cotenant.core.mig import Geometry, Placement, geometry, kind_of, parse_placement
from cotenant.fleet.controller.miso_gpu import MisoGpu, Wish
from cotenant.fleet.controller.planners import FleetPlan, View
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import NodeGpu, NodeSpec
from cotenant.fleet.state import Assignment, GpuShare, Job, Place
from cotenant.policy.mig.decide import PartitionRules, Tenancy, choose_gpu, cost_table, fit_mask, replan, warm_up
from cotenant.profiles.mig.mps_mig import MpsMigModel

STANDS_IN = "A100-40GB"  # a GPU without MIG gets the slice sizes of this model, for which the predictor was trained


class MisoPlanner:
    """A Planner that partitions GPUs; a job has one slice of one GPU, a gang has whole GPUs.

    `rules`: those of the simulator, policy miso. `mechanism`: how slices are made: mig, mps or time. `measure_s`:
    seconds of steady steps at each of the three MPS percentages (100, 50 and 14 %) at which jobs are measured.
    `restart_s`: time that a move costs a job; a move must gain more than that.
    """

    def __init__(
        self, rules: PartitionRules | None = None, *, mechanism: str = Mps.name, measure_s: float = 10.0,
        restart_s: float = 10.0, model: MpsMigModel | None = None,
    ) -> None:  # fmt: skip
        self.rules = rules or PartitionRules("miso", profile_after_s=0.0)
        if not self.rules.repartitions:
            raise InputError(f"policy {self.rules.policy} does not repartition; only miso does", field="policy")
        self.mechanism, self.measure_s, self.restart_s = mechanism, measure_s, restart_s
        self._model = model
        self.gpus: dict[str, MisoGpu] = {}  # by UUID
        self._speeds: dict[str, np.ndarray] = {}  # job -> its measured speed on each kind of slice
        self._gangs: dict[str, tuple[str, ...]] = {}  # job -> UUIDs of its whole GPUs
        self.measurements = self.repartitions = 0

    # ---- Planner

    def describe(self) -> dict[str, Any]:
        return {
            "label": self.rules.policy, "policy": self.rules.policy, "objective": self.rules.objective,
            "mechanism": self.mechanism, "measure_s": self.measure_s, "horizon_s": self.rules.horizon_s,
        }  # fmt: skip

    def fault(self) -> str:
        return ""

    def warm_up(self) -> None:
        self._model = self._model or MpsMigModel.load()
        warm_up(geometry(STANDS_IN, double_memory=False))

    def check(self, job: Job, nodes: Iterable[NodeSpec]) -> None:
        found = tuple(nodes)
        geometries = [_geometry_of(gpu) for node in found for gpu in node.gpus]
        if job.spec.slice is not None and geometries and not any(_allowed(geo, job.spec).any() for geo in geometries):
            kind_of(geometries[0], job.spec.slice)  # raises an error that names the slices of this GPU model
        most = max((len(node.gpus) for node in found), default=0)
        if found and job.spec.gpus > most:
            raise InputError(f"{job.spec.gpus:g} GPUs are requested and no node has more than {most}", field="gpus")

    def plan(self, view: View) -> FleetPlan:
        """See Planner. Measured speeds are kept in memory only, so a restarted controller measures again."""
        nodes = {gpu.uuid: node for node in view.nodes for gpu in node.gpus}
        jobs = {job.id: job for job in view.jobs}
        plan = FleetPlan()
        self._adopt(view, nodes)
        left = self._forget(jobs, nodes)
        self._measure_adopted(jobs, view.now_s)
        if view.early:
            self._admit(view, jobs, plan, idle_only=True)
        else:
            self._observe(jobs)
            for gpu in self.gpus.values():
                self._advance(gpu, jobs, view.now_s)
            self._admit(view, jobs, plan, idle_only=False)
            for uuid in left:
                self._after_departure(self.gpus[uuid], jobs)
        self._assign(jobs, nodes, plan)
        return plan

    # ---- the state of GPUs and jobs

    def _adopt(self, view: View, nodes: dict[str, NodeSpec]) -> None:
        """Record GPUs that are new, and jobs that an earlier controller started."""
        for node in view.nodes:
            for device in node.gpus:
                if device.uuid not in self.gpus:
                    self.gpus[device.uuid] = MisoGpu(_geometry_of(device), self.measure_s)
        known = {job for gpu in self.gpus.values() for job in gpu.place} | set(self._gangs)
        for job in view.jobs:
            if job.attempt is None or job.id in known:
                continue
            shares = [share for place in job.attempt.assignment.places for share in place.gpus]
            if len(shares) > 1 or job.spec.gpus > 1:
                self._gangs[job.id] = tuple(share.uuid for share in shares)
            elif shares and shares[0].uuid in self.gpus:
                gpu = self.gpus[shares[0].uuid]
                gpu.place[job.id] = _placement(shares[0].slice)

    def _forget(self, jobs: dict[str, Job], nodes: dict[str, NodeSpec]) -> list[str]:
        """Forget jobs that have finished and GPUs that no longer exist; returns the UUIDs of GPUs that jobs have left.
        """
        for uuid in [uuid for uuid in self.gpus if uuid not in nodes]:
            del self.gpus[uuid]
        self._gangs = {
            job: held for job, held in self._gangs.items() if job in jobs and all(uuid in nodes for uuid in held)
        }
        self._speeds = {job: row for job, row in self._speeds.items() if job in jobs}
        left = []
        for uuid, gpu in self.gpus.items():
            gone = [job for job in gpu.jobs if job not in jobs]
            for job in gone:
                gpu.leave(job)
            if gone:
                left.append(uuid)
        return left

    def _measure_adopted(self, jobs: dict[str, Job], now_s: float) -> None:
        """Measure the jobs of GPUs that were adopted during a measurement or a change of slices, so that not every job
        has a slice of its own."""
        for gpu in self.gpus.values():
            slices = [place for place in gpu.place.values() if place is not None]
            whole = len(slices) == len(gpu.place) and gpu.geo.fits(slices)
            if gpu.measurement is None and len(gpu.place) > 1 and not whole:
                gpu.begin(None, _attempts(gpu, jobs), now_s)
                self.measurements += 1

    def _observe(self, jobs: dict[str, Job]) -> None:
        for gpu in self.gpus.values():
            for name in gpu.jobs:
                attempt = jobs[name].attempt
                told = attempt.progress if attempt is not None else None
                if told and isinstance(told.get("step"), int) and isinstance(told.get("written_unix_s"), float):
                    gpu.see(name, int(told.get("attempt") or 0), told["step"], told["written_unix_s"])

    def _believed(self, gpu: MisoGpu, names: list[str], jobs: dict[str, Job]) -> np.ndarray:
        """Estimated speeds as an array (jobs, kinds of slices): the measured speed if there is one, else the square
        root of the slice's fraction of the SMs; 0 for slices below the job's minimum.
        """
        prior = np.sqrt([p.compute / gpu.geo.compute_slices for p in gpu.geo.profiles.values()])
        rows = []
        for name in names:
            row = self._speeds.get(name, prior)
            row = prior if len(row) != len(prior) else row
            rows.append(np.where(_allowed(gpu.geo, jobs[name].spec), row, 0.0))
        return np.array(rows).reshape(len(names), len(gpu.geo.kinds))

    # ---- measuring

    def _advance(self, gpu: MisoGpu, jobs: dict[str, Job], now_s: float) -> None:
        """Advance the measurement of one GPU's jobs, and choose the MIG layout that follows from the measured speeds.
        """
        was = gpu.measurement
        found = gpu.advance(_attempts(gpu, jobs), now_s, lambda x: self._predict(x, gpu.geo))
        if found is None:
            return
        for name, row in found.items():
            self._speeds[name] = np.where(row > 0, row, 1e-3)
        if was is not None and gpu.jobs:
            self._layout(gpu, jobs, keep=False)

    def _predict(self, latencies: np.ndarray, geo: Geometry) -> np.ndarray:
        if self._model is None:
            self._model = MpsMigModel.load()
        return np.asarray(self._model.predict_speeds(latencies[None], geo)[0])

    def _layout(self, gpu: MisoGpu, jobs: dict[str, Job], *, keep: bool) -> bool:
        """Assign a slice to every job of the GPU by estimated speeds. False: the jobs do not fit. `keep`: jobs stay on
        their slices unless a move gains more than it costs."""
        names = gpu.jobs
        before = tuple(gpu.place[name] for name in names)
        if len(names) == 1:
            wanted: tuple[Placement | None, ...] = (None,)
        else:
            speeds = self._believed(gpu, names, jobs)
            current = before if keep else (None,) * len(names)
            if keep and any(place is None for place in before):
                current = tuple(place or gpu.geo.whole[0] for place in before)
            decided = replan(
                gpu.geo, self.rules, speeds, Tenancy(tuple(range(len(names))), current),
                np.full(len(names), self.restart_s),
            )  # fmt: skip
            if decided is None:
                return False
            wanted = decided.placements
        gpu.place = dict(zip(names, wanted, strict=True))
        self.repartitions += before != wanted
        return True

    # ---- arrivals and departures

    def _admit(self, view: View, jobs: dict[str, Job], plan: FleetPlan, *, idle_only: bool) -> None:
        """Admit waiting jobs first come, first served; a gang without enough GPUs blocks later jobs, unless all GPUs of
        the present nodes would not suffice."""
        placed = {name for gpu in self.gpus.values() for name in gpu.place} | set(self._gangs)
        for job in view.jobs:
            if job.id in placed:
                continue
            if not self._suffices(job, view):
                plan.waiting[job.id] = Reason.GANG_TOO_LARGE_NOW
            elif job.spec.gpus > 1:
                if not self._admit_gang(job, view):
                    plan.waiting[job.id] = Reason.GANG_TOO_LARGE_NOW
                    break
            elif not self._admit_one(job, jobs, view.now_s, idle_only=idle_only):
                plan.waiting[job.id] = Reason.GPUS_FULL
                break
        for job in view.jobs:
            has_gpu = job.id in self._gangs or any(job.id in gpu.place for gpu in self.gpus.values())
            if job.id not in plan.waiting and not has_gpu:
                plan.waiting[job.id] = Reason.GPUS_FULL

    def _suffices(self, job: Job, view: View) -> bool:
        """Whether a present node could hold a job if it were empty."""
        if job.spec.gpus > 1:
            return any(len(node.gpus) >= job.spec.gpus for node in view.nodes)
        return any(_allowed(gpu.geo, job.spec).any() for gpu in self.gpus.values())

    def _admit_gang(self, job: Job, view: View) -> bool:
        held = {uuid for uuids in self._gangs.values() for uuid in uuids}
        for node in view.nodes:
            idle = [g.uuid for g in node.gpus if not self.gpus[g.uuid].place and g.uuid not in held]
            if len(idle) >= job.spec.gpus:
                self._gangs[job.id] = tuple(idle[: round(job.spec.gpus)])
                return True
        return False

    def _admit_one(self, job: Job, jobs: dict[str, Job], now_s: float, *, idle_only: bool) -> bool:
        held = {uuid for uuids in self._gangs.values() for uuid in uuids}
        open_ = {
            uuid: gpu for uuid, gpu in self.gpus.items()
            if uuid not in held and gpu.measurement is None and not (idle_only and gpu.place)
        }  # fmt: skip
        uuid = self._choose(job, jobs, open_)
        if uuid is None:
            return False
        gpu = open_[uuid]
        if not gpu.place:
            gpu.place[job.id] = None
            return True
        everybody = [*gpu.jobs, job.id]
        if self.rules.profiles and any(name not in self._speeds for name in everybody):
            gpu.begin(job.id, _attempts(gpu, jobs), now_s)
            self.measurements += 1
            return True
        gpu.place[job.id] = None
        if self._layout(gpu, jobs, keep=False):
            return True
        gpu.leave(job.id)
        return False

    def _choose(self, job: Job, jobs: dict[str, Job], open_: dict[str, MisoGpu]) -> str | None:
        """Choose the GPU that a waiting job joins, by the simulator's rule (`choose_gpu`), which compares GPUs of one
        geometry. The first geometry of which a GPU can take the job is used, and the first of equally good GPUs. None:
        no GPU can take the job.
        """
        by_geometry: dict[str, list[str]] = {}
        for uuid, gpu in open_.items():
            by_geometry.setdefault(gpu.geo.gpu, []).append(uuid)
        for uuids in by_geometry.values():
            names = [name for uuid in uuids for name in open_[uuid].jobs] + [job.id]
            row = {name: i for i, name in enumerate(names)}
            gpu = open_[uuids[0]]
            speeds = self._believed(gpu, names, jobs)
            tenants = [(i, [row[name] for name in open_[uuid].jobs]) for i, uuid in enumerate(uuids)]
            cost = cost_table(gpu.geo, self.rules, speeds)
            index = choose_gpu(gpu.geo, self.rules, cost, fit_mask(speeds), tenants, row[job.id])
            if index is not None:
                return uuids[index]
        return None

    def _after_departure(self, gpu: MisoGpu, jobs: dict[str, Job]) -> None:
        """Give the remaining jobs the slice of a job that has ended, if that pays. Nothing is measured again."""
        if gpu.measurement is None and gpu.place:
            self._layout(gpu, jobs, keep=True)

    # ---- the plan

    def _assign(self, jobs: dict[str, Job], nodes: dict[str, NodeSpec], plan: FleetPlan) -> None:
        for uuid, gpu in self.gpus.items():
            for name, wish in gpu.wishes().items():
                speed = self._speed(gpu, name, jobs)
                if wish.measuring or wish.slice is not None:
                    plan.reasons[name] = Reason.MEASURED if wish.measuring else Reason.NEW_LAYOUT
                plan.assign[name] = Assignment((self._place(nodes[uuid], uuid, wish),), 0, speed)
                attempt = jobs[name].attempt
                if attempt is not None and attempt.assignment.same_gpus(plan.assign[name]):
                    gpu.stays(name, attempt.n)
        for name, uuids in self._gangs.items():
            node = nodes[uuids[0]]
            part = len(uuids) / len(node.gpus)
            shares = tuple(GpuShare(uuid) for uuid in uuids)
            place = Place(node.name, shares, round(node.cpus * part, 3), int(node.memory_bytes * part))
            plan.assign[name] = Assignment((place,), 0, 1.0)

    def _place(self, node: NodeSpec, uuid: str, wish: Wish) -> Place:
        if mechanisms.find(self.mechanism).capabilities.instances:
            # A job that is alone has the instance of the whole GPU. Jobs that are being measured have it, too, and
            # share it under MPS.
            whole = str(self.gpus[uuid].geo.whole[0])
            limit = wish.limit if wish.measuring else None
            share = GpuShare(uuid, wish.share, self.mechanism, wish.slice or whole, None, limit)
        elif wish.limit >= 1 and not wish.measuring:
            share = GpuShare(uuid)
        else:
            share = GpuShare(uuid, wish.share, self.mechanism, wish.slice, None, wish.limit)
        part = wish.share / len(node.gpus)
        # rounded down, because the CPUs of all jobs together must not be more than the node has
        cpus = math.floor(node.cpus * part * 1000) / 1000
        return Place(node.name, (share,), cpus, int(node.memory_bytes * part))

    def _speed(self, gpu: MisoGpu, name: str, jobs: dict[str, Job]) -> float:
        """Estimated speed of a job relative to the whole GPU. While n jobs are measured, 1/n is assumed for each."""
        place = gpu.place[name]
        if gpu.measurement is not None:
            return round(1 / len(gpu.place), 6)
        if place is None:
            return 1.0
        return float(self._believed(gpu, [name], jobs)[0, gpu.geo.kinds.index(place.kind)])


def _attempts(gpu: MisoGpu, jobs: dict[str, Job]) -> dict[str, int]:
    """Return for each job of the GPU the number of its latest attempt (run of its processes), counted from 0; -1 if the
    job has never run.
    """
    found = {}
    for name in gpu.jobs:
        attempt = jobs[name].attempt
        found[name] = attempt.n if attempt is not None else jobs[name].n - 1
    return found


def _geometry_of(gpu: NodeGpu) -> Geometry:
    try:
        return geometry(gpu.model)
    except InputError:
        return geometry(STANDS_IN, double_memory=False)


def _placement(text: str | None) -> Placement | None:
    """The placement of a share's slice; None if the share has no slice, or has a MIG instance that another planner
    chose."""
    return parse_placement(text) if text is not None and "@" in text else None


def _allowed(geo: Geometry, spec: JobSpec) -> np.ndarray:
    """For each kind of slice, whether it has at least the compute and memory of the smallest one that the job accepts.
    None has if that one does not exist on this GPU model.
    """
    if spec.slice is None:
        return np.ones(len(geo.kinds), dtype=bool)
    try:
        least = geo.every[kind_of(geo, spec.slice)]
    except InputError:
        return np.zeros(len(geo.kinds), dtype=bool)
    return np.array(
        [p.compute >= least.compute and p.memory_slots >= least.memory_slots for p in geo.profiles.values()]
    )
