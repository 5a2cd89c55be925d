"""Sentences about the events of a job; similar consecutive events are combined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cotenant.core.events import Kind, Reason
from cotenant.core.metrics.timeline import HOLDING
from cotenant.report.text import clock_text, figures, join_words, plural, time_text

MOVES_TOLD = 2  # at most this many moves within one period of running get a sentence each; more are combined
# At most this many periods of running or waiting get a sentence each. If there are more, those in the middle are
# combined.
STRETCHES_TOLD = 8
Where = list[tuple[int, float]]

WAITED: dict[Reason, str] = {
    Reason.GPUS_FULL: "every GPU was held by jobs earlier in the order",
    Reason.GANG_TOO_LARGE_NOW: "fewer GPUs were free than the {gpus} that the job needs",
    Reason.NO_CPU_OR_MEMORY: "GPUs were free, but no node with free GPUs had the CPU and memory for the job",
    Reason.NO_GPU_OF_MODEL: "no GPU of a model that the job accepts was free",
    Reason.RESERVED: "free GPUs were kept for a job that had waited longer",
    Reason.OUTRANKED: "jobs earlier in the order took the GPUs",
    Reason.NOT_CHOSEN: "the policy gave the GPUs to jobs that gain more by them",
}
LOST: dict[Reason, str] = {
    Reason.GPUS_FULL: "jobs earlier in the order took every GPU",
    Reason.GANG_TOO_LARGE_NOW: "jobs earlier in the order left fewer GPUs than the {gpus} that the job needs",
    Reason.NO_CPU_OR_MEMORY: "jobs earlier in the order left no node with GPUs, CPU and memory for the job",
    Reason.NO_GPU_OF_MODEL: "jobs earlier in the order left no GPU of a model that the job accepts",
    Reason.RESERVED: "the GPUs were kept for a job that had waited longer",
    Reason.OUTRANKED: "jobs earlier in the order took the GPUs",
    Reason.NOT_CHOSEN: "the policy gave the GPUs to jobs that gain more by them",
    Reason.REPLACED: "all jobs were placed again",
    Reason.FAILED: "the job's processes failed",
    Reason.LOST: "the job's node, or the process that ran the job there, was lost",
    Reason.CANCELLED: "the job was cancelled",
    Reason.TAKEN_DOWN: "the fleet was taken down",
    Reason.KILLED: "the job did not end within its grace time and was killed; work since its last checkpoint is lost",
    Reason.UNSAVED: "the job ended by the signal that asked it to stop, not with exit code 75; work since its last "
    "checkpoint is lost",
}
WHY: dict[Reason, str] = {
    Reason.RESERVED: "the job had waited so long that it went first",
    Reason.GAVE_WAY: "the job gave CPU and memory above its proportional share to other jobs",
    Reason.GOT_IDEAL: "the CPU and memory for the job's ideal speed had become free",
    Reason.OTHER_SPEED: "the job's own progress, or the other job on its GPU, changed its speed",
    Reason.REPLACED: "all jobs were placed again",
}
NEVER: dict[Reason, str] = {
    Reason.GANG_TOO_LARGE_NOW: "the cluster has fewer GPUs than the {gpus} that the job needs",
    Reason.GPUS_FULL: "the cluster has fewer GPUs than the {gpus} that the job needs",
    Reason.NO_CPU_OR_MEMORY: "no node has the CPU and memory that the job needs",
    Reason.NO_GPU_OF_MODEL: "the cluster has no GPU of a model that the job accepts",
    Reason.FAILED: "the job failed, and no start is left (retries)",
    Reason.CANCELLED: "the job was cancelled",
}


@dataclass(frozen=True)
class Happening:
    """One event in a job's history. `gpus`: number of GPUs that the job wants; `where`: (node, GPUs) pairs, None if the
    record has no placements.
    """

    gpus: float
    time_s: float
    kind: Kind
    reason: Reason
    cpus: float
    memory_bytes: float
    speed: float
    where: Where | None
    gpu_model: str = ""  #: model of its GPUs; empty if the cluster has one model only, or the job has no GPUs

    @property
    def holds(self) -> bool:
        return self.kind in HOLDING

    def to_dict(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "kind": self.kind.name.lower(),
            "reason": self.reason.name.lower(),
            "cpus": self.cpus,
            "memory_bytes": self.memory_bytes,
            "speed": self.speed,
            "nodes": None if self.where is None else [{"node": n, "gpus": g} for n, g in self.where],
        }


@dataclass(frozen=True)
class Step:
    """One sentence of a job's history and the time to which it refers."""

    time_s: float
    text: str


