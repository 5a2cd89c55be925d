"""Reads and changes MIG modes and instances, and lists processes, by NVML's Python package (pynvml).

Every call goes through `Nvml.call`, which turns an NVML error into a WorkError with one sentence. Tests pass a stateful
stand-in for pynvml, so that they run all code of this module.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.core.mig import Geometry, Placement, SliceProfile

MIB = 1 << 20
# NVML's GPU instance profiles by index, largest first; a profile that is not listed has the name that the driver
# reports
KINDS = {
    5: "8g", 4: "7g", 6: "6g", 3: "4g", 2: "3g", 1: "2g", 9: "1g+", 0: "1g",
    12: "4g+gfx", 17: "3g+gfx", 8: "2g+me", 11: "2g+gfx", 16: "2g+me.all", 14: "2g-me",
    7: "1g+me", 10: "1g+gfx", 15: "1g+me.all", 13: "1g-me",
}  # fmt: skip
PLAIN = re.compile(r"\d+g\+?")
MOST_LISTED = 16  # most entries of an array that an NVML function fills
MOST_PROFILES = 32  # all profile indices below this are tried, also those that KINDS does not list
COMPUTE_PROFILES = 9
SHARED_ENGINES = 0
NO_INSTANCE = 0xFFFFFFFF

SENTENCES = {
    "NVML_ERROR_NO_PERMISSION": "needs root (or the capability that the driver asks for)",
    "NVML_ERROR_IN_USE": "failed: a process or an existing instance uses it",
    "NVML_ERROR_INSUFFICIENT_RESOURCES": "failed: there are not enough free slices at that place",
    "NVML_ERROR_NOT_SUPPORTED": "is not supported by this GPU or driver",
    "NVML_ERROR_FUNCTION_NOT_FOUND": "needs a newer driver",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": "needs a newer driver",
    "NVML_ERROR_INVALID_ARGUMENT": "was refused as invalid by the driver",
    "NVML_ERROR_NOT_FOUND": "failed: the driver found no such GPU or instance",
    "NVML_ERROR_GPU_IS_LOST": "failed because the GPU fell off the bus",
    "NVML_ERROR_RESET_REQUIRED": "takes effect only after a GPU reset",
    "NVML_ERROR_DRIVER_NOT_LOADED": "failed: the NVIDIA driver is not loaded",
    "NVML_ERROR_LIBRARY_NOT_FOUND": "failed: there is no NVIDIA driver on this machine",
}


@dataclass(frozen=True)
class GpuInstance:
    """An existing GPU instance of MIG. `placement`: profile and start; `uuid`: UUID of the instance's MIG device, None
    if it has no MIG device.
    """

    id: int
    placement: Placement
    compute_ids: tuple[int, ...]
    uuids: tuple[str, ...] = ()  #: UUIDs of its MIG devices, one for each compute instance
    name: str = ""

    @property
    def uuid(self) -> str | None:
        """UUID of the GPU instance's first MIG device; None if the instance has no compute instance."""
        return self.uuids[0] if self.uuids else None

    def __str__(self) -> str:
        return f"{self.name}@{self.placement.start}"


@dataclass
class NvmlGpu:
    """A GPU of this machine; `handle` is NVML's handle of it."""

    index: int
    uuid: str
    name: str
    handle: Any = field(repr=False)


