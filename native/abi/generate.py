"""Generates from the schema files (*.toml in this folder) what C and Python share: the C headers in this folder,
src/cotenant/abi/ and docs/protocol.md.

Usage: python native/abi/generate.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from schema import HERE, SCALARS, Field, Schema, Struct, read

ROOT = HERE.parent.parent
SCHEMAS = ("protocol", "tenant_page", "floor", "copy_page", "rules", "contention")
MADE_BY = "Generated from {}.toml by native/abi/generate.py: change the TOML file, then run the script."
WIDTH = 120


# -- C -----------------------------------------------------------------------------------------------------------------


def c_header(schema: Schema) -> str:
    """Return the text of a C header."""
    guard = f"COTENANT_ABI_{schema.stem.upper()}_H"
    lines = [f"/* {MADE_BY.format(schema.stem)}", f" * {schema.raw['summary']}  docs/protocol.md explains it. */"]
    lines += [f"#ifndef {guard}", f"#define {guard}", "", "#include <stdbool.h>", "#include <stdint.h>", ""]
    for name, kind, value, meaning in schema.raw.get("constants", []):
        lines += _c_line(f"#define {schema.macro}{name} {_c_value(name, kind, value)}", meaning)
    for enum in schema.enums:
        lines += ["", f"/* {enum['meaning']}. */", f"enum {schema.tag}{_snake(enum['name'])} {{"]
        for name, number, meaning in enum["values"]:
            lines += _c_line(f"    {schema.macro}{enum['macro_prefix']}{name} = {number},", meaning)
        lines.append("};")
    for struct in schema.structs:
        lines += _c_struct(schema, struct)
    if schema.raw.get("messages"):
        lines += _c_message(schema)
    return "\n".join([*lines, "", "#endif", ""])


def _c_struct(schema: Schema, struct: Struct) -> list[str]:
    lines = ["", f"/* {struct.meaning}. */", f"struct {schema.tag}{struct.name} {{"]
    for field in struct.fields:
        if field.heading:
            lines.append(f"    /* {field.heading} */")
        kind = SCALARS[field.type][1] if field.type in SCALARS else f"struct {schema.tag}{field.type}"
        count = (
            field.count_text if field.count_text.isdigit() or not field.count_text else schema.macro + field.count_text
        )
        lines += _c_line(f"    {kind} {field.name}{f'[{count}]' if count else ''};", field.meaning)
    name = f"{schema.tag}{struct.name}"
    check = f'sizeof(struct {name}) == {struct.bytes}, "{name} does not have {struct.bytes} bytes"'
    return [*lines, "};", f"_Static_assert({check});"]


def _c_message(schema: Schema) -> list[str]:
    bodies = [struct for struct in schema.structs if struct.kind == "message" and struct.name != "header"]
    size = bodies[0].bytes
    lines = [
        "",
        "/* A message. */",
        f"struct {schema.tag}message {{",
        f"    struct {schema.tag}header header;",
        "    union {",
    ]
    lines += [f"        struct {schema.tag}{body.name} {body.name};" for body in bodies]
    lines += [f"        uint8_t bytes[{size}];", "    } body;", "};"]
    size_text = f"{schema.macro}MESSAGE_BYTES"
    check = f'sizeof(struct {schema.tag}message) == {size_text}, "a message does not have {size_text}"'
    return [*lines, f"_Static_assert({check});"]


def _c_line(code: str, meaning: str) -> list[str]:
    if not meaning:
        return [code]
    if len(code) + len(meaning) + 7 <= WIDTH:
        return [f"{code} /* {meaning} */"]
    indent = " " * (len(code) - len(code.lstrip()))
    return [*_wrapped(meaning, indent + "/* ", indent + " * ", " */"), code]


def _wrapped(text: str, first: str, other: str, end: str) -> list[str]:
    lines, line = [], first
    for word in text.split():
        if len(line) + len(word) + len(end) > WIDTH:
            lines.append(line.rstrip())
            line = other
        line += word + " "
    return [*lines, line.rstrip() + end]


def _c_value(name: str, kind: str, value: Any) -> str:
    if kind == "string":
        return f'"{value}"'
    text = _number(name, value)
    return {"u32": f"{text}u", "u64": f"UINT64_C({text})", "i32": text}[kind]


def _number(name: str, value: int) -> str:
    return f"0x{value:X}" if name.endswith("MAGIC") or value in (0xFFFFFFFF, (1 << 64) - 1) else str(value)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


# -- Python ------------------------------------------------------------------------------------------------------------


def python_module(schema: Schema) -> str:
    """Return the text of a Python module. It imports nothing but the standard library, so that every other
    module of Cotenant may import it. Constants and enums that the schema lists in `c_only` are left out."""
    pages = [struct for struct in schema.structs if struct.kind in ("page", "value")]
    rows = [struct for struct in schema.structs if struct.kind == "row"]
    messages = [struct for struct in schema.structs if struct.kind == "message"]
    c_only = schema.raw.get("c_only", [])
    enums = [enum for enum in schema.enums if enum["name"] not in c_only]
    imports = [f"import {name}" for name, used in (("ctypes", pages), ("enum", enums), ("struct", rows)) if used]
    lines = [
        f'"""{schema.raw["summary"]}',
        "",
        MADE_BY.format(schema.stem),
        '"""',
        "",
        "from __future__ import annotations",
        "",
    ]
    lines += [*imports, ""] if imports else []
    for name, kind, value, meaning in schema.raw.get("constants", []):
        if name in c_only:
            continue
        text = f'"{value}"' if kind == "string" else _number(name, value)
        lines += _py_line(f"{name} = {text}", meaning)
    for enum in enums:
        base = "IntFlag" if enum.get("flags") else "IntEnum"
        lines += ["", "", f"class {enum['name']}(enum.{base}):", *_doc(enum["meaning"]), ""]
        for name, number, meaning in enum["values"]:
            lines += _py_line(f"    {name} = {number}", meaning)
    if messages:
        lines += ["", "", *_py_layouts(schema, messages)]
    for struct in rows:
        formats = "".join(_format(field) for field in struct.fields)
        after_class = [""] if lines[-1].startswith(" ") else []
        lines += ["", *after_class, f'{struct.name.upper()} = struct.Struct("={formats}")  # {struct.meaning}']
    for struct in pages:
        lines += ["", "", *_py_page(struct)]
    return "\n".join([*lines, ""])