@dataclass(frozen=True)
class Stretch:
    """Consecutive events during which the job held GPUs, or held none."""

    holds: bool
    events: list[Happening]
    end_s: float

    @property
    def begin_s(self) -> float:
        return self.events[0].time_s

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def tell(
    events: list[Happening],
    facts: dict[str, Any],
    end_s: float,
    cluster_at: Callable[[float], str | None],
    every_event: bool = False,
) -> list[Step]:
    """Return the history of a job up to `end_s` (its finish or the record's end), without the sentence about its end.

    `cluster_at` returns the state of the cluster at a time.
    """
    steps = [Step(float(facts["arrival_s"]), "arrived")]
    stretches = _stretches(events, end_s)
    first, last = len(stretches), len(stretches)
    if not every_event and len(stretches) > STRETCHES_TOLD:
        first, last = STRETCHES_TOLD // 2, len(stretches) - STRETCHES_TOLD // 2
    for i, stretch in enumerate(stretches):
        if first <= i < last:
            if i == first:
                steps.append(_turns(stretches[first:last], facts))
            continue
        before = stretches[i - 1] if i else None
        if stretch.holds:
            steps += _ran(stretch, before, every_event)
        else:
            steps += _waited(stretch, before, facts, cluster_at, every_event)
    return steps


def _stretches(events: list[Happening], end_s: float) -> list[Stretch]:
    groups: list[list[Happening]] = []
    for event in events:
        if event.kind == Kind.FINISH:
            break
        if not groups or groups[-1][-1].holds != event.holds:
            groups.append([])
        groups[-1].append(event)
    ends = [group[0].time_s for group in groups[1:]] + [end_s] * bool(groups)
    return [Stretch(group[0].holds, group, end) for group, end in zip(groups, ends, strict=True)]


# ---- waiting


def _waited(
    stretch: Stretch,
    before: Stretch | None,
    facts: dict[str, Any],
    cluster_at: Callable[[float], str | None],
    every_event: bool,
) -> list[Step]:
    steps = []
    first = stretch.events[0]
    if first.kind == Kind.PREEMPT:
        ran = f" after running {time_text(before.length_s)}" if before is not None else ""
        steps.append(Step(first.time_s, f"lost its GPUs{ran}{_because(first.reason, LOST, facts)}"))
    rejected = next((event for event in stretch.events if event.kind == Kind.REJECT), None)
    if rejected is not None:
        return [*steps, Step(rejected.time_s, f"rejected{_because(rejected.reason, NEVER, facts)}")]
    waits = [event for event in stretch.events if event.kind == Kind.WAIT]
    if every_event:
        return steps + [Step(e.time_s, f"waited: {_wait_reason(e.reason, facts)}") for e in waits]
    if stretch.length_s <= 0:
        return steps
    looked = cluster_at(waits[0].time_s if waits else stretch.begin_s)
    beside = f" ({looked})" if looked else ""
    reasons = _reasons_by_time(waits, stretch.end_s)
    # before the scheduler has considered the job, the state of the cluster explains nothing
    if not reasons and before is None:
        steps.append(Step(stretch.begin_s, f"waited {time_text(stretch.length_s)} for the next round"))
    elif not reasons:
        steps.append(Step(stretch.begin_s, f"waited {time_text(stretch.length_s)}{beside}"))
    elif len(reasons) == 1:
        why = _wait_reason(reasons[0][0], facts)
        steps.append(Step(stretch.begin_s, f"waited {time_text(stretch.length_s)}: {why}{beside}"))
    else:
        parts = [f"for {time_text(length)} {_wait_reason(reason, facts)}" for reason, length in reasons]
        steps.append(Step(stretch.begin_s, f"waited {time_text(stretch.length_s)}: {join_words(parts)}{beside}"))
    return steps


