"""The device plugin of one resource: answers the kubelet's calls, and registers with it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cotenant.core.errors import InputError, WorkError
from cotenant.kube import names, units
from cotenant.kube.inventory import Inventory
from cotenant.kube.messages import DEVICE_PLUGIN, REGISTRATION, caller, device_plugin, handler, open_channel
from cotenant.kube.metrics import PluginMetrics

API = "v1beta1"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
TOGETHER_S = 2.0  # time within which the kubelet asks for a container's other resource
ALIVE_S = 1.0
REGISTER_S = 5.0
KUBELET_SOCKET = "kubelet.sock"
OTHER = {names.SHARE_RESOURCE: names.MEMORY_RESOURCE, names.MEMORY_RESOURCE: names.SHARE_RESOURCE}


@dataclass(frozen=True)
class Grant:
    """What a container gets together with its devices."""

    mounts: bool = False  # True: the plugin mounts the libraries and the socket, not the webhook
    cdi_kind: str | None = None  # nvidia.com/gpu: name devices by CDI instead of a variable
    host_libraries: str = str(names.HOST_LIBRARIES)
    host_sockets: str = str(names.HOST_SOCKETS)


@dataclass(frozen=True)
class Allocation:
    """One answer to Allocate."""

    at_s: float
    resource: str
    ids: frozenset[str]


@dataclass
class Desk:
    """Shared state of the plugins of a node's resources: the inventory, and the latest allocations."""

    inventory: Inventory
    grant: Grant = field(default_factory=Grant)
    one_gpu: bool = True  # advertise at most the free units of one GPU
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
    taken: dict[str, set[str]] = field(default_factory=dict)  # resource -> allocated ids, by PodResources
    log: deque[Allocation] = field(default_factory=lambda: deque(maxlen=4096))
    kick: threading.Event = field(default_factory=threading.Event)
    # (share units, memory units) of containers on this node without devices; True: ask the API server again
    pending: Callable[[bool], list[tuple[int, int]]] = lambda anew: []
    _half: Allocation | None = None  # the last allocation, if its container's other resource is still to come

    def note(self, resource: str, ids: list[str]) -> None:
        """Record an allocation; PodResources will show its container later."""
        allocation = Allocation(time.monotonic(), resource, frozenset(ids))
        if resource in OTHER:
            alone = self._needs(resource, len(ids)) == {0}
            self._half = None if alone or self._other_half(resource) else allocation
        self.log.append(allocation)
        self.taken.setdefault(resource, set()).update(ids)
        self.kick.set()
        if self.one_gpu:
            self.inventory.wake()

    def shown(self) -> str | None:
        """The one GPU whose free units are advertised, of share and memory alike; None: all GPUs."""
        if not self.one_gpu:
            return None
        half = self._half
        if half is not None and time.monotonic() - half.at_s <= TOGETHER_S:
            # A container has the one resource and is about to get the other: the kubelet must still see it free there.
            return units.gpu_of(next(iter(half.ids)))
        found = {resource: self.inventory.of(resource) for resource in OTHER}
        return units.roomiest(list(found.values()), [set(self.taken.get(resource, ())) for resource in found])

    def _needs(self, resource: str, size: int) -> set[int]:
        """Numbers of units of the other resource, of waiting containers that take `size` units of this one."""
        mine = int(resource == names.MEMORY_RESOURCE)
        for anew in (False, True):
            found = {pair[1 - mine] for pair in self.pending(anew) if pair[mine] == size}
            if found:
                break
        return found

    def _other_half(self, resource: str) -> Allocation | None:
        """The last allocation, if its container still needs units of this resource."""
        half = self._half
        if half is None or half.resource != OTHER[resource] or time.monotonic() - half.at_s > TOGETHER_S:
            return None
        return half

    def unclaimed(
        self, resource: str, count: int, listed: Mapping[Any, Mapping[str, Mapping[str, list[str]]]]
    ) -> list[str]:
        """GPUs of the last allocation of so many devices that PodResources lists for no container; empty if there is
        none.
        """
        claimed = {one for pod in listed.values() for mine in pod.values() for ids in mine.values() for one in ids}
        for allocation in reversed(list(self.log)):  # the kubelet may ask for more meanwhile
            if allocation.resource == resource and len(allocation.ids) == count and not allocation.ids & claimed:
                return sorted({units.gpu_of(one) for one in allocation.ids})
        return []

    def check_together(self, resource: str, size: int, gpu: str) -> None:
        """Raise InputError if a container's other resource was placed on another GPU: no GPU had room for both."""
        half = self._other_half(resource) if resource in OTHER else None
        if half is None or len(half.ids) not in self._needs(resource, size):
            return
        where = units.gpu_of(next(iter(half.ids)))
        if where != gpu:
            self._half = None
            raise InputError(
                f"{len(half.ids)} units of {half.resource} are free on {where} and {size} of {resource} on {gpu},"
                f" but on no GPU both. {units.FAILED}"
            )

    def beside(self, resource: str, size: int) -> tuple[str, set[str] | None]:
        """Where a container's units of one resource should go, given its other resource.

        The kubelet does not tell for which container it asks. The pods that wait on this node are known, and thus how
        many units of the other resource such a container takes. Returns the GPU where those were just placed, otherwise
        the GPUs that have room for both (None: any).
        """
        needs, half, other = self._needs(resource, size), self._other_half(resource), OTHER[resource]
        if half is not None and (not needs or len(half.ids) in needs):
            return units.gpu_of(next(iter(half.ids))), None
        need, taken = max(needs, default=0), self.taken.get(other, set())
        if not need:
            return "", None
        free = Counter(units.gpu_of(one) for one, good in self.inventory.of(other).items() if good and one not in taken)
        return "", {uuid for uuid, count in free.items() if count >= need}


