"""The standard gRPC services health (grpc.health.v1) and server reflection (v1 and v1alpha)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cotenant.core import protobuf
from cotenant.serving.gateway.http2_stream import Handler, Slot
from cotenant.serving.protocol.messages import SERVICE, classes

NOT_FOUND = 5
HEALTH = "grpc.health.v1"
VERSIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_HEALTH = {
    "HealthCheckRequest": "string service 1", "HealthCheckResponse": "HealthCheckResponse.ServingStatus status 1"
}  # fmt: skip
_STATUS = {"HealthCheckResponse.ServingStatus": "UNKNOWN SERVING NOT_SERVING SERVICE_UNKNOWN"}
SERVING, NOT_SERVING = 1, 2
_REFLECTION = {
    "ServerReflectionRequest": (
        "string host 1, string file_by_filename 3, string file_containing_symbol 4, "
        "ExtensionRequest file_containing_extension 5, string all_extension_numbers_of_type 6, string list_services 7"
    ),
    "ExtensionRequest": "string containing_type 1, int32 extension_number 2",
    "ServerReflectionResponse": (
        "string valid_host 1, ServerReflectionRequest original_request 2, "
        "FileDescriptorResponse file_descriptor_response 4, "
        "ExtensionNumberResponse all_extension_numbers_response 5, "
        "ListServiceResponse list_services_response 6, ErrorResponse error_response 7"
    ),
    "FileDescriptorResponse": "[bytes] file_descriptor_proto 1",
    "ExtensionNumberResponse": "string base_type_name 1, [int32] extension_number 2",
    "ListServiceResponse": "[ServiceResponse] service 1",
    "ServiceResponse": "string name 1",
    "ErrorResponse": "int32 error_code 1, string error_message 2",
}
_CHOICES = ("file_by_filename", "file_containing_symbol", "file_containing_extension", "all_extension_numbers_of_type",
            "list_services")  # fmt: skip
# method -> its message types, for methods whose messages are not named METHODRequest and METHODResponse
_SIGNATURES = {"ModelStreamInfer": ("ModelInferRequest", "ModelStreamInferResponse")}


def handlers(methods: Mapping[str, Handler], ready: Callable[[], bool]) -> dict[bytes, Handler]:
    """Return the handlers by path. `methods`: the handlers of the inference service, by the method's name; `ready`:
    whether the server is ready.
    """
    health = protobuf.classes(HEALTH, _HEALTH, _STATUS)
    inference = SERVICE.strip("/")
    known = {"", inference, f"{HEALTH}.Health"}

    def check(slot: Slot, message: Any) -> None:
        if message.service not in known:
            slot.fail(NOT_FOUND, f"there is no service {message.service[:200]!r}")
            return
        status = SERVING if ready() else NOT_SERVING
        slot.reply(health["HealthCheckResponse"](status=status).SerializeToString())

    streams = {name for name, handler in methods.items() if handler.streaming}
    files = [
        _file(classes(), inference, {name: name in streams for name in methods}),
        _file(health, f"{HEALTH}.Health", {"Check": False}, prefix="Health"),
    ]
    paths = {f"/{HEALTH}.Health/Check".encode(): Handler(check, health["HealthCheckRequest"], guarded=False)}
    kinds = {version: protobuf.classes(version, _REFLECTION) for version in VERSIONS}
    for version, own in kinds.items():
        service = f"{version}.ServerReflection"
        files.append(_file(own, service, {"ServerReflectionInfo": True}, prefix="ServerReflection"))
    for version, own in kinds.items():
        path = f"/{version}.ServerReflection/ServerReflectionInfo"
        paths[path.encode()] = Handler(_Reflection(own, files).serve, own["ServerReflectionRequest"], streaming=True)
    return paths


def _file(own: Mapping[str, Any], service: str, methods: Mapping[str, bool], prefix: str = "") -> Any:
    """Return the file descriptor of message classes made by protobuf.classes, with a service added to it. `methods`:
    name of each method of the service -> whether it is a stream; `prefix`: what the names of the methods' messages
    begin with.
    """
    from google.protobuf import descriptor_pb2

    file = descriptor_pb2.FileDescriptorProto()
    next(iter(own.values())).DESCRIPTOR.file.CopyToProto(file)
    made = file.service.add(name=service.rpartition(".")[2])
    for name, streams in methods.items():
        stem = f"{prefix}{name}" if f"{prefix}{name}Request" in own else prefix or name
        taken, given = _SIGNATURES.get(name, (f"{stem}Request", f"{stem}Response"))
        made.method.add(
            name=name, input_type=f".{file.package}.{taken}", output_type=f".{file.package}.{given}",
            client_streaming=streams, server_streaming=streams,
        )  # fmt: skip
    return file


class _Reflection:
    """Answers clients' questions about the descriptors of the server's services."""

    def __init__(self, own: Mapping[str, Any], files: list[Any]) -> None:
        self.own = own
        self._files = {file.name: file.SerializeToString() for file in files}
        self._services = [f"{file.package}.{service.name}" for file in files for service in file.service]
        self._symbols: dict[str, str] = {}
        for file in files:
            for kind in (*file.message_type, *file.enum_type, *file.service):
                self._add(file.name, file.package, kind)

    def _add(self, file: str, scope: str, kind: Any) -> None:
        name = f"{scope}.{kind.name}"
        self._symbols[name] = file
        for part in ("nested_type", "enum_type"):
            for inner in getattr(kind, part, ()):
                self._add(file, name, inner)
        for method in getattr(kind, "method", ()):
            self._symbols[f"{name}.{method.name}"] = file

    def serve(self, slot: Slot, request: Any) -> None:
        """Answer one request of the reflection stream."""
        response = self.own["ServerReflectionResponse"](valid_host=request.host, original_request=request)
        asked = next((x.name for x, _ in request.ListFields() if x.name in _CHOICES), "list_services")
        if asked == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
        else:
            symbol = getattr(request, asked)
            if asked == "all_extension_numbers_of_type" and symbol in self._symbols:
                response.all_extension_numbers_response.base_type_name = symbol
            else:
                self._descriptor(response, asked, symbol)
        slot.reply(response.SerializeToString())

    def _descriptor(self, response: Any, asked: str, symbol: Any) -> None:
        found = None
        if asked == "file_by_filename":
            found = self._files.get(symbol)
        elif asked == "file_containing_symbol":
            found = self._files.get(self._symbols.get(symbol, ""))
        if found is None:
            response.error_response.error_code = NOT_FOUND
            response.error_response.error_message = f"there is no such {asked.rpartition('_')[2]}"
        else:
            response.file_descriptor_response.file_descriptor_proto.append(found)
