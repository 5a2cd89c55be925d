"""Mechanism mig: each worker of a server has a MIG instance for itself."""

from __future__ import annotations

from pathlib import Path

from cotenant.agent.mechanisms.base import Capabilities, Mechanism, Use, WorkerShare
from cotenant.core.errors import WorkError
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device_of


class Mig(Mechanism):
    """Assigns instances of a GPU's existing layout; `cotenant mig apply` creates the layout."""

    name = "mig"
    uses = frozenset({Use.SERVICE})
    capabilities = Capabilities(
        compute="the SMs, caches and memory bandwidth of the instance",
        memory="the memory of the instance",
        resize="needs a new process on another instance",
        isolation="as between two GPUs: faults and errors stay within the instance",
        sms_by=Strength.HARDWARE,
        memory_by=Strength.HARDWARE,
        faults_by=Strength.HARDWARE,
        concurrent=True,
        instances=True,
        notes=("sizes and placements are those of the GPU's MIG profiles; MIG mode must be on",),
    )

    def __init__(self, folder: Path, gpus: tuple[Gpu, ...] = ()) -> None:
        super().__init__(folder, gpus)
        self._taken: dict[str, str] = {}  # name of a worker -> UUID of its MIG instance

    def worker_environment(self, share: WorkerShare, gpu: Gpu) -> dict[str, str]:
        """Environment variables that give a worker a free MIG instance. `share.partition` is the name of a MIG profile,
        for example "3g.71gb"; the instance must have as many slices (3g), whatever its memory.
        """
        size = share.partition.split(".")[0]
        taken = set(self._taken.values())
        found = [uuid for kind, uuid in device_of(gpu).mig_instances(gpu.uuid) if kind.split(".")[0] == size]
        free = [uuid for uuid in found if uuid not in taken]
        if not free:
            what = f"GPU {gpu.index} has no free MIG instance {share.partition}"
            raise WorkError(f"{what}: create the plan's layout with cotenant mig apply")
        self._taken[share.name] = free[0]
        return {"CUDA_VISIBLE_DEVICES": free[0]}

    def worker_gone(self, name: str) -> None:
        self._taken.pop(name, None)
