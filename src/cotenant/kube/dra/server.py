"""The DRA driver's services for the kubelet: registration, preparing claims, health of devices.

The services make no tenants. The binder makes those of pods with claims as it makes those of all other pods.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cotenant.core.errors import InputError, WorkError
from cotenant.kube import names
from cotenant.kube.dra import offer
from cotenant.kube.dra.held import NodeClaims
from cotenant.kube.dra.slices import NodeSlices
from cotenant.kube.inventory import Inventory
from cotenant.kube.messages import DRA_HEALTH, DRA_PLUGINS, PLUGIN_REGISTRATION, dra_health, handler, registration

CDI_KIND = "nvidia.com/gpu"
SOCKET = "plugin.sock"
HEALTHY, UNHEALTHY = 1, 2
HEALTH_EVERY_S, LOOK_EVERY_S = 10.0, 1.0


@dataclass(frozen=True)
class ClaimSettings:
    """Settings: the kubelet's folders, and how the container runtime learns which devices to use."""

    node: str
    registry: Path = Path(str(names.PLUGINS_REGISTRY))
    folder: Path = Path(str(names.KUBELET_PLUGINS / offer.DRIVER))
    cdi_kind: str = CDI_KIND


class _Service:
    """NodePrepareResources and NodeUnprepareResources in one version of the interface."""

    def __init__(self, claims: NodeClaims, kick: Callable[[], None], package: Any) -> None:
        self._claims, self._kick, self._package = claims, kick, package

    def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802 names of the protocol
        """Prepare claims: answer with what each claim's containers need to see their GPU, or with the reason why a
        claim cannot be prepared."""
        answer = self._package.NodePrepareResourcesResponse()
        for claim in request.claims:
            found = answer.claims[claim.uid]
            try:
                for device in self._claims.prepare(claim.namespace, claim.name, claim.uid):
                    found.devices.add(**device)
                self._kick()
            except (InputError, WorkError) as error:
                found.error = f"cotenant: {error}"
        return answer

    def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Releases nothing here, since the share is released when the pod has ended."""
        answer = self._package.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].error = ""
        self._kick()
        return answer


class _Health:
    """Send the health of the node's devices, which appears in the status of pods: at once, on every change, and before
    the kubelet's timeout of 30 s.
    """

    def __init__(self, slices: NodeSlices, inventory: Inventory, pool: str, serving: Callable[[], bool]) -> None:
        self._slices, self._inventory, self._pool, self._serving = slices, inventory, pool, serving

    def NodeWatchResources(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Send the kubelet a complete list of devices after each change."""
        version, sent, sent_s = -1, None, 0.0
        while context.is_active() and self._serving():
            found = [(name, UNHEALTHY if fault else HEALTHY) for name, _, fault in self._slices.known()]
            if found != sent or time.monotonic() - sent_s >= HEALTH_EVERY_S:
                sent, sent_s = found, time.monotonic()
                answer = dra_health.NodeWatchResourcesResponse()
                for name, health in found:
                    one = answer.devices.add(health=health, last_updated_time=int(time.time()))
                    one.device.pool_name, one.device.device_name = self._pool, name
                yield answer
            version = self._inventory.wait(version, LOOK_EVERY_S)


class ClaimServer:
    """The sockets of one node's driver. `kick`: called when a claim was prepared or released."""

    def __init__(
        self,
        settings: ClaimSettings,
        claims: NodeClaims,
        slices: NodeSlices,
        inventory: Inventory,
        kick: Callable[[], None],
    ) -> None:
        self._settings, self._inventory = settings, inventory
        self._serving = threading.Event()
        self._prepare = [handler(name, _Service(claims, kick, package)) for name, package in DRA_PLUGINS.values()]
        self._health = _Health(slices, inventory, settings.node, self._serving.is_set)
        self._servers: list[grpc.Server] = []

    @property
    def socket(self) -> Path:
        """Path of the socket at which the kubelet calls NodePrepareResources and the driver's other services."""
        return self._settings.folder / SOCKET

    @property
    def registration_socket(self) -> Path:
        """Path of the socket in the folder that the kubelet watches for registrations of plugins."""
        return self._settings.registry / f"{offer.DRIVER}-reg.sock"

    def start(self) -> None:
        """Listen on both sockets. Raises WorkError if they cannot be created."""
        self._serving.set()
        try:
            self._settings.folder.mkdir(parents=True, exist_ok=True)
            self._serve(self.socket, [*self._prepare, handler(DRA_HEALTH, self._health)])
            self._serve(self.registration_socket, [handler(PLUGIN_REGISTRATION, self)])
        except (OSError, RuntimeError) as error:
            raise WorkError(f"{self._settings.registry}: cannot listen: {error}") from None

    def _serve(self, path: Path, services: list[grpc.GenericRpcHandler]) -> None:
        path.unlink(missing_ok=True)
        server = grpc.server(futures.ThreadPoolExecutor(8), handlers=services, options=[("grpc.so_reuseport", 0)])
        server.add_insecure_port(f"unix://{path}")
        os.chmod(path, 0o600)
        server.start()
        self._servers.append(server)

    def stop(self) -> None:
        """Stop listening."""
        self._serving.clear()
        self._inventory.wake()
        for server in self._servers:
            server.stop(0.2).wait(2.0)
        self._servers.clear()
        for path in (self.registration_socket, self.socket):
            path.unlink(missing_ok=True)

    def GetInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Name of the driver, and supported versions of the interface."""
        versions = [*DRA_PLUGINS, DRA_HEALTH]
        return registration.PluginInfo(
            type="DRAPlugin", name=offer.DRIVER, endpoint=str(self.socket), supported_versions=versions
        )

    def NotifyRegistrationStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Result of the registration. The kubelet itself retries."""
        return registration.RegistrationStatusResponse()
