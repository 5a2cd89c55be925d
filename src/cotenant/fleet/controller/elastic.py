"""Elastic policies for the fleet: a running job gets more, fewer or other GPUs, through its checkpoint and a restart.

The decisions are those of the simulator, by the same policy objects (policy.elastic). This planner gives a policy its
view of the fleet, and chooses the GPUs for the configurations (GPU model and number of GPUs) that the policy returns.
The policy's own counts (time run by GPU model, the most GPUs that a job ever had) are lost when the controller ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.events import Reason
from cotenant.core.gpus import find_gpu
from cotenant.fleet.controller.gpuchoice import GpuChooser
from cotenant.fleet.controller.planners import FleetPlan, View
from cotenant.fleet.controller.profiles import UNKNOWN_LENGTH_S
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import NodeSpec
from cotenant.fleet.state import PARKED, STOPPING, Assignment, Job, Place
from cotenant.policy.elastic import view as elastic
from cotenant.policy.elastic.registry import find_elastic
from cotenant.policy.elastic.view import NONE, Configurations
from cotenant.profiles.training.elastic import ElasticModel, ElasticProfiles, load_elastic

SOLVER_LIMIT_S = 1.0


class ElasticBook:
    """Finds a job's elastic profile, which states its speed for each GPU model and number of GPUs: in the job's profile
    file if the job has one, else in `shared`, the fleet's set of profiles, by the name of the job's model. `default`:
    name of the profile for models that `shared` lacks.
    """

    def __init__(self, shared: ElasticProfiles, default: str | None = None) -> None:
        if default is not None and default not in shared.models:
            known = ", ".join(shared.models)
            raise InputError(f"no profile named {default!r}; known: {known}", field="default-profile")
        self.shared, self.default = shared, default
        self._found: dict[tuple[str | None, str], ElasticModel] = {}

    def model(self, spec: JobSpec) -> ElasticModel:
        """Return the elastic profile of a job. Raises InputError if it has none."""
        key = (spec.profile, spec.model)
        if key not in self._found:
            self._found[key] = self._find(spec)
        return self._found[key]

    def _find(self, spec: JobSpec) -> ElasticModel:
        models = self.shared.models if spec.profile is None else load_elastic(spec.profile).models
        name = spec.model
        if spec.profile is not None and not name:
            name = next(iter(models))
        if name not in models and spec.profile is None and self.default is not None:
            name = self.default
        if name not in models:
            known = ", ".join(models)
            raise InputError(
                f"{name!r} has no elastic profile; known: {known}; or give a profile file", field="model"
            )
        return models[name]


class ElasticPlanner:
    """A Planner that uses the elastic policy named `policy`. `profiles`: a set or file of elastic profiles, for jobs
    that state a model but have no profile file (default: the set that belongs to the policy). `default`: name of the
    profile for models that `profiles` lacks."""

    def __init__(self, policy: str, profiles: str | None = None, default: str | None = None) -> None:
        self.name, self.entry = policy, find_elastic(policy)
        if self.entry.packs:
            raise InputError(f"policy {policy} packs two jobs on a GPU, which a fleet does not support", field="policy")
        self.policy = self.entry.make(SOLVER_LIMIT_S)
        self.book = ElasticBook(load_elastic(profiles or self.entry.profiles), default)
        self._most: dict[str, int] = {}
        self._received_s: dict[str, dict[str, float]] = {}  # job -> GPU model -> seconds that the job has run on it
        self._counted_s: dict[str, float] = {}
        self._lost: dict[str, str] = {}  # job -> what is wrong with its profile, so that it cannot be planned
        self._models: list[str] = []  # the GPU models that the cluster has had, those without a node now included

    # ---- Planner

    def describe(self) -> dict[str, Any]:
        return {"label": self.name, "policy": self.name, "elastic_profiles": self.book.shared.name}

    def fault(self) -> str:
        lost = "; ".join(self._lost.values())
        return f"jobs wait because their profiles cannot be used: {lost}" if lost else ""

    def warm_up(self) -> None:
        """See Planner. Elastic policies have no compiled code, so nothing is done."""

    def check(self, job: Job, nodes: Iterable[NodeSpec]) -> None:
        spec = job.spec
        if spec.shared:
            raise InputError(
                f"policy {self.name} assigns only whole GPUs; request neither a fraction nor a slice",
                field="gpus" if spec.slice is None else "slice",
            )
        model, room = self.book.model(spec), _room(tuple(nodes))
        if not room:
            return  # no node has answered yet, so there is no GPU to plan for
        can = [
            (gpu, n) for gpu, most in room.items() for n in model.rate.get(gpu, ())
            if n <= most and (n == spec.gpus or not self.entry.rigid)
        ]  # fmt: skip
        if not can:
            measured = ", ".join(f"{'/'.join(map(str, sorted(by)))} x {gpu}" for gpu, by in model.rate.items())
            there = ", ".join(f"{most} x {gpu}" for gpu, most in room.items())
            raise InputError(
                f"the fleet ({there}) has none of the models and numbers of GPUs on which profile {model.name} was "
                f"measured ({measured})"
                + (f"; policy {self.name} runs this job on exactly {spec.gpus:g} GPUs" if self.entry.rigid else ""),
                field="gpus",
            )
        price = self.book.shared.price
        lacking = [gpu for gpu, _ in can if gpu not in price]
        if self.entry.needs_price and lacking:
            raise InputError(f"policy {self.name} needs a price of {lacking[0]} in the profiles", field="policy")

    def plan(self, view: View) -> FleetPlan:
        plan, nodes = FleetPlan(), tuple(node for node in view.nodes if node.plain_gpus)
        self._count(view.jobs, nodes)
        fixed = [job for job in view.jobs if _holds(job) and (view.early or job.id in view.pinned)]
        stays = [(job, job.attempt.assignment) for job in fixed if job.attempt is not None]
        plan.assign |= {job.id: held for job, held in stays}
        taken = [*view.held, *(held for _, held in stays)]
        jobs = [job for job in view.jobs if job.id not in plan.assign and self._known(job)]
        plan.waiting |= {job.id: Reason.NOT_CHOSEN for job in view.jobs if job.id not in plan.assign}
        room = _room(nodes) - _held(taken, nodes)
        self._remember(room)
        options = self._configurations(jobs, room)
        if not len(options.gpu):
            return plan
        decided = self.policy.decide(self._view(view, jobs, nodes, options))
        chosen = [(job, int(c)) for job, c in zip(jobs, decided.config, strict=True) if c != NONE]
        placed = self._place(chosen, options, nodes, view.nodes, taken)
        for job, c in chosen:
            if job.id in placed:
                plan.assign[job.id] = placed[job.id]
                plan.waiting.pop(job.id)
                self._most[job.id] = max(self._most.get(job.id, 0), int(options.count[c]))
            else:
                plan.waiting[job.id] = Reason.GPUS_FULL
        return plan

    # ---- input of the policy

    def _known(self, job: Job) -> bool:
        try:
            self.book.model(job.spec)
        except InputError as error:
            self._lost[job.id] = str(error)
            return False
        return True

    def _count(self, jobs: Sequence[Job], nodes: Sequence[NodeSpec]) -> None:
        """For each job that has GPUs, add the time for which it ran since the last view to the job's total on the GPU
        model that it uses, and update the largest number of GPUs that it has had. Forget ended jobs.
        """
        open_ = {job.id for job in jobs}
        books: tuple[dict[str, Any], ...] = (self._most, self._received_s, self._counted_s, self._lost)
        for book in books:
            for job_id in [name for name in book if name not in open_]:
                del book[job_id]
        for job in jobs:
            if job.attempt is None:
                continue
            received = self._received_s.setdefault(job.id, {})
            for gpu, count in _held([job.attempt.assignment], nodes).items():
                received[gpu] = received.get(gpu, 0.0) + job.attained_s - self._counted_s.get(job.id, 0.0)
                self._most[job.id] = max(self._most.get(job.id, 0), count)
            self._counted_s[job.id] = job.attained_s

    def _remember(self, room: Counter[str]) -> None:
        """Add the models in `room` to those of the cluster. The policy numbers the models and keeps figures for each
        (demand, time received) from round to round, so a new policy object replaces it if there is one more."""
        models = sorted({*self._models, *room})
        if models != self._models:
            self._models, self.policy = models, self.entry.make(SOLVER_LIMIT_S)

    def _configurations(self, jobs: Sequence[Job], room: Counter[str]) -> Configurations:
        """Every (GPU model, count) that a job's profile has and the fleet has room for; by model, then count."""
        models = self._models
        found = sorted({
            (g, n) for job in jobs for g, gpu in enumerate(models) for n in self.book.model(job.spec).rate.get(gpu, ())
            if n <= room[gpu]
        })  # fmt: skip
        price = np.array([self.book.shared.price.get(gpu, np.nan) for gpu in models])
        return Configurations(
            np.array([g for g, _ in found], np.int64), np.array([n for _, n in found], np.int64),
            np.array([room[gpu] for gpu in models], np.int64), price,
        )  # fmt: skip

    def _view(
        self, view: View, jobs: Sequence[Job], nodes: Sequence[NodeSpec], options: Configurations
    ) -> elastic.View:
        rate = np.array([self._rates(job, options) for job in jobs]).reshape(len(jobs), len(options.gpu))
        kinds: dict[tuple[Any, ...], int] = {}
        rows = zip(rate.tolist(), jobs, strict=True)
        kind = [kinds.setdefault((*row, job.spec.gpus), len(kinds)) for row, job in rows]
        restart = np.nan_to_num([self.book.model(job.spec).restart_s for job in jobs])
        received = [[self._received_s.get(job.id, {}).get(gpu, 0.0) for gpu in self._models] for job in jobs]
        return elastic.View(
            options=options,
            rate=rate,
            wants=np.array([int(job.spec.gpus) for job in jobs]),
            held=np.array([self._configuration(job, nodes, options) if _holds(job) else NONE for job in jobs]),
            most=np.array([self._most.get(job.id, 0) for job in jobs]),
            left=np.array([self._work(job) * (1.0 - min(job.done, 0.999999)) for job in jobs]),
            age_s=np.array([max(0.0, view.now_s - job.arrival_s) for job in jobs]),
            restarts=np.array([max(0, job.n - 1) for job in jobs]),
            restart_s=restart,
            received_s=np.array(received, np.float64).reshape(len(jobs), len(self._models)),
            priority=np.array([job.spec.priority for job in jobs]),
            kind=np.array(kind),
            job=np.array([job.row for job in jobs]),
            host=np.full(len(jobs), NONE),
        )  # fmt: skip

    def _rates(self, job: Job, options: Configurations) -> list[float]:
        by = self.book.model(job.spec).rate
        return [
            _now(by.get(self._models[g], {}).get(n), job) for g, n in zip(options.gpu, options.count, strict=True)
        ]

    def _configuration(self, job: Job, nodes: Sequence[NodeSpec], options: Configurations) -> int:
        """The configuration that a job holds, or held when it was parked (its memory was moved off the GPU); NONE if it
        waits or stops."""
        if job.attempt is None or job.attempt.phase == STOPPING:
            return NONE
        held = _held([job.attempt.assignment], nodes)
        for c, (g, n) in enumerate(zip(options.gpu.tolist(), options.count.tolist(), strict=True)):
            if held == {self._models[g]: n}:
                return c
        return NONE

    def _work(self, job: Job) -> float:
        """The whole work of a job, in the unit of its profile's rates."""
        spec, model = job.spec, self.book.model(job.spec)
        if spec.iterations is not None and spec.duration_s is None:
            return spec.iterations
        if spec.duration_s is None and model.work > 0:
            return model.work
        by = next(model.rate[gpu] for gpu in (*self._models, *model.rate) if model.rate.get(gpu))
        below = [n for n in by if n <= spec.gpus]
        rate = float(by[max(below) if below else min(by)].mean())
        return rate * (UNKNOWN_LENGTH_S if spec.duration_s is None else spec.duration_s)

    # ---- the policy's configurations as GPUs

    def _place(
        self, chosen: list[tuple[Job, int]], options: Configurations, nodes: Sequence[NodeSpec],
        everywhere: Sequence[NodeSpec], taken: Sequence[Assignment],
    ) -> dict[str, Assignment]:  # fmt: skip
        """Choose GPUs. Jobs that keep their configuration keep their GPUs; then the other jobs are placed, the largest
        gangs first. If a job finds no space that way, all jobs are placed again, the largest first, and those without
        space wait."""
        placed: dict[str, Assignment] = {}
        for keeps in (True, False):
            placed, chooser = {}, GpuChooser(everywhere)
            for held in taken:
                chooser.hold(held)
            for job, c in chosen:
                current = None if job.attempt is None else job.attempt.assignment
                same = current is not None and self._configuration(job, nodes, options) == c
                if keeps and same and current is not None and chooser.keep(current):
                    placed[job.id] = current
            for job, c in sorted(chosen, key=lambda x: (-int(options.count[x[1]]), x[0].row)):
                if job.id not in placed:
                    places = _gang(self._models[options.gpu[c]], int(options.count[c]), nodes, chooser)
                    if places is not None:
                        placed[job.id] = self._assignment(job, c, options, places)
            if len(placed) == len(chosen):
                break
        return placed

    def _assignment(self, job: Job, c: int, options: Configurations, places: tuple[Place, ...]) -> Assignment:
        model, gpu, count = self.book.model(job.spec), self._models[options.gpu[c]], int(options.count[c])
        alone = _now(next(iter(model.rate[gpu].values())), job)
        each = _now(model.batch.get(gpu, {}).get(count), job) / count
        return Assignment(
            places, speed=_now(model.rate[gpu][count], job) / alone, batch=count * max(1, round(each)) if each else 0
        )


