"""The device plugin of a node: a server per resource, the kubelet and its restarts, health, the binder; one loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.registry import device
from cotenant.kube import names
from cotenant.kube.api import KubeApi
from cotenant.kube.binder import LIST_EVERY_S, Binder
from cotenant.kube.claims import ClaimDriver, ClaimSettings
from cotenant.kube.escapes import EscapeWatch, GpuProcesses, nvml_processes
from cotenant.kube.inventory import FaultSource, check_whole, gpus_of, mig_slices, nvml_faults
from cotenant.kube.plugin import KUBELET_SOCKET, Desk, ResourcePlugin
from cotenant.kube.units import MigSlice

LOG = logging.getLogger(__name__)

ROUND_S = 1.0
HEALTH_EVERY_S = 5.0
AFTER_ALLOCATE_S = 0.1


@dataclass(frozen=True)
class NodeSettings:
    """Where things are on the node, and what is offered how. `whole`: GPUs given away entire (UUIDs, indices, all)."""

    node: str
    agent_folder: Path = Path(str(names.HOST_AGENT))
    plugin_folder: Path = Path(str(names.DEVICE_PLUGINS))
    pod_resources: Path = Path(str(names.POD_RESOURCES)) / KUBELET_SOCKET
    whole: tuple[str, ...] = ()
    faults: FaultSource = nvml_faults
    slices: Callable[[], Iterable[MigSlice]] = mig_slices
    processes: Callable[[Iterable[str]], GpuProcesses] = nvml_processes
    list_every_s: float = LIST_EVERY_S
    claims: ClaimSettings | None = None  # place pods by claims, and offer no units


class AgentOrders:
    """Orders to the agent, each on a connection of its own: an agent that was restarted is found again by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        """One order, one answer."""
        with ControlClient(self._folder, timeout_s=10.0) as client:
            return client.call(op, **order)


class NodePlugin:
    """Runs until `stop`."""

    def __init__(self, settings: NodeSettings, desk: Desk, api: KubeApi) -> None:
        self.settings = settings
        self.desk = desk
        self._agent = AgentOrders(settings.agent_folder)
        self._claims = ClaimDriver(settings.claims, api, desk.inventory, desk.kick.set) if settings.claims else None
        self._binder = Binder(
            self._agent,
            desk,
            api,
            str(settings.pod_resources),
            settings.node,
            settings.list_every_s,
            self._claims,
        )
        self._plugins: dict[str, ResourcePlugin] = {}
        self._kubelet: tuple[int, int, int] | None = None  # the socket we are registered at
        self._stop = threading.Event()
        self._health_s = -1e9
        self._slices: list[MigSlice] = []
        self._faults: dict[str, str] = {}
        self._said = ""
        self._escapes = EscapeWatch()

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. InputError for settings that do not fit the node; everything else is tried again."""
        try:
            if self._claims is not None:
                self._claims.start()
            while not self._stop.is_set():
                self.round()
                if self._kubelet is not None:
                    ready()
                    ready = lambda: None  # noqa: E731 said once
                if self.desk.kick.wait(ROUND_S):
                    self.desk.kick.clear()
                    self._stop.wait(AFTER_ALLOCATE_S)  # the kubelet lists an allocation once it has our answer
        finally:
            if self._claims is not None:
                self._claims.stop()
            for plugin in self._plugins.values():
                plugin.stop()

    def stop(self) -> None:
        """End the run. What was bound stays bound: the next plugin takes it over."""
        self._stop.set()
        self.desk.kick.set()

    def round(self) -> None:
        """One look at everything. A side that does not answer does not keep the others from being looked at."""
        faults = []
        for step in (self._look, self._meet_kubelet, self._offer, self._binder.round):
            try:
                step()
            except WorkError as error:
                faults.append(str(error))
        self._say("; ".join(dict.fromkeys(faults)))

    # -- the node --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """GPUs as the agent has them, with their health."""
        try:
            status = self._agent.call("status")
            self._agent.call("expect", kind="pod")
        except WorkError as error:
            self.desk.inventory.all_sick(str(error))
            raise
        due = time.monotonic() - self._health_s >= HEALTH_EVERY_S
        monitored = any(device(row["kind"]).monitored for row in status["gpus"])
        if due:
            self._health_s = time.monotonic()
            self._faults = dict(self.settings.faults(status["gpus"]))
            self._slices = list(self.settings.slices())
        in_mig = {piece.gpu for piece in self._slices}
        gpus = [g for g in gpus_of(status, self.settings.whole, self._faults) if g.uuid not in in_mig]
        check_whole(self.settings.whole, gpus_of(status, (), {}))
        self.desk.inventory.set(gpus, self._slices)
        if due and monitored:
            running = self.settings.processes([gpu.uuid for gpu in gpus])
            found = self._escapes.look(running, self._agent.call("list")["tenants"])
            self.desk.metrics.escaped = len(found)
            self._binder.escaped(found)

    def _offer(self) -> None:
        """The node's GPUs for claims, where pods are placed by those."""
        if self._claims is not None and self._claims.offer():
            LOG.info("offered by claims: %d GPUs", len(self.desk.inventory.gpus))

    # -- the kubelet -----------------------------------------------------------------------------------------------

    def _meet_kubelet(self) -> None:
        """Serve every resource there is, and register with a kubelet that does not know us yet.

        A kubelet that starts empties the folder: its socket is another one, and ours are gone.
        """
        kubelet = self.settings.plugin_folder / KUBELET_SOCKET
        try:
            found = kubelet.stat()
        except OSError:
            self._kubelet = None
            raise WorkError(f"{kubelet}: there is no kubelet yet") from None
        identity = (found.st_dev, found.st_ino, found.st_ctime_ns)
        if identity != self._kubelet:
            for known in self._plugins.values():
                known.stop()
            self._plugins.clear()
            self._kubelet = None
        by_claims = self._claims is not None
        for resource in self.desk.inventory.resources():
            if by_claims and not resource.startswith(names.MIG_PREFIX):
                continue  # one GPU must not be offered in two ways
            plugin = self._plugins.get(resource)
            if plugin is not None and plugin.path.exists():
                continue
            if plugin is not None:
                plugin.stop()
            fresh = ResourcePlugin(resource, self.desk, self.settings.plugin_folder)
            fresh.start()
            try:
                fresh.register(kubelet)
            except WorkError:
                fresh.stop()
                raise
            self._plugins[resource] = fresh
            LOG.info("registered %s: %d devices", resource, len(self.desk.inventory.of(resource)))
        self._kubelet = identity

    def _say(self, fault: str) -> None:
        if fault != self._said:
            LOG.log(logging.WARNING if fault else logging.INFO, fault or "all is well again")
            self._said = fault


def run(settings: NodeSettings, desk: Desk, api: KubeApi, metrics: tuple[str, int] | None = None) -> None:
    """Run the plugin in the foreground until SIGTERM or SIGINT."""
    import signal

    plugin = NodePlugin(settings, desk, api)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: plugin.stop())
    if metrics is not None:
        desk.metrics.listen(*metrics)
    if not settings.plugin_folder.is_dir():
        raise InputError("this is no folder of a kubelet's device plugins", file=settings.plugin_folder)
    plugin.run(lambda: LOG.info("ready"))
