"""Compile CUDA C where it runs, by nvcc or by the NVRTC that PyTorch brings, and launch it on the bare driver."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cotenant.bench.driver import Driver
from cotenant.core.errors import WorkError

_P = ctypes.c_void_p


def ptx_of(source: Path) -> bytes:
    """PTX of a CUDA C file. WorkError when this machine has no compiler for it."""
    if shutil.which("nvcc"):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "kernels.ptx"
            command = ["nvcc", "-O2", "-arch=compute_80", "-ptx", "-o", str(target), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return target.read_bytes() + b"\0"
    return _by_nvrtc(source)


def _nvrtc() -> ctypes.CDLL:
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations or [] if found else []:
        names += glob.glob(os.path.join(place, "*", "lib", "libnvrtc.so.*"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise WorkError("neither nvcc nor NVRTC is there to compile the probe's kernels")


def _by_nvrtc(source: Path) -> bytes:
    library = _nvrtc()
    program, size = _P(), ctypes.c_size_t()
    code = library.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), b"kernels.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=compute_80")
    if code == 0 and library.nvrtcCompileProgram(program, 1, options) != 0:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise WorkError(f"NVRTC refused {source.name}: {log.value.decode(errors='replace')[:300]}")
    if code != 0 or library.nvrtcGetPTXSize(program, ctypes.byref(size)) != 0:
        raise WorkError(f"NVRTC failed on {source.name}")
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, text)
    return text.raw


class Kernels:
    """The functions of one compiled file."""

    def __init__(self, cuda: Driver, source: Path) -> None:
        self.cuda = cuda
        self._module = _P()
        self._functions: dict[str, _P] = {}
        cuda.call("cuModuleLoadData", ctypes.byref(self._module), ptx_of(source))

    def launch(self, name: str, blocks: int, threads: int, *arguments: object) -> None:
        """Queue a kernel on the NULL stream; arguments are ctypes values."""
        if name not in self._functions:
            function = _P()
            self.cuda.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._functions[name] = function
        places = [ctypes.cast(ctypes.pointer(value), _P) for value in arguments]  # type: ignore[type-var]
        params = (_P * len(places))(*places)
        self.cuda.call("cuLaunchKernel", self._functions[name], blocks, 1, 1, threads, 1, 1, 0, None, params, None)


def upload(cuda: Driver, values: ctypes.Array[ctypes.c_uint64] | ctypes.Array[ctypes.c_uint32]) -> _P:
    """Device memory with these values."""
    device = _P()
    cuda.call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(ctypes.sizeof(values)))
    cuda.call("cuMemcpyHtoD_v2", device, values, ctypes.c_size_t(ctypes.sizeof(values)))
    return device


def words(values: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """A C array of 64-bit words."""
    return (ctypes.c_uint64 * len(values))(*values)