class ResourcePlugin:
    """The DevicePlugin service of one resource, on a socket of its own."""

    def __init__(self, resource: str, desk: Desk, folder: Path) -> None:
        self.resource = resource
        self.desk = desk
        self.folder = folder
        self.endpoint = f"cotenant-{resource.partition('/')[2]}.sock"
        self._server: grpc.Server | None = None
        self._ended = threading.Event()

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The socket."""
        return self.folder / self.endpoint

    def start(self) -> None:
        """Listen, replacing a socket that an earlier plugin left."""
        self.stop()
        self.path.unlink(missing_ok=True)
        self._ended = threading.Event()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8, thread_name_prefix=self.endpoint),
            handlers=[handler(DEVICE_PLUGIN, self)],
            options=[("grpc.so_reuseport", 0)],
        )
        try:
            if self._server.add_insecure_port(f"unix://{self.path}") == 0:
                raise RuntimeError("no port")
            os.chmod(self.path, 0o600)  # may raise OSError, if a starting kubelet has just emptied the folder
        except (RuntimeError, OSError):
            raise WorkError(f"{self.path}: cannot listen") from None
        self._server.start()

    def stop(self) -> None:
        """Stop listening and end every stream."""
        self._ended.set()
        self.desk.inventory.wake()
        if self._server is not None:
            self._server.stop(0.2).wait(2.0)
            self._server = None
        self.path.unlink(missing_ok=True)

    def register(self, kubelet: Path) -> None:
        """Register with the kubelet. Raises WorkError with its answer."""
        request = device_plugin.RegisterRequest(
            version=API, endpoint=self.endpoint, resource_name=self.resource, options=self._options()
        )
        with open_channel(kubelet) as channel:
            try:
                caller(channel, REGISTRATION, "Register")(request, timeout=REGISTER_S, wait_for_ready=True)
            except grpc.RpcError as error:
                raise WorkError(f"the kubelet refuses {self.resource}: {said(error)}") from None
        self.desk.metrics.registration(self.resource)

    # -- the service -----------------------------------------------------------------------------------------------

    def _options(self) -> Any:
        return device_plugin.DevicePluginOptions(get_preferred_allocation_available=True)

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802 names of the protocol
        """Preferred allocations are supported; no call before containers start."""
        return self._options()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """The devices with their health, sent now and on every change."""
        ended, sent, version = self._ended, None, -1
        while context.is_active() and not ended.is_set():
            health = self._health()
            if health != sent:
                sent = health
                yield device_plugin.ListAndWatchResponse(
                    devices=[
                        device_plugin.Device(ID=name, health=HEALTHY if good else UNHEALTHY)
                        for name, good in health.items()
                    ]
                )
            version = self.desk.inventory.wait(version, ALIVE_S)

    def _health(self) -> dict[str, bool]:
        shown = self.desk.shown() if self.resource in OTHER else None
        found = units.offered(self.desk.inventory.of(self.resource), self.desk.taken.get(self.resource, set()), shown)
        good = sum(found.values())
        self.desk.metrics.devices(self.resource, good, len(found) - good)
        return found

    def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Units of one GPU, the one with the container's other resource."""
        answers = []
        for asked in request.container_requests:
            available, must = list(asked.available_deviceIDs), list(asked.must_include_deviceIDs)
            if self.resource in (names.SHARE_RESOURCE, names.MEMORY_RESOURCE):
                beside, room = self.desk.beside(self.resource, asked.allocation_size)
                ids = units.prefer(available, must, asked.allocation_size, beside, room)
            else:
                ids = units.prefer_whole(available, must, asked.allocation_size)
            answers.append(device_plugin.ContainerPreferredAllocationResponse(deviceIDs=ids))
        return device_plugin.PreferredAllocationResponse(container_responses=answers)

    def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer with the devices, mounts and variables of each container. Units of two GPUs are refused; the pod's
        events give the reason."""
        answers, asked = [], [list(one.devices_ids) for one in request.container_requests]
        known = self.desk.inventory.of(self.resource)
        try:
            for ids in asked:
                gpus = units.check_allocation(ids, known, self.resource)
                self.desk.check_together(self.resource, len(ids), gpus[0])
                answers.append(self._grant(gpus))
        except InputError as error:
            self.desk.metrics.allocation(self.resource, "refused")
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"cotenant: {error.message}")
        for ids in asked:
            self.desk.note(self.resource, ids)
            self.desk.metrics.allocation(self.resource, "granted")
        return device_plugin.AllocateResponse(container_responses=answers)

    def _grant(self, gpus: list[str]) -> Any:
        answer = device_plugin.ContainerAllocateResponse()
        if self.resource == names.MEMORY_RESOURCE:
            return answer  # the GPU itself is passed with the share
        grant = self.desk.grant
        if grant.cdi_kind:
            answer.cdi_devices.extend(device_plugin.CDIDevice(name=f"{grant.cdi_kind}={uuid}") for uuid in gpus)
        else:
            answer.envs["NVIDIA_VISIBLE_DEVICES"] = ",".join(gpus)
        if grant.mounts and not self.resource.startswith(names.MIG_PREFIX):
            pairs = ((names.LIBRARIES, grant.host_libraries), (names.SOCKETS, grant.host_sockets))
            answer.mounts.extend(
                device_plugin.Mount(container_path=str(inside), host_path=outside, read_only=True)
                for inside, outside in pairs
            )
        return answer

    def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Does nothing; GetDevicePluginOptions does not request it."""
        return device_plugin.PreStartContainerResponse()


def said(error: grpc.RpcError) -> str:
    """The error message of a peer."""
    with contextlib.suppress(AttributeError):
        return str(error.details() or error.code().name)
    return str(error)