def _reasons_by_time(waits: list[Happening], end_s: float) -> list[tuple[Reason, float]]:
    """Return the reasons of waiting, with the time during which each applied, longest first."""
    held: Counter[Reason] = Counter()
    ends = [event.time_s for event in waits[1:]] + [end_s] * bool(waits)
    for event, end in zip(waits, ends, strict=True):
        held[event.reason] += end - event.time_s  # type: ignore[assignment]
    return [(reason, float(length)) for reason, length in held.most_common() if length > 0]


def _wait_reason(reason: Reason, facts: dict[str, Any]) -> str:
    return WAITED.get(reason, "no share was free").format(gpus=figures(facts["gpus"]))


# ---- running


def _ran(stretch: Stretch, before: Stretch | None, every_event: bool) -> list[Step]:
    first, *rest = stretch.events
    steps = [Step(first.time_s, _began(first, before))]
    changes = [(old, new) for old, new in zip(stretch.events, rest, strict=False)]
    moves = sum(new.kind == Kind.MOVE for _, new in changes)
    sizes = sum(new.kind == Kind.RESIZE for _, new in changes)
    if every_event or moves + sizes <= MOVES_TOLD:
        return steps + [Step(new.time_s, _changed(old, new)) for old, new in changes]
    steps += [Step(new.time_s, _changed(old, new)) for old, new in changes if new.kind not in (Kind.MOVE, Kind.RESIZE)]
    steps.append(Step(rest[0].time_s, _many_changes(stretch, moves, sizes)))
    return sorted(steps, key=lambda step: step.time_s)


def _began(event: Happening, before: Stretch | None) -> str:
    word = {Kind.START: "started", Kind.RESUME: "ran again", Kind.PROFILE: "began to be measured"}.get(
        event.kind, "ran"
    )
    return f"{word} on {_place(event)}{_share(event)}{_because(event.reason)}"


def _changed(old: Happening, new: Happening) -> str:
    if new.kind == Kind.MOVE:
        before, after = _nodes(old.where), _nodes(new.where)
        way = f"within {after}" if old.where and before == after else f"from {before} to {after}"
        return f"moved {way}{_size_change(old, new)}{_because(new.reason)}"
    if new.kind == Kind.RESIZE:
        change = _size_change(old, new).removeprefix(", ") or "the same CPU and memory"
        return f"kept its GPUs with {change}{_because(new.reason)}"
    if new.kind == Kind.REPARTITION:
        return f"its GPU was repartitioned{_because(new.reason)}"
    if new.kind == Kind.PROFILE:
        return f"was measured on {_place(new)}"
    return f"ran on {_place(new)}{_share(new)}{_because(new.reason)}"


def _many_changes(stretch: Stretch, moves: int, sizes: int) -> str:
    changed = [e for e in stretch.events[1:] if e.kind in (Kind.MOVE, Kind.RESIZE)]
    done = []
    if moves:
        nodes = sorted({node for event in stretch.events for node, _ in event.where or []})
        among = f" among {_node_list(nodes)}" if nodes else ""
        done.append(f"was moved {plural(moves, 'time')}{among}")
    if sizes:
        done.append(f"had its CPU and memory changed {plural(sizes, 'time')}")
    cpus = [event.cpus for event in stretch.events]
    span = f", with {figures(min(cpus))} to {plural(max(cpus), 'CPU')}" if max(cpus) > min(cpus) else ""
    reasons = Counter(event.reason for event in changed)
    why = _because(reasons.most_common(1)[0][0], mostly="mostly " if len(reasons) > 1 else "")
    return f"{join_words(done)} until {clock_text(changed[-1].time_s)}{span}{why}"


