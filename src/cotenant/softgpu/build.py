"""Build the software GPU's driver library with the system's C compiler, once per source."""

from __future__ import annotations

from pathlib import Path

from cotenant.shim.build import ABI_HEADERS, C_FLAGS, NATIVE, SOURCES, cached, run_compiler

SOFT_SOURCES = NATIVE / "softgpu"
HEADERS = (*sorted(SOFT_SOURCES.glob("*.h")), *ABI_HEADERS, SOURCES / "cuda_abi.h")
LIBRARY = "libcotenant-softgpu.so"


def build(*, cache: Path | None = None) -> Path:
    """Path of the software GPU's library, built if need be.

    It has a name of its own and is never found as libcuda.so.1: a tenant gets it as its driver only when the launcher
    says so.
    """
    sources = [path for path in sorted(SOFT_SOURCES.glob("*.c")) if path.name != "soft_nvml.c"]
    texts = [path.read_bytes() for path in (*sources, *HEADERS)]

    def make(scratch: Path, target: Path) -> None:
        del scratch
        linking = ["-shared", "-Wl,-Bsymbolic", f"-Wl,-soname,{LIBRARY}"]
        run_compiler([*C_FLAGS, *linking, *map(str, sources), "-o", str(target), "-ldl", "-lpthread"])

    return cached(LIBRARY, texts, make, cache)


def build_nvml(*, cache: Path | None = None) -> Path:
    """Path of the software GPU's small stand-in for NVML, built if need be."""
    sources = [SOFT_SOURCES / name for name in ("soft_nvml.c", "state.c", "slices.c", "share.c")]
    texts = [path.read_bytes() for path in (*sources, *HEADERS)]

    def make(scratch: Path, target: Path) -> None:
        del scratch
        linking = ["-shared", "-Wl,-Bsymbolic", "-Wl,-soname,libcotenant-softnvml.so"]
        run_compiler([*C_FLAGS, *linking, *map(str, sources), "-o", str(target), "-lpthread"])

    return cached("libcotenant-softnvml.so", texts, make, cache)
