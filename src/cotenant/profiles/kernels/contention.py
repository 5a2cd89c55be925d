"""Model of contention between kernels of different processes on one GPU, with the software GPU's constants.

The same model as in softgpu/share.c. SMs: a kernel gets those that earlier kernels leave free (a running kernel is not
preempted and has no priority). It needs all SMs that it would fill, or a third of them if it is bound by memory; with
fewer it is slower in proportion. Memory bandwidth: shared in proportion to the kernels' accesses under way. These are
the number of SMs that the kernel holds times the accesses per SM of its work class (memory-bound, compute-bound or
unknown). No kernel gets more bandwidth than it needs, and the rest goes to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.abi import contention as soft


@dataclass(frozen=True)
class Contention:
    """Constants of the model of contention between kernels. `demand[c]`: fraction of the bandwidth that a kernel of
    class c uses alone; `density[c]`: its memory accesses in flight per SM, relative to a memory-bound kernel. Times are
    in nanoseconds.
    """

    sm_count: int
    demand: tuple[float, ...]
    density: tuple[float, ...]
    fill: tuple[float, ...]  # largest fraction of the SMs that a kernel of the class can keep busy
    reach: tuple[float, ...]  # fraction of the SMs that suffices for the full speed of a kernel of the class
    sliced: float
    slice_ns: int
    launch_ns: int
    notice_ns: int
    event_ns: int
    switch_ns: int


def read_table() -> Contention:
    """Return the software GPU's constants of the contention model."""
    kinds = ("UNKNOWN", "MEMORY", "COMPUTE")
    return Contention(
        soft.SM_COUNT,
        (0.0, *(getattr(soft, f"DEMAND_{kind}_PERMILLE") / 1000 for kind in kinds)),
        (0.0, *(getattr(soft, f"DENSITY_{kind}_PERMILLE") / 1000 for kind in kinds)),
        (1.0, 1.0, soft.FILL_MEMORY_PERMILLE / 1000, 1.0),
        (1.0, 1.0, soft.REACH_MEMORY_PERMILLE / 1000, 1.0),
        soft.SLICED_PERMILLE / 1000,
        soft.TIME_SLICE_NS,
        soft.LAUNCH_NS,
        soft.NOTICE_NS,
        soft.EVENT_NS,
        soft.SWITCH_NS,
    )


def grants(needs: Sequence[float]) -> list[float]:
    """Return the fraction of the SMs that each kernel gets, oldest first; `needs` are the fractions of the SMs that the
    kernels would fill.
    """
    left, found = 1.0, []
    for need in needs:
        got = min(need, left)
        found.append(got)
        left -= got
    return found


def rates(table: Contention, needs: Sequence[float], classes: Sequence[int]) -> list[float]:
    """Return the speed of each kernel relative to its speed alone, oldest kernel first."""
    held = grants(needs)
    used = [min(need, table.reach[c]) for need, c in zip(needs, classes, strict=True)]
    speeds = [min(1.0, got / part) if part else 0.0 for got, part in zip(held, used, strict=True)]
    asks = [table.demand[c] * speed for c, speed in zip(classes, speeds, strict=True)]
    weights = [table.density[c] * got for c, got in zip(classes, held, strict=True)]
    given = _fair(asks, weights)
    return [
        speed if ask <= 0 else speed * min(1.0, got / ask) for speed, ask, got in zip(speeds, asks, given, strict=True)
    ]


def _fair(asks: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the weighted max-min shares of a capacity of 1, for users that ask for the amounts `asks`."""
    given = [0.0] * len(asks)
    open_ = {i for i, ask in enumerate(asks) if ask > 0 and weights[i] > 0}
    left = 1.0
    while open_:
        total = sum(weights[i] for i in open_)
        full = {i for i in open_ if asks[i] <= left * weights[i] / total}
        for i in full or open_:
            given[i] = asks[i] if full else left * weights[i] / total
        if not full:
            break
        left -= sum(asks[i] for i in full)
        open_ -= full
    return given
