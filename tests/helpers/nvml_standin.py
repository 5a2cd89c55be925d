# ruff: noqa: N802, N815 - the names are those of the NVML functions it stands in for
"""A stateful stand-in for pynvml with MIG. Its tables come from public `nvidia-smi mig -lgip` and `-lgipp` listings.

It has tables and bookkeeping of placements of its own, so that it does not agree with the package by construction, and
it fails as NVML does: no permission, in use, insufficient resources, not supported, function not found.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pynvml

# NVML profile index: (id, name, instances, MiB, SMs, compute slices, starts, slots), from the public listings.
A100_40 = {
    0: (19, "MIG 1g.5gb", 7, 4864, 14, 1, (0, 1, 2, 3, 4, 5, 6), 1),
    7: (20, "MIG 1g.5gb+me", 1, 4864, 14, 1, (0, 1, 2, 3, 4, 5, 6), 1),
    9: (15, "MIG 1g.10gb", 4, 9984, 14, 1, (0, 2, 4, 6), 2),
    1: (14, "MIG 2g.10gb", 3, 9984, 28, 2, (0, 2, 4), 2),
    2: (9, "MIG 3g.20gb", 2, 20096, 42, 3, (0, 4), 4),
    3: (5, "MIG 4g.20gb", 1, 20096, 56, 4, (0,), 4),
    4: (0, "MIG 7g.40gb", 1, 40320, 98, 7, (0,), 8),
}
H100_80 = {
    0: (19, "MIG 1g.10gb", 7, 9984, 16, 1, (0, 1, 2, 3, 4, 5, 6), 1),
    7: (20, "MIG 1g.10gb+me", 1, 9984, 16, 1, (0, 1, 2, 3, 4, 5, 6), 1),
    9: (15, "MIG 1g.20gb", 4, 20096, 26, 1, (0, 2, 4, 6), 2),
    1: (14, "MIG 2g.20gb", 3, 20096, 32, 2, (0, 2, 4), 2),
    2: (9, "MIG 3g.40gb", 2, 40448, 60, 3, (0, 4), 4),
    3: (5, "MIG 4g.40gb", 1, 40448, 64, 4, (0,), 4),
    4: (0, "MIG 7g.80gb", 1, 81152, 132, 7, (0,), 8),
}
# An RTX PRO 6000 has twelve memory slots. Each row ends with video decoders and optical flow units.
RTX_6000 = {
    3: (0, "MIG 4g.96gb", 1, 97408, 188, 4, (0,), 12, 4, 1),
    12: (32, "MIG 4g.96gb+gfx", 1, 97408, 188, 4, (0,), 12, 4, 1),
    1: (5, "MIG 2g.48gb", 2, 48512, 94, 2, (0, 6), 6, 2, 0),
    11: (35, "MIG 2g.48gb+gfx", 2, 48512, 94, 2, (0, 6), 6, 2, 0),
    16: (64, "MIG 2g.48gb+me.all", 1, 48512, 94, 2, (0, 6), 6, 4, 1),
    14: (66, "MIG 2g.48gb-me", 2, 48512, 94, 2, (0, 6), 6, 0, 0),
    0: (14, "MIG 1g.24gb", 4, 24192, 46, 1, (0, 3, 6, 9), 3, 1, 0),
    7: (21, "MIG 1g.24gb+me", 1, 24192, 46, 1, (0, 3, 6, 9), 3, 1, 1),
    10: (47, "MIG 1g.24gb+gfx", 4, 24192, 46, 1, (0, 3, 6, 9), 3, 1, 0),
    15: (65, "MIG 1g.24gb+me.all", 1, 24192, 46, 1, (0, 3, 6, 9), 3, 4, 1),
    13: (67, "MIG 1g.24gb-me", 4, 24192, 46, 1, (0, 3, 6, 9), 3, 0, 0),
}
FULL_COMPUTE = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}  # compute slices -> index of the compute profile that fills them


class _Info:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@dataclass
class _Instance:
    id: int
    index: int
    start: int
    compute: list[int] = field(default_factory=list)


@dataclass
class Card:
    """One GPU of the stand-in."""

    name: str = "NVIDIA A100-SXM4-40GB"
    uuid: str = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
    profiles: dict[int, tuple[Any, ...]] = field(default_factory=lambda: dict(A100_40))
    mig: bool = True
    pending: bool | None = None
    has_mig: bool = True
    reset_needed: bool = False
    instances: dict[int, _Instance] = field(default_factory=dict)
    processes: dict[int, int | None] = field(default_factory=dict)
    mps_clients: list[int] = field(default_factory=list)
    next_id: int = 1
    pci: int = 0x20B010DE
    slices: int = 7


class Interrupted(BaseException):
    """Raised to simulate the death of the process that was changing the GPU."""


class StandIn:
    """Replaces the pynvml module. `die_at`: number of the change before which the process dies."""

    c_nvmlGpuInstancePlacement_t = pynvml.c_nvmlGpuInstancePlacement_t
    c_nvmlGpuInstance_t = pynvml.c_nvmlGpuInstance_t
    c_nvmlComputeInstance_t = pynvml.c_nvmlComputeInstance_t

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            self.value = value
            super().__init__(f"NVML error {value}")

    def __init__(
        self, *cards: Card, root: bool = True, die_at: int | None = None, old_driver: bool = False, fail_at: int = 0
    ) -> None:
        for name in dir(pynvml):
            if name.startswith("NVML_ERROR_"):
                setattr(self, name, getattr(pynvml, name))
        self.cards = list(cards) or [Card()]
        self.root, self.die_at, self.old_driver = root, die_at, old_driver
        self.fail_at = fail_at  # the change of this number is refused, once
        self.changes: list[str] = []

    # ---- bookkeeping of the stand-in

    def fail(self, name: str) -> None:
        raise self.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))

    def change(self, what: str) -> None:
        if not self.root:
            self.fail("NO_PERMISSION")
        self.changes.append(what)
        if self.die_at is not None and len(self.changes) == self.die_at:
            raise Interrupted(what)
        if self.fail_at == len(self.changes):
            self.changes[-1] += " refused"
            self.fail("UNKNOWN")

    @staticmethod
    def handle(kind: Any, card: int, instance: int, compute: int = 0) -> Any:
        return ctypes.cast(ctypes.c_void_p((card + 1) << 32 | instance << 16 | compute + 1), kind)

    def unpack(self, handle: Any) -> tuple[Card, _Instance, int]:
        value = ctypes.cast(handle, ctypes.c_void_p).value or 0
        card = self.cards[(value >> 32) - 1]
        instance = card.instances.get(value >> 16 & 0xFFFF)
        if instance is None:
            self.fail("NOT_FOUND")
            raise AssertionError
        return card, instance, (value & 0xFFFF) - 1

    def taken(self, card: Card) -> tuple[set[int], int]:
        slots: set[int] = set()
        compute = 0
        for instance in card.instances.values():
            row = card.profiles[instance.index]
            slots |= set(range(instance.start, instance.start + row[7]))
            compute += row[5]
        return slots, compute

    def card(self, handle: int) -> Card:
        return self.cards[handle]

    # ---- functions of pynvml

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        if isinstance(handle, tuple):  # the handle of a MIG device is a tuple
            card, instance, compute = handle
            return f"MIG-{self.cards[card].uuid[4:12]}-0000-0000-{compute:04d}-{instance:012d}"
        return self.cards[handle].uuid

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.cards[handle].name.encode()

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return _Info(pciDeviceId=self.cards[handle].pci)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        card = self.card(handle)
        if not card.has_mig:
            self.fail("NOT_SUPPORTED")
        return [int(card.mig), int(card.mig if card.pending is None else card.pending)]

    def nvmlDeviceSetMigMode(self, handle: int, mode: int) -> int:
        card = self.card(handle)
        if not card.has_mig:
            self.fail("NOT_SUPPORTED")
        if card.processes or (not mode and card.instances):
            self.fail("IN_USE")
        self.change(f"mode {mode}")
        card.pending = bool(mode)
        if card.reset_needed and card.mig != bool(mode):
            return pynvml.NVML_ERROR_RESET_REQUIRED
        card.mig = bool(mode)
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [
            _Info(pid=pid, gpuInstanceId=0xFFFFFFFF if where is None else where)
            for pid, where in self.card(handle).processes.items()
        ]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: int) -> list[Any]:
        if self.old_driver:
            self.fail("FUNCTION_NOT_FOUND")
        return [_Info(pid=pid, gpuInstanceId=None) for pid in self.card(handle).mps_clients]

    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: int, index: int, version: int = 2) -> Any:
        if self.old_driver and version == 2:
            self.fail("FUNCTION_NOT_FOUND")
        card = self.card(handle)
        if not card.mig or index not in card.profiles:
            self.fail("NOT_SUPPORTED")
        identity, name, count, mib, sms, slices = card.profiles[index][:6]
        decoders, flow = (*card.profiles[index][8:], 0, 0)[:2]
        values = {
            "id": identity,
            "sliceCount": slices,
            "instanceCount": count,
            "multiprocessorCount": sms,
            "memorySizeMB": mib,
            "decoderCount": decoders,
            "ofaCount": flow or int(slices == card.slices or name.endswith("+me")),
        }
        return _Info(**values, **({"name": name.encode()} if version == 2 else {}))

    def by_id(self, card: Card, profile_id: int) -> tuple[int, tuple[Any, ...]]:
        for index, row in card.profiles.items():
            if row[0] == profile_id:
                return index, row
        self.fail("INVALID_ARGUMENT")
        raise AssertionError

    def nvmlDeviceGetGpuInstancePossiblePlacements(self, handle: int, profile_id: int, array: Any, count: Any) -> None:
        _, row = self.by_id(self.card(handle), profile_id)
        for i, start in enumerate(row[6]):
            array[i].start, array[i].size = start, row[7]
        count._obj.value = len(row[6])

    def nvmlDeviceGetGpuInstances(self, handle: int, profile_id: int, array: Any, count: Any) -> None:
        card = self.card(handle)
        index, _ = self.by_id(card, profile_id)
        found = [i for i in card.instances.values() if i.index == index]
        for n, instance in enumerate(found):
            array[n] = self.handle(self.c_nvmlGpuInstance_t, handle, instance.id)
        count._obj.value = len(found)

    def nvmlDeviceGetGpuInstanceById(self, handle: int, identity: int) -> Any:
        if identity not in self.card(handle).instances:
            self.fail("NOT_FOUND")
        return self.handle(self.c_nvmlGpuInstance_t, handle, identity)

    def nvmlGpuInstanceGetInfo(self, handle: Any) -> Any:
        card, instance, _ = self.unpack(handle)
        row = card.profiles[instance.index]
        return _Info(id=instance.id, profileId=row[0], placement=_Info(start=instance.start, size=row[7]))

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, handle: int, profile_id: int, placement: Any) -> Any:
        card = self.card(handle)
        index, row = self.by_id(card, profile_id)
        start, size = placement._obj.start, placement._obj.size
        slots, compute = self.taken(card)
        if start not in row[6] or size != row[7]:
            self.fail("INVALID_ARGUMENT")
        if slots & set(range(start, start + size)) or compute + row[5] > card.slices:
            self.fail("INSUFFICIENT_RESOURCES")
        if sum(i.index == index for i in card.instances.values()) >= row[2]:
            self.fail("INSUFFICIENT_RESOURCES")
        self.change(f"create {row[1]}@{start}")
        identity = card.next_id
        card.next_id += 1
        card.instances[identity] = _Instance(identity, index, start)
        return self.handle(self.c_nvmlGpuInstance_t, handle, identity)

    def nvmlGpuInstanceDestroy(self, handle: Any) -> None:
        card, instance, _ = self.unpack(handle)
        if instance.compute:
            self.fail("IN_USE")
        self.change(f"destroy {instance.id}")
        del card.instances[instance.id]

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, handle: Any, index: int, engine: int, version: int = 2
    ) -> Any:
        if self.old_driver and version == 2:
            self.fail("FUNCTION_NOT_FOUND")
        card, instance, _ = self.unpack(handle)
        row = card.profiles[instance.index]
        # an instance of one slice with media extensions has a compute profile of its own
        media = row[1].endswith("+me") and row[5] == 1
        if index != (7 if media else FULL_COMPUTE[row[5]]) or engine != 0:
            self.fail("NOT_SUPPORTED")
        return _Info(id=index, sliceCount=card.profiles[instance.index][5])

    def nvmlGpuInstanceGetComputeInstances(self, handle: Any, profile: int, array: Any, count: Any) -> None:
        card, instance, _ = self.unpack(handle)
        for n, compute in enumerate(instance.compute):
            array[n] = self.handle(self.c_nvmlComputeInstance_t, self.cards.index(card), instance.id, compute)
        count._obj.value = len(instance.compute)

    def nvmlGpuInstanceCreateComputeInstance(self, handle: Any, profile: int) -> Any:
        card, instance, _ = self.unpack(handle)
        if instance.compute:
            self.fail("INSUFFICIENT_RESOURCES")
        self.change(f"fill {instance.id}")
        instance.compute.append(0)
        return self.handle(self.c_nvmlComputeInstance_t, self.cards.index(card), instance.id, 0)

    def nvmlComputeInstanceGetInfo(self, handle: Any) -> Any:
        _, _, compute = self.unpack(handle)
        return _Info(id=compute)

    def nvmlComputeInstanceDestroy(self, handle: Any) -> None:
        card, instance, compute = self.unpack(handle)
        if instance.id in card.processes.values():
            self.fail("IN_USE")
        self.change(f"empty {instance.id}")
        instance.compute.remove(compute)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> tuple[int, int, int]:
        live = [(i.id, compute) for i in self.card(handle).instances.values() for compute in i.compute]
        if index >= len(live):
            self.fail("NOT_FOUND")
        return handle, *live[index]

    def nvmlDeviceGetGpuInstanceId(self, handle: tuple[int, int, int]) -> int:
        return handle[1]
