"""Messages of the kubelet's gRPC interfaces, as tables: device plugin, PodResources, claims (DRA).

Built at run time in a descriptor pool of their own, so no generated code has to match the protobuf that is installed,
and nothing clashes with another package's copy. Only the fields that are read or written here are listed; protobuf
skips the rest. Names and numbers are those of the public interfaces in k8s.io/kubelet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# field: name -> (number, type); a type is a scalar, "Message", "[type]" for repeated, "{type}" for a map from string
Fields = dict[str, tuple[int, str]]
_SCALARS = {"string": 9, "bool": 8, "int32": 5, "int64": 3}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3

_DEVICE_PLUGIN: dict[str, Fields] = {
    "Empty": {},
    "DevicePluginOptions": {"pre_start_required": (1, "bool"), "get_preferred_allocation_available": (2, "bool")},
    "RegisterRequest": {
        "version": (1, "string"),
        "endpoint": (2, "string"),
        "resource_name": (3, "string"),
        "options": (4, "DevicePluginOptions"),
    },
    "NUMANode": {"ID": (1, "int64")},
    "TopologyInfo": {"nodes": (1, "[NUMANode]")},
    "Device": {"ID": (1, "string"), "health": (2, "string"), "topology": (3, "TopologyInfo")},
    "ListAndWatchResponse": {"devices": (1, "[Device]")},
    "PreStartContainerRequest": {"devices_ids": (1, "[string]")},
    "PreStartContainerResponse": {},
    "ContainerPreferredAllocationRequest": {
        "available_deviceIDs": (1, "[string]"),
        "must_include_deviceIDs": (2, "[string]"),
        "allocation_size": (3, "int32"),
    },
    "PreferredAllocationRequest": {"container_requests": (1, "[ContainerPreferredAllocationRequest]")},
    "ContainerPreferredAllocationResponse": {"deviceIDs": (1, "[string]")},
    "PreferredAllocationResponse": {"container_responses": (1, "[ContainerPreferredAllocationResponse]")},
    "ContainerAllocateRequest": {"devices_ids": (1, "[string]")},
    "AllocateRequest": {"container_requests": (1, "[ContainerAllocateRequest]")},
    "Mount": {"container_path": (1, "string"), "host_path": (2, "string"), "read_only": (3, "bool")},
    "DeviceSpec": {"container_path": (1, "string"), "host_path": (2, "string"), "permissions": (3, "string")},
    "CDIDevice": {"name": (1, "string")},
    "ContainerAllocateResponse": {
        "envs": (1, "{string}"),
        "mounts": (2, "[Mount]"),
        "devices": (3, "[DeviceSpec]"),
        "annotations": (4, "{string}"),
        "cdi_devices": (5, "[CDIDevice]"),
    },
    "AllocateResponse": {"container_responses": (1, "[ContainerAllocateResponse]")},
}
_POD_RESOURCES: dict[str, Fields] = {
    "ListPodResourcesRequest": {},
    "ContainerDevices": {"resource_name": (1, "string"), "device_ids": (2, "[string]")},
    "ClaimResource": {"cdi_devices": (1, "[CDIDevice]"), "driver_name": (2, "string"), "pool_name": (3, "string"),
                      "device_name": (4, "string")},
    "CDIDevice": {"name": (1, "string")},
    "DynamicResource": {"claim_name": (2, "string"), "claim_namespace": (3, "string"),
                        "claim_resources": (4, "[ClaimResource]")},
    "ContainerResources": {
        "name": (1, "string"),
        "devices": (2, "[ContainerDevices]"),
        "dynamic_resources": (5, "[DynamicResource]"),
    },
    "PodResources": {"name": (1, "string"), "namespace": (2, "string"), "containers": (3, "[ContainerResources]")},
    "ListPodResourcesResponse": {"pod_resources": (1, "[PodResources]")},
}  # fmt: skip


_REGISTRATION: dict[str, Fields] = {
    "InfoRequest": {},
    "PluginInfo": {
        "type": (1, "string"),
        "name": (2, "string"),
        "endpoint": (3, "string"),
        "supported_versions": (4, "[string]"),
    },
    "RegistrationStatus": {"plugin_registered": (1, "bool"), "error": (2, "string")},
    "RegistrationStatusResponse": {},
}
_DRA: dict[str, Fields] = {
    "Claim": {"namespace": (1, "string"), "uid": (2, "string"), "name": (3, "string")},
    "Device": {
        "request_names": (1, "[string]"),
        "pool_name": (2, "string"),
        "device_name": (3, "string"),
        "cdi_device_ids": (4, "[string]"),
        "share_id": (5, "string"),
    },
    "NodePrepareResourceResponse": {"devices": (1, "[Device]"), "error": (2, "string")},
    "NodeUnprepareResourceResponse": {"error": (1, "string")},
    "NodePrepareResourcesRequest": {"claims": (1, "[Claim]")},
    "NodePrepareResourcesResponse": {"claims": (1, "{NodePrepareResourceResponse}")},
    "NodeUnprepareResourcesRequest": {"claims": (1, "[Claim]")},
    "NodeUnprepareResourcesResponse": {"claims": (1, "{NodeUnprepareResourceResponse}")},
}


def _file(package: str, messages: dict[str, Fields]) -> Any:
    file: Any = descriptor_pb2.FileDescriptorProto(name=f"cotenant/{package}.proto", package=package, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number, label=_OPTIONAL)
            if kind.startswith("{"):
                entry_name = f"{field_name.title().replace('_', '')}Entry"
                entry = message.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=_OPTIONAL, type=_SCALARS["string"])
                value = entry.field.add(name="value", number=2, label=_OPTIONAL)
                _type(value, kind[1:-1], package)
                field.label, field.type, field.type_name = _REPEATED, _MESSAGE, f".{package}.{name}.{entry_name}"
                continue
            if kind.startswith("["):
                field.label, kind = _REPEATED, kind[1:-1]
            _type(field, kind, package)
    return file


def _type(field: Any, kind: str, package: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _MESSAGE, f".{package}.{kind}"


class Package:
    """Message classes of one package, as attributes: `device_plugin.RegisterRequest(...)`."""

    def __init__(self, package: str, messages: dict[str, Fields]) -> None:
        pool = descriptor_pool.DescriptorPool()
        pool.Add(_file(package, messages))
        self._classes = {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return self._classes[name]
        except KeyError:
            raise AttributeError(name) from None


device_plugin = Package("v1beta1", _DEVICE_PLUGIN)
pod_resources = Package("v1", _POD_RESOURCES)
registration = Package("pluginregistration", _REGISTRATION)
dra_v1 = Package("k8s.io.kubelet.pkg.apis.dra.v1", _DRA)
dra_v1beta1 = Package("k8s.io.kubelet.pkg.apis.dra.v1beta1", _DRA)


class Call(NamedTuple):
    """A method of a service: message classes, and whether the answer is a stream."""

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
SERVICES: dict[str, dict[str, Call]] = {
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
    """A server's handler for a service: its methods are those of `target` with the same names."""
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
    """A client's connection to a unix socket. The authority is given, for Go's servers do not take a path as one."""
    return grpc.insecure_channel(f"unix://{path}", options=[("grpc.default_authority", "localhost")])


def devices_of(container: Any) -> Iterator[tuple[str, list[str]]]:
    """(resource, device ids) of a container in an answer of PodResources; one resource may come in several parts."""
    for devices in container.devices:
        yield devices.resource_name, list(devices.device_ids)
