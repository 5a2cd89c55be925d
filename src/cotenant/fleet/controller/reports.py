"""Report ingest: applies nodes' reports to the job table: starts, progress, ends, and their consequences."""

from __future__ import annotations

from typing import Any

from cotenant.core.events import Kind, Reason
from cotenant.fleet.controller.counts import Counts
from cotenant.fleet.controller.job_table import JobTable, ask_stop
from cotenant.fleet.noderuntime import attempt as pages
from cotenant.fleet.state import (
    CANCELLED,
    ENDED,
    FAILED,
    FINISHED,
    PARKED,
    STARTING,
    STOPPING,
    UP,
    WAITING,
    Attempt,
    Job,
)
from cotenant.training.contract import PREEMPTED_EXIT

BACK_OFF_MOST_S = 60.0


class ReportIngest:
    """Applies nodes' answers to the job table. `freed`: whether GPUs were released; `failed`: whether that was because
    a job failed or was lost.
    """

    def __init__(self, table: JobTable, grace_s: float, counts: Counts) -> None:
        self.table, self.grace_s, self.counts = table, grace_s, counts
        self.freed = self.failed = False
        self.held_until_s: dict[str, float] = {}  # job -> time before which a lost job is not restarted

    def answer(
        self, node: str, sent: list[dict[str, Any]], answer: dict[str, Any], here: list[Job], now_s: float
    ) -> None:
        """Apply one node's answer to the orders `sent`. `here`: the jobs that run on this node according to the job
        table."""
        for order, result in zip(sent, answer["results"], strict=False):
            if "error" in result:
                self._refused(node, order, str(result["error"]), now_s)
        seen = set()
        forget: list[str] = []
        for report in answer["reports"]:
            name = report["attempt"]
            job_id, _, n = name.rpartition(".")
            job = self.table.jobs.get(job_id)
            if job is None or job.attempt is None or str(job.attempt.n) != n:
                self._stranger(node, report, forget)
                continue
            seen.add(job_id)
            self._report(node, job, job.attempt, report, answer["now_ns"], now_s)
        if forget:
            self.table.orders[node].append({"do": "forget", "attempts": forget})
        for job in here:
            attempt = job.attempt
            if attempt is not None and node in attempt.nodes and job.id not in seen and node not in attempt.ended:
                # the orders for the job were sent before this answer, so a job that the answer lacks does not exist on
                # the node
                error = "the node has no record of the job" if node in attempt.up else "the node never started the job"
                self._part_ended(node, job, attempt, pages.lost_exit(error), now_s)

    def _stranger(self, node: str, report: dict[str, Any], forget: list[str]) -> None:
        """Handle an attempt that is not, or no longer, in the job table."""
        if report["phase"] == pages.ENDED:
            forget.append(report["attempt"])
        elif report["phase"] != pages.STOPPING:
            order = {"do": "stop", "attempt": report["attempt"], "why": "cancel", "grace_s": 0.0}
            self.table.orders[node].append(order)

    def _refused(self, node: str, order: dict[str, Any], error: str, now_s: float) -> None:
        """Handle an order that the node could not execute."""
        job_id, _, n = str(order.get("attempt", "")).rpartition(".")
        job = self.table.jobs.get(job_id)
        if job is None or job.attempt is None or str(job.attempt.n) != n:
            return
        if order["do"] == "start":
            self._part_ended(node, job, job.attempt, pages.lost_exit(error), now_s)
        elif order["do"] in ("park", "resume"):
            # the order failed: a job that cannot be parked is stopped, and a job that cannot be resumed is restarted
            job.attempt.phase, job.attempt.stop_why = UP, ""
            ask_stop(self.table, job, "preempt", now_s, job.grace_s(self.grace_s), job.target_reason)

    def _report(
        self, node: str, job: Job, attempt: Attempt, report: dict[str, Any], node_ns: int, now_s: float
    ) -> None:
        # Times of a node are converted to the fleet's clock, which stands still between two controllers if the machine
        # reboots or the second one is on another machine. No time of an attempt may precede one that is known already.
        known_s = max(attempt.created_s, attempt.counted_s, attempt.started_s or 0.0)

        def fleet_s(at_ns: int) -> float:
            return max(known_s, min(now_s, now_s - (node_ns - at_ns) / 1e9)) if at_ns else now_s

        if report["progress"] is not None:
            attempt.progress = report["progress"]
            fraction = attempt.progress.get("fraction")
            if isinstance(fraction, int | float) and 0 <= fraction <= 1:
                job.done = float(fraction)
        if report["started_ns"] and node not in attempt.up:
            attempt.up.add(node)
            if len(attempt.up) == len(attempt.nodes) and attempt.started_s is None:
                self._started(job, attempt, fleet_s(report["started_ns"]))
        if report["phase"] == pages.ENDED and node not in attempt.ended:
            self._part_ended(node, job, attempt, report["exit"] or {}, fleet_s(report["ended_ns"]))
        elif report["phase"] == pages.STOPPING and attempt.phase in (STARTING, UP, PARKED):
            attempt.phase, attempt.stop_s = STOPPING, now_s  # the job's lease ended before the controller extended it
            attempt.stop_why = "lease"
            self.table.touch(job)
        else:
            self._repeat(node, job, attempt, report, now_s)
        self._credit(job, attempt, now_s)

    def _repeat(self, node: str, job: Job, attempt: Attempt, report: dict[str, Any], now_s: float) -> None:
        """Send an order again if the node's report shows that the order has not reached it. An order is lost if the
        node or the controller is down.
        """
        orders = self.table.orders[node]
        if report["phase"] == pages.ENDED:
            return
        if attempt.phase == STOPPING and attempt.stop_why == "park":
            self._parking(node, job, attempt, bool(report["parked"]), now_s)
        elif attempt.phase == STOPPING and not report["stop"]:
            why, grace_s = attempt.stop_why, job.grace_s(self.grace_s)
            orders.append({"do": "stop", "attempt": job.attempt_id(), "why": why, "grace_s": grace_s})
        elif attempt.phase == UP and report["parked"]:
            orders.append({"do": "resume", "attempt": job.attempt_id()})
        elif attempt.phase in (STARTING, UP):
            place = next(p for p in attempt.assignment.places if p.node == node)
            if (report["cpus"], report["memory_bytes"]) != (place.cpus, place.memory_bytes):
                orders.append(
                    {"do": "resize", "attempt": job.attempt_id(), "cpus": place.cpus,
                     "memory_bytes": place.memory_bytes}
                )  # fmt: skip

    def _parking(self, node: str, job: Job, attempt: Attempt, parked: bool, now_s: float) -> None:
        # the controller was killed after it had committed that the job is to be parked; it may not have sent the order
        if not parked:
            self.table.orders[node].append({"do": "park", "attempt": job.attempt_id()})
            return
        attempt.off_on.add(node)
        if len(attempt.off_on) < len(attempt.nodes):
            return
        self._credit(job, attempt, now_s)
        attempt.phase, attempt.stop_why, attempt.stop_s, attempt.off = PARKED, "", None, True
        self.table.tell(now_s, job, Kind.PREEMPT, job.target_reason)
        self.table.touch(job)

    def _started(self, job: Job, attempt: Attempt, at_s: float) -> None:
        if attempt.phase == STARTING:
            attempt.phase = UP
        # an attempt to run a job holds its GPUs from its creation on, so its time counts from its creation
        attempt.started_s, attempt.counted_s = at_s, attempt.created_s
        kind = Kind.START if job.first_start_s is None else Kind.RESUME
        if job.first_start_s is None:
            job.first_start_s = at_s
            self.counts.waits.observe(max(0.0, at_s - job.arrival_s))
        job.told = -1
        self.table.tell(at_s, job, kind, job.target_reason, attempt.assignment)
        self.table.touch(job)

    def _credit(self, job: Job, attempt: Attempt, now_s: float) -> None:
        """Add the run time of a job since its last update."""
        if attempt.started_s is None or attempt.off or attempt.ended_s is not None:
            return
        passed_s = max(0.0, now_s - attempt.counted_s)
        attempt.counted_s = max(attempt.counted_s, now_s)
        job.attained_s += passed_s
        job.last_run_s = now_s
        alone_s = job.isolated_s
        if attempt.progress is None and alone_s:
            job.done = min(1.0, job.done + passed_s * attempt.assignment.speed / alone_s)

    # -- ends ------------------------------------------------------------------------------------------------------

    def _part_ended(self, node: str, job: Job, attempt: Attempt, exit_: dict[str, Any], at_s: float) -> None:
        """Record that an attempt's processes on one node have ended, and stop the attempt's processes on all other
        nodes.
        """
        attempt.ended[node] = exit_
        attempt.ended_s = at_s if attempt.ended_s is None else max(attempt.ended_s, at_s)
        self.table.touch(job)
        if len(attempt.ended) == len(attempt.nodes):
            self.conclude(job, attempt)
        elif exit_.get("code", 1) != 0 and not exit_.get("asked"):
            ask_stop(self.table, job, "gang", at_s, min(5.0, job.grace_s(self.grace_s)))

    def lost_node(self, node: str, job: Job, now_s: float) -> None:
        """Mark a node as lost: the node does not answer, and all leases of jobs on it have ended."""
        if job.attempt is not None and node not in job.attempt.ended:
            self._part_ended(node, job, job.attempt, pages.lost_exit(f"node {node} was lost"), now_s)

    def conclude(self, job: Job, attempt: Attempt) -> None:
        """Finish, restart or requeue a job, since all processes of its attempt have ended."""
        end_s = attempt.ended_s or 0.0
        was_up = attempt.started_s is not None and not attempt.off
        if was_up:
            job.attained_s += max(0.0, end_s - attempt.counted_s)
            job.last_run_s = end_s
        attached = attempt.progress is not None
        exit_ = _decisive(attempt)
        asked = bool(attempt.stop_why and attempt.stop_why != "gang") or bool(exit_.get("asked"))
        code = int(exit_.get("code", 1))
        attempt.phase = ENDED
        job.exit = exit_
        self.freed = True
        if code == 0 and (attached or not exit_.get("asked")):
            job.done = 1.0
            self._close(job, FINISHED, end_s, Kind.FINISH, Reason.DONE, was_up)
        elif job.cancel:
            self._close(job, CANCELLED, end_s, Kind.REJECT, Reason.CANCELLED, was_up)
        elif exit_.get("lost") or (code == PREEMPTED_EXIT and not asked):
            job.losses += 1
            self.held_until_s[job.id] = end_s + min(BACK_OFF_MOST_S, 0.25 * 2.0 ** min(job.losses, 12))
            self._again(job, attempt, end_s, Reason.LOST, was_up)
            self.failed = True
        elif asked and (not attached or code in (0, PREEMPTED_EXIT, 137, 143)):
            self._again(job, attempt, end_s, _why_stopped(job, exit_, code), was_up)
        else:
            self.failed = True
            job.failures += 1
            if job.failures > job.spec.retries:
                self._close(job, FAILED, end_s, Kind.REJECT, Reason.FAILED, was_up)
            else:
                self._again(job, attempt, end_s, Reason.FAILED, was_up)

    def _close(self, job: Job, state: str, end_s: float, kind: Kind, reason: Reason, was_up: bool) -> None:
        if kind != Kind.FINISH and was_up:
            self.table.tell(end_s, job, Kind.PREEMPT, reason)
        self.table.tell(end_s, job, kind, reason)
        self.table.over_with(job, state, end_s)

    def _again(self, job: Job, attempt: Attempt, end_s: float, reason: Reason, was_up: bool) -> None:
        """Requeue the job with the progress of its last checkpoint."""
        if was_up:
            self.table.tell(end_s, job, Kind.PREEMPT, reason)
        if reason == Reason.LOST:
            job.target = None
        job.done = _saved(attempt)
        job.state = WAITING
        job.told = -1
        self.table.touch(job)
        job.attempt = None


