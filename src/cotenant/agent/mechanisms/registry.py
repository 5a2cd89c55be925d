"""The list of all mechanisms. Its names are those that the configuration, the command line and the fleet accept."""

from __future__ import annotations

from pathlib import Path

from cotenant.agent.mechanisms.base import Mechanism, Use
from cotenant.agent.mechanisms.cores import Cores
from cotenant.agent.mechanisms.green import Green
from cotenant.agent.mechanisms.mig import Mig
from cotenant.agent.mechanisms.mps import Mps
from cotenant.agent.mechanisms.slices import Slices
from cotenant.agent.mechanisms.time import Time
from cotenant.agent.mechanisms.whole import Whole
from cotenant.core.errors import InputError
from cotenant.devices.base import Gpu

MECHANISMS: dict[str, type[Mechanism]] = {kind.name: kind for kind in (Time, Slices, Whole, Mps, Green, Mig, Cores)}
DEFAULT = Time.name  # the mechanism of a job that names none
AUTO = "auto"  # stands for `slices` if the driver supports them, otherwise for `time`
EXCLUSIVE = Whole.name  # the mechanism of a tenant that has its GPUs for itself


def names(use: Use) -> tuple[str, ...]:
    """Return the names of the mechanisms that may be used for this purpose."""
    return tuple(name for name, kind in MECHANISMS.items() if use in kind.uses)


def find(name: str, use: Use | None = None, *, field: str = "mechanism") -> type[Mechanism]:
    """The mechanism of this name. Raises InputError that lists those allowed for `use`."""
    kind = MECHANISMS.get(name)
    if kind is None or (use is not None and use not in kind.uses):
        known = names(use) if use is not None else tuple(MECHANISMS)
        raise InputError(f"{name[:40]!r} is not one of {', '.join(known)}", field=field)
    return kind


def choose(use: Use, *, concurrent: bool) -> str:
    """Return the name of the first mechanism in the list that lets tenants use a GPU at the same time; with
    `concurrent=False`, of the first that lets them use it one after the other.
    """
    shared = (name for name in names(use) if not MECHANISMS[name].capabilities.exclusive)
    return next(name for name in shared if MECHANISMS[name].capabilities.concurrent == concurrent)


def mix(one: str, other: str) -> bool:
    """Return whether tenants of two mechanisms may share a GPU."""
    mine, theirs = MECHANISMS[one].capabilities, MECHANISMS[other].capabilities
    return one == other or other in mine.mixes_with or one in theirs.mixes_with


def make(folder: Path, use: Use, gpus: tuple[Gpu, ...] = ()) -> dict[str, Mechanism]:
    """Create each mechanism that is allowed for `use`, with runtime files under `folder`, for the given GPUs."""
    return {name: MECHANISMS[name](folder, gpus) for name in names(use)}


def end_left_behind(folder: Path, use: Use, gpus: tuple[Gpu, ...]) -> None:
    """End what the mechanisms of a killed process still run in its folder, such as MPS daemons."""
    for mechanism in make(folder, use, gpus).values():
        mechanism.taken_over()
        mechanism.close()
