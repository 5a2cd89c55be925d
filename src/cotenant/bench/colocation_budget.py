"""`cotenant bench budget`: how much best-effort (BE) work may overlap with a latency-sensitive (LS) service.

BE launches wait at the GPU's LS gate while an LS-activity flag is set there. The benchmark keeps such a flag set all
the time, as if LS work never paused. BE work therefore runs only as the setting `overlap` of scheme tidal allows: one
launch at a time, for a part of the time, on a part of the SMs. `choose_budget` chooses the setting from the measured
slowdowns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from cotenant.agent.gate.client import Floor, join_floor
from cotenant.bench.be_loads import KIND
from cotenant.bench.colocation import LEAD_S, LsLoad, Plan, ls_block, parse_schemes, quantile, rate_between
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program
from cotenant.core.errors import InputError
from cotenant.policy.colocation import CurvePoint, choose_budget

SEED = 7  # seed of the arrivals; it is the same for all blocks, so that all have the same arrivals
ALIVE_S = 0.05
PARTS = (0.1, 0.25, 1.0)
OVERLAPS = (0.05, 0.1, 0.2, 0.4, 1.0)


@dataclass(frozen=True)
class Budget:
    """The plan of a measurement: BE work `load` (addN or copyN) on each fraction `parts` of the SMs, for each fraction
    `overlap` of the time. `tolerated`: slowdown of the LS service that is allowed."""

    ls: LsLoad
    load: str = "add64"
    parts: Sequence[float] = PARTS
    overlap: Sequence[float] = OVERLAPS
    tolerated: float = 1.05
    block_s: float = 0.6


def bytes_moved(load: str) -> int:
    """Return the bytes that one unit of addN or copyN reads and writes. InputError for a load that is not memory-bound.
    """
    found = KIND.match(load)
    if found is None or found[1] not in ("add", "copy"):
        raise InputError(f"{load!r} is not memory-bound: write addN or copyN", field="--be")
    return 2 * int(found[2]) << 20


def measure(
    gpus: str, wanted: Budget, found: dict[str, Any] | None = None, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Return the measured `rows` {be_sms, overlap, ls_service_over_alone, ls_p99_service_over_alone, be_gb_per_s}, and
    the `budget`: the CurvePoint, a row or a point between two rows, at which best-effort (BE) work has the largest
    bandwidth while the median service time stays within `tolerated` times the median without BE work. `found` gets each
    row when it is measured.
    """
    found = {} if found is None else found
    rows: list[dict[str, Any]] = []
    found |= {"ls": asdict(wanted.ls), "be": wanted.load, "tolerated": wanted.tolerated, "rows": rows}
    unit_bytes = bytes_moved(wanted.load)
    with Rig(gpus, together=True) as rig:
        ls = rig.ls(batch=wanted.ls.batch)
        tenants = {part: rig.be(f"be-{part}", sms=part, below=True) for part in wanted.parts}
        for program in (ls, *tenants.values()):
            program.wait_ready()
        found["gpu"] = ls.gpu
        floor = join_floor(rig.bench.folder, rig.uuid)
        with held_up(floor):
            for part, be in tenants.items():
                for row in _curve(rig, wanted, ls, be, part, unit_bytes):
                    rows.append(row)
                    progress(said(row))
        floor.close()
    points = [CurvePoint(r["overlap"], r["ls_service_over_alone"], r["be_gb_per_s"], r["be_sms"]) for r in rows]
    found["budget"] = asdict(choose_budget(points, wanted.tolerated))
    return found


def _curve(
    rig: Rig, wanted: Budget, ls: Program, be: Program, part: float, unit_bytes: int
) -> Iterator[dict[str, Any]]:
    """Produce the rows for one fraction of the SMs: latency-sensitive (LS) requests alone, then together with
    best-effort (BE) work for a growing fraction of the time.
    """
    plan = Plan(wanted.ls, [], parse_schemes("tidal"), block_s=wanted.block_s)
    rig.scheme("mps-plus")  # under this scheme best-effort work is not held back while the load is set up
    be.ask(f"load {wanted.load}", 60)
    alone_ms = quantile(ls_block(ls, plan, SEED, raises=False)["service_ms"], 0.5)
    for overlap in wanted.overlap:
        rig.scheme("tidal", overlap=overlap)
        be.tell(f"run {wanted.block_s + 2 * LEAD_S}")
        time.sleep(LEAD_S)
        seen = ls_block(ls, plan, SEED, raises=False)
        block = be.answer(60)
        rate = rate_between(block, seen["begin_ns"], min(seen["end_ns"], block["end_ns"]))
        yield {
            "be_sms": part,
            "overlap": overlap,
            "ls_service_over_alone": quantile(seen["service_ms"], 0.5) / alone_ms,
            "ls_p99_service_over_alone": quantile(seen["service_ms"], 0.99) / alone_ms,
            "be_gb_per_s": rate * unit_bytes / 1e9,
        }


def said(row: dict[str, Any]) -> str:
    """Return one line of text that reports a row of the measurement as progress."""
    return (
        f"BE on {row['be_sms']:.0%} of the SMs for {row['overlap']:.0%} of the time: median LS "
        f"service time {row['ls_service_over_alone']:.2f} times that of LS alone, BE {row['be_gb_per_s']:.0f} GB/s"
    )


@contextmanager
def held_up(floor: Floor) -> Iterator[None]:
    """Return a context in which this process's LS-activity flag is set. A thread sets it again and again, as a
    heartbeat.
    """
    over = threading.Event()

    def keep() -> None:
        while not over.wait(ALIVE_S):
            floor.raise_()

    floor.raise_()
    keeping = threading.Thread(target=keep)
    keeping.start()
    try:
        yield
    finally:
        over.set()
        keeping.join()
        floor.lower()
