"""Compiles native/ for a wheel, and says in the wheel's name which C library its libraries need at least.

An editable installation has no libraries of its own: a source checkout compiles them when they are first used.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_GLIBC = (2, 17)


class NativeLibraries(BuildHookInterface[Any]):
    """The libraries go beside cotenant/native/libraries.py."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add what came of it to the wheel."""
        if version == "editable" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        self.folder = Path(tempfile.mkdtemp())
        command = ["make", "-s", "-C", os.path.join(self.root, "native"), f"-j{os.cpu_count()}", f"OUT={self.folder}"]
        subprocess.run([*command, "CFLAGS=-O2"], check=True)
        libraries = sorted(self.folder.glob("*.so"))
        build_data["force_include"] |= {str(path): f"cotenant/native/{path.name}" for path in libraries}
        build_data["pure_python"] = False
        major, minor = max(OLDEST_GLIBC, *map(needed_glibc, libraries))
        build_data["tag"] = f"py3-none-manylinux_{major}_{minor}_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder that was compiled in."""
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


def needed_glibc(library: Path) -> tuple[int, int]:
    """The newest version of the C library that symbols are asked of, as (major, minor)."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes())
    return max(((int(major), int(minor)) for major, minor in found), default=OLDEST_GLIBC)
