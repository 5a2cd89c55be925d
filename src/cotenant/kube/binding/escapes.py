"""Processes of pods that use the agent's GPUs and have not come to it: LD_PRELOAD lost, another C library, a bypass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from cotenant.agent.tenants.places import Place, place_of
from cotenant.devices.nvidia import Nvidia
from cotenant.devices.registry import device

GpuProcesses = Mapping[str, Iterable[int]]  # GPU's UUID -> process numbers on the host


class Escape(NamedTuple):
    """A process that nothing holds to a share."""

    uid: str
    pid: int
    gpu: str


class EscapeWatch:
    """Remembers who was there the last time: a process that has just started may still be on its way to the agent."""

    def __init__(self, locate: Callable[[int], Place | None] = place_of) -> None:
        self._locate = locate
        self._before: set[Escape] = set()

    def look(self, running: GpuProcesses, tenants: Iterable[Mapping[str, Any]]) -> list[Escape]:
        """Processes on the GPUs, twice in a row, that are in a pod and in no tenant's list."""
        connected = {pid for tenant in tenants for pid in tenant["pids"]}
        seen = set()
        for gpu, pids in running.items():
            for pid in pids:
                place = None if pid in connected else self._locate(pid)
                if place is not None and place.kind == "pod":
                    seen.add(Escape(place.id, pid, gpu))
        found = sorted(seen & self._before)
        self._before = seen
        return found


def nvml_processes(uuids: Iterable[str]) -> GpuProcesses:
    """The processes on these cards."""
    return device(Nvidia.name).processes(uuids)
