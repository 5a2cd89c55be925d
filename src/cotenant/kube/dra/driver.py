"""The DRA driver of a node: registers with the kubelet, prepares claims, publishes the GPUs.

Allocations of claims are read from the API server, so the driver is stateless and can be restarted. The binder decides
on tenants as for any pod.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cotenant.core.errors import InputError, WorkError
from cotenant.kube import names
from cotenant.kube.client import KubeApi
from cotenant.kube.dra import claims, offer
from cotenant.kube.inventory import Inventory
from cotenant.kube.messages import DRA_HEALTH, DRA_PLUGINS, PLUGIN_REGISTRATION, dra_health, handler, registration
from cotenant.kube.shares import shares_of

CDI_KIND = "nvidia.com/gpu"
LOG = logging.getLogger(__name__)
SOCKET = "plugin.sock"
HEALTHY, UNHEALTHY = 1, 2
HEALTH_EVERY_S, LOOK_EVERY_S = 10.0, 1.0


@dataclass(frozen=True)
class ClaimSettings:
    """The kubelet's folders, and how devices are named to the runtime."""

    node: str
    registry: Path = Path(str(names.PLUGINS_REGISTRY))
    folder: Path = Path(str(names.KUBELET_PLUGINS / offer.DRIVER))
    cdi_kind: str = CDI_KIND


class _Service:
    """NodePrepareResources and NodeUnprepareResources in one version of the interface."""

    def __init__(self, driver: ClaimDriver, package: Any) -> None:
        self._driver, self._package = driver, package

    def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802 names of the protocol
        """What a claim's containers need to see their GPU; for a claim that cannot be prepared, the reason."""
        answer = self._package.NodePrepareResourcesResponse()
        for claim in request.claims:
            found = answer.claims[claim.uid]
            try:
                for device in self._driver.prepare(claim.namespace, claim.name, claim.uid):
                    found.devices.add(**device)
            except (InputError, WorkError) as error:
                found.error = f"cotenant: {error}"
        return answer

    def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Nothing to undo; the share is released when the pod has ended."""
        answer = self._package.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].error = ""
        self._driver.kick()
        return answer


class _Health:
    """Health of devices, for the status of pods: sent at once, on a change, and before the kubelet's timeout of
    30 s.
    """

    def __init__(self, driver: ClaimDriver, inventory: Inventory) -> None:
        self._driver, self._inventory = driver, inventory

    def NodeWatchResources(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Send the kubelet a complete list of devices after each change."""
        version, sent, sent_s = -1, None, 0.0
        while context.is_active() and self._driver.serving:
            found = [(name, UNHEALTHY if fault else HEALTHY) for name, _, fault in self._driver.known()]
            if found != sent or time.monotonic() - sent_s >= HEALTH_EVERY_S:
                sent, sent_s = found, time.monotonic()
                answer = dra_health.NodeWatchResourcesResponse()
                for name, health in found:
                    one = answer.devices.add(health=health, last_updated_time=int(time.time()))
                    one.device.pool_name, one.device.device_name = self._driver.settings.node, name
                yield answer
            version = self._inventory.wait(version, LOOK_EVERY_S)


