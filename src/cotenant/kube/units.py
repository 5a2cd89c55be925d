"""Units of GPUs for the kubelet: their names, and which units may be allocated together. Pure functions.

The kubelet counts identical devices and chooses among them itself; it does not know GPUs. So a unit's name contains its
GPU, preferred allocations keep a container on one GPU, and an allocation across two is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cotenant.core.errors import InputError
from cotenant.kube import names

SEPARATOR = "::"
FAILED = "This pod has failed and is not retried; its controller, if it has one, creates another"


@dataclass(frozen=True)
class NodeGpu:
    """One GPU of the node. `whole`: the GPU is offered only as a whole, not in units. `fault`: why the GPU cannot be
    used now."""

    uuid: str
    index: int
    memory_bytes: int
    whole: bool = False
    fault: str = ""

    def units(self, resource: str) -> int:
        """Number of devices of a resource."""
        if resource == names.GPU_RESOURCE:
            return int(self.whole)
        if self.whole:
            return 0
        return names.SHARE_UNITS if resource == names.SHARE_RESOURCE else self.memory_bytes // names.MEMORY_UNIT_BYTES


@dataclass(frozen=True)
class MigSlice:
    """One MIG instance of the node, offered as a whole, since the hardware isolates it."""

    uuid: str
    resource: str
    gpu: str
    gpu_index: int
    fault: str = ""


def device_id(uuid: str, number: int | None = None) -> str:
    """Name of a unit: the GPU's UUID, followed by a number if the GPU has several units. Names never change."""
    return uuid if number is None else f"{uuid}{SEPARATOR}{number:04d}"


def gpu_of(device: str) -> str:
    """Return the GPU (or MIG instance) to which a unit belongs."""
    return device.partition(SEPARATOR)[0]


def devices(gpus: Iterable[NodeGpu], resource: str) -> dict[str, bool]:
    """Return every device of a resource, with its health."""
    found: dict[str, bool] = {}
    for gpu in gpus:
        if resource == names.GPU_RESOURCE:
            if gpu.whole:
                found[device_id(gpu.uuid)] = not gpu.fault
            continue
        for number in range(gpu.units(resource)):
            found[device_id(gpu.uuid, number)] = not gpu.fault
    return found


def roomiest(known: Sequence[Mapping[str, bool]], taken: Sequence[Collection[str]]) -> str:
    """The GPU with the most free units. GPUs are compared by the free fraction of their scarcest resource, then of the
    first resource. `known[i]`: devices of resource i with their health; `taken[i]`: the allocated ones. Empty if there
    are no GPUs.
    """
    left: dict[str, list[float]] = {}
    for devices_of_one, used in zip(known, taken, strict=True):
        total = Counter(gpu_of(device) for device in devices_of_one)
        free = Counter(gpu_of(device) for device, good in devices_of_one.items() if good and device not in used)
        for uuid, count in total.items():
            left.setdefault(uuid, []).append(free[uuid] / count)
    return min(left, key=lambda uuid: (-min(left[uuid]), -left[uuid][0], uuid), default="")


def offered(all_devices: Mapping[str, bool], taken: Collection[str], shown: str | None) -> dict[str, bool]:
    """Health of devices as reported to the kubelet. If `shown` names a GPU, only its devices and allocated ones count
    as healthy. So the scheduler never sees more free units than one GPU has, and never places a pod whose units would
    be on two GPUs.
    """
    if shown is None:
        return dict(all_devices)
    return {device: good and (device in taken or gpu_of(device) == shown) for device, good in all_devices.items()}


def prefer(
    available: Sequence[str], must: Sequence[str], size: int, beside: str = "", room: set[str] | None = None
) -> list[str]:
    """Choose units of one GPU for a container, including `must`. Of the GPUs with enough free units, the fullest is
    taken, to leave room for large shares. Empty if no single GPU suffices: then the kubelet chooses, and the plugin
    refuses the allocation. `beside`: the GPU of the container's other resource. `room`: GPUs that have room for the
    other resource.
    """
    by_gpu: dict[str, list[str]] = {}
    for device in available:
        by_gpu.setdefault(gpu_of(device), []).append(device)
    held = {gpu_of(device) for device in must}
    if len(held) > 1:
        return []
    fitting = [uuid for uuid, mine in by_gpu.items() if len(set(mine) | set(must)) >= size and held <= {uuid}]
    if not fitting:
        return []
    good = [uuid for uuid in fitting if room is None or uuid in room] or fitting
    chosen = min(good, key=lambda uuid: (uuid != beside, len(by_gpu[uuid]), uuid))
    rest = sorted(set(by_gpu[chosen]) - set(must))
    return [*must, *rest[: size - len(must)]]


def prefer_whole(available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
    """Choose whole GPUs for a container, in a fixed order."""
    return [*must, *sorted(set(available) - set(must))[: size - len(must)]]


def check_allocation(ids: Sequence[str], known: Mapping[str, bool], resource: str) -> list[str]:
    """The GPUs of an allocation; for units there is exactly one. Raises InputError if units are unknown, unhealthy, or
    of two GPUs."""
    unknown = [device for device in ids if device not in known]
    if not ids or unknown:
        what = f"{unknown[0][:80]!r} is" if unknown else "an empty list is"
        raise InputError(f"{what} no device of {resource} on this node")
    sick = sorted({gpu_of(device) for device in ids if not known[device]})
    if sick:
        raise InputError(f"{', '.join(sick)} is not healthy")
    counts = Counter(gpu_of(device) for device in ids)
    if resource in (names.SHARE_RESOURCE, names.MEMORY_RESOURCE) and len(counts) > 1:
        parts = " and ".join(f"{count} on {uuid}" for uuid, count in sorted(counts.items()))
        raise InputError(
            f"{len(ids)} units of {resource} are free only across GPUs ({parts}), but a share must be on "
            f"one GPU. {FAILED}"
        )
    return sorted(counts)