def _now(phases: np.ndarray | None, job: Job) -> float:
    """The entry of `phases` for the present training phase of a job; 0 if `phases` is None."""
    return 0.0 if phases is None else float(phases[min(int(job.done * len(phases)), len(phases) - 1)])


def _holds(job: Job) -> bool:
    return job.attempt is not None and job.attempt.phase not in (PARKED, STOPPING)


def _name(node: NodeSpec) -> str:
    """Return the GPU model of a node, by the name that profiles use."""
    model = node.plain_gpus[0].model
    try:
        return find_gpu(model).name
    except InputError:
        return model


def _room(nodes: Sequence[NodeSpec]) -> Counter[str]:
    """Return the number of whole GPUs by GPU model."""
    found: Counter[str] = Counter()
    for node in nodes:
        if node.plain_gpus:
            found[_name(node)] += len(node.plain_gpus)
    return found


def _held(assignments: Iterable[Assignment], nodes: Sequence[NodeSpec]) -> Counter[str]:
    """Return the number of GPUs, by model, of which the given assignments hold any part."""
    names = {node.name: _name(node) for node in nodes}
    held = {(place.node, share.uuid) for held in assignments for place in held.places for share in place.gpus}
    return Counter(names[node] for node, _ in held if node in names)


def _gang(model: str, count: int, nodes: Sequence[NodeSpec], chooser: GpuChooser) -> tuple[Place, ...] | None:
    """Choose the fullest node that has space for the whole gang, else as few nodes as possible. None if there is not
    enough space."""
    free = {node.name: chooser.count_free(node.name) for node in nodes if _name(node) == model}
    by_name = {node.name: node for node in nodes}
    if sum(free.values()) < count:
        return None
    found, left = [], count
    while left:
        whole = [name for name in free if free[name] >= left]
        name = min(whole, key=free.__getitem__) if whole else max(free, key=free.__getitem__)
        n = min(left, free.pop(name))
        shares = chooser.choose(name, n, "")
        assert shares is not None
        node = by_name[name]
        part = n / len(node.gpus)
        found.append(Place(name, shares, round(node.cpus * part, 6), int(node.memory_bytes * part)))
        left -= n
    return tuple(found)
