"""Explains one job's history in sentences, from the record of its run alone."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cotenant.core.errors import InputError
from cotenant.core.events import Kind, Reason
from cotenant.core.metrics.summary import Analysis
from cotenant.core.record.record import Record
from cotenant.report.story import Happening, Step, tell
from cotenant.report.text import clock_text, join_words, metric_text, plural, ratio_text, time_text

_DIFF_AMONG = 20_000  # up to this many ids are compared by letters, to suggest a similar one


@dataclass
class Story:
    """The history of one job: facts, figures, events, and sentences."""

    job: str
    run: str
    #: facts about the job: gpus, model, tenant, priority, arrival_s, isolated_s, deadline_s, as far as known
    facts: dict[str, Any]
    #: figures of the job: finish_s, jct_s, queueing_s, running_s, slowdown, ftf_rho, preemptions, moves
    figures: dict[str, float | None]
    events: list[Happening]
    steps: list[Step] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Return a description of the job, such as "job7 under fifo + tune: res50, 4 GPUs, tenant vc1" for the job
        job7.
        """
        what = [str(self.facts["model"])] if self.facts.get("model") else []
        what.append(plural(self.facts["gpus"], "GPU"))
        if self.facts.get("tenant"):
            what.append(f"tenant {self.facts['tenant']}")
        return f"{self.job} under {self.run}: {', '.join(what)}"

    def lines(self) -> list[str]:
        """Return the job's history as lines of text: title, then time and sentence."""
        times = [clock_text(step.time_s) for step in self.steps]
        width = max((len(text) for text in times), default=0)
        return [self.title, *(f"  {at:>{width}}  {step.text}" for at, step in zip(times, self.steps, strict=True))]

    def to_dict(self) -> dict[str, Any]:
        """Return the job's history as plain data for JSON."""
        return {
            "job": self.job,
            "run": self.run,
            **self.facts,
            **self.figures,
            "story": [asdict(step) for step in self.steps],
            "events": [event.to_dict() for event in self.events],
        }


def explain(record: Record, job: str, every_event: bool = False) -> Story:
    """Return the history of the job with this id; `every_event`: do not combine events.

    Raises InputError for an id that the run does not have, with similar ones.
    """
    row = find_job(record, job)
    analysis = Analysis(record)
    jobs = analysis.jobs
    figures: dict[str, float | None] = {}
    for name in ("first_start_s", "finish_s", "jct_s", "queueing_s", "running_s", "slowdown", "ftf_rho"):
        value = float(getattr(jobs, name)[row])
        figures[name] = value if np.isfinite(value) else None
    figures["preemptions"] = int(jobs.preemptions[row])
    figures["moves"] = int(jobs.moves[row]) if record.info.placements else None
    story = Story(job, record.info.label, _facts(record, row), figures, happenings(record, row))
    end_s = record.end_s if figures["finish_s"] is None else figures["finish_s"]
    story.steps = tell(story.events, story.facts, end_s, rounds_at(record), every_event)
    story.steps.append(_ending(story, record))
    return story


