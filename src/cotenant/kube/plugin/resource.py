"""The device plugin of one resource: answers the kubelet's calls, and registers with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from cotenant.core.errors import InputError, WorkError
from cotenant.kube import names, units
from cotenant.kube.messages import DEVICE_PLUGIN, REGISTRATION, caller, device_plugin, error_text, handler, open_channel
from cotenant.kube.plugin.state import OTHER, PluginState

API = "v1beta1"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
ALIVE_S = 1.0
REGISTER_S = 5.0
KUBELET_SOCKET = "kubelet.sock"


class ResourcePlugin:
    """The DevicePlugin service of one resource, on a socket of its own."""

    def __init__(self, resource: str, state: PluginState, folder: Path) -> None:
        self.resource = resource
        self.state = state
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
        """Listen on the plugin's socket, which replaces a socket that an earlier plugin left."""
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
                raise RuntimeError("gRPC cannot bind the socket")
            os.chmod(self.path, 0o600)  # raises OSError if a kubelet that is starting has just emptied the folder
        except (RuntimeError, OSError):
            raise WorkError(f"{self.path}: cannot listen") from None
        self._server.start()

    def stop(self) -> None:
        """Stop listening and end every stream to the kubelet."""
        self._ended.set()
        self.state.inventory.wake()
        if self._server is not None:
            self._server.stop(0.2).wait(2.0)
            self._server = None
        self.path.unlink(missing_ok=True)

    def register(self, kubelet: Path) -> None:
        """Register with the kubelet. Raises WorkError with the kubelet's answer if it refuses."""
        request = device_plugin.RegisterRequest(
            version=API, endpoint=self.endpoint, resource_name=self.resource, options=self._options()
        )
        with open_channel(kubelet) as channel:
            try:
                caller(channel, REGISTRATION, "Register")(request, timeout=REGISTER_S, wait_for_ready=True)
            except grpc.RpcError as error:
                raise WorkError(f"the kubelet refuses {self.resource}: {error_text(error)}") from None
        self.state.metrics.registration(self.resource)

    # -- the service -----------------------------------------------------------------------------------------------

    def _options(self) -> Any:
        return device_plugin.DevicePluginOptions(get_preferred_allocation_available=True)

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802 names of the protocol
        """Tell the kubelet that preferred allocations are supported, and that no call is needed before containers
        start."""
        return self._options()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Send the resource's devices with their health to the kubelet, now and on every change."""
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
            version = self.state.inventory.wait(version, ALIVE_S)

    def _health(self) -> dict[str, bool]:
        shown = self.state.shown() if self.resource in OTHER else None
        found = units.offered(self.state.inventory.of(self.resource), self.state.taken.get(self.resource, set()), shown)
        good = sum(found.values())
        self.state.metrics.devices(self.resource, good, len(found) - good)
        return found

    def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Prefer units of one GPU: the GPU on which the container's other resource (share or memory) is."""
        answers = []
        for asked in request.container_requests:
            available, must = list(asked.available_deviceIDs), list(asked.must_include_deviceIDs)
            if self.resource in (names.SHARE_RESOURCE, names.MEMORY_RESOURCE):
                beside, room = self.state.beside(self.resource, asked.allocation_size)
                ids = units.prefer(available, must, asked.allocation_size, beside, room)
            else:
                ids = units.prefer_whole(available, must, asked.allocation_size)
            answers.append(device_plugin.ContainerPreferredAllocationResponse(deviceIDs=ids))
        return device_plugin.PreferredAllocationResponse(container_responses=answers)

    def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer with the devices, mounts and variables of each container. Units of two GPUs are refused; the pod's
        events give the reason."""
        answers, asked = [], [list(one.devices_ids) for one in request.container_requests]
        known = self.state.inventory.of(self.resource)
        try:
            for ids in asked:
                gpus = units.check_allocation(ids, known, self.resource)
                self.state.check_together(self.resource, len(ids), gpus[0])
                answers.append(self._grant(gpus))
        except InputError as error:
            self.state.metrics.allocation(self.resource, "refused")
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"cotenant: {error.message}")
        for ids in asked:
            self.state.note(self.resource, ids)
            self.state.metrics.allocation(self.resource, "granted")
        return device_plugin.AllocateResponse(container_responses=answers)

    def _grant(self, gpus: list[str]) -> Any:
        answer = device_plugin.ContainerAllocateResponse()
        if self.resource == names.MEMORY_RESOURCE:
            return answer  # the GPU itself comes with the container's share, not with its memory units
        grant = self.state.grant
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
        """Does nothing. The kubelet does not call this method, since GetDevicePluginOptions does not ask for it."""
        return device_plugin.PreStartContainerResponse()
