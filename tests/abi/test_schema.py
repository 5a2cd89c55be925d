"""The schema of what C and Python share: what is generated from it is checked in, and C and Python agree."""

from __future__ import annotations

import ctypes
import enum
import inspect
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from native_sources import NATIVE

from cotenant.abi import contention, copy_page, floor, protocol, rules, tenant_page

ABI = NATIVE / "abi"
sys.path.insert(0, str(ABI))
import generate  # noqa: E402
import schema  # noqa: E402

MODULES = {m.__name__.rsplit(".", 1)[1]: m for m in (protocol, tenant_page, floor, copy_page, rules, contention)}


def test_generated_files_are_those_of_the_schema() -> None:
    stale = [str(path) for path, text in generate.outputs().items() if path.read_text() != text]
    assert not stale, f"run python native/abi/generate.py; stale: {stale}"
    assert set(generate.SCHEMAS) == {path.stem for path in ABI.glob("*.toml")} == set(MODULES)


def facts_of(module: ModuleType, read: schema.Schema) -> dict[str, int]:
    """Constants, sizes and offsets as Python has them, by the C expression that should have the same value."""
    facts: dict[str, int] = {}
    prefixes = {entry["name"]: entry["macro_prefix"] for entry in read.enums}
    for name, value in vars(module).items():
        if isinstance(value, int):
            facts[f"{read.macro}{name}"] = value
        elif inspect.isclass(value) and issubclass(value, enum.Enum):
            facts |= {f"{read.macro}{prefixes[name]}{entry.name}": int(entry.value) for entry in value}
        elif inspect.isclass(value) and issubclass(value, ctypes.Structure):
            c_name = read.tag + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Layout")).lower()
            facts[f"sizeof(struct {c_name})"] = ctypes.sizeof(value)
            for field in value._fields_:
                facts[f"offsetof(struct {c_name}, {field[0]})"] = getattr(value, field[0]).offset
    for name, fields in getattr(module, "LAYOUTS", {}).items():
        offset = 0
        for field, form in fields:
            facts[f"offsetof(struct {read.tag}{name}, {field})"] = offset
            offset += struct.calcsize("=" + form)
        facts[f"sizeof(struct {read.tag}{name})"] = offset
    return facts


def test_python_and_c_agree_on_every_byte(tmp_path: Path) -> None:
    """The generator writes both: here a compiler, ctypes and the struct module have the word."""
    facts: dict[str, int] = {"sizeof(struct cotenant_kernel)": floor.KERNEL.size}
    for stem, module in MODULES.items():
        facts |= facts_of(module, schema.read(stem))
    assert len(facts) > 300
    includes = "".join(f'#include "{ABI / stem}.h"\n' for stem in MODULES)
    prints = "\n".join(f'printf("%llu\\n", (unsigned long long)({expression}));' for expression in facts)
    (tmp_path / "facts.c").write_text(
        f"#include <stdio.h>\n#include <stddef.h>\n{includes}int main(void) {{\n{prints}\n}}\n"
    )
    subprocess.run(["cc", "-std=gnu11", str(tmp_path / "facts.c"), "-o", str(tmp_path / "facts")], check=True)
    printed = subprocess.run([str(tmp_path / "facts")], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(facts, map(int, printed), strict=True)) == facts


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ('["a", "u32", ""], ["b", "u64", ""]', "would lie at 4, which is not a multiple of 8"),
        ('["a", "u64[3]", ""]', "its fields take 24 bytes, but its size is 16"),
        ('["a", "u32", ""], ["a", "u32", ""]', "two fields have the same name"),
        ('["a", "u8", ""], ["b", "to 1", ""]', "offset 1 lies before the field"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: str, why: str
) -> None:
    text = f'[[struct]]\nname = "s"\nbytes = 16\nkind = "page"\nmeaning = "S"\nfields = [{fields}]\n'
    (tmp_path / "wrong.toml").write_text(text)
    monkeypatch.setattr(schema, "HERE", tmp_path)
    with pytest.raises(schema.SchemaError, match=why):
        schema.read("wrong")