def _py_layouts(schema: Schema, messages: list[Struct]) -> list[str]:
    lines = ["# fields and their formats for the struct module, in order; x is padding"]
    lines += ["LAYOUTS: dict[str, tuple[tuple[str, str], ...]] = {"]
    for struct in messages:
        lines.append(f'    "{struct.name}": (  # {struct.meaning}')
        for field in struct.fields:
            lines += _py_line(f'        ("{field.name}", "{_format(field)}"),', field.meaning)
        lines.append("    ),")
    lines += ["}", "BODY_OF: dict[MessageType, str] = {"]
    bodies = [(name, body) for name, _, body, *_ in schema.raw["messages"] if body != "-"]
    return [*lines, *(f'    MessageType.{name}: "{body}",' for name, body in bodies), "}"]


def _py_page(struct: Struct) -> list[str]:
    name = _class(struct.name, struct.kind)
    lines = [f"class {name}(ctypes.Structure):", *_doc(struct.meaning), "", "    _fields_ = ("]
    notes: list[str] = []
    for field in struct.fields:
        kind = f"ctypes.{SCALARS[field.type][2]}" if field.type in SCALARS else _class(field.type)
        count = f" * {field.count_text}" if field.count_text else ""
        lines.append(f'        ("{field.name}", {kind}{count}),')
        if field.heading:
            notes.append(f"    # {field.heading}")
        if not field.reserved:
            plain = "bool" if field.type == "bool" else "int"
            notes += _py_line(f"    {field.name}: {f'ctypes.Array[{kind}]' if count else plain}", field.meaning)
    return [*lines, "    )", *notes]