class ClaimDriver:
    """The driver of one node."""

    def __init__(self, settings: ClaimSettings, api: KubeApi, inventory: Inventory, kick: Callable[[], None]) -> None:
        self.settings = settings
        self.kick = kick
        self.serving = False
        self._api = api
        self._inventory = inventory
        self._servers: list[grpc.Server] = []
        self._offered: tuple[int, frozenset[str]] | None = None
        self._counters: bool | None = None  # whether the API server supports shared counters
        self._version: tuple[int, int] | None = None
        self._claims: dict[tuple[str, str], dict[str, Any]] = {}  # (namespace, name) -> allocated claim
        self._lock = threading.Lock()  # for changes of it

    # -- the kubelet -----------------------------------------------------------------------------------------------

    @property
    def socket(self) -> Path:
        """Socket for preparing claims."""
        return self.settings.folder / SOCKET

    @property
    def registration_socket(self) -> Path:
        """Socket in the folder that the kubelet watches for registrations."""
        return self.settings.registry / f"{offer.DRIVER}-reg.sock"

    def start(self) -> None:
        """Listen. Raises WorkError if the sockets cannot be created."""
        services = [handler(name, _Service(self, package)) for name, package in DRA_PLUGINS.values()]
        services.append(handler(DRA_HEALTH, _Health(self, self._inventory)))
        self.serving = True
        try:
            self.settings.folder.mkdir(parents=True, exist_ok=True)
            self._serve(self.socket, services)
            self._serve(self.registration_socket, [handler(PLUGIN_REGISTRATION, self)])
        except (OSError, RuntimeError) as error:
            raise WorkError(f"{self.settings.registry}: cannot listen: {error}") from None

    def _serve(self, path: Path, services: list[grpc.GenericRpcHandler]) -> None:
        path.unlink(missing_ok=True)
        server = grpc.server(futures.ThreadPoolExecutor(8), handlers=services, options=[("grpc.so_reuseport", 0)])
        server.add_insecure_port(f"unix://{path}")
        os.chmod(path, 0o600)
        server.start()
        self._servers.append(server)

    def stop(self) -> None:
        """Stop listening."""
        self.serving = False
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

    # -- claims ----------------------------------------------------------------------------------------------------

    def prepare(self, namespace: str, name: str, uid: str) -> list[dict[str, Any]]:
        """Devices of an allocated claim for the kubelet. InputError or WorkError say why there are none."""
        claim = self._claim(namespace, name)
        if claim["metadata"].get("uid") != uid:
            raise InputError(f"claim {namespace}/{name} has been replaced by another one")
        devices = []
        for result in claims.allocated(claim, self.settings.node):
            device: dict[str, Any] = {
                "request_names": [result["request"]],
                "pool_name": result["pool"],
                "device_name": result["device"],
                "cdi_device_ids": [f"{self.settings.cdi_kind}={self._uuid(result['device'])}"],
            }
            if result.get("shareID"):
                device["share_id"] = result["shareID"]
            devices.append(device)
        if not devices:
            raise InputError(f"claim {namespace}/{name} has no GPU of this node")
        self.kick()
        return devices

    def known(self) -> list[tuple[str, str, str]]:
        """Devices of this node: name, UUID, fault."""
        found = [
            (name, gpu.uuid, gpu.fault)
            for gpu in self._inventory.gpus
            for name in offer.device_names(gpu, self._version or offer.COUNTERS_SINCE, self._counters is True).values()
        ]
        return found + [(offer.mig_name(piece), piece.uuid, piece.fault) for piece in self._inventory.slices]

    def _uuid(self, device: str) -> str:
        for name, uuid, fault in self.known():
            if name == device:
                if fault:
                    raise InputError(f"{device} cannot be used: {fault}")
                return uuid
        raise InputError(f"there is no {device} on this node")

    def _claim(self, namespace: str, name: str) -> dict[str, Any]:
        """A claim as it is now. Raises ApiError."""
        group = offer.api_version(self.kubernetes())
        found = self._api.get(f"/apis/{group}/namespaces/{namespace}/resourceclaims/{name}")
        with self._lock:
            self._claims.pop((namespace, name), None)
            if claims.allocated(found, self.settings.node):
                self._claims[namespace, name] = found
        return found

    def _claim_of(self, pod: Mapping[str, Any], name: str) -> dict[str, Any]:
        """A pod's claim; a known one is used as long as it is reserved for that pod, since until then its allocation
        does not change. A claim that was deleted and made again under its name is another one.
        """
        namespace = pod["metadata"]["namespace"]
        known = self._claims.get((namespace, name))
        return known if known is not None and claims.reserved(known, pod) else self._claim(namespace, name)

    def devices(self, pod: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
        """Devices of a pod's containers by their claims, in units as in PodResources. Raises ApiError, InputError."""
        found: dict[str, dict[str, list[str]]] = {}
        instances = {piece.uuid for piece in self._inventory.slices}
        for share in shares_of(pod):
            container = pod["spec"][share.list_name][share.index]
            for name in claims.claims_of_container(pod, container) if share.claimed else ():
                claim = self._claim_of(pod, name)
                results = claims.allocated(claim, self.settings.node) if claims.reserved(claim, pod) else []
                for result in results:
                    uuid = self._uuid(result["device"])
                    if uuid in instances:  # isolated by the hardware
                        continue
                    ids = [f"{uuid}::claim{n:04d}" for n in range(claims.units_of_result(result))]
                    found.setdefault(share.container, {}).setdefault(names.SHARE_RESOURCE, []).extend(ids)
        return found

    def forget(self, live: set[tuple[str, str]]) -> None:
        """Keep only claims (namespace, name) that pods still use."""
        with self._lock:
            self._claims = {key: claim for key, claim in self._claims.items() if key in live}

    # -- the offer -------------------------------------------------------------------------------------------------

    def kubernetes(self) -> tuple[int, int]:
        """Version of the cluster. Raises ApiError."""
        if self._version is None:
            found = self._api.get("/version")
            minor = "".join(c for c in str(found.get("minor", "")) if c in "0123456789")
            self._version = (int(found.get("major", 1)), int(minor or 34))
        return self._version

    def offer(self) -> bool:
        """Write the node's ResourceSlices if its devices, or what claims hold of them, have changed; returns whether
        they have. Raises ApiError, InputError.
        """
        with self._lock:  # the kubelet has claims prepared meanwhile
            known = list(self._claims.values())
        held = frozenset(result["device"] for claim in known for result in claims.allocated(claim, self.settings.node))
        now = self._inventory.version, held
        if now == self._offered:
            return False
        kubernetes = self.kubernetes()
        if self._counters is None:
            self._counters = kubernetes >= offer.COUNTERS_SINCE
        changed = self._write(held, kubernetes)
        self._offered = now
        return changed

    def _write(self, held: frozenset[str], kubernetes: tuple[int, int]) -> bool:
        """Write the slices. Those with counters first, the last of them before the others: whether the API server
        supports counters must be known before devices that need them are published.
        """
        node, counters = self.settings.node, self._counters is True
        path = f"/apis/{offer.api_version(kubernetes)}/resourceslices"
        wanted = offer.devices(self._inventory.gpus, self._inventory.slices, kubernetes, counters)
        before = self._slices(path, len(offer.resource_slices(node, wanted, kubernetes)))
        if counters:
            was = [device for one in before.values() for device in one["spec"].get("devices") or ()]
            wanted += offer.kept(was, wanted, held)
        same = dict(enumerate(map(_content, offer.resource_slices(node, wanted, kubernetes))))
        if {number: _content(one) for number, one in before.items()} == same:
            return False
        generation = max((one["spec"]["pool"]["generation"] for one in before.values()), default=0)
        slices = offer.resource_slices(node, wanted, kubernetes, generation + 1)
        for number, one in reversed(list(enumerate(slices))):
            if number in before:
                one["metadata"] = before[number]["metadata"]
                written = self._api.replace(f"{path}/{one['metadata']['name']}", one)
            else:
                written = self._api.create(path, one)
            if counters and _counting(written) != _counting(one):
                LOG.warning(
                    "the API server has no shared counters (feature DRAPartitionableDevices): a GPU is offered "
                    "either as shares or as a whole"
                )
                self._counters = False
                return self._write(held, kubernetes)
        for number in before.keys() - dict(enumerate(slices)).keys():
            self._api.delete(f"{path}/{before[number]['metadata']['name']}")
        return True

    def _slices(self, path: str, least: int) -> dict[int, dict[str, Any]]:
        """The existing slices of this node, by number; a killed driver may have skipped the first."""
        found: dict[int, dict[str, Any]] = {}
        for number in itertools.count():
            one = self._api.find(f"{path}/{offer.slice_name(self.settings.node, number)}")
            if one is not None:
                found[number] = one
            elif number > least:
                return found
        raise AssertionError("unreachable")


def _content(one: Mapping[str, Any]) -> list[Any]:
    """The content of a slice by which versions of it are compared."""
    spec = one["spec"]
    return [spec["pool"]["resourceSliceCount"], spec.get("devices") or [], spec.get("sharedCounters") or []]


def _counting(one: Mapping[str, Any]) -> list[bool]:
    """Whether a slice has counters, and which of its devices consume them."""
    spec = one["spec"]
    return [bool(spec.get("sharedCounters")), *(bool(d.get("consumesCounters")) for d in spec.get("devices") or ())]
