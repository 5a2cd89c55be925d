"""Build the shim with the system's C compiler, once per source and driver, and say how a tenant is given it.

build()                 -> path of libcotenant-shim.so
build_nvml()            -> path of libcotenant-nvml.so
tenant_environment(...) -> what the launcher adds to a tenant's environment
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.core.folders import cache_folder
from cotenant.shim.elf import defined_symbols
from cotenant.shim.stubs import stub_assembly

STUBS = Path(__file__).with_name("stubs.py")
NATIVE = Path(__file__).resolve().parents[3] / "native"
SOURCES = NATIVE / "shim"
ABI_HEADERS = tuple(sorted((NATIVE / "abi").glob("*.h")))
C_FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-fno-semantic-interposition", "-Wall", "-Wextra")
PASSED_ON = (
    "COTENANT_SOFTGPU_STATE",
    "COTENANT_SOFTGPU_COUNT",
    "COTENANT_SOFTGPU_MEMORY",
    "COTENANT_SOFTGPU_LINK_MBPS",
)


def compiler() -> str:
    """The C compiler: $CC, else cc."""
    return os.environ.get("CC", "cc")


def run_compiler(arguments: Iterable[str]) -> None:
    """Run the compiler; raises InputError with its first lines when it fails or is missing."""
    command = [compiler(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(
            f"a C compiler is needed to build the driver shim, and {command[0]!r} did not run: {error}"
        ) from None
    if done.returncode != 0:
        raise InputError(f"the C compiler failed: {' '.join(done.stderr.split()[:60])}")


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()[:16]


def cached(name: str, parts: Iterable[bytes], make: Callable[[Path, Path], None], cache: Path | None = None) -> Path:
    """Path of `name` for this content; `make(folder, target)` writes it when it is not there yet.

    The library is put in place by rename, so a process that has an older one mapped keeps it. Of several who want it at
    once one builds, and the others wait for it.
    """
    folder = (cache or cache_folder()) / _digest([*parts, platform.machine().encode(), " ".join(C_FLAGS).encode()])
    target = folder / name
    if target.exists():
        return target
    if sys.stderr.isatty():  # a person waits; what programs read from there stays theirs
        print(f"compiling {name} (once; some seconds)", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: all of them build
                fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                return target
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / name
                make(Path(scratch), built)
                os.replace(built, target)
        finally:
            os.close(lock)
    except OSError as error:
        why = f"{name} cannot be built in {folder} ({error.strerror}); $COTENANT_CACHE names another folder"
        raise InputError(why) from None
    return target


def _require_machine() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise InputError(f"the driver shim is written for x86-64; this machine is {platform.machine()}")


def known_exports(driver: Path | None) -> set[str]:
    """Names the shim exports: those of the list that ships, and whatever the given driver exports beyond it."""
    names = set((SOURCES / "driver_exports.txt").read_text().split())
    if driver is not None:
        names |= {
            name for name in defined_symbols(driver, dynamic=True) if name.startswith("cu") and name[2:3].isupper()
        }
    return names


def _shim_sources() -> list[Path]:
    return [path for path in sorted(SOURCES.rglob("*.c")) if not path.name.startswith("nvml")]


def build(driver: Path | None = None, *, cache: Path | None = None) -> Path:
    """Build libcotenant-shim.so (SONAME libcuda.so.1) unless it is there; `driver` adds that driver's exports."""
    _require_machine()
    exports = known_exports(driver)
    sources = _shim_sources()
    texts = [path.read_bytes() for path in (*sorted(SOURCES.rglob("*.[ch]")), *ABI_HEADERS)]

    def make(scratch: Path, target: Path) -> None:
        objects, wrapped = [], set()
        for source in sources:
            made = scratch / ("-".join(source.relative_to(SOURCES).parts) + ".o")
            run_compiler([*C_FLAGS, f"-I{SOURCES}", "-c", str(source), "-o", str(made)])
            objects.append(str(made))
            wrapped |= {name for name in defined_symbols(made, dynamic=False) if _is_entry_point(name)}
        assembly = scratch / "exports.S"
        assembly.write_text(stub_assembly(exports, wrapped, "cot_open_driver"))
        run_compiler(
            [
                "-shared",
                "-Wl,-soname,libcuda.so.1",
                "-Wl,-z,now",
                *objects,
                str(assembly),
                "-o",
                str(target),
                "-ldl",
                "-lpthread",
            ]
        )

    parts = [*texts, STUBS.read_bytes(), "\n".join(sorted(exports)).encode()]
    return cached("libcotenant-shim.so", parts, make, cache)


def build_nvml(library: Path | None = None, *, cache: Path | None = None) -> Path:
    """Build libcotenant-nvml.so (SONAME libnvidia-ml.so.1) unless it is there; `library` adds its exports."""
    _require_machine()
    source = SOURCES / "nvml_shim.c"
    exports = set((SOURCES / "nvml_exports.txt").read_text().split())
    if library is not None:
        exports |= {name for name in defined_symbols(library, dynamic=True) if name.startswith("nvml")}

    def make(scratch: Path, target: Path) -> None:
        made, assembly = scratch / "nvml.o", scratch / "nvml_exports.S"
        run_compiler([*C_FLAGS, "-c", str(source), "-o", str(made)])
        wrapped = {name for name in defined_symbols(made, dynamic=False) if name.startswith("nvml")}
        assembly.write_text(stub_assembly(exports, wrapped, "cot_open_nvml"))
        linking = ["-shared", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,-z,now"]
        run_compiler([*linking, str(made), str(assembly), "-o", str(target), "-ldl", "-lpthread"])

    parts = [source.read_bytes(), STUBS.read_bytes(), "\n".join(sorted(exports)).encode()]
    return cached("libcotenant-nvml.so", parts, make, cache)


def _is_entry_point(name: str) -> bool:
    return name.startswith("cu") and name[2:3].isupper()


def tenant_environment(
    socket: Path | str, token: str, driver: Path | str, *, nvml: Path | None = None, cache: Path | None = None
) -> dict[str, str]:
    """What the launcher adds to the environment of a tenant: where things are, never what is allowed.

    `driver` and `nvml` are those of the tenant's device; without `nvml` its programs find none. An LD_PRELOAD that is
    already set is kept after the shims.
    """
    driver = Path(driver).resolve()
    preload = [str(build(driver, cache=cache))]
    environment = {"COTENANT_SOCKET": str(socket), "COTENANT_TOKEN": token, "COTENANT_DRIVER": str(driver)}
    if nvml is not None:
        preload.append(str(build_nvml(nvml, cache=cache)))
        environment["COTENANT_NVML"] = str(nvml.resolve())
    preload += [entry for entry in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if entry]
    preload = list(dict.fromkeys(preload))
    if any(sign in path for path in preload for sign in " :"):
        raise InputError(f"the loader cannot preload from {preload[0]!r}: $COTENANT_CACHE must have no blank or colon")
    environment["LD_PRELOAD"] = ":".join(preload)
    environment.update({name: os.environ[name] for name in PASSED_ON if name in os.environ})
    return environment
