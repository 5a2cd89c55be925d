"""Which GPU a worker process sees, and what enforces its part of it: environment variables for each mechanism."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms.mps import Mps
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.gpus import Gpu, discover
from cotenant.serving.workers.base import WorkerSpec

_MIG_LINE = re.compile(r"MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES in its order, else all."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = ["all"] if text is None else [part.strip() for part in text.split(",") if part.strip()]
    try:
        return discover(wanted)
    except InputError as error:
        raise WorkError(f"CUDA_VISIBLE_DEVICES: {error.message}") from None
    except WorkError:
        hint = "`mechanism: cores` serves on CPU cores, `backend: timed` only takes the time of a profile"
        raise WorkError(f"no NVIDIA GPU was found here: {hint}") from None


class Devices:
    """Gives workers their GPUs. MPS daemons are started with the first worker on a GPU and quit at the end."""

    def __init__(self, mechanism: str, count: int, find: Callable[[], tuple[Gpu, ...]] = visible_gpus) -> None:
        self.mechanism = mechanism
        self.gpus = find()
        if len(self.gpus) < count:
            raise WorkError(f"the services file has {count} GPUs; {len(self.gpus)} can be used here")
        self._folder = tempfile.TemporaryDirectory(prefix="cotenant-")
        self._mps = Mps(Path(self._folder.name))
        self._taken: dict[str, str] = {}  # worker -> MIG instance

    def environment(self, spec: WorkerSpec) -> Mapping[str, str]:
        """What a worker's process gets beside its own environment."""
        gpu = self.gpus[spec.gpu]
        if self.mechanism == "mig":
            return {"CUDA_VISIBLE_DEVICES": self._instance(spec, gpu)}
        seen = {"CUDA_VISIBLE_DEVICES": gpu.uuid}
        if self.mechanism == "time":
            return seen
        # green contexts of several processes run at once under MPS only; what they may use, their ladders say
        limit = 1.0 if self.mechanism == "green" else spec.fraction
        tenant = TenantSpec(name=spec.name, limit=limit, mechanism="mps")
        return {**seen, **self._mps.grant(tenant, (gpu,)).environment}

    def _instance(self, spec: WorkerSpec, gpu: Gpu) -> str:
        """A MIG instance of the partition's size that nobody has."""
        found = [uuid for size, uuid in mig_instances(gpu) if size.split(".")[0] == spec.partition.split(".")[0]]
        free = [uuid for uuid in found if uuid not in self._taken.values()]
        if not free:
            what = f"GPU {gpu.index} has no free MIG instance {spec.partition}"
            raise WorkError(f"{what}: make the plan's layout with cotenant mig apply")
        self._taken[spec.name] = free[0]
        return free[0]

    def released(self, spec: WorkerSpec) -> None:
        """A worker has ended."""
        self._taken.pop(spec.name, None)

    def close(self) -> None:
        """Quit the daemons."""
        self._mps.close()
        self._folder.cleanup()


def mig_instances(gpu: Gpu) -> list[tuple[str, str]]:
    """(size, UUID) of the MIG instances of a GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found: list[tuple[str, str]] = []
    mine = False
    for line in done.stdout.splitlines():
        if line.startswith("GPU "):
            mine = gpu.uuid in line
        match = _MIG_LINE.search(line)
        if match and mine:
            found.append((match.group(1), match.group(2)))
    return found
