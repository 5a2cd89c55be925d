"""The node's resources: the agent's GPUs, the MIG instances, and why some of these cannot be used. Shared between
threads.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.devices.registry import device
from cotenant.kube import names
from cotenant.kube.units import MigSlice, NodeGpu, devices

Faults = Mapping[str, str]  # UUID -> why the GPU cannot be used
# a GPU's index or UUID
GPU_NAME = re.compile(r"[0-9]{1,3}|GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class Inventory:
    """The latest view of the node; `wait` blocks until it changes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.gpus: tuple[NodeGpu, ...] = ()  # the agent's GPUs
        self.slices: tuple[MigSlice, ...] = ()  # the MIG instances that exist now on the node's GPUs
        self.version = 0

    def index_of(self, uuid: str) -> str:
        """A GPU's name for messages."""
        return next((f"GPU {gpu.index}" for gpu in self.gpus if gpu.uuid == uuid), uuid)

    def set(self, gpus: Iterable[NodeGpu], slices: Iterable[MigSlice] = ()) -> bool:
        """Set a new view of the node; returns whether it differs from the present one."""
        with self._condition:
            new = tuple(gpus), tuple(slices)
            if new == (self.gpus, self.slices):
                return False
            self.gpus, self.slices = new
            self.version += 1
            self._condition.notify_all()
            return True

    def all_sick(self, why: str) -> bool:
        """Mark all GPUs as unusable, because no agent would enforce a share."""
        return self.set((dataclasses.replace(gpu, fault=gpu.fault or why) for gpu in self.gpus), self.slices)

    def wake(self) -> None:
        """Wake the threads that wait for a change of the view."""
        with self._condition:
            self.version += 1
            self._condition.notify_all()

    def wait(self, version: int, seconds: float) -> int:
        """Wait until the version of the view differs from the given one, or the time has passed; returns the present
        version.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.version != version, seconds)
            return self.version

    def resources(self) -> list[str]:
        """Return the resources of which the node has at least one device, the share first."""
        mig = sorted({piece.resource for piece in self.slices})
        return [
            name for name in (names.SHARE_RESOURCE, names.MEMORY_RESOURCE, names.GPU_RESOURCE, *mig) if self.of(name)
        ]

    def of(self, resource: str) -> dict[str, bool]:
        """Return the devices of a resource with their health."""
        if resource.startswith(names.MIG_PREFIX):
            return {piece.uuid: not piece.fault for piece in self.slices if piece.resource == resource}
        return devices(self.gpus, resource)


def gpus_of(status: Mapping[str, Any], whole: Iterable[str], faults: Faults) -> list[NodeGpu]:
    """The agent's GPUs from its status. `whole`: UUIDs or indices of the GPUs that are offered only as whole GPUs, or
    `all`."""
    wanted = set(whole)
    found = []
    for row in status["gpus"]:
        is_whole = bool(wanted & {"all", row["uuid"], str(row["index"])})
        uuid = str(row["uuid"])
        gpu = NodeGpu(uuid, int(row["index"]), int(row["memory_bytes"]), is_whole, faults.get(uuid, ""))
        found.append(gpu)
    return found


def check_whole(whole: Iterable[str], gpus: Iterable[NodeGpu]) -> None:
    """Raise InputError for a GPU that the agent does not have."""
    if missing := absent(whole, gpus):
        raise InputError(
            f"the agent has no GPU {missing[0]!r}; it has {', '.join(g.uuid for g in gpus)}", field="--whole"
        )


def absent(whole: Iterable[str], gpus: Iterable[NodeGpu]) -> list[str]:
    """The entries of `whole` that name no GPU of the agent."""
    known = {name for gpu in gpus for name in (gpu.uuid, str(gpu.index))} | {"all"}
    return [text for text in whole if text not in known]


def nvml_faults(rows: Iterable[Mapping[str, Any]]) -> Faults:
    """GPUs of the agent that NVML reports as lost or in need of a reset."""
    uuids: dict[str, list[str]] = {}
    for row in rows:
        uuids.setdefault(row["kind"], []).append(str(row["uuid"]))
    return {uuid: why for kind, mine in uuids.items() for uuid, why in device(kind).faults(mine).items()}


def mig_slices(before: Iterable[MigSlice] = ()) -> list[MigSlice]:
    """Existing MIG instances; none without NVML. `before`: the result of the last call. If a GPU cannot be read now,
    its earlier instances are returned with the error, since the GPU must not be offered in shares.
    """
    known, found = list(before), []
    try:
        from cotenant.devices import mig
        from cotenant.devices.nvml import Nvml

        with Nvml() as nvml:
            for gpu in nvml.devices():
                try:
                    found += _instances(mig.export(nvml, gpu.uuid))
                except WorkError as error:
                    found += [dataclasses.replace(one, fault=str(error)) for one in known if one.gpu == gpu.uuid]
    except ImportError:
        return []
    except WorkError as error:
        return [dataclasses.replace(one, fault=str(error)) for one in known]
    return found


def _instances(table: Mapping[str, Any]) -> list[MigSlice]:
    return [
        MigSlice(
            instance["uuid"], names.MIG_PREFIX + str(instance["profile"]).replace("+", "."), gpu["uuid"], gpu["index"]
        )
        for gpu in table["gpus"]
        for instance in gpu["instances"]
        if instance["uuid"]
    ]


FaultSource = Callable[[Iterable[Mapping[str, Any]]], Faults]
