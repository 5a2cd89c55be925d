"""A stand-in for the kubelet, as a device plugin sees it: registration, devices, admission of pods, PodResources,
restarts.

It does what the kubelet's device manager does, from the public description of the interface: it takes a plugin's
preferred units only where they are free and healthy, gives an init container's devices to the containers after it,
remembers allocations over a restart in a checkpoint, and empties its folder of sockets when it starts.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from cotenant.kube.messages import (
    DEVICE_PLUGIN,
    POD_RESOURCES,
    REGISTRATION,
    caller,
    device_plugin,
    handler,
    open_channel,
    pod_resources,
)

Allocations = dict[str, dict[str, dict[str, list[str]]]]  # pod's UID -> container -> resource -> ids


class AdmissionError(Exception):
    """Raised if the pod is not admitted; the text is that of its event."""


class Endpoint:
    """One registered plugin."""

    def __init__(self, resource: str, path: Path) -> None:
        self.resource = resource
        self.channel = open_channel(path)
        self.options = caller(self.channel, DEVICE_PLUGIN, "GetDevicePluginOptions")(device_plugin.Empty(), timeout=60)
        self.devices: dict[str, str] = {}
        self.updates = 0
        self.ended = False
        self._stream = caller(self.channel, DEVICE_PLUGIN, "ListAndWatch")(device_plugin.Empty())
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            for answer in self._stream:
                self.devices = {device.ID: device.health for device in answer.devices}
                self.updates += 1
        except grpc.RpcError:
            pass
        self.ended = True
        self.devices = dict.fromkeys(self.devices, "Unhealthy")  # a plugin that has ended offers no devices

    def close(self) -> None:
        self._stream.cancel()
        self.channel.close()


class Kubelet:
    """`folder` has device-plugins/ and pod-resources/, as /var/lib/kubelet has."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.plugins, self.resources = folder / "device-plugins", folder / "pod-resources"
        for path in (self.plugins, self.resources):
            path.mkdir(parents=True, exist_ok=True)
        self.pods: dict[str, dict[str, Any]] = {}
        self.allocated: Allocations = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.registered: list[str] = []
        self._last: dict[str, int] = {}  # resource -> number of its last registration
        self._lock = threading.Lock()
        self.answers: list[Any] = []
        self._random = random.Random(seed)
        self._servers: list[grpc.Server] = []
        self.start()

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for path in self.plugins.glob("*.sock"):
            path.unlink()
        checkpoint = self.plugins / "kubelet_internal_checkpoint"
        self.allocated = json.loads(checkpoint.read_text()) if checkpoint.exists() else {}
        for path, service in ((self.plugins, REGISTRATION), (self.resources, POD_RESOURCES)):
            server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[handler(service, self)])
            (path / "kubelet.sock").unlink(missing_ok=True)
            server.add_insecure_port(f"unix://{path / 'kubelet.sock'}")
            server.start()
            self._servers.append(server)

    def stop(self) -> None:
        with self._lock:
            self._last.clear()
            ended = list(self.endpoints.values())
            self.endpoints.clear()
        for endpoint in ended:
            endpoint.close()
        for server in self._servers:
            server.stop(0).wait()
        self._servers.clear()

    def restart(self) -> None:
        self.stop()
        self.start()

    # -- services --------------------------------------------------------------------------------------------------

    def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.version != "v1beta1":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unsupported version {request.version}")
        if "/" in request.endpoint or "/" not in request.resource_name:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "malformed endpoint or resource")
        before = self.endpoints.pop(request.resource_name, None)
        if before is not None:
            before.close()
        self.registered.append(request.resource_name)
        order = (request.resource_name, request.endpoint, len(self.registered))
        self._last[request.resource_name] = len(self.registered)
        threading.Thread(target=self._connect, args=order, daemon=True).start()
        return device_plugin.Empty()

    def _connect(self, resource: str, endpoint: str, number: int) -> None:
        try:
            made = Endpoint(resource, self.plugins / endpoint)
        except grpc.RpcError:
            return  # the plugin has gone meanwhile, and will register again
        with self._lock:
            if self._last.get(resource) == number:  # false if a later registration has replaced this one
                self.endpoints[resource] = made
                return
        made.close()

    def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Pods with what their regular containers and sidecars have; init containers that end are not listed."""
        return pod_resources.ListPodResourcesResponse(pod_resources=[self._listed(pod) for pod in self.pods.values()])

    def _listed(self, pod: dict[str, Any]) -> Any:
        mine = self.allocated.get(pod["metadata"]["uid"], {})
        containers = [
            *(c for c in pod["spec"].get("initContainers") or [] if c.get("restartPolicy") == "Always"),
            *pod["spec"]["containers"],
        ]
        return pod_resources.PodResources(
            name=pod["metadata"]["name"],
            namespace=pod["metadata"]["namespace"],
            containers=[
                pod_resources.ContainerResources(
                    name=c["name"],
                    devices=[
                        pod_resources.ContainerDevices(resource_name=resource, device_ids=ids)
                        for resource, ids in mine.get(c["name"], {}).items()
                    ],
                )
                for c in containers
            ],
        )

    # -- devices ---------------------------------------------------------------------------------------------------

    def healthy(self, resource: str) -> list[str]:
        endpoint = self.endpoints.get(resource)
        return [] if endpoint is None else sorted(i for i, h in endpoint.devices.items() if h == "Healthy")

    def in_use(self, resource: str) -> set[str]:
        return {
            one
            for containers in self.allocated.values()
            for mine in containers.values()
            for one in mine.get(resource, ())
        }

    def allocatable(self, resource: str) -> int:
        """Number of devices in the node's status, which the scheduler reads."""
        return len(self.healthy(resource))

    def fits(self, pod: dict[str, Any]) -> bool:
        """Whether the scheduler would place the pod here: whether the units in the node's status, less those of its
        pods, suffice."""
        wanted: Counter[str] = Counter()
        for container in pod["spec"]["containers"]:
            for resource, count in ((container.get("resources") or {}).get("limits") or {}).items():
                wanted[resource] += int(count) if "cotenant.dev/" in resource else 0
        return all(self.allocatable(r) - len(self.in_use(r)) >= n for r, n in wanted.items() if n)

    # -- pods ------------------------------------------------------------------------------------------------------

    def admit(self, pod: dict[str, Any]) -> None:
        """Give a pod its devices. AdmissionError: the pod has failed, with this text as its event."""
        uid = pod["metadata"]["uid"]
        reuse: dict[str, set[str]] = {}
        mine: dict[str, dict[str, list[str]]] = {}
        for kind, container in _containers(pod):
            limits = (container.get("resources") or {}).get("limits") or {}
            wanted = [(r, int(n)) for r, n in limits.items() if "cotenant.dev/" in r and int(n)]
            self._random.shuffle(wanted)  # Go iterates over a map in random order
            for resource, count in wanted:
                ids = self._choose(resource, count, reuse.get(resource, set()), mine)
                self._allocate(resource, ids)
                mine.setdefault(container["name"], {})[resource] = ids
                if kind == "initContainers" and container.get("restartPolicy") != "Always":
                    reuse.setdefault(resource, set()).update(ids)
                else:
                    reuse.get(resource, set()).difference_update(ids)
        self.allocated[uid] = mine
        self.pods[uid] = pod
        self._checkpoint()

    def _choose(self, resource: str, count: int, reuse: set[str], mine: Any) -> list[str]:
        taken = self.in_use(resource) | {i for c in mine.values() for i in c.get(resource, ())}
        must = sorted(reuse)[:count]
        free = [i for i in self.healthy(resource) if i not in taken]
        if len(must) + len(free) < count:
            raise AdmissionError(
                f"Allocate failed due to requested number of devices unavailable for {resource}. Requested: {count},"
                f" Available: {len(free)}, which is unexpected"
            )
        ids = list(must)
        endpoint = self.endpoints[resource]
        if endpoint.options.get_preferred_allocation_available and len(ids) < count:
            self._random.shuffle(free)
            asked = device_plugin.ContainerPreferredAllocationRequest(
                available_deviceIDs=sorted(reuse | set(free)), must_include_deviceIDs=must, allocation_size=count
            )
            call = caller(endpoint.channel, DEVICE_PLUGIN, "GetPreferredAllocation")
            answer = call(device_plugin.PreferredAllocationRequest(container_requests=[asked]), timeout=60)
            preferred = list(answer.container_responses[0].deviceIDs)
            ids += [i for i in preferred if i in free and i not in ids][: count - len(ids)]
        return ids + [i for i in free if i not in ids][: count - len(ids)]

    def _allocate(self, resource: str, ids: list[str]) -> None:
        asked = device_plugin.AllocateRequest(
            container_requests=[device_plugin.ContainerAllocateRequest(devices_ids=ids)]
        )
        try:
            answer = caller(self.endpoints[resource].channel, DEVICE_PLUGIN, "Allocate")(asked, timeout=60)
        except grpc.RpcError as error:
            raise AdmissionError(
                f"Allocate failed due to rpc error: code = {error.code().name} desc = {error.details()}, which is"
                " unexpected"
            ) from None
        self.answers.append(answer.container_responses[0])

    def readmit(self, pod: dict[str, Any]) -> None:
        """Admit a running pod again, as a restarted kubelet does. It allocates the devices of an ended init container
        again, and refuses the pod while the plugin has not registered. AdmissionError: the pod is ended."""
        for kind, container in _containers(pod):
            mine = self.allocated[pod["metadata"]["uid"]].get(container["name"], {})
            ended = kind == "initContainers" and container.get("restartPolicy") != "Always"
            for resource in mine if ended else ():
                if not self.healthy(resource):
                    raise AdmissionError(
                        "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices"
                        f" {resource}, which is unexpected"
                    )

    def remove(self, pod: dict[str, Any]) -> None:
        """Remove a pod that has ended."""
        self.pods.pop(pod["metadata"]["uid"], None)
        self.allocated.pop(pod["metadata"]["uid"], None)
        self._checkpoint()

    def _checkpoint(self) -> None:
        (self.plugins / "kubelet_internal_checkpoint").write_text(json.dumps(self.allocated))


def _containers(pod: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("initContainers", "containers"):
        for container in pod["spec"].get(kind) or []:
            yield kind, container
