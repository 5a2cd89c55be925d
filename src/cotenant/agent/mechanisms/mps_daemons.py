"""Backend of the mechanism mps for MPS control protocol 2: a control daemon per GPU; a tenant's limits are environment
variables of its programs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.mechanisms.base import Enforcement, ShareSpec
from cotenant.agent.mechanisms.mps_control import CLIENT_PRIORITY, PERCENTAGE, Control
from cotenant.agent.mechanisms.proof import Client, Look, Place
from cotenant.core.errors import WorkError
from cotenant.devices.base import Gpu


@dataclass
class _Daemon:
    control: Control
    tenants: set[str] = field(default_factory=set)


class MpsDaemons:
    """The MPS daemons, one per GPU: started for the GPU's first tenant and quit after its last."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder, self._command = folder, command
        self._daemons: dict[str, _Daemon] = {}
        # UUID of a GPU -> thread that ends the GPU's MPS daemon by the quit command
        self._ending: dict[str, threading.Thread] = {}
        self._starting = threading.Lock()

    def prepare(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """Start the MPS daemon of a GPU, which takes from 10 ms to many seconds."""
        if len(gpus) == 1:
            self._daemon_of(gpus[0].uuid)

    def settle(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
        for gpu in gpus:
            daemon = self._daemons.get(gpu.uuid)
            if daemon is not None and not daemon.tenants:
                self._quit(gpu.uuid)

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """See Mechanism."""
        if len(gpus) != 1:
            raise WorkError("mps gives a tenant one GPU before driver release 615; start one tenant per GPU")
        daemon = self._daemon_of(gpus[0].uuid)
        daemon.tenants.add(spec.name)
        environment = daemon.control.folders() | {
            # the daemon offers only this GPU, as index 0; without the variable, frameworks that count GPUs by NVML
            # would find all of them
            "CUDA_VISIBLE_DEVICES": "0",
            PERCENTAGE: f"{spec.limit * 100:g}",
            CLIENT_PRIORITY: "0" if spec.priority >= 0 else "1",
        }
        if spec.memory_bytes is not None:
            environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, spec.memory_bytes >> 20)}M"
        request, weight = f"the tenant's request of {spec.request:.0%}", f"the tenant's weight of {spec.weight:g}"
        remarks = (
            *([f"{request} is not enforced: MPS reserves SMs from driver release 615 on"] if spec.request else []),
            *([f"{weight} has no effect: MPS has weights from driver release 620 on"] if spec.weight else []),
        )
        return Enforcement(environment, SlotFlag.UNGATED, below={CLIENT_PRIORITY: "1"}, remarks=remarks)

    def resize(self, spec: ShareSpec) -> str:
        """See Mechanism."""
        return "memory at once, the SM percentage for processes started from now on"

    def revoke(self, name: str) -> None:
        """Remove a tenant, and quit the MPS daemon of its GPU if the tenant was the last on that GPU."""
        for uuid, daemon in list(self._daemons.items()):
            if name in daemon.tenants:
                daemon.tenants.discard(name)
                if not daemon.tenants:
                    self._quit(uuid)

    def has(self, name: str) -> bool:
        """Return whether this backend (one MPS daemon per GPU) serves a tenant."""
        return any(name in daemon.tenants for daemon in self._daemons.values())

    def left_behind(self, gpus: tuple[Gpu, ...]) -> bool:
        """Return whether one of these GPUs has an MPS daemon, started by this agent or by an earlier one that was
        killed.
        """
        return any(gpu.uuid in self._daemons or self._answers(gpu.uuid) for gpu in gpus)

    def sweep(self, gpus: tuple[Gpu, ...]) -> None:
        """Quit the MPS daemons that an earlier agent left and no tenant uses."""
        for gpu in gpus:
            if gpu.uuid not in self._daemons and self.left_behind((gpu,)):
                self._daemons[gpu.uuid] = _Daemon(self._control(gpu.uuid))
                self._quit(gpu.uuid)

    def look(self) -> Look | None:
        """See Mechanism."""
        clients, places = [], {}
        for uuid, daemon in list(self._daemons.items()):
            server = self.server(uuid)
            listed = daemon.control.order("get_client_list", str(server)).split() if server is not None else []
            clients += [Client(int(word), Place(uuid)) for word in listed if word.isdigit()]
            places.update(dict.fromkeys(daemon.tenants, Place(uuid)))
        return Look(tuple(clients), places) if places else None

    def close(self) -> None:
        """Quit every MPS daemon of this backend and wait until it has ended."""
        for uuid in list(self._daemons):
            self._quit(uuid)
        for uuid in list(self._ending):
            self.await_end(uuid)

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that currently have an MPS daemon."""
        return tuple(self._daemons)

    def server(self, uuid: str) -> int | None:
        """Pid of a GPU's MPS server; None if there is none."""
        daemon = self._daemons.get(uuid)
        try:
            words = daemon.control.order("get_server_list").split() if daemon is not None else []
        except WorkError:
            return None
        return next((int(word) for word in words if word.isdigit()), None)

    def _control(self, uuid: str) -> Control:
        # a short name: the path of a socket is limited to about 100 bytes, and the daemon appends names of its own
        folder = self._folder / f"mps-{uuid[-12:]}"
        return Control(self._command, folder / "pipe", folder / "log", 2)

    def _answers(self, uuid: str) -> bool:
        control = self._control(uuid)
        return control.pipe.exists() and control.answers()

    def _daemon_of(self, uuid: str) -> _Daemon:
        with self._starting:
            return self._daemons.get(uuid) or self._start(uuid)

    def _start(self, uuid: str) -> _Daemon:
        self.await_end(uuid)
        daemon = _Daemon(self._control(uuid))
        if self._answers(uuid):
            # a daemon that an earlier agent started still serves its tenants, so it is used again
            self._daemons[uuid] = daemon
            return daemon
        daemon.control.start(visible=uuid)
        self._daemons[uuid] = daemon
        try:
            daemon.control.order("get_server_list")
        except WorkError:
            self._quit(uuid)
            raise
        return daemon

    def _quit(self, uuid: str) -> None:
        """End a GPU's MPS daemon in a thread, because this takes seconds if the MPS server does not end at once."""
        thread = threading.Thread(target=self._end, args=(self._daemons.pop(uuid),), name="mps-quit", daemon=True)
        self._ending[uuid] = thread
        thread.start()

    def _end(self, daemon: _Daemon) -> None:
        for order in ("quit -t 5", "quit"):
            try:
                daemon.control.order(order)
                return
            except WorkError:
                continue  # this sends the daemon a second order to quit; if that fails, too, the daemon has ended

    def await_end(self, uuid: str) -> None:
        """If the MPS daemon of a GPU was told to quit, wait until it has ended."""
        ending = self._ending.pop(uuid, None)
        if ending is not None:
            ending.join()
