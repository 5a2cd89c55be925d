"""Detects processes of pods that use the agent's GPUs without having connected: LD_PRELOAD lost, another C library, a
bypass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from cotenant.agent.tenants.places import Place, place_of
from cotenant.devices.nvidia import Nvidia
from cotenant.devices.registry import device

GpuProcesses = Mapping[str, Iterable[int]]  # GPU's UUID -> pids on the host


class Escape(NamedTuple):
    """A process without a limit on its share."""

    uid: str
    pid: int
    gpu: str


class EscapeWatch:
    """Compares two consecutive checks, since a process that has just started may still be connecting to the agent."""

    def __init__(self, locate: Callable[[int], Place | None] = place_of) -> None:
        self._locate = locate
        self._before: set[Escape] = set()

    def look(self, running: GpuProcesses, tenants: Iterable[Mapping[str, Any]]) -> list[Escape]:
        """Processes on the GPUs, found twice in a row, that belong to a pod and to no tenant."""
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
    """The processes on these GPUs, by NVML."""
    return device(Nvidia.name).processes(uuids)
