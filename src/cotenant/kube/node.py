"""Main loop of the node's device plugin. Each round updates the GPUs and their health, the binder and the DRA driver.
The registrar registers the node's resources with the kubelet in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import InputError, WorkError
from cotenant.kube import names
from cotenant.kube.binding.binder import Binder
from cotenant.kube.binding.events import PodEvents
from cotenant.kube.binding.pods import LIST_EVERY_S, NodePods
from cotenant.kube.client import KubeApi
from cotenant.kube.dra.held import NodeClaims
from cotenant.kube.dra.server import ClaimServer, ClaimSettings
from cotenant.kube.dra.slices import NodeSlices
from cotenant.kube.inventory import (
    GPU_NAME,
    FaultSource,
    Inventory,
    absent,
    check_whole,
    gpus_of,
    mig_slices,
    nvml_faults,
)
from cotenant.kube.plugin.registrar import Registrar
from cotenant.kube.plugin.resource import KUBELET_SOCKET
from cotenant.kube.plugin.state import Grant, PluginState
from cotenant.kube.units import MigSlice

LOG = logging.getLogger(__name__)

ROUND_S = 1.0
HEALTH_EVERY_S = 5.0
AFTER_ALLOCATE_S = 0.1


@dataclass(frozen=True)
class NodeSettings:
    """Paths on the node, and how resources are offered. `whole`: GPUs offered only as whole (UUIDs, indices, all);
    `one_gpu`: advertise at most the free units of one GPU."""

    node: str
    agent_folder: Path = Path(str(names.HOST_AGENT))
    plugin_folder: Path = Path(str(names.DEVICE_PLUGINS))
    pod_resources: Path = Path(str(names.POD_RESOURCES)) / KUBELET_SOCKET
    whole: tuple[str, ...] = ()
    faults: FaultSource = nvml_faults
    slices: Callable[[Iterable[MigSlice]], Iterable[MigSlice]] = mig_slices
    list_every_s: float = LIST_EVERY_S
    claims: ClaimSettings | None = None  # settings for placing pods by claims; None: pods are placed by units
    grant: Grant = field(default_factory=Grant)
    one_gpu: bool = True


class AgentOrders:
    """Sends orders to the agent, each on a new connection, so that a restarted agent is found again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        """Send one order to the agent and return the agent's answer."""
        with ControlClient(self._folder, timeout_s=10.0) as client:
            return client.call(op, **order)


class NodePlugin:
    """The device plugin of one node. `run` returns after `stop` was called."""

    def __init__(self, settings: NodeSettings, api: KubeApi) -> None:
        self.settings = settings
        self._agent = AgentOrders(settings.agent_folder)
        pods = NodePods(api, settings.node, settings.list_every_s)
        self.state = state = PluginState(Inventory(), settings.grant, settings.one_gpu, waiting=pods.waiting)
        self._offered = NodeSlices(api, state.inventory, settings.node)
        self._claims: NodeClaims | None = None
        if settings.claims is not None:
            self._claims = NodeClaims(api, self._offered, settings.node, settings.claims.cdi_kind)
            self._server = ClaimServer(settings.claims, self._claims, self._offered, state.inventory, state.kick.set)
        events = PodEvents(api, settings.node)
        self._binder = Binder(self._agent, state, pods, events, str(settings.pod_resources), self._claims)
        self._registrar = Registrar(settings.plugin_folder, state, by_claims=settings.claims is not None)
        self._resources: list[str] = []
        self._stop = threading.Event()
        self._health_s = -1e9
        self._slices: list[MigSlice] = []
        self._faults: dict[str, str] = {}
        self._said = ""

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Run the device plugin until `stop`. Raises InputError for settings that do not fit the node; everything else
        is retried.
        """
        try:
            if self._claims is not None:
                self._server.start()
            self._registrar.start()
            while not self._stop.is_set():
                self.round()
                if self._registrar.met == self._resources:
                    ready()
                    ready = lambda: None  # noqa: E731 said once
                if self.state.kick.wait(ROUND_S):
                    self.state.kick.clear()
                    # the kubelet lists an allocation only some time after the plugin's answer
                    self._stop.wait(AFTER_ALLOCATE_S)
        finally:
            if self._claims is not None:
                self._server.stop()
            self._registrar.stop()

    def stop(self) -> None:
        """End the plugin's loop. Tenants of pods remain and are taken over by the next plugin."""
        self._stop.set()
        self.state.kick.set()

    def round(self) -> None:
        """Update all parts of the plugin once. A server that does not answer does not affect the other parts."""
        faults = []
        for step in (self._look, self._tell_kubelet, self._binder.round, self._offer):
            try:
                step()
            except WorkError as error:
                faults.append(str(error))
        self._say("; ".join(dict.fromkeys(faults)))

    # -- the node --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the agent's GPUs and their health."""
        try:
            status = self._agent.call("status")
            self._agent.call("expect", kind="pod")
        except WorkError as error:
            self.state.inventory.all_sick(str(error))
            raise
        due = time.monotonic() - self._health_s >= HEALTH_EVERY_S
        if due:
            self._health_s = time.monotonic()
            self._faults = dict(self.settings.faults(status["gpus"]))
            self._slices = list(self.settings.slices(self._slices))
        in_mig = {piece.gpu for piece in self._slices}
        gpus = [g for g in gpus_of(status, self.settings.whole, self._faults) if g.uuid not in in_mig]
        there = gpus_of(status, (), {})
        missing = absent(self.settings.whole, there)
        check_whole([text for text in missing if not GPU_NAME.fullmatch(text)], there)
        self.state.inventory.set(gpus, self._slices)
        if due:
            self._binder.not_enforced(self._agent.call("list")["tenants"])
            escaped = [row for row in status["unseen"] if row["holder"] and row["holder"]["kind"] == "pod"]
            self.state.metrics.escaped = len(escaped)
            self._binder.escaped(escaped)
        # A missing GPU is reported in each round, but does not end the plugin. All nodes of a cluster have the same
        # settings, so the GPU may belong to another node, or it is broken.
        if missing:
            raise WorkError(f"the agent has no GPU {', '.join(missing)} to offer as a whole")

    def _offer(self) -> None:
        """Publish the node's GPUs for claims, if pods are placed by claims."""
        if self._claims is not None and self._offered.write(self._claims.held()):
            inventory = self.state.inventory
            gpus, instances = len(inventory.gpus), len(inventory.slices)
            LOG.info("published for resource claims: %d GPUs, %d MIG instances", gpus, instances)

    def _tell_kubelet(self) -> None:
        """Have new resources registered with the kubelet. Raises WorkError while any is not registered."""
        resources = self.state.inventory.resources()
        if resources != self._resources:
            self._resources = resources
            self._registrar.look()
        if self._registrar.fault:
            raise WorkError(self._registrar.fault)

    def _say(self, fault: str) -> None:
        if fault != self._said:
            LOG.log(logging.WARNING if fault else logging.INFO, fault or "the node plugin works again")
            self._said = fault


def run(settings: NodeSettings, api: KubeApi, metrics: tuple[str, int] | None = None) -> None:
    """Run the plugin in the foreground until SIGTERM or SIGINT."""
    import signal

    plugin = NodePlugin(settings, api)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: plugin.stop())
    if metrics is not None:
        plugin.state.metrics.listen(*metrics)
    if not settings.plugin_folder.is_dir():
        raise InputError("this is not the device-plugin folder of a kubelet", file=settings.plugin_folder)
    plugin.run(lambda: LOG.info("ready"))
