"""Finds what would enforce each property of a share (GPU time, SMs, memory, bandwidth, isolation of faults) on a GPU,
and how strongly. `cotenant ps` and `cotenant doctor` show the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cotenant.agent.mechanisms.base import Use
from cotenant.agent.mechanisms.mps import Mps
from cotenant.agent.mechanisms.mps_prospects import MpsHere, find_mps, mps_prospects
from cotenant.agent.mechanisms.registry import MECHANISMS, names
from cotenant.agent.mechanisms.slices import Slices
from cotenant.core.strength import Promise, Prospect, Strength
from cotenant.devices.base import Gpu
from cotenant.devices.memory_limit_probe import detect
from cotenant.devices.registry import device_of
from cotenant.policy.memory_limits import prospect

LINK_FREE = (
    "copies of all tenants share the link without scheduling; cotenant agent --copy-period-bytes 64MiB schedules them"
)


@dataclass(frozen=True)
class Found:
    """What a machine offers to enforce shares of one GPU. `slices`: why hardware time slices cannot be used; empty if
    they can. `copies`: whether the agent schedules copies on the PCIe link.
    """

    memory: Prospect
    mps: MpsHere
    slices: str = ""
    copies: bool = False


def find(gpu: Gpu, folder: Path) -> Found:
    """Examine this machine; no agent needs to run. As root, this creates a control group, tries to limit it, and
    removes it.
    """
    memory = prospect(detect(device_of(gpu), gpu))
    return Found(memory, find_mps(gpu, folder), Slices(folder).refusal(gpu))


def under(mechanism: str, found: Found) -> tuple[Prospect, ...]:
    """Return what enforces each property of a share (time, SMs, memory, bandwidth, isolation of faults) for a tenant of
    a mechanism.
    """
    can = MECHANISMS[mechanism].capabilities
    sms, faults = (
        mps_prospects(found.mps)
        if mechanism == Mps.name
        else (
            Prospect(Promise.SMS, can.sms_by, "", "a tenant has all SMs while it may run"),
            Prospect(Promise.FAULTS, can.faults_by, "a CUDA context for each tenant", can.isolation),
        )
    )
    memory = found.memory
    if can.memory_by is Strength.HARDWARE:
        memory = Prospect(Promise.MEMORY, can.memory_by, can.memory, can.memory)
    bandwidth = Prospect(Promise.BANDWIDTH, Strength.NOTHING, "", LINK_FREE, (LINK_FREE,))
    if found.copies:
        why = "the shim splits the tenant's copies into chunks, which are scheduled by weight"
        bandwidth = Prospect(Promise.BANDWIDTH, Strength.SHIM, "copies on the link are scheduled", why)
    time = Prospect(Promise.TIME, can.time_by, can.compute, can.compute)
    if mechanism == Slices.name and found.slices:
        why = f"hardware time slices are not available: {found.slices}"
        todo = f"{why}; turns that the agent grants (--mechanism time) do not need them"
        time = Prospect(Promise.TIME, Strength.NOTHING, "", why, (todo,))
    return time, sms, memory, bandwidth, faults


def strongest(found: Found) -> Iterator[tuple[str, Prospect]]:
    """For each property of a share (time, SMs, memory, bandwidth, isolation of faults), compare the mechanisms that let
    several tenants share a GPU: find which of them enforces the property most strongly on this machine, and what
    prevents stronger enforcement.
    """
    shared = [name for name in names(Use.TENANT) if not MECHANISMS[name].capabilities.exclusive]
    for each in zip(*(under(name, found) for name in shared), strict=True):
        best = min(range(len(each)), key=lambda index: each[index].by.rank)
        # if the hardware enforces the property, no other mechanism could enforce it more strongly, so it does not
        # matter what prevents the other mechanisms from that
        relevant = (each[best],) if each[best].by.at_least(Strength.HARDWARE) else each
        obstacles = dict.fromkeys(text for other in relevant for text in other.obstacles)
        yield shared[best], replace(each[best], obstacles=tuple(obstacles))


def row_of(mechanism: str, found: Prospect) -> dict[str, Any]:
    """Describe how a mechanism enforces a property of a share, in JSON types, for --json."""
    return {
        "promise": found.promise,
        "by": found.by,
        "mechanism": mechanism,
        "note": found.how,
        "why": found.why,
        "obstacles": list(found.obstacles),
    }