def _why_stopped(job: Job, exit_: dict[str, Any], code: int) -> Reason:
    """Return why a job that was asked to stop lost its GPUs; KILLED or UNSAVED if it also lost work."""
    if exit_.get("killed"):
        return Reason.KILLED
    reason = Reason(job.target_reason)
    return Reason.UNSAVED if code in (137, 143) and reason != Reason.TAKEN_DOWN else reason


def _decisive(attempt: Attempt) -> dict[str, Any]:
    """The exit that decides how an attempt ended: a failure before any stop was requested, else a loss, else any
    nonzero exit, else any exit."""

    def rank(exit_: dict[str, Any]) -> int:
        code, asked = int(exit_.get("code", 1)), bool(exit_.get("asked"))
        if exit_.get("lost"):
            return 1
        if code != 0 and not asked:
            return 0
        return 2 if code != 0 else 3

    return min((attempt.ended[node] for node in attempt.nodes), key=rank)


def _saved(attempt: Attempt) -> float:
    """Return the fraction of a job's work that is in its checkpoint; 0 for a job that reports none."""
    told = attempt.progress or {}
    step, total = told.get("checkpoint_step"), told.get("total_steps")
    if isinstance(step, int) and isinstance(total, int) and total > 0:
        return min(1.0, step / total)
    return 0.0