def _py_line(code: str, meaning: str) -> list[str]:
    if not meaning:
        return [code]
    if len(code) + len(meaning) + 4 <= WIDTH:
        return [f"{code}  # {meaning}"]
    indent = " " * (len(code) - len(code.lstrip()))
    return [*_wrapped(meaning, indent + "# ", indent + "# ", ""), code]


def _doc(meaning: str) -> list[str]:
    return [f'    """{meaning[0].upper()}{meaning[1:]}."""']


def _class(name: str, kind: str = "page") -> str:
    return "".join(part.capitalize() for part in name.split("_")) + ("Layout" if kind == "page" else "")


def _format(field: Field) -> str:
    if field.reserved:
        return f"{field.bytes}x"
    if field.count is not None:
        return f"{field.count}s"
    return SCALARS[field.type][3]


# -- the page of the docs ----------------------------------------------------------------------------------------------


def docs_page(schemas: list[Schema]) -> str:
    """Return the text of docs/protocol.md."""
    lines = [
        "# What C and Python share",
        "",
        "This page has the messages, pages of shared memory and constants that the C code and Python share.",
        "`native/abi/generate.py` writes it from the schema beside that file, as it writes the C headers there and",
        "`src/cotenant/abi/`. To change something, change the schema, run the generator and build again.",
    ]
    for schema in schemas:
        lines += ["", f"## {schema.raw['title']}", "", schema.raw["summary"], "", schema.raw["about"].strip()]
        lines += _docs_messages(schema)
        rows = [
            (f"`{name}`", f"`{value if kind == 'string' else _number(name, value)}`", meaning)
            for name, kind, value, meaning in schema.raw.get("constants", [])
        ]
        lines += _table("Constants", ("name", "value", "meaning"), rows)
        for enum in schema.enums:
            if enum["name"] != "MessageType":
                rows = [(f"`{name}`", str(number), meaning) for name, number, meaning in enum["values"]]
                lines += _table(f"{enum['name']}: {_lower(enum['meaning'])}", ("name", "value", "meaning"), rows)
        for struct in schema.structs:
            lines += _docs_struct(struct)
    return "\n".join([*lines, ""])


def _docs_messages(schema: Schema) -> list[str]:
    rows = [
        (f"`{name}`", str(number), sender, "" if body == "-" else f"`{body}`", meaning)
        for name, number, body, sender, meaning in schema.raw.get("messages", [])
    ]
    return _table("Messages", ("name", "type", "from", "body", "meaning"), rows)


def _docs_struct(struct: Struct) -> list[str]:
    rows = [
        (str(field.offset), f"`{field.name}`", field.type + (f"[{field.count_text}]" if field.count_text else ""),
         field.unit, field.meaning)
        for field in struct.fields
        if not field.reserved
    ]  # fmt: skip
    title = f"`{struct.name}` ({struct.bytes} bytes): {_lower(struct.meaning)}"
    return _table(title, ("offset", "field", "type", "unit", "meaning"), rows)


def _lower(text: str) -> str:
    return text if text.split()[0].isupper() or "_" in text.split()[0] else text[0].lower() + text[1:]


def _table(title: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    lines = [" | ".join(heads), "|".join(["---"] * len(heads)), *(" | ".join(row) for row in rows)]
    return ["", f"### {title}", "", *(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)]


def outputs() -> dict[Path, str]:
    """Return every generated file with its text."""
    schemas = [read(stem) for stem in SCHEMAS]
    made = {ROOT / "docs" / "protocol.md": docs_page(schemas)}
    for schema in schemas:
        made[HERE / f"{schema.stem}.h"] = c_header(schema)
        made[ROOT / "src" / "cotenant" / "abi" / f"{schema.stem}.py"] = python_module(schema)
    return made


if __name__ == "__main__":
    for path, text in outputs().items():
        path.write_text(text)
