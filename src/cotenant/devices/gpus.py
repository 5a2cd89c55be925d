"""The GPUs of this node: real ones through NVML (or nvidia-smi), or the software GPU through its own library."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from cotenant.core.errors import InputError, WorkError


@dataclass(frozen=True)
class Gpu:
    """One GPU. `uuid` is GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, the only identity; `index` is for people."""

    uuid: str
    name: str
    memory_bytes: int
    index: int
    soft: bool = False

    def as_dict(self) -> dict[str, object]:
        """Plain data for --json."""
        return asdict(self)


def uuid_text(raw: bytes) -> str:
    """The 16 bytes of a CUuuid as NVML prints them."""
    digits = raw.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def uuid_bytes(text: str) -> bytes:
    """The reverse of uuid_text."""
    return bytes.fromhex(text.removeprefix("GPU-").removeprefix("MIG-").replace("-", ""))


def discover(wanted: Sequence[str]) -> tuple[Gpu, ...]:
    """GPUs by `soft`, `all`, or UUIDs / indices. InputError for an unknown one, WorkError when there are none."""
    if list(wanted) == ["soft"]:
        return soft_gpus()
    if "soft" in wanted:
        raise InputError("soft stands alone: the software GPU never mixes with real ones", field="--gpus")
    real = real_gpus()
    if list(wanted) == ["all"]:
        if not real:
            raise WorkError("no NVIDIA GPU was found; --gpus soft starts the software GPU instead")
        return real
    chosen = []
    for text in wanted:
        match = [g for g in real if text in (g.uuid, str(g.index))]
        if not match:
            known = ", ".join(g.uuid for g in real) or "none on this machine"
            raise InputError(f"no GPU {text!r} here; known: {known}", field="--gpus")
        if match[0] in chosen:
            raise InputError(f"the GPU {text!r} is named twice", field="--gpus")
        chosen.append(match[0])
    return tuple(chosen)


def within(memory_bytes: int | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs with at most that much memory each: the rest is for programs that are no tenants."""
    if memory_bytes is None:
        return tuple(gpus)
    return tuple(replace(gpu, memory_bytes=min(gpu.memory_bytes, memory_bytes)) for gpu in gpus)


def soft_gpus() -> tuple[Gpu, ...]:
    """Ask the software GPU's library what it simulates."""
    from cotenant.softgpu.build import build

    library = ctypes.CDLL(str(build()))
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # says what a program may see; this is about what is there
    try:
        _check(library.cuInit(0), "cuInit")
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden
    count = ctypes.c_int()
    _check(library.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    found = []
    for index in range(count.value):
        device = ctypes.c_int()
        _check(library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        raw = (ctypes.c_ubyte * 16)()
        _check(library.cuDeviceGetUuid(raw, device), "cuDeviceGetUuid")
        total = ctypes.c_size_t()
        _check(library.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
        name = ctypes.create_string_buffer(96)
        _check(library.cuDeviceGetName(name, 96, device), "cuDeviceGetName")
        found.append(Gpu(uuid_text(bytes(raw)), name.value.decode(), total.value, index, soft=True))
    return tuple(found)


def _check(code: int, call: str) -> None:
    if code != 0:
        raise WorkError(f"the software GPU failed: {call} returned {code}")


def real_gpus() -> tuple[Gpu, ...]:
    """All NVIDIA GPUs, in NVML's order; none when there is no driver. Without NVML's Python binding: nvidia-smi."""
    try:
        from cotenant.devices.nvml import Nvml

        nvml = Nvml()
    except ImportError:
        return _from_nvidia_smi()
    try:
        with nvml:
            return tuple(
                Gpu(
                    device.uuid,
                    device.name,
                    int(nvml.call(f"reading GPU {device.index}", "nvmlDeviceGetMemoryInfo", device.handle).total),
                    device.index,
                )
                for device in nvml.devices()
            )
    except WorkError:
        return ()


def free_bytes(uuid: str) -> int | None:
    """What the driver says is free on a GPU; None where it cannot be asked (the software GPU)."""
    query = ["nvidia-smi", f"--id={uuid}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        return int(done.stdout.strip()) << 20
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def driver_free_bytes(gpu: Gpu) -> int | None:
    """What the driver says is free on a GPU, the software one too."""
    if not gpu.soft:
        return free_bytes(gpu.uuid)
    from cotenant.softgpu.build import build_nvml

    library = ctypes.CDLL(str(build_nvml()))
    device = ctypes.c_void_p()
    memory = (ctypes.c_uint64 * 3)()  # total, free, used
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(gpu.index, ctypes.byref(device)):
        return None
    return int(memory[1]) if library.nvmlDeviceGetMemoryInfo(device, memory) == 0 else None


def _from_nvidia_smi() -> tuple[Gpu, ...]:
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode != 0:
        return ()
    found = []
    for line in done.stdout.splitlines():
        index, uuid, name, mebibytes = (part.strip() for part in line.split(",", 3))
        found.append(Gpu(uuid, name, int(mebibytes) << 20, int(index)))
    return tuple(found)