def _turns(stretches: list[Stretch], facts: dict[str, Any]) -> Step:
    """Combine many periods of running and waiting into one sentence."""
    ran = sum(s.length_s for s in stretches if s.holds)
    waited = sum(s.length_s for s in stretches if not s.holds)
    lost = [e for s in stretches for e in s.events if e.kind == Kind.PREEMPT]
    reasons = Counter(event.reason for event in lost)
    why = _because(reasons.most_common(1)[0][0], LOST, facts, "mostly " if len(reasons) > 1 else "") if lost else ""
    text = (
        f"took turns with others until {clock_text(stretches[-1].end_s)}: ran {time_text(ran)} and waited "
        f"{time_text(waited)}, losing its GPUs {plural(len(lost), 'time')}{why}"
    )
    return Step(stretches[0].begin_s, text)


# ---- words


def _because(
    reason: Reason, words: dict[Reason, str] = WHY, facts: dict[str, Any] | None = None, mostly: str = ""
) -> str:
    if reason not in words:
        return ""
    return f": {mostly}{words[reason].format(gpus=figures(facts['gpus']) if facts else '')}"


def _share(event: Happening) -> str:
    if event.cpus <= 0 and event.memory_bytes <= 0:
        return ""
    speed = f", at {_speed(event.speed)}" if event.speed > 0 else ""
    return f" with {plural(event.cpus, 'CPU')} and {_gigabytes(event.memory_bytes)}{speed}"


def _size_change(old: Happening, new: Happening) -> str:
    parts = []
    before, after = (sum(g for _, g in e.where) if e.where else e.gpus for e in (old, new))
    if f"{before:.3g}" != f"{after:.3g}":
        parts.append(f"{_gpus(after)} instead of {_gpus(before)}")
    if old.cpus != new.cpus:
        parts.append(f"{plural(new.cpus, 'CPU')} instead of {figures(old.cpus)}")
    if old.memory_bytes != new.memory_bytes:
        parts.append(f"{_gigabytes(new.memory_bytes)} instead of {_gigabytes(old.memory_bytes)}")
    if old.speed != new.speed and new.speed > 0:
        parts.append(f"at {_speed(new.speed)}")
    return f", {', '.join(parts)}" if parts else ""


def _place(event: Happening) -> str:
    where = event.where
    total = sum(gpus for _, gpus in where) if where else event.gpus
    amount = _gpus(total, event.gpu_model)
    if not where:
        return amount
    if len(where) == 1 or len(where) > 6:
        return f"{amount} of {_nodes(where)}"
    return f"{amount} of {_nodes(where)} ({' + '.join(figures(gpus) for _, gpus in where)})"


def _gpus(count: float, model: str = "") -> str:
    name = f"{model} GPU".strip()
    return f"{figures(count)} of a {name}" if count < 1 else plural(count, name)


def _nodes(where: Where | None) -> str:
    return _node_list([node for node, _ in where]) if where else "other GPUs"


def _node_list(nodes: list[int]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    if len(nodes) > 6:
        return f"{len(nodes)} nodes"
    return f"nodes {join_words([str(node) for node in nodes])}"


def _speed(speed: float) -> str:
    """Describe a job's speed in words. Speed 1 is that on the reference GPU (the GPU model to which the trace's times
    refer) with CPU and memory in proportion to the job's GPUs.
    """
    return f"{'' if figures(speed) == '1' else figures(speed) + '× '}the speed of a GPU-proportional share"


def _gigabytes(count: float) -> str:
    return f"{figures(count / 1e9)} GB"
