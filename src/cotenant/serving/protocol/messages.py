"""The messages of the Open Inference Protocol over gRPC, declared here and built by protobuf when first used.

They live in a descriptor pool of their own: a client library in the same process may have registered its own copies of
the same names. Field numbers are the protocol's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PACKAGE = "inference"
SERVICE = "/inference.GRPCInferenceService/"

# message -> fields (number, name, type); type: a scalar, a message, [type] repeated, {value} a map from string
_FIELDS: dict[str, list[tuple[int, str, Any]]] = {
    "ServerLiveRequest": [],
    "ServerLiveResponse": [(1, "live", "bool")],
    "ServerReadyRequest": [],
    "ServerReadyResponse": [(1, "ready", "bool")],
    "ModelReadyRequest": [(1, "name", "string"), (2, "version", "string")],
    "ModelReadyResponse": [(1, "ready", "bool")],
    "ServerMetadataRequest": [],
    "ServerMetadataResponse": [(1, "name", "string"), (2, "version", "string"), (3, "extensions", ["string"])],
    "ModelMetadataRequest": [(1, "name", "string"), (2, "version", "string")],
    "TensorMetadata": [(1, "name", "string"), (2, "datatype", "string"), (3, "shape", ["int64"])],
    "ModelMetadataResponse": [
        (1, "name", "string"), (2, "versions", ["string"]), (3, "platform", "string"),
        (4, "inputs", ["TensorMetadata"]), (5, "outputs", ["TensorMetadata"]),
    ],
    "InferParameter": [
        (1, "bool_param", "bool"), (2, "int64_param", "int64"), (3, "string_param", "string"),
        (4, "double_param", "double"), (5, "uint64_param", "uint64"),
    ],
    "InferTensorContents": [
        (1, "bool_contents", ["bool"]), (2, "int_contents", ["int32"]), (3, "int64_contents", ["int64"]),
        (4, "uint_contents", ["uint32"]), (5, "uint64_contents", ["uint64"]), (6, "fp32_contents", ["float"]),
        (7, "fp64_contents", ["double"]), (8, "bytes_contents", ["bytes"]),
    ],
    "InferInputTensor": [
        (1, "name", "string"), (2, "datatype", "string"), (3, "shape", ["int64"]),
        (4, "parameters", {"InferParameter"}), (5, "contents", "InferTensorContents"),
    ],
    "InferRequestedOutputTensor": [(1, "name", "string"), (2, "parameters", {"InferParameter"})],
    "ModelInferRequest": [
        (1, "model_name", "string"), (2, "model_version", "string"), (3, "id", "string"),
        (4, "parameters", {"InferParameter"}), (5, "inputs", ["InferInputTensor"]),
        (6, "outputs", ["InferRequestedOutputTensor"]), (7, "raw_input_contents", ["bytes"]),
    ],
    "InferOutputTensor": [
        (1, "name", "string"), (2, "datatype", "string"), (3, "shape", ["int64"]),
        (4, "parameters", {"InferParameter"}), (5, "contents", "InferTensorContents"),
    ],
    "ModelInferResponse": [
        (1, "model_name", "string"), (2, "model_version", "string"), (3, "id", "string"),
        (4, "parameters", {"InferParameter"}), (5, "outputs", ["InferOutputTensor"]),
        (6, "raw_output_contents", ["bytes"]),
    ],
    "ModelStreamInferResponse": [(1, "error_message", "string"), (2, "infer_response", "ModelInferResponse")],
    "ModelConfigRequest": [(1, "name", "string"), (2, "version", "string")],
    "ModelInputConfig": [(1, "name", "string"), (2, "data_type", "int32"), (4, "dims", ["int64"])],
    "ModelOutputConfig": [(1, "name", "string"), (2, "data_type", "int32"), (3, "dims", ["int64"])],
    "ModelConfig": [
        (1, "name", "string"), (2, "platform", "string"), (4, "max_batch_size", "int32"),
        (5, "input", ["ModelInputConfig"]), (6, "output", ["ModelOutputConfig"]), (17, "backend", "string"),
    ],
    "ModelConfigResponse": [(1, "config", "ModelConfig")],
    "ModelStatisticsRequest": [(1, "name", "string"), (2, "version", "string")],
    "StatisticDuration": [(1, "count", "uint64"), (2, "ns", "uint64")],
    "InferStatistics": [(1, "success", "StatisticDuration"), (2, "fail", "StatisticDuration")],
    "ModelStatistics": [
        (1, "name", "string"), (2, "version", "string"), (4, "inference_count", "uint64"),
        (5, "execution_count", "uint64"), (6, "inference_stats", "InferStatistics"),
    ],
    "ModelStatisticsResponse": [(1, "model_stats", ["ModelStatistics"])],
    "RepositoryIndexRequest": [(1, "repository_name", "string"), (2, "ready", "bool")],
    "RepositoryIndexResponse.ModelIndex": [
        (1, "name", "string"), (2, "version", "string"), (3, "state", "string"), (4, "reason", "string"),
    ],
    "RepositoryIndexResponse": [(1, "models", ["RepositoryIndexResponse.ModelIndex"])],
    "RepositoryModelLoadRequest": [(1, "repository_name", "string"), (2, "model_name", "string")],
    "RepositoryModelLoadResponse": [],
    "RepositoryModelUnloadRequest": [(1, "repository_name", "string"), (2, "model_name", "string")],
    "RepositoryModelUnloadResponse": [],
}  # fmt: skip
_ONEOFS = {"InferParameter": "parameter_choice"}
_SCALARS = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13,
}  # fmt: skip
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3

# data types of model configurations, whose enum is numbered so
CONFIG_TYPES = {
    name: number
    for number, name in enumerate(
        ("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32",
         "FP64", "STRING", "BF16")
    )
}  # fmt: skip


def _add(proto: Any, fields: list[tuple[int, str, Any]], name: str) -> None:
    """Fields of one message; a map is a repeated message with a key and a value."""
    if name in _ONEOFS:
        proto.oneof_decl.add(name=_ONEOFS[name])
    for number, key, kind in fields:
        field = proto.field.add(name=key, number=number, label=_OPTIONAL)
        if name in _ONEOFS:
            field.oneof_index = 0
        if isinstance(kind, set):
            (value,) = kind
            entry = key.title().replace("_", "") + "Entry"
            nested = proto.nested_type.add(name=entry)
            nested.options.map_entry = True
            _add(nested, [(1, "key", "string"), (2, "value", value)], "")
            kind = [f"{proto.name}.{entry}"]
        if isinstance(kind, list):
            field.label = _REPEATED
            (kind,) = kind
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type, field.type_name = _MESSAGE, f".{PACKAGE}.{kind}"


@cache
def classes() -> dict[str, Any]:
    """Message classes by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="cotenant_oip.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for name in sorted(_FIELDS, key=lambda name: name.count(".")):
        outer, _, inner = name.rpartition(".")
        made[name] = made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
    for name, fields in _FIELDS.items():
        _add(made[name], fields, name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _FIELDS
    }