def find_job(record: Record, job: str) -> int:
    """Return the row of a job id in the jobs table; InputError suggests similar ids."""
    ids = record.job("id")
    found = np.flatnonzero(ids == job)
    if len(found):
        return int(found[0])
    starts = [str(other) for other in ids if str(other).startswith(job) or str(other).endswith(job)][:3] if job else []
    near = starts or difflib.get_close_matches(job, [str(other) for other in ids[:_DIFF_AMONG]], n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {join_words(near, 'or')}?"
    elif len(ids):
        hint = f"its {plural(len(ids), 'job')} are named like {ids[0]}"
    else:
        hint = "it has no jobs"
    raise InputError(f"no job {job!r} in this run; {hint}", file=record.path, field="JOB")


def happenings(record: Record, row: int) -> list[Happening]:
    """Return the events of one job from the record."""
    found = []
    model_of = _gpu_models(record)
    for i in np.flatnonzero(record.events.job == row):
        where = None if record.placements is None else record.placements.at(int(i))
        events = record.events
        found.append(
            Happening(
                gpus=float(record.jobs["gpus"][row]),
                time_s=float(events.time_s[i]),
                kind=Kind(int(events.kind[i])),
                reason=Reason(int(events.reason[i])),
                cpus=float(events.cpu_milli[i]) / 1000,
                memory_bytes=float(events.memory_mb[i]) * 1e6,
                speed=float(events.speed[i]),
                where=where,
                gpu_model="/".join(dict.fromkeys(model_of[node] for node, _ in where or () if node in model_of)),
            )
        )
    return found


def _gpu_models(record: Record) -> dict[int, str]:
    """Return the GPU model of each node; empty if the cluster has only one model. The record lists models only of nodes
    with GPUs, so nodes cannot be told apart if some have none."""
    names, of = record.info.cluster.get("gpu_models") or [], record.info.cluster.get("node_models") or []
    if len(names) < 2 or len(of) != record.info.cluster.get("nodes"):
        return {}
    return {node: str(names[index]) for node, index in enumerate(of)}


def rounds_at(record: Record) -> Any:
    """Return a function of a time. It describes the cluster's state as the last decision up to that time left it, and
    returns None if no decision had been made by then, or if the record does not state the number of GPUs.
    """
    times = record.rounds["time_s"].to_numpy()
    total = record.info.cluster.get("gpus")

    def at(time_s: float) -> str | None:
        i = int(np.searchsorted(times, time_s, "right")) - 1
        if i < 0 or not total:
            return None
        held, waiting = float(record.rounds["gpus_held"][i]), int(record.rounds["waiting"][i])
        return f"{held:g} of {total:g} GPUs held, {plural(waiting, 'job')} waiting"

    return at


def _facts(record: Record, row: int) -> dict[str, Any]:
    entry = record.jobs.row(row, named=True)
    names = ("arrival_s", "gpus", "model", "tenant", "priority", "isolated_s", "deadline_s")
    return {name: entry[name] for name in names if entry[name] is not None and entry[name] == entry[name]}


def _ending(story: Story, record: Record) -> Step:
    figures, arrival = story.figures, float(story.facts["arrival_s"])
    if figures["finish_s"] is None:
        last = story.events[-1].kind if story.events else None
        if last == Kind.REJECT:
            ran = figures["first_start_s"] is not None
            ended = f"ended unfinished; it had run {time_text(figures['running_s'])}" if ran else "never ran"
            return Step(story.events[-1].time_s, ended)
        so_far = f"run {time_text(figures['running_s'])} by then" if figures["running_s"] else "not run yet"
        left = f"the record ends {time_text(record.end_s - arrival)} after the job's arrival; the job had {so_far}"
        return Step(record.end_s, f"not finished: {left}")
    parts = f"{time_text(figures['queueing_s'])} waiting and {time_text(figures['running_s'])} running"
    against = []
    if figures["slowdown"] is not None:
        against.append(f"slowdown {ratio_text(figures['slowdown'])}")
    if figures["ftf_rho"] is not None:
        against.append(f"finish-time fairness ρ {ratio_text(figures['ftf_rho'])}")
    deadline = story.facts.get("deadline_s")
    if deadline is not None:
        late = figures["finish_s"] - deadline
        against.append(f"deadline missed by {time_text(late)}" if late > 0 else "deadline met")
    tail = f" ({', '.join(against)})" if against else ""
    return Step(figures["finish_s"], f"finished {time_text(figures['jct_s'])} after its arrival: {parts}{tail}")


def notable_jobs(record: Record) -> list[tuple[str, str]]:
    """Return unusual jobs as (job id, why it is unusual): the slowest job, the one that waited longest, those preempted
    and moved most often ...
    """
    jobs = Analysis(record).jobs
    ids = record.job("id")
    found: dict[str, list[str]] = {}
    for values, what, unit in (
        (jobs.jct_s, "took longest", "s"),
        (jobs.queueing_s, "waited longest", "s"),
        (jobs.slowdown, "was slowed down most", "ratio"),
        (jobs.ftf_rho, "was furthest behind an equal share, by ρ", "ratio"),
        (jobs.preemptions.astype(np.float64), "was preempted most often", "count"),
        (jobs.moves.astype(np.float64), "was moved most often", "count"),
    ):
        if np.isnan(values).all():
            continue
        row = int(np.nanargmax(values))
        if values[row] > 0:
            found.setdefault(str(ids[row]), []).append(f"{what} ({metric_text(float(values[row]), unit)})")
    return [(job, join_words(reasons)) for job, reasons in found.items()]
