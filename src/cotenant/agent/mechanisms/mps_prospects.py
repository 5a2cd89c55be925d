"""Finds what MPS would enforce on a GPU of this machine, and what prevents that, for `cotenant doctor`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cotenant.agent.mechanisms.mps_control import PIPE_FOLDER, Abilities, abilities
from cotenant.agent.processes import environment
from cotenant.core.strength import Promise, Prospect, Strength
from cotenant.devices.base import Device, Gpu
from cotenant.devices.registry import device_of

DAEMON = "nvidia-cuda-mps-control"
EXCLUSIVE, PROHIBITED = "exclusive process", "prohibited"


@dataclass(frozen=True)
class MpsHere:
    """What MPS could enforce on this machine, as found out without starting any process of MPS."""

    can: Abilities
    compute_mode: str = ""  # compute mode of the GPU, such as EXCLUSIVE_PROCESS; empty if it is unknown
    foreign: tuple[str, ...] = ()  # other MPS daemons, such as "process 12 with pipes in /run/nvidia-mps"
    remedy: str = Device.mps_remedy  # what to do if the MPS control command is missing


def find_mps(gpu: Gpu, folder: Path, command: str | None = None) -> MpsHere:
    """Find out what MPS could enforce on this machine. `folder`: the agent's folder; `command`: path to use instead of
    that of nvidia-cuda-mps-control.
    """
    device = device_of(gpu)
    command = command or device.mps_control()
    if command is None:
        return MpsHere(Abilities(0), remedy=device.mps_remedy)
    return MpsHere(abilities(command), device.compute_mode(gpu.uuid), foreign_daemons(folder), device.mps_remedy)


def mps_prospects(found: MpsHere) -> tuple[Prospect, Prospect]:
    """What would enforce SM shares and isolate faults of tenants with --mechanism mps."""
    can, obstacles = found.can, _obstacles(found)
    if not can.protocol:
        why = f"{DAEMON} is not installed, so MPS cannot run"
        todo = f"{why}: {found.remedy}"
        return (
            Prospect(Promise.SMS, Strength.NOTHING, "no MPS", why, (todo,)),
            Prospect(Promise.FAULTS, Strength.NOTHING, "no MPS", why),
        )
    if can.protocol == 2:
        older = "this MPS has no namespaces, which need driver release 615"
        return (
            Prospect(
                Promise.SMS,
                Strength.SHIM,
                "a percentage in the environment of the tenant's programs",
                "the MPS server takes the percentage from the program, which can set another one",
                (older, *obstacles),
            ),
            Prospect(
                Promise.FAULTS,
                Strength.NOTHING,
                "one server for all tenants of the GPU",
                "a fatal fault of one client ends all clients of the server",
                ("SM partitions, which isolate faults of SMs, are used from driver release 615 on",),
            ),
        )
    lending = ", and lends them while they are idle" if can.shareable else ""
    return (
        Prospect(
            Promise.SMS,
            Strength.SERVER,
            "the percentage of the tenant's namespace; a tenant with a request also has an SM partition",
            f"the MPS server has a limit per namespace that no client can raise, and reserves SMs in chunks{lending}",
            obstacles,
        ),
        Prospect(
            Promise.FAULTS,
            Strength.SERVER,
            "an SM partition, for tenants with a request",
            "the server ends the clients of the partition whose SMs have the fault; other faults end all clients",
            ("a tenant without a request has no partition",),
        ),
    )


def _obstacles(found: MpsHere) -> tuple[str, ...]:
    """Sentences about what lets programs escape the MPS server's limits, or prevents the server from running."""
    said = [
        f"another MPS daemon runs here ({text}): this agent's limits do not apply to programs that "
        "connect to it; end it with its own quit command"
        for text in found.foreign
    ]
    if found.compute_mode == PROHIBITED:
        said.append("the GPU's compute mode is prohibited: no program can use it; nvidia-smi -c 0 changes that")
    elif found.compute_mode != EXCLUSIVE:
        said.append(
            f"the GPU's compute mode is {found.compute_mode or 'unknown'}: a program that leaves MPS has "
            "the whole GPU and is only reported; nvidia-smi -c EXCLUSIVE_PROCESS prevents it"
        )
    return tuple(said)


def foreign_daemons(folder: Path, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """MPS control daemons whose pipes are outside the agent's folder."""
    # daemons are told apart by their pipe folder, since one daemon may consist of several processes
    found: dict[str, str] = {}
    for entry in sorted(filter(str.isdigit, os.listdir(proc)), key=int):
        try:
            words = (proc / entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if not any(Path(word).name == DAEMON for word in words[:3]) or not {"-d", "-f"} & set(words):
                continue
            variables = [variable.decode(errors="replace") for variable in environment(int(entry), proc)]
        except PermissionError:
            found.setdefault(entry, f"process {entry} of another user")
            continue
        except OSError:
            continue  # the process has just ended, so its environment cannot be read
        named = (text.partition("=")[2] for text in variables if text.startswith(f"{PIPE_FOLDER}="))
        pipe = next(named, "the daemon's default folder")
        if not Path(pipe).is_relative_to(folder):
            found.setdefault(pipe, f"process {entry} with pipes in {pipe}")
    return tuple(found.values())
