"""Chooses what enforces a tenant's memory limit on a GPU: the kernel if it can, otherwise the driver, otherwise the
shim. Pure: it takes what was found on the machine, and returns the choice with its reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cotenant.core.strength import Promise, Prospect, Strength

FIRST_RELEASE = 615  # the first release of NVIDIA's driver with memory limits
FIRST_KERNEL = "6.14"  # the first Linux release with the dmem controller
SHIM_LIMITS = "the shim in the tenant's process counts its GPU memory and refuses what exceeds the limit"


class GroupLimit(NamedTuple):
    """A limit on the memory of one GPU that is set on a control group."""

    group: Path
    limit_bytes: int


@dataclass(frozen=True)
class Detected:
    """What a machine offers for memory limits on one GPU, as far as this can be found without lasting changes."""

    release: str = ""  # release of the driver; empty if it is not known
    call: bool = False  # whether NVML, the driver's management library, has the calls that set memory limits
    cgroup: int = 0  # version of the kernel's control groups (cgroups); 0 if there are none
    dmem: bool = False  # whether the kernel accounts for this GPU's memory
    root: bool = False  # whether this process may set memory limits (it runs as root)
    mig: bool = False
    trial: str = ""  # why a trial to set a limit on a control group and read it back failed; empty if it succeeded
    # memory limits below the GPU's size that another program has set on control groups
    foreign: tuple[GroupLimit, ...] = ()
    remedy: str = "install that release or a newer one"  # what to do if the driver has no memory limits


def by_shim(why: str, obstacles: tuple[str, ...]) -> Prospect:
    """Return a Prospect which says that only the shim limits the memory, for the reason `why`."""
    return Prospect(Promise.MEMORY, Strength.SHIM, "the shim's ledger", why, obstacles)


def prospect(found: Detected, *, swaps: bool = False) -> Prospect:
    """Return what would enforce a tenant's memory limit on the GPU that `found` describes. `swaps`: the tenant's memory
    is swapped to the host and back.
    """
    missing = _missing(found)
    foreign = tuple(
        f"another program limits GPU memory of a control group: {each.group}: {each.limit_bytes / 2**30:.1f} GiB; "
        "programs below it get no more, whatever their own limits are; remove that limit, or let the program and the "
        "tenants use different GPUs"
        for each in found.foreign
    )
    if missing:
        why = f"{SHIM_LIMITS}, because {missing[0][0]}"
        obstacles = (*(f"{text}: {todo}" for text, todo in missing), *foreign)
        return by_shim(why, obstacles)
    if swaps:
        why = (
            f"{SHIM_LIMITS}, because the driver's limits have not been measured with a swapped tenant, which frees and "
            "allocates memory as its contents move"
        )
        return by_shim(why, foreign)
    if found.dmem:
        why = "the kernel's dmem controller accounts this GPU's memory and refuses what exceeds dmem.max"
        return Prospect(Promise.MEMORY, Strength.KERNEL, "dmem.max of the tenant's control group", why, foreign)
    no_dmem = f"the kernel does not count this GPU's memory (that needs the dmem controller, Linux {FIRST_KERNEL})"
    why = (
        "the driver counts the GPU memory of the tenant's control group and refuses what exceeds the limit, because "
        f"{no_dmem}"
    )
    todo = f"{no_dmem}: start a kernel that has the controller (CONFIG_CGROUP_DMEM)"
    return Prospect(
        Promise.MEMORY, Strength.DRIVER, "the driver's limit on the tenant's control group", why, (todo, *foreign)
    )


def _missing(found: Detected) -> list[tuple[str, str]]:
    """Return the reasons why neither kernel nor driver can enforce a limit, each with a remedy; the most basic first.
    """
    missing = []
    if not found.call:
        release = f"driver {found.release}" if found.release else "the driver here"
        text = f"{release} has no memory limits, which need release {FIRST_RELEASE}"
        missing.append((text, found.remedy))
    if found.cgroup != 2:
        what = (
            f"control groups here are of version {found.cgroup}"
            if found.cgroup
            else "this system has no control groups"
        )
        text = f"{what}, and the driver's limits need version 2 alone (not the hybrid of both)"
        missing.append((text, "boot with systemd.unified_cgroup_hierarchy=1, or show /sys/fs/cgroup to the agent"))
    if found.mig:
        text = "MIG is on, and the driver has no memory limits for its instances"
        missing.append((text, "switch it off (nvidia-smi -mig 0), or give tenants whole instances"))
    if not missing and not found.root:
        text = "only root may set the driver's limits, and the agent does not run as root"
        missing.append((text, "start cotenant agent as root"))
    if not missing and found.trial:
        text = f"a trial limit did not take effect: {found.trial}"
        missing.append((text, "the kernel's log (dmesg) may say why"))
    return missing
