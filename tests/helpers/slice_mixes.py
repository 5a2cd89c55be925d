"""Random mixes of tenants under time slices in virtual time, and how well each window of 2 s keeps the promises."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from cotenant.policy.shares import MS_NS, SECOND_NS, Share
from cotenant.sim.shares.engine import Load
from cotenant.sim.shares.slices import SliceEngine, SliceResult

BUCKET_NS = 100 * MS_NS
WINDOW = 20  # buckets in a window
SECONDS = 14
UNUSABLE_NS = MS_NS  # no other tenant could use a gap of this length: it takes two switches

# kinds of tenants that pause: least and most GPU work, and least and most pause after it, with their units in ns
WORK = {
    "launch": ((8, 80, 10_000), (2, 30, 10_000)),
    "train": ((4, 60, MS_NS), (2, 100, 100_000)),
    "bursty": ((60, 500, MS_NS), (40, 400, MS_NS)),
    "pausing": ((500, 3000, MS_NS), (400, 2500, MS_NS)),
}

Spans = list[tuple[int, int]]


class Verdict(NamedTuple):
    """Of one mix, in fractions of a window, the worst of all windows: part above a limit, part that a request was short
    of. `settled`: the same two, of windows with no change in the two seconds before. `idle`: time in which the GPU was
    idle while a tenant below its limit had work, as a mean over windows. `served`: whether a tenant is
    latency-sensitive."""

    above: float
    short: float
    settled: tuple[float, float]
    idle: float
    served: bool


def mix(seed: int) -> tuple[list[Load], dict[str, str]]:
    """Return two to four tenants with random requests, limits and behaviour, and the work classes of some of them."""
    draw = random.Random(seed)
    count, left = draw.choice([2, 2, 3, 3, 4]), 1.0
    loads, classes = list[Load](), dict[str, str]()
    for number in range(count):
        most = max(0.06, min(0.8, left - 0.05 * (count - number)))
        request = min(draw.choice([0.0, round(draw.uniform(0.05, most), 2)]), round(left, 2))
        left -= request
        least = max(request, 0.1)
        limit = draw.choice([1.0, 1.0, least, min(1.0, round(least + draw.uniform(0.05, 0.4), 2))])
        kind = draw.choice(["busy", "busy", "launch", "train", "bursty", "pausing"])
        work: dict[str, Any] = {
            field: draw.randint(least, most) * unit_ns
            for field, (least, most, unit_ns) in zip(("busy_ns", "pause_ns"), WORK.get(kind, ()), strict=False)
        }
        if draw.random() < 0.2:
            work["start_ns"] = draw.randint(0, 5000) * MS_NS
        if draw.random() < 0.15:
            work["stop_ns"] = draw.randint(7000, 12000) * MS_NS
        loads.append(Load(f"{kind}{number}", Share(request, limit), **work))
    if draw.random() < 0.25:
        classes[draw.choice(loads).name] = "latency-sensitive"
        for load in loads:
            if load.name not in classes and not load.share.request and draw.random() < 0.7:
                classes[load.name] = "best-effort"
    return loads, classes


def per_bucket(spans: Spans) -> list[int]:
    """Return how much of each bucket the spans take, in ns."""
    took = [0] * (10 * SECONDS)
    for start_ns, end_ns in spans:
        while start_ns < end_ns and start_ns < SECONDS * SECOND_NS:
            until_ns = min(end_ns, start_ns - start_ns % BUCKET_NS + BUCKET_NS)
            took[start_ns // BUCKET_NS] += until_ns - start_ns
            start_ns = until_ns
    return took


def both(some: Spans, others: Spans) -> Spans:
    """Return the intersection of two sorted lists of spans."""
    found, at = Spans(), 0
    for start_ns, end_ns in some:
        while at and others[at - 1][1] > start_ns:
            at -= 1
        while at < len(others) and others[at][0] < end_ns:
            low, high = max(start_ns, others[at][0]), min(end_ns, others[at][1])
            if low < high:
                found.append((low, high))
            if others[at][1] >= end_ns:
                break
            at += 1
    return found


def wanting(load: Load, result: SliceResult) -> Spans:
    """Return when the tenant had work."""
    stop_ns = result.end_ns if load.stop_ns is None else load.stop_ns
    spans, since_ns = Spans(), load.start_ns
    for name, _, end_ns in result.bursts:
        if name == load.name:
            spans.append((since_ns, min(end_ns, stop_ns)))
            since_ns = end_ns + load.pause_ns
    return spans + ([(since_ns, stop_ns)] if since_ns < stop_ns else [])


def changes(loads: list[Load], result: SliceResult) -> list[int]:
    """Return when tenants came or went, or began or ended pauses that are long enough to count as idle."""
    found = [load.start_ns for load in loads] + [load.stop_ns for load in loads if load.stop_ns is not None]
    pauses = {load.name: load.pause_ns for load in loads if load.pause_ns >= 300 * MS_NS}
    for name, _, end_ns in result.bursts:
        if name in pauses:
            found += [end_ns, end_ns + pauses[name]]
    return found


def judge(seed: int) -> Verdict:
    """Simulate the mix of `seed` and judge every window of 2 s, the first included."""
    loads, classes = mix(seed)
    result = SliceEngine(loads, classes=classes).run(SECONDS * SECOND_NS)
    gaps, at_ns = Spans(), 0
    for _, start_ns, end_ns in sorted(result.spans, key=lambda span: span[1]):
        if start_ns > at_ns + UNUSABLE_NS:
            gaps.append((at_ns, start_ns))
        at_ns = max(at_ns, end_ns)
    gaps.append((at_ns, max(at_ns, result.end_ns)))
    worked = {load.name: per_bucket([(b, e) for name, b, e in result.spans if name == load.name]) for load in loads}
    wants = {load.name: wanting(load, result) for load in loads}
    wanted = {name: per_bucket(spans) for name, spans in wants.items()}
    wasted = {name: per_bucket(both(gaps, spans)) for name, spans in wants.items()}
    moved = changes(loads, result)
    above = short = settled_above = settled_short = idle = 0.0
    windows = range(10 * SECONDS - WINDOW + 1)
    for first in windows:
        last, lost = first + WINDOW, 0.0
        start_ns, end_ns = first * BUCKET_NS, last * BUCKET_NS
        settled = not any(start_ns - 2 * SECOND_NS < at < end_ns for at in moved)
        for load in loads:
            had, want, waste = (
                sum(took[load.name][first:last]) / (WINDOW * BUCKET_NS) for took in (worked, wanted, wasted)
            )
            if load.busy_ns is not None and load.pause_ns < 40 * MS_NS:
                here = start_ns >= load.start_ns and (load.stop_ns is None or end_ns <= load.stop_ns)
                want = load.busy_ns / (load.busy_ns + load.pause_ns) if here else 0.0
            more, less = had - load.share.limit, load.share.request * want - had
            above, short = max(above, more), max(short, less)
            if settled:
                settled_above, settled_short = max(settled_above, more), max(settled_short, less)
            allowed = load.share.limit * (1.0 if load.share.limit == 1.0 else min(want, 1.0))
            if had < allowed - 0.02:
                lost = max(lost, waste)
        idle += lost / len(windows)
    served = "latency-sensitive" in classes.values()
    return Verdict(above, short, (settled_above, settled_short), idle, served)
