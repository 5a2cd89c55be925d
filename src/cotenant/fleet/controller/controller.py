"""The controller's loop, in a single thread: observe, snapshot, policy, plan, apply. A change of a job's state is
stored before the controller acts on it.

A step sends the previous step's orders together with a request for reports, records the answers in the job table,
decides if a round begins, commits the changes, and only then creates new orders. If the controller is killed at any
point, the next one finds the job table in the store and the jobs on their nodes.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cotenant.core.errors import InputError, WorkError
from cotenant.core.events import Kind, Reason
from cotenant.fleet.controller.apply import Applier, resumes
from cotenant.fleet.controller.clock import FleetClock
from cotenant.fleet.controller.counts import Counts
from cotenant.fleet.controller.inbox import Inbox
from cotenant.fleet.controller.intake import admit
from cotenant.fleet.controller.job_table import JobTable, ask_stop, holds_gpus
from cotenant.fleet.controller.leases import Leases
from cotenant.fleet.controller.planners import FleetPlan, Planner, View
from cotenant.fleet.controller.reports import ReportIngest
from cotenant.fleet.controller.rounds import round_row
from cotenant.fleet.executors.base import Executor
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.noderuntime.tenancy import can_park
from cotenant.fleet.nodes import NodeSpec, by_number
from cotenant.fleet.state import CANCELLED, Job
from cotenant.fleet.store.database import StoreError
from cotenant.fleet.store.jobs import Lock, Store, take_lock

LOG = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.05  # interval between two polls of the nodes while there are few attempts to run jobs
POLL_MANY_S = 0.2  # interval between two polls if there are MANY attempts or more
POLL_IDLE_S = 1.0
MANY = 64
FAULT_PAUSE_S = 1.0
DRAIN_MARGIN_S = 1.0
MOST_QUEUED = 1_000_000


@dataclass(frozen=True)
class ControllerOptions:
    """Options of the controller. Times in seconds (docs/howto/fleet.md).

    `lease_s`: length of a round; `keep_s`: how long jobs continue without a controller, and how long the controller
    waits for an unresponsive node; `early`: GPUs that become free are also assigned between rounds.
    """

    folder: Path
    lease_s: float = 300.0
    keep_s: float = 120.0
    grace_s: float = 30.0
    early: bool = True
    monotonic_ns: Callable[[], int] = time.monotonic_ns


class Controller:
    """One run of the controller. `run()` returns after `stop()`; other threads use `call`."""

    def __init__(
        self, options: ControllerOptions, executor: Executor, planner: Planner, lock: Lock | None = None
    ) -> None:
        """Load the folder's job table. Takes the folder's lock, unless `lock` is given; raises WorkError if another
        controller holds it."""
        self.options, self.executor, self.planner = options, executor, planner
        self.lock = lock or take_lock(options.folder)
        try:
            self.store = Store(options.folder, database=self.lock.database)
            self.epoch = int(self.store.meta("epoch") or 0) + 1
            self.store.set_meta("epoch", str(self.epoch))
            self.store.commit()
        except BaseException:
            self.lock.release()
            raise
        self.clock = FleetClock(self.store, options.monotonic_ns)
        self.table = JobTable(self.store)
        self.counts = Counts()
        self.ingest = ReportIngest(self.table, options.grace_s, self.counts)
        self.parks: dict[str, bool] = {}
        self.can_park = can_park
        self.applier = Applier(self.table, options.grace_s, options.folder, self.parks)
        self.nodes: dict[str, NodeSpec] = {}
        self.known: dict[str, NodeSpec] = {}  # all nodes that this controller has ever seen
        self.node_ns: dict[str, int] = {}  # node -> the time that its monotonic clock had in its latest report
        self.leases = Leases(options.lease_s, options.keep_s)
        self.fault, self.planner_fault = "", ""
        self._next_tick = 0
        self._fill = False
        self._inbox = Inbox()
        self._stopping = self._replaced = False
        self._draining_until: float | None = None

    # -- for other threads -----------------------------------------------------------------------------------------

    def call(self, work: Callable[[], T], timeout_s: float = 60.0) -> T:
        """Execute `work` in the controller's thread, between two steps, and return its result."""
        return self._inbox.call(work, timeout_s)

    def stop(self) -> None:
        """End the controller's loop soon; jobs continue until their leases end."""
        self._stopping = True
        self._inbox.wake()

    # -- for answers (in the controller's thread) ------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """See answers.Fleet."""
        options = self.options
        return {
            "folder": str(options.folder), "executor": self.executor.name, "policy": self.planner.describe(),
            "lease_s": options.lease_s, "keep_s": options.keep_s,
        }  # fmt: skip

    def faults(self) -> list[str]:
        """See answers.Fleet."""
        return [text for text in (self.fault, self.planner_fault, self.planner.fault(), self.executor.fault()) if text]

    # -- orders of users (in the controller's thread) --------------------------------------------------------------

    def submit(self, specs: list[JobSpec], arrivals_s: list[float] | None = None) -> list[str]:
        """Queue jobs, store them durably, and return their ids. `arrivals_s`: fleet times, None: now."""
        if len(self.table.jobs) + len(specs) > MOST_QUEUED:
            raise WorkError(f"the queue is full: it holds {len(self.table.jobs):,} jobs")
        if self._draining_until is not None:
            raise WorkError("the fleet is being stopped")
        now_s = self.clock.now_s()
        specs = admit(specs, self.table.jobs.values(), self.planner, self.known.values(), self.options.folder, now_s)
        arrivals = arrivals_s or [now_s] * len(specs)
        jobs = self.table.add(zip(specs, (max(0.0, t) for t in arrivals), strict=True))
        self._fill = self._fill or self.options.early
        return [job.id for job in jobs]

    def cancel(self, job_id: str, *, flush: bool = True) -> str:
        """Cancel a job; returns its state, cancelled or stopping. Without `flush`, the caller must make the change
        durable."""
        job = self.find(job_id)
        now_s = self.clock.now_s()
        job.cancel, job.target = True, None
        self.table.touch(job)
        if job.attempt is not None:
            ask_stop(self.table, job, "cancel", now_s, job.grace_s(self.options.grace_s), int(Reason.CANCELLED))
            state = "stopping"
        else:
            if not job.arrived:
                self._arrive(job, now_s)
            self.table.tell(now_s, job, Kind.REJECT, Reason.CANCELLED)
            self.table.over_with(job, CANCELLED, now_s)
            state = CANCELLED
        if flush:
            self.table.flush()
        return state

    def find(self, job_id: str) -> Job:
        """The unfinished job with that id. Raises InputError if there is none."""
        job = self.table.jobs.get(job_id)
        if job is None:
            found = self.store.rows("SELECT state FROM jobs WHERE id=?", (job_id,))
            why = f"job {job_id!r} is {found[0][0]} already" if found else f"there is no job {job_id!r}"
            raise InputError(why, field="ID")
        return job

    def begin(self) -> None:
        """Start the clock that measures the fleet's time."""
        self.clock.begin()
        self.store.commit()

    def drain(self, within_s: float) -> None:
        """Checkpoint and stop every job, then end the loop; the jobs continue when the fleet is started again."""
        self._draining_until = self.options.monotonic_ns() / 1e9 + within_s
        now_s = self.clock.now_s()
        for job in self.table.running():
            grace_s = min(within_s, job.grace_s(self.options.grace_s))
            ask_stop(self.table, job, "shutdown", now_s, grace_s, int(Reason.TAKEN_DOWN))
        for job in self.table.jobs.values():
            job.target = None
        self.table.flush()

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Run the controller's loop until it is stopped."""
        try:
            self.step()
            ready()
            while not self._stopping:
                self._inbox.serve(self._patience_s())
                self.step()
                if self._draining_until is not None:
                    late = self.options.monotonic_ns() / 1e9 > self._draining_until + DRAIN_MARGIN_S
                    if late or not self.table.running():
                        break
        finally:
            self.close()

    def close(self) -> None:
        """Release all resources of the controller; jobs continue. If another controller has taken over, the executor's
        processes on nodes keep running for that controller; otherwise they are ended.
        """
        self._inbox.close()
        try:
            self.clock.save()
            self.store.commit()
        except WorkError as error:
            self._replaced |= not isinstance(error, StoreError)
        (self.executor.close if self._replaced else self.executor.shutdown)()
        self.store.close()
        self.lock.release()

    def _patience_s(self) -> float:
        if self.fault:
            return FAULT_PAUSE_S
        if any(orders for name, orders in self.table.orders.items() if name in self.nodes):
            return 0.0
        running = len(self.table.running())
        open_ = bool(self.table.jobs)
        wait_s = (POLL_MANY_S if running > MANY else POLL_S) if running else POLL_IDLE_S
        if self._fill:
            wait_s = min(wait_s, 0.02)
        if self.clock.runs and open_:
            wait_s = min(wait_s, self._next_tick * self.options.lease_s - self.clock.now_s())
        return max(0.0, wait_s)

    def step(self) -> None:
        """One iteration of the loop. If the store cannot be written, running jobs continue and leases are extended."""
        try:
            self._observe()
            if self.fault:  # the disk with the store was full, so test whether it accepts writes again
                self.clock.save()
                self.store.commit()
            if self.clock.runs:
                self._admit()
                self._decide()
                if self._draining_until is None:
                    self.applier.start_ready(self.nodes, self.node_ns, self.leases, self.clock.now_s(),
                                             self._port)  # fmt: skip
            self.table.flush()
            if self.fault:
                LOG.info("the store can be written again")
            self.fault = ""
        except StoreError as error:
            if not self.fault:
                more = "running jobs continue, but no job is started or accepted until the store can be written again"
                LOG.error(f"{error}; {more}")
            self.fault = str(error)
            self.table.load()

    # -- observe ---------------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        self.nodes = dict(self.executor.members())
        for name, node in self.nodes.items():
            if name not in self.known:
                self.parks[name] = self.can_park(node)
                self._fill = self._fill or self.options.early
            self.known[name] = node
        orders = {name: list(self.table.orders.pop(name, [])) for name in self.nodes}
        here: defaultdict[str, list[Job]] = defaultdict(list)
        for job in self.table.running():
            for place in job.attempt.nodes if job.attempt else ():
                here[place].append(job)
        now_s, may = self.clock.now_s(), self.store.may_extend
        self.leases.extend(orders, here, self.node_ns, now_s, self.options.monotonic_ns() / 1e9, may)
        answers = self.executor.exchange(self.epoch, orders)
        now_s = self.clock.now_s()
        for name, answer in answers.items():
            if answer is None:
                self.nodes.pop(name, None)
                self.node_ns.pop(name, None)
            elif answer["refused"] is not None:
                self._replaced = True
                raise WorkError(f"node {name} follows a newer controller: this one stops")
            else:
                self.node_ns[name] = answer["now_ns"]
                self.ingest.answer(name, orders[name], answer, here[name], now_s)
        for name, jobs in here.items():
            if name not in self.nodes:
                self._unreachable(name, jobs, now_s)
        # after a crash the job is placed again at once, even if other jobs wait for the next round
        if self.ingest.failed or (self.ingest.freed and self.options.early):
            self._fill = True
        self.ingest.failed = self.ingest.freed = False

    def _unreachable(self, name: str, jobs: list[Job], now_s: float) -> None:
        """Handle the jobs of nodes that do not answer. A job may still run on an unresponsive node until its lease and
        grace time have ended.
        """
        for job in jobs:
            if self.leases.surely_over(name, job.grace_s(self.options.grace_s), now_s):
                self.ingest.lost_node(name, job, now_s)

    # -- decide ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit jobs whose arrival time has come. If the option `early` is off, they are admitted at the first round
        after that time.
        """
        now_s = self.clock.now_s()
        for job in self.table.jobs.values():
            if job.arrived:
                continue
            if job.arrival_s > now_s:
                break  # the list of jobs is ordered by arrival, so no later job has arrived either
            self._arrive(job, job.arrival_s)
            self._fill = self._fill or self.options.early

    def _arrive(self, job: Job, at_s: float) -> None:
        job.arrived = True
        self.table.tell(at_s, job, Kind.ARRIVE, Reason.NONE)
        self.table.touch(job)

    def _decide(self) -> None:
        now_s, lease_s = self.clock.now_s(), self.options.lease_s
        held = self.ingest.held_until_s
        for job_id in [name for name, until_s in held.items() if until_s <= now_s]:
            del held[job_id]
            self._fill = True
        tick = int(now_s / lease_s + 1e-9)
        if tick >= self._next_tick:
            self._next_tick = tick + 1
            if self.table.jobs:
                self._round(tick * lease_s, early=False)
            self._fill = False
        elif self._fill and not any(job.target is not None for job in self.table.jobs.values()):
            self._fill = False
            if self.table.waiting():
                self._round(now_s, early=True)

    def _round(self, at_s: float, *, early: bool) -> None:
        if self._draining_until is not None:
            return
        now_s = self.clock.now_s()
        held = self.ingest.held_until_s
        jobs = tuple(
            j for j in self.table.jobs.values()
            if j.arrived and not j.cancel and j.arrival_s <= (now_s if early else at_s + 1e-9)
            and j.id not in held
            and (j.attempt is None or all(node in self.nodes for node in j.attempt.nodes))
        )  # fmt: skip
        pinned = frozenset(job.id for job in jobs if self._is_pinned(job, now_s))
        nodes = tuple(self.nodes[name] for name in sorted(self.nodes, key=by_number))
        mine = {job.id for job in jobs}
        others = (job.attempt for job in self.table.running() if job.id not in mine)
        kept = tuple(attempt.assignment for attempt in others if attempt is not None and holds_gpus(attempt))
        view = View(at_s, nodes, jobs, early, pinned, kept)
        started = time.perf_counter()
        try:
            plan = self.planner.plan(view)
            self.planner_fault = ""
        except Exception as error:  # an exception in a policy must not affect jobs that run already
            text = f"planner failed: {str(error) or repr(error)}; allocations unchanged"
            if text != self.planner_fault:
                LOG.error(text)
            self.planner_fault = text
            return
        self.counts.decided(time.perf_counter() - started)
        self._apply(plan, view, now_s, early)

    def _is_pinned(self, job: Job, now_s: float) -> bool:
        """Whether a job that cannot save its work, and has lost it r times, has run for less than 2^r rounds. Such a
        job is kept running: otherwise jobs that take turns would start over for ever.
        """
        attempt = job.attempt
        if attempt is None or attempt.progress is not None or attempt.started_s is None:
            return False
        lost = attempt.n - job.failures - job.losses
        saves = all(self.parks.get(node) for node in attempt.nodes)
        return lost > 0 and not saves and now_s - attempt.started_s < self.options.lease_s * 2.0 ** min(lost, 30)

    def _apply(self, plan: FleetPlan, view: View, now_s: float, early: bool) -> None:
        given = [(job, plan.assign[job.id]) for job in view.jobs if job.id in plan.assign]
        if early and not any(job.attempt is None or resumes(job, target) for job, target in given):
            return
        self.applier.plan(plan, view.jobs, now_s, early=early)
        for job in self.table.running():
            self.table.touch(job)  # store how much of its work the job has done by now
        self.store.add_round(round_row(view, plan, self.counts.last_decision_s))
        self.clock.save()

    def _port(self, node: str) -> int:
        """A free port on a node, for a gang's rendezvous; 0 if the node does not answer."""
        answer = self.executor.exchange(self.epoch, {node: [{"do": "port"}]}).get(node)
        if not answer or answer["refused"] is not None:
            return 0
        return int(answer["results"][0].get("port", 0))
