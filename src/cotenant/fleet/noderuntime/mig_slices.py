"""Creates MIG instances for starting jobs, replacing unused ones that are in the way.

A job names its slice by kind and start (`3g@4`). Jobs that are measured together share the whole instance (`7g@0`)
under MPS, each with its own percentage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotenant.agent.mechanisms.base import WorkerShare
from cotenant.agent.mechanisms.mps_daemons import MpsDaemons
from cotenant.core.errors import WorkError
from cotenant.core.mig import Placement, parse_placement
from cotenant.devices import mig
from cotenant.devices.base import Gpu
from cotenant.devices.nvml import Nvml
from cotenant.training.contract import read_json, write_json


def ensure_instance(nvml: Nvml, gpu: str, wanted: Placement) -> str:
    """UUID of the instance at a placement. If there is none, unused instances that overlap are destroyed and the
    instance is created. Raises WorkError if a process runs on an overlapping instance, or if MIG is off.
    """
    device = nvml.find(gpu)
    if not nvml.mode(device)[0]:
        raise WorkError(f"MIG on GPU {device.index} is off; `cotenant mig enable --gpu {device.uuid}` turns it on")
    geo = nvml.geometry(device)
    kept: list[Placement] = []
    for instance in nvml.instances(device, geo):
        if instance.placement != wanted and geo.fits([*kept, instance.placement, wanted]):
            kept.append(instance.placement)
    mig.apply(nvml, gpu, geo.format([*kept, wanted]), beside_running=True)
    return next(i.uuid for i in nvml.instances(device, geo) if i.placement == wanted and i.uuid)


class MigSlices:
    """The MIG instances of the jobs on one node."""

    def __init__(self, folder: Path, nvml: Callable[[], Nvml] = Nvml, command: str = "nvidia-cuda-mps-control") -> None:
        self._nvml, self._mps = nvml, MpsDaemons(folder, command)
        # file with the instance of each attempt that runs under MPS; it is on disk, since jobs outlive this process
        self._book = folder / "slices.json"
        self._under_mps: dict[str, Gpu] = {}
        for attempt, uuid in (read_json(self._book) or {}).items():
            self._enter(attempt, str(uuid), 1.0)

    def environment(self, attempt: str, share: dict[str, Any]) -> dict[str, str]:
        """Create an attempt's slice if it does not exist, and return the environment with which the job's processes run
        on it. `share`: `uuid` of the GPU, `slice`, and `limit` (0..1 of the slice) if several jobs share the slice
        under MPS.
        """
        with self._nvml() as nvml:
            uuid = ensure_instance(nvml, share["uuid"], parse_placement(str(share["slice"])))
        visible = {"CUDA_VISIBLE_DEVICES": uuid}
        if share.get("limit") is None:
            return visible
        environment = self._enter(attempt, uuid, float(share["limit"]))
        self._write()
        return visible | environment

    def leave(self, attempt: str) -> None:
        """Release the slice of an attempt whose processes have ended, if it was shared under MPS. After its last job
        the instance's MPS daemon is ended, since it would keep the instance in use."""
        instance = self._under_mps.pop(attempt, None)
        if instance is not None:
            self._mps.revoke(attempt)
            # the instance is in use, and cannot be replaced, until the daemon has ended
            self._mps.await_end(instance.uuid)
            self._write()

    def _enter(self, attempt: str, uuid: str, limit: float) -> dict[str, str]:
        instance = Gpu(uuid, "MIG", 0, 0)
        granted = self._mps.grant(WorkerShare(attempt, limit), (instance,))
        self._under_mps[attempt] = instance
        return granted.environment

    def _write(self) -> None:
        write_json(self._book, {attempt: gpu.uuid for attempt, gpu in self._under_mps.items()})
