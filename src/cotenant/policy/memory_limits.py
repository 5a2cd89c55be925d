"""What holds a tenant to its memory on a GPU: the kernel, else the driver, else the shim. Pure: what was found on a
machine comes in, the choice with its reasons comes out."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.strength import Promise, Prospect, Strength

FIRST_RELEASE = 615  # of NVIDIA's driver with memory limits
FIRST_KERNEL = "6.14"  # with the dmem controller


@dataclass(frozen=True)
class Detected:
    """What a machine has for limits on the memory of one GPU, as far as it could be found without changing anything
    that stays."""

    release: str = ""  # of the driver; empty: not known
    call: bool = False  # NVML has the calls
    cgroup: int = 0  # version of the control groups; 0: there are none
    dmem: bool = False  # the kernel counts this GPU's memory
    root: bool = False  # limits may be set from here
    mig: bool = False
    trial: str = ""  # why a limit on a group made for the purpose could not be set and read back; empty: it could
    foreign: tuple[str, ...] = ()  # groups that another program holds to less than the card: "PATH: 4.0 GiB"


def prospect(found: Detected, *, swaps: bool = False) -> Prospect:
    """What would hold a tenant of that GPU to its memory. `swaps`: its contents move to host memory and back."""
    missing = _missing(found)
    foreign = tuple(
        f"another program limits GPU memory of a control group: {text}; programs below it have no more, whatever they"
        " were promised; remove that limit, or let the program and the tenants use different GPUs"
        for text in found.foreign
    )
    if missing:
        why = f"the shim in the tenant's process counts and refuses, because {missing[0][0]}"
        obstacles = (*(f"{text}: {todo}" for text, todo in missing), *foreign)
        return Prospect(Promise.MEMORY, Strength.SHIM, "the shim's ledger", why, obstacles)
    if swaps:
        why = (
            "the shim in the tenant's process counts and refuses, because it frees memory and takes it again as it"
            " moves contents, and what the driver's limits make of that has not been measured"
        )
        return Prospect(Promise.MEMORY, Strength.SHIM, "the shim's ledger", why, foreign)
    if found.dmem:
        why = "the kernel's dmem controller counts this GPU's memory and refuses what is over dmem.max"
        return Prospect(Promise.MEMORY, Strength.KERNEL, "dmem.max of the tenant's control group", why, foreign)
    no_dmem = f"the kernel does not count this GPU's memory (dmem controller, Linux {FIRST_KERNEL} and newer)"
    why = f"the driver counts and refuses by control group, because {no_dmem}"
    todo = f"{no_dmem}: start a kernel that has the controller (CONFIG_CGROUP_DMEM)"
    return Prospect(
        Promise.MEMORY, Strength.DRIVER, "the driver's limit on the tenant's control group", why, (todo, *foreign)
    )


def _missing(found: Detected) -> list[tuple[str, str]]:
    """What stands in the way of a limit by kernel or driver, with what to do; the first cause first."""
    missing = []
    if not found.call:
        release = f"driver {found.release}" if found.release else "the driver here"
        text = f"{release} has no memory limits, which come with release {FIRST_RELEASE}"
        missing.append((text, "install that release or a newer one"))
    if found.cgroup != 2:
        what = f"control groups here are of version {found.cgroup}" if found.cgroup else "there are no control groups"
        text = f"{what}, and the driver's limits need version 2 alone (not the hybrid of both)"
        missing.append((text, "boot with systemd.unified_cgroup_hierarchy=1, or let the agent see /sys/fs/cgroup"))
    if found.mig:
        text = "MIG is on, and the driver limits no memory of its instances"
        missing.append((text, "switch it off (nvidia-smi -mig 0), or give tenants whole instances"))
    if not missing and not found.root:
        text = "only root may set the driver's limits, and the agent does not run as root"
        missing.append((text, "start cotenant agent as root"))
    if not missing and found.trial:
        text = f"a limit that was set as a trial did not come to be: {found.trial}"
        missing.append((text, "the kernel's log (dmesg) may say why"))
    return missing
