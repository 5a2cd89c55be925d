"""Mechanism mps: tenants run concurrently under NVIDIA's Multi-Process Service (MPS), each with a share of the SMs. It
starts and stops the MPS daemons.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.mechanisms.base import Capabilities, Enforcement, Mechanism, ShareSpec, Use
from cotenant.agent.mechanisms.mps_control import PERCENTAGE, Abilities, abilities
from cotenant.agent.mechanisms.mps_daemons import MpsDaemons
from cotenant.agent.mechanisms.mps_namespaces import MpsNamespaces
from cotenant.agent.mechanisms.proof import Look
from cotenant.core.errors import WorkError
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device_of


class Mps(Mechanism):
    """Uses one daemon with namespaces if MPS has control protocol 3 (driver 615 or newer), else a daemon per GPU."""

    name = "mps"
    uses = frozenset({Use.TENANT, Use.SERVICE, Use.JOB, Use.PROFILE})
    capabilities = Capabilities(
        compute="at most the percentage of the SMs that is the tenant's limit; from driver release 615 on, SMs are "
        "reserved for the request if the GPU has no other programs; before, the request is not enforced; "
        "memory bandwidth and caches are shared by all",
        memory="limited by the shim for each tenant, and by MPS's limit on pinned memory for each process",
        resize="an SM percentage is fixed when a process connects: a new one applies to processes started later",
        isolation="address spaces are isolated, faults are not: a client killed inside a kernel or a fatal GPU "
        "error can end all clients of the server, except those of other SM partitions; without "
        "protocol 3 one server serves one user",
        # what the oldest MPS (control protocol 2) enforces; mps_prospects.py finds what this machine's MPS enforces
        sms_by=Strength.SHIM,
        memory_by=Strength.SHIM,
        faults_by=Strength.NOTHING,
        concurrent=True,
        notes=(
            "before release 615 the percentage is an environment variable: a tenant that changes it "
            "before its first CUDA call gets what it sets, up to the server's default; from 615 on its "
            "namespace has the percentage",
            "a program that does not use its MPS pipe folder has the whole GPU: the agent reports this within two "
            "seconds, and nvidia-smi -c EXCLUSIVE_PROCESS prevents it",
            "needs nvidia-cuda-mps-control; on the software GPU tenants run concurrently without it",
        ),
    )

    def __init__(self, folder: Path, gpus: tuple[Gpu, ...] = (), command: str | None = None) -> None:
        """`command`: path to use instead of that of nvidia-cuda-mps-control."""
        super().__init__(folder, gpus)
        self.command = command
        self._two: MpsDaemons | None = None
        self._three: MpsNamespaces | None = None
        self._can: Abilities | None = None

    def prepare(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        backend = self._backend(spec.name, gpus)
        if backend is not None:
            backend.prepare(spec, gpus)

    def settle(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        for backend in self._backends():
            backend.settle(spec, gpus)

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        backend = self._backend(spec.name, gpus)
        # the software GPU without a daemon: processes run concurrently, and only the shim limits memory
        if backend is None:
            if len(gpus) != 1:
                raise WorkError("mps gives a tenant of the software GPU one GPU; start one tenant per GPU")
            return Enforcement({PERCENTAGE: f"{spec.limit * 100:g}"}, SlotFlag.UNGATED)
        return backend.grant(spec, gpus)

    def resize(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> str:
        found = [backend.resize(spec) for backend in self._backends() if backend.has(spec.name)]
        return found[0] if found else "memory at once, the SM percentage for processes started from now on"

    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        for backend in self._backends():
            backend.revoke(name)

    def worker_gone(self, name: str) -> None:
        # with protocol 2 nothing is revoked, because the GPU's daemon stays for the next worker
        if self._three is not None:
            self._three.revoke(name)

    def taken_over(self) -> None:
        mine = tuple(gpu for gpu in self.gpus if self._control_of((gpu,)) is not None)
        if not mine or not list(self.folder.glob("mps*")):
            return
        command = self._control_of(mine)
        assert command is not None
        self._daemons(command).sweep(mine)
        if self.can(command).protocol == 3:
            self._namespaces(command).sweep()

    def look(self) -> Look | None:
        found = [look for backend in self._backends() if (look := backend.look()) is not None]
        if not found:
            return None
        clients = tuple(client for look in found for client in look.clients)
        places = {name: place for look in found for name, place in look.places.items()}
        return Look(clients, places, {name: text for look in found for name, text in look.put_right.items()})

    async def watch(self, lost: Callable[[str, str], None]) -> None:
        """Watch the MPS servers, and call `lost` if one dies, because its clients then fail."""
        # imported here, because commands that only list mechanisms do not need this module
        from cotenant.agent.mechanisms.mps_watch import MpsWatch

        def died(uuid: str) -> None:
            text = f"the MPS server of GPU {uuid} has died: programs on it have lost their GPU and must start again"
            lost(uuid, text)

        await MpsWatch(self, died).run()

    def close(self) -> None:
        """Quit every MPS daemon and wait until it has ended."""
        for backend in self._backends():
            backend.close()

    def watched(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that currently have an MPS server."""
        return tuple({uuid for backend in self._backends() for uuid in backend.gpus()})

    def server(self, uuid: str) -> int | None:
        """Pid of a GPU's MPS server; None if there is none."""
        found = (backend.server(uuid) for backend in self._backends() if uuid in backend.gpus())
        return next((pid for pid in found if pid is not None), None)

    def can(self, command: str) -> Abilities:
        """What the MPS control command can do. The command is run once to find that."""
        if self._can is None:
            self._can = abilities(command)
        return self._can

    def _backends(self) -> list[MpsDaemons | MpsNamespaces]:
        return [backend for backend in (self._two, self._three) if backend is not None]

    def _backend(self, name: str, gpus: tuple[Gpu, ...]) -> MpsDaemons | MpsNamespaces | None:
        """The backend that enforces a tenant's share: that which already serves the tenant, else namespaces if they are
        available and no daemon of an earlier agent serves the GPU, else a daemon per GPU.
        """
        command = self._control_of(gpus)
        if command is None:
            return None
        for backend in self._backends():
            if backend.has(name):
                return backend
        if self.can(command).protocol == 3 and not self._daemons(command).left_behind(gpus):
            return self._namespaces(command)
        return self._daemons(command)

    def _control_of(self, gpus: tuple[Gpu, ...]) -> str | None:
        own = device_of(gpus[0]).mps_control()
        return None if own is None else self.command or own

    def _daemons(self, command: str) -> MpsDaemons:
        if self._two is None:
            self._two = MpsDaemons(self.folder, command)
        return self._two

    def _namespaces(self, command: str) -> MpsNamespaces:
        if self._three is None:
            self._three = MpsNamespaces(self.folder, command, self.can(command), self.gpus)
        return self._three