class Nvml:
    """A session with NVML, which is used as a context manager."""

    def __init__(self, library: ModuleType | Any | None = None) -> None:
        if library is None:
            import pynvml

            library = pynvml
        self.lib: Any = library
        self._codes = {getattr(library, name): name for name in SENTENCES if hasattr(library, name)}

    def __enter__(self) -> Nvml:
        self.call("opening NVML", "nvmlInit")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.call("closing NVML", "nvmlShutdown")

    def call(self, doing: str, function: str, *args: Any) -> Any:
        """Call an NVML function. If it fails, raises WorkError with `doing` (what was attempted) and the reason."""
        call: Callable[..., Any] | None = getattr(self.lib, function, None)
        if call is None:
            raise WorkError(f"{doing} needs a newer nvidia-ml-py: the installed one has no {function}")
        try:
            return call(*args)
        except self.lib.NVMLError as error:
            name = self._codes.get(getattr(error, "value", None), "")
            raise NvmlCallError(f"{doing} {SENTENCES.get(name, f'failed: {error}')}", name) from None

    # ---- GPUs

    def devices(self) -> list[NvmlGpu]:
        count = self.call("counting GPUs", "nvmlDeviceGetCount")
        result = []
        for index in range(count):
            handle = self.call(f"opening GPU {index}", "nvmlDeviceGetHandleByIndex", index)
            uuid = _text(self.call(f"naming GPU {index}", "nvmlDeviceGetUUID", handle))
            name = _text(self.call(f"naming GPU {index}", "nvmlDeviceGetName", handle))
            result.append(NvmlGpu(index, uuid, name, handle))
        return result

    def pci_id(self, device: NvmlGpu) -> int:
        """PCI ids of device and vendor in one number, as mig-parted writes them: 0x233010DE."""
        return int(self.call(f"reading GPU {device.index}", "nvmlDeviceGetPciInfo", device.handle).pciDeviceId)

    def fault(self, uuid: str) -> str:
        """Why a GPU cannot be used now, in words; empty if NVML can read it. Faults of other GPUs do not matter."""
        try:
            handle = self.call(f"opening {uuid}", "nvmlDeviceGetHandleByUUID", uuid)
            self.call(f"reading {uuid}", "nvmlDeviceGetMemoryInfo", handle)
        except WorkError as error:
            return str(error)
        return ""

    def find(self, gpu: str) -> NvmlGpu:
        """The GPU with this UUID, beginning of a UUID, or index. Raises InputError that lists the machine's GPUs."""
        devices = self.devices()
        wanted = gpu.strip()
        exact = [d for d in devices if wanted in (d.uuid, str(d.index))]
        matches = exact or [d for d in devices if len(wanted) >= 4 and d.uuid.startswith(wanted)]
        if len(matches) == 1:
            return matches[0]
        there = ", ".join(f"GPU {d.index} {d.uuid} ({d.name})" for d in devices) or "no GPU"
        what = "is not unique" if matches else "is not on this machine"
        raise InputError(f"GPU {gpu!r} {what}; this machine has {there}", field="gpu")

    # ---- MIG mode

    def mode(self, device: NvmlGpu) -> tuple[bool, bool]:
        """Whether MIG is on now, and whether it will be on after the next GPU reset."""
        now, pending = self.call(f"reading the MIG mode of GPU {device.index}", "nvmlDeviceGetMigMode", device.handle)
        return bool(now), bool(pending)

    def set_mode(self, device: NvmlGpu, on: bool) -> bool:
        """Turn MIG on or off. Returns False if that takes effect only after a GPU reset."""
        doing = f"switching MIG {'on' if on else 'off'} on GPU {device.index}"
        status = self.call(doing, "nvmlDeviceSetMigMode", device.handle, int(on))
        return int(status) == 0 and self.mode(device)[0] == on

    # ---- placements and instances

    def geometry(self, device: NvmlGpu) -> Geometry:
        """The MIG profiles that a GPU offers and their possible placements, as the driver reports them."""
        found: dict[str, SliceProfile] = {}
        for index in (*KINDS, *(i for i in range(MOST_PROFILES) if i not in KINDS)):
            info = self._profile(device, index)
            places = [] if info is None else self.possible_placements(device, int(info.id))
            if info is None or not places:
                continue
            profile = _slice_profile(index, info, places)
            found.setdefault(profile.kind, profile)
        if not found:
            raise WorkError(f"GPU {device.index} ({device.name}) offers no MIG profiles; is MIG on, and supported?")
        plain = {kind: profile for kind, profile in found.items() if PLAIN.fullmatch(kind)}
        variants = {kind: profile for kind, profile in found.items() if kind not in plain}
        whole = next(iter((plain or variants).values()))
        engines = (max(p.engines[0] for p in found.values()), max(p.engines[1] for p in found.values()))
        return Geometry(device.name, whole.compute, whole.memory_slots, plain, "NVML", variants, engines)

    def _profile(self, device: NvmlGpu, index: int) -> Any | None:
        doing = f"reading the MIG profiles of GPU {device.index}"
        return self._newest(doing, "nvmlDeviceGetGpuInstanceProfileInfo", device.handle, index)

    def _newest(self, doing: str, function: str, *args: Any) -> Any | None:
        """Read a profile by the newest version of the call that the driver has; None if there is no such profile."""
        for version in (2, 1):
            try:
                return self.call(doing, function, *args, version)
            except NvmlCallError as error:
                if error.code in ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_INVALID_ARGUMENT", "NVML_ERROR_NOT_FOUND"):
                    return None
                old = error.code in ("NVML_ERROR_FUNCTION_NOT_FOUND", "NVML_ERROR_ARGUMENT_VERSION_MISMATCH")
                if version == 1 or not old:
                    raise
        return None

    def possible_placements(self, device: NvmlGpu, profile_id: int) -> list[tuple[int, int]]:
        """Possible placements of a profile, as (start, size) in memory slots."""
        doing, kind = f"reading the MIG placements of GPU {device.index}", self.lib.c_nvmlGpuInstancePlacement_t
        places = self._listed(kind, doing, "nvmlDeviceGetGpuInstancePossiblePlacements", device.handle, profile_id)
        return [(int(place.start), int(place.size)) for place in places]

    def _listed(self, kind: Any, doing: str, function: str, *args: Any) -> list[Any]:
        """Call an NVML function that fills an array of `kind`, and return the array's entries."""
        array, count = (kind * MOST_LISTED)(), ctypes.c_uint(MOST_LISTED)
        self.call(doing, function, *args, array, ctypes.byref(count))
        return [array[i] for i in range(count.value)]

    def instances(self, device: NvmlGpu, geo: Geometry) -> list[GpuInstance]:
        """The existing GPU instances, ordered by start."""
        uuids = self._uuids(device)
        found = []
        for kind, profile in geo.every.items():
            doing, handle_kind = f"listing the instances of GPU {device.index}", self.lib.c_nvmlGpuInstance_t
            handles = self._listed(handle_kind, doing, "nvmlDeviceGetGpuInstances", device.handle, profile.profile_id)
            for handle in handles:
                info = self.call("reading a GPU instance", "nvmlGpuInstanceGetInfo", handle)
                compute = tuple(c for c, _ in self._compute(handle))
                place = Placement(int(info.placement.start), kind)
                found.append(GpuInstance(int(info.id), place, compute, uuids.get(int(info.id), ()), profile.name))
        # instances whose profile the driver does not describe
        for missing in uuids.keys() - {instance.id for instance in found}:
            handle = self._instance(device, missing)
            info = self.call("reading a GPU instance", "nvmlGpuInstanceGetInfo", handle)
            name = f"profile-{int(info.profileId)}"
            compute = tuple(c for c, _ in self._compute(handle))
            found.append(
                GpuInstance(missing, Placement(int(info.placement.start), name), compute, uuids[missing], name)
            )
        return sorted(found, key=lambda g: g.placement)

    def _instance(self, device: NvmlGpu, instance_id: int) -> Any:
        return self.call("opening a GPU instance", "nvmlDeviceGetGpuInstanceById", device.handle, instance_id)

    def _compute(self, instance: Any) -> list[tuple[int, Any]]:
        """Id and handle of each compute instance in a GPU instance."""
        found = []
        for info in self._compute_profiles(instance):
            doing, kind = "listing compute instances", self.lib.c_nvmlComputeInstance_t
            for handle in self._listed(kind, doing, "nvmlGpuInstanceGetComputeInstances", instance, info.id):
                one = self.call("reading a compute instance", "nvmlComputeInstanceGetInfo", handle)
                found.append((int(one.id), handle))
        return sorted(found, key=lambda pair: pair[0])

    def _compute_profiles(self, instance: Any) -> list[Any]:
        """Return the compute instance profiles that a GPU instance of MIG allows."""
        infos = (
            self._newest(
                "reading compute profiles", "nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, index,
                SHARED_ENGINES,
            )
            for index in range(COMPUTE_PROFILES)
        )  # fmt: skip
        return [info for info in infos if info is not None]

    def _uuids(self, device: NvmlGpu) -> dict[int, tuple[str, ...]]:
        """GPU instance id -> UUIDs of its MIG devices. A divided instance has one for each of its compute instances."""
        most = int(self.call("counting MIG devices", "nvmlDeviceGetMaxMigDeviceCount", device.handle))
        result: dict[int, tuple[str, ...]] = {}
        for index in range(most):
            try:
                handle = self.call("opening a MIG device", "nvmlDeviceGetMigDeviceHandleByIndex", device.handle, index)
            except NvmlCallError as error:
                if error.code == "NVML_ERROR_NOT_FOUND":
                    continue
                raise
            instance = int(self.call("reading a MIG device", "nvmlDeviceGetGpuInstanceId", handle))
            uuid = _text(self.call("reading a MIG device", "nvmlDeviceGetUUID", handle))
            result[instance] = (*result.get(instance, ()), uuid)
        return result

    def create(self, device: NvmlGpu, profile: SliceProfile, start: int) -> int:
        """Create a GPU instance and return its id. Programs can use it only after `fill`."""
        place = self.lib.c_nvmlGpuInstancePlacement_t(start, profile.memory_slots)
        handle = self.call(
            f"creating {profile.name}@{start} on GPU {device.index}",
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            device.handle,
            profile.profile_id,
            ctypes.byref(place),
        )
        return int(self.call("reading the new GPU instance", "nvmlGpuInstanceGetInfo", handle).id)

    def fill(self, device: NvmlGpu, instance_id: int) -> None:
        """Create a compute instance that has all of a GPU instance, so that programs can use it."""
        handle = self._instance(device, instance_id)
        doing = f"creating the compute instance of GPU instance {instance_id} on GPU {device.index}"
        offered = self._compute_profiles(handle)
        if not offered:
            raise WorkError(f"{doing} failed: the driver offers no compute profile for the whole GPU instance")
        widest = max(offered, key=lambda info: int(info.sliceCount))
        self.call(doing, "nvmlGpuInstanceCreateComputeInstance", handle, widest.id)

    def destroy(self, device: NvmlGpu, instance_id: int) -> None:
        """Destroy a GPU instance and its compute instances."""
        handle = self._instance(device, instance_id)
        doing = f"destroying GPU instance {instance_id} on GPU {device.index}"
        for _, compute in self._compute(handle):
            self.call(doing, "nvmlComputeInstanceDestroy", compute)
        self.call(doing, "nvmlGpuInstanceDestroy", handle)

    def processes(self, device: NvmlGpu) -> dict[int, int | None]:
        """Pid of each process on the GPU -> id of its GPU instance (None: the whole GPU)."""
        doing = f"listing processes on GPU {device.index}"
        found = list(self.call(doing, "nvmlDeviceGetComputeRunningProcesses", device.handle))
        try:  # NVML lists the clients of an MPS server in a call of its own
            found += self.call(doing, "nvmlDeviceGetMPSComputeRunningProcesses", device.handle)
        except NvmlCallError as error:
            if error.code not in ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_FUNCTION_NOT_FOUND"):
                raise
        result: dict[int, int | None] = {}
        for process in found:
            where = getattr(process, "gpuInstanceId", NO_INSTANCE)
            result[int(process.pid)] = None if where in (None, NO_INSTANCE) else int(where)
        return result


class NvmlCallError(WorkError):
    """Raised if an NVML call failed. `code`: NVML's name of the error, empty if it is not known."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def _slice_profile(index: int, info: Any, places: list[tuple[int, int]]) -> SliceProfile:
    kind = KINDS.get(index, "")
    said = _text(getattr(info, "name", "")).removeprefix("MIG ").strip()
    if not kind:
        kind = re.sub(r"\.\d+gb", "", said) or f"profile-{int(info.id)}"
    slices, suffix = int(info.sliceCount), kind.lstrip("0123456789").removeprefix("g")
    gib = round(int(info.memorySizeMB) / 1024 + 0.49)
    name = said or f"{slices}g.{gib}gb{'' if suffix == '+' else suffix}"
    return SliceProfile(
        kind, name, int(info.id), slices, places[0][1], int(info.memorySizeMB) * MIB, int(info.multiprocessorCount),
        tuple(sorted(start for start, _ in places)), int(info.instanceCount),
        (int(getattr(info, "decoderCount", 0)), int(getattr(info, "ofaCount", 0))),
    )  # fmt: skip


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
