"""Protobuf messages built at run time from tables, so that no generated code depends on the installed protobuf version.
Each table has its own descriptor pool: definitions of the same name in other packages do not clash.

A message is "TYPE NAME NUMBER, ..." where TYPE is a scalar, a message or an enumeration of the table; [TYPE] is
repeated, {TYPE} a map from strings, {KEY TYPE} a map from KEY, TYPE? a scalar with presence. A message named
OUTER.INNER is nested in OUTER. Only fields that are read or written need to be listed: protobuf skips unknown ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_FIELD = re.compile(r"(\{[^}]*\}|\S+) (\w+) (\d+)")
_SCALARS = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13,
}  # fmt: skip
_MESSAGE, _ENUM = 11, 14
_OPTIONAL, _REPEATED = 1, 3


def classes(
    package: str, messages: Mapping[str, str], enums: Mapping[str, str] | None = None,
    oneofs: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Build message classes; returns them by name. `enums`: names of each enumeration's values, numbered from 0.
    `oneofs`: messages whose fields are all in one oneof -> the oneof's name.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"cotenant/{package}.proto", package=package, syntax="proto3")
    enums = enums or {}
    made: dict[str, Any] = {}
    for name in sorted(messages, key=lambda name: name.count(".")):
        outer, _, inner = name.rpartition(".")
        made[name] = made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
    for name, values in enums.items():
        outer, _, inner = name.rpartition(".")
        enum = (made[outer] if outer else file).enum_type.add(name=inner)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)

    def add(message: Any, full_name: str, kind: str, name: str, number: int) -> Any:
        field = message.field.add(name=name, number=number, label=_OPTIONAL)
        if kind[0] == "{":
            key, _, value = kind[1:-1].rpartition(" ")
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            add(entry, "", key or "string", "key", 1)
            add(entry, "", value, "value", 2)
            kind = f"[{full_name}.{entry.name}]"
        if kind[0] == "[":
            field.label, kind = _REPEATED, kind[1:-1]
        if kind[-1] == "?":
            field.proto3_optional, field.oneof_index, kind = True, len(message.oneof_decl), kind[:-1]
            message.oneof_decl.add(name=f"_{name}")
        field.type = _SCALARS.get(kind) or (_ENUM if kind in enums else _MESSAGE)
        if kind not in _SCALARS:
            field.type_name = f".{package}.{kind}"
        return field

    for name, table in messages.items():
        if choice := (oneofs or {}).get(name):
            made[name].oneof_decl.add(name=choice)
        for kind, key, number in _FIELD.findall(table):
            field = add(made[name], name, kind, key, int(number))
            if choice:
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def plain(message: Any) -> dict[str, Any]:
    """Return the fields of a message that are set, as plain data. Values of enumerations are given by name."""

    def value(field: Any, one: Any) -> Any:
        if field.message_type is not None:
            return plain(one)
        return field.enum_type.values_by_number[one].name if field.enum_type is not None else one

    found: dict[str, Any] = {}
    for field, content in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            found[field.name] = {key: value(inner, content[key]) for key in content}
        elif isinstance(content, str | bytes) or not hasattr(content, "__len__"):
            found[field.name] = value(field, content)
        else:
            found[field.name] = [value(field, one) for one in content]
    return found
