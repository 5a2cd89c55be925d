"""Messages of the kubelet's gRPC interfaces as tables (core/protobuf.py): device plugin, PodResources, claims (DRA).

Names and numbers are those of the public interfaces in k8s.io/kubelet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc

from cotenant.core import protobuf

_DEVICE_PLUGIN = {
    "Empty": "",
    "DevicePluginOptions": "bool pre_start_required 1, bool get_preferred_allocation_available 2",
    "RegisterRequest": "string version 1, string endpoint 2, string resource_name 3, DevicePluginOptions options 4",
    "NUMANode": "int64 ID 1",
    "TopologyInfo": "[NUMANode] nodes 1",
    "Device": "string ID 1, string health 2, TopologyInfo topology 3",
    "ListAndWatchResponse": "[Device] devices 1",
    "PreStartContainerRequest": "[string] devices_ids 1",
    "PreStartContainerResponse": "",
    "ContainerPreferredAllocationRequest": (
        "[string] available_deviceIDs 1, [string] must_include_deviceIDs 2, int32 allocation_size 3"
    ),
    "PreferredAllocationRequest": "[ContainerPreferredAllocationRequest] container_requests 1",
    "ContainerPreferredAllocationResponse": "[string] deviceIDs 1",
    "PreferredAllocationResponse": "[ContainerPreferredAllocationResponse] container_responses 1",
    "ContainerAllocateRequest": "[string] devices_ids 1",
    "AllocateRequest": "[ContainerAllocateRequest] container_requests 1",
    "Mount": "string container_path 1, string host_path 2, bool read_only 3",
    "DeviceSpec": "string container_path 1, string host_path 2, string permissions 3",
    "CDIDevice": "string name 1",
    "ContainerAllocateResponse": (
        "{string} envs 1, [Mount] mounts 2, [DeviceSpec] devices 3, {string} annotations 4, [CDIDevice] cdi_devices 5"
    ),
    "AllocateResponse": "[ContainerAllocateResponse] container_responses 1",
}
_POD_RESOURCES = {
    "ListPodResourcesRequest": "",
    "ContainerDevices": "string resource_name 1, [string] device_ids 2",
    "ClaimResource": "[CDIDevice] cdi_devices 1, string driver_name 2, string pool_name 3, string device_name 4",
    "CDIDevice": "string name 1",
    "DynamicResource": "string claim_name 2, string claim_namespace 3, [ClaimResource] claim_resources 4",
    "ContainerResources": "string name 1, [ContainerDevices] devices 2, [DynamicResource] dynamic_resources 5",
    "PodResources": "string name 1, string namespace 2, [ContainerResources] containers 3",
    "ListPodResourcesResponse": "[PodResources] pod_resources 1",
}
_REGISTRATION = {
    "InfoRequest": "",
    "PluginInfo": "string type 1, string name 2, string endpoint 3, [string] supported_versions 4",
    "RegistrationStatus": "bool plugin_registered 1, string error 2",
    "RegistrationStatusResponse": "",
}
_DRA = {
    "Claim": "string namespace 1, string uid 2, string name 3",
    "Device": (
        "[string] request_names 1, string pool_name 2, string device_name 3, [string] cdi_device_ids 4, "
        "string share_id 5"
    ),
    "NodePrepareResourceResponse": "[Device] devices 1, string error 2",
    "NodeUnprepareResourceResponse": "string error 1",
    "NodePrepareResourcesRequest": "[Claim] claims 1",
    "NodePrepareResourcesResponse": "{NodePrepareResourceResponse} claims 1",
    "NodeUnprepareResourcesRequest": "[Claim] claims 1",
    "NodeUnprepareResourcesResponse": "{NodeUnprepareResourceResponse} claims 1",
}

_HEALTH = {
    "NodeWatchResourcesRequest": "",
    "DeviceIdentifier": "string pool_name 1, string device_name 2",
    # health is an enum in the kubelet's definition
    "DeviceHealth": "DeviceIdentifier device 1, int32 health 2, int64 last_updated_time 3",
    "NodeWatchResourcesResponse": "[DeviceHealth] devices 1",
}


def _classes(name: str, messages: dict[str, str]) -> SimpleNamespace:
    """Message classes of one package, as attributes: `device_plugin.RegisterRequest(...)`."""
    return SimpleNamespace(**protobuf.classes(name, messages))


device_plugin = _classes("v1beta1", _DEVICE_PLUGIN)
pod_resources = _classes("v1", _POD_RESOURCES)
registration = _classes("pluginregistration", _REGISTRATION)
dra_v1 = _classes("k8s.io.kubelet.pkg.apis.dra.v1", _DRA)
dra_v1beta1 = _classes("k8s.io.kubelet.pkg.apis.dra.v1beta1", _DRA)
dra_health = _classes("v1alpha1", _HEALTH)


class Call(NamedTuple):
    """A method of a service: message classes, and whether the response is a stream."""

    request: Any
    response: Any
    streams: bool = False


REGISTRATION = "v1beta1.Registration"
DEVICE_PLUGIN = "v1beta1.DevicePlugin"
POD_RESOURCES = "v1.PodResourcesLister"
PLUGIN_REGISTRATION = "pluginregistration.Registration"
DRA_PLUGINS = {
    "v1.DRAPlugin": ("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", dra_v1),
    "v1beta1.DRAPlugin": ("k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin", dra_v1beta1),
}
DRA_HEALTH = "v1alpha1.DRAResourceHealth"
SERVICES: dict[str, dict[str, Call]] = {
    DRA_HEALTH: {
        "NodeWatchResources": Call(
            dra_health.NodeWatchResourcesRequest, dra_health.NodeWatchResourcesResponse, streams=True
        )
    },
    REGISTRATION: {"Register": Call(device_plugin.RegisterRequest, device_plugin.Empty)},
    DEVICE_PLUGIN: {
        "GetDevicePluginOptions": Call(device_plugin.Empty, device_plugin.DevicePluginOptions),
        "ListAndWatch": Call(device_plugin.Empty, device_plugin.ListAndWatchResponse, streams=True),
        "GetPreferredAllocation": Call(
            device_plugin.PreferredAllocationRequest, device_plugin.PreferredAllocationResponse
        ),
        "Allocate": Call(device_plugin.AllocateRequest, device_plugin.AllocateResponse),
        "PreStartContainer": Call(device_plugin.PreStartContainerRequest, device_plugin.PreStartContainerResponse),
    },
    POD_RESOURCES: {"List": Call(pod_resources.ListPodResourcesRequest, pod_resources.ListPodResourcesResponse)},
    PLUGIN_REGISTRATION: {
        "GetInfo": Call(registration.InfoRequest, registration.PluginInfo),
        "NotifyRegistrationStatus": Call(registration.RegistrationStatus, registration.RegistrationStatusResponse),
    },
}
for _service, _package in DRA_PLUGINS.values():
    SERVICES[_service] = {
        f"Node{verb}Resources": Call(
            getattr(_package, f"Node{verb}ResourcesRequest"), getattr(_package, f"Node{verb}ResourcesResponse")
        )
        for verb in ("Prepare", "Unprepare")
    }


def handler(service: str, target: object) -> grpc.GenericRpcHandler:
    """Return a server's handler for a service. Each method of the service is answered by the method of `target` that
    has the same name."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, call in SERVICES[service].items():
        make = grpc.unary_stream_rpc_method_handler if call.streams else grpc.unary_unary_rpc_method_handler
        methods[name] = make(
            getattr(target, name),
            request_deserializer=call.request.FromString,
            response_serializer=call.response.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service, methods)


def caller(channel: grpc.Channel, service: str, name: str) -> Callable[..., Any]:
    """A client's call of one method."""
    call = SERVICES[service][name]
    make = channel.unary_stream if call.streams else channel.unary_unary
    return make(
        f"/{service}/{name}",
        request_serializer=call.request.SerializeToString,
        response_deserializer=call.response.FromString,
    )


def open_channel(path: object) -> grpc.Channel:
    """Open a client's channel to a unix socket. The authority is set, since Go's servers reject a path as the
    authority.
    """
    options = [("grpc.default_authority", "localhost"), ("grpc.initial_reconnect_backoff_ms", 100)]
    return grpc.insecure_channel(f"unix://{path}", options=options)


def devices_of(container: Any) -> Iterator[tuple[str, list[str]]]:
    """(resource, device ids) of a container in an answer of PodResources; a resource may occur several times."""
    for devices in container.devices:
        yield devices.resource_name, list(devices.device_ids)


def error_text(error: grpc.RpcError) -> str:
    """Return the error message that the other side of a call has sent."""
    with contextlib.suppress(AttributeError):
        return str(error.details() or error.code().name)
    return str(error)
