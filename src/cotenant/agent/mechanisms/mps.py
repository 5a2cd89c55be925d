"""mps: tenants run at once under NVIDIA's Multi-Process Service, each with part of the SMs. Owns the daemons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.mechanisms.base import Capabilities, Enforcement, Mechanism, ShareSpec, Use
from cotenant.agent.mechanisms.mps_control import Abilities, abilities
from cotenant.agent.mechanisms.mps_daemons import MpsDaemons
from cotenant.agent.mechanisms.mps_namespaces import MpsNamespaces
from cotenant.agent.mechanisms.proof import Look
from cotenant.core.errors import WorkError
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device_of


class Mps(Mechanism):
    """By namespaces of one daemon where the driver has protocol 3 (release 615), else by a daemon per GPU."""

    name = "mps"
    uses = frozenset({Use.TENANT, Use.SERVICE, Use.JOB, Use.PROFILE})
    capabilities = Capabilities(
        compute="at most limit percent of the SMs; from release 615 of the driver on the request is SMs of its own"
        " where the GPU has no program yet, before it is not enforced; memory bandwidth and caches are shared by all",
        memory="capped by the shim per tenant; MPS's own pinned limit backs it per process",
        resize="an SM percentage is fixed once a process has connected: a new one is for processes started later",
        isolation="address spaces are apart, faults are not: a client killed inside a kernel or a fatal GPU error"
        " can take every client of the server with it, but for clients of different SM partitions; without protocol 3"
        " one server serves one user",
        sms_by=Strength.SHIM,  # the least, of protocol 2: mps_prospects has what a machine's MPS keeps
        memory_by=Strength.SHIM,
        faults_by=Strength.NOTHING,
        concurrent=True,
        notes=(
            "before release 615 the percentage travels in the environment: a tenant that changes it before its first"
            " CUDA call has what it sets, up to the server's default; from 615 on its namespace has the percentage",
            "a program that leaves its pipe folder has the whole GPU: it is named within two seconds, and kept out by"
            " nvidia-smi -c EXCLUSIVE_PROCESS",
            "needs nvidia-cuda-mps-control; on the software GPU tenants run at once without it",
        ),
    )

    def __init__(self, folder: Path, gpus: tuple[Gpu, ...] = (), command: str | None = None) -> None:
        """`command`: the control command, instead of the device's own."""
        super().__init__(folder, gpus)
        self.command = command
        self._two: MpsDaemons | None = None
        self._three: MpsNamespaces | None = None
        self._can: Abilities | None = None

    def prepare(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
        backend = self._backend(spec.name, gpus)
        if backend is not None:
            backend.prepare(spec, gpus)

    def settle(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
        for backend in self._backends():
            backend.settle(spec, gpus)

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """See Mechanism."""
        backend = self._backend(spec.name, gpus)
        if backend is None:  # processes run at once without a daemon; the memory limit is the shim's alone
            if len(gpus) != 1:
                raise WorkError("mps gives a tenant of the software GPU one GPU; start one tenant per GPU")
            return Enforcement({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{spec.limit * 100:g}"}, SlotFlag.UNGATED)
        return backend.grant(spec, gpus)

    def resize(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> str:
        """See Mechanism."""
        found = [backend.resize(spec) for backend in self._backends() if backend.has(spec.name)]
        return found[0] if found else "memory at once, the SM percentage for processes started from now on"

    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
        for backend in self._backends():
            backend.revoke(name)

    def worker_gone(self, name: str) -> None:
        """See Mechanism."""
        if self._three is not None:  # a daemon per GPU is kept for the next worker
            self._three.revoke(name)

    def taken_over(self) -> None:
        """See Mechanism."""
        mine = tuple(gpu for gpu in self.gpus if self._control_of((gpu,)) is not None)
        if not mine or not list(self.folder.glob("mps*")):
            return
        command = self._control_of(mine)
        assert command is not None
        self._daemons(command).sweep(mine)
        if self.can(command).protocol == 3:
            self._namespaces(command).sweep()

    def look(self) -> Look | None:
        """See Mechanism."""
        found = [look for backend in self._backends() if (look := backend.look()) is not None]
        if not found:
            return None
        clients = tuple(client for look in found for client in look.clients)
        places = {name: place for look in found for name, place in look.places.items()}
        return Look(clients, places, {name: text for look in found for name, text in look.put_right.items()})

    async def watch(self, lost: Callable[[str, str], None]) -> None:
        """See Mechanism: the clients of a server that dies end with an error."""
        from cotenant.agent.mechanisms.mps_watch import MpsWatch  # not for commands that only list mechanisms

        def died(uuid: str) -> None:
            text = f"the MPS server of GPU {uuid} has died: programs on it have lost their GPU and must start again"
            lost(uuid, text)

        await MpsWatch(self, died).run()

    def close(self) -> None:
        """Quit every daemon, and wait for their ends."""
        for backend in self._backends():
            backend.close()

    def watched(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that have a server now."""
        return tuple({uuid for backend in self._backends() for uuid in backend.gpus()})

    def server(self, uuid: str) -> int | None:
        """Number of the server's process on a GPU; None while there is none."""
        found = (backend.server(uuid) for backend in self._backends() if uuid in backend.gpus())
        return next((pid for pid in found if pid is not None), None)

    def can(self, command: str) -> Abilities:
        """What the control command can do; it is asked once."""
        if self._can is None:
            self._can = abilities(command)
        return self._can

    def _backends(self) -> list[MpsDaemons | MpsNamespaces]:
        return [backend for backend in (self._two, self._three) if backend is not None]

    def _backend(self, name: str, gpus: tuple[Gpu, ...]) -> MpsDaemons | MpsNamespaces | None:
        """What enforces a tenant's share: a daemon per GPU also where one of an older agent still serves programs."""
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
