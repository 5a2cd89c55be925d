"""The C sources and headers that tests compile, and the symbols of compiled libraries."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"
SHIM = NATIVE / "shim"
SOFTGPU = NATIVE / "softgpu"


def compile_c(arguments: Iterable[str | Path]) -> None:
    """Run the C compiler."""
    subprocess.run(["cc", *map(str, arguments)], check=True, timeout=120)


def exports(library: Path) -> set[str]:
    """The functions that a library exports."""
    listed = ["nm", "-D", "--defined-only", "--format=posix", str(library)]
    lines = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0] for line in lines if line.split()[1] in "TWi"}


def listed_exports(header: Path) -> set[str]:
    """The names in a list of exports."""
    return set(re.findall(r"^E\((\w+)\)$", header.read_text(), re.MULTILINE))
