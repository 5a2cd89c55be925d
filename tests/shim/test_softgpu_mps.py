"""The software GPU as a client of the stand-in for MPS: what a program sees, and the errors that the server causes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from cotenant.native.libraries import SOFT_DRIVER, library_path
from cotenant.softgpu import mps as mps_standin

UUID = "GPU-636f7465-6e61-6e74-3073-6f6674677075"
MIB = 1 << 20
# Prints the status of cuInit, then SMs, free MiB and total MiB, then for each input line the status of the call that it
# names.
PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
code = cuda.cuInit(0)
print(code, flush=True)
if code:
    sys.exit()
sms, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
cuda.cuDeviceGetAttribute(ctypes.byref(sms), 16, 0)
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(sms.value, free.value >> 20, total.value >> 20, flush=True)
for line in sys.stdin:
    print(cuda.cuCtxSynchronize(), flush=True)
"""


class Programs:
    """Starts programs in namespaces of a daemon of release 615."""

    def __init__(self, folder: Path) -> None:
        self.command, self.pipe = str(mps_standin.install(folder)), folder / "pipe"
        self.started: list[subprocess.Popen[str]] = []
        self.environment = os.environ | {
            "COTENANT_SOFTGPU_STATE": str(folder / "gpu"), "COTENANT_SOFTGPU_MEMORY": str(2048 * MIB),
            "COTENANT_SOFTGPU_MPS": self.command, "MPS_STANDIN_RELEASE": "615", "MPS_STANDIN_GPUS": f"{UUID}=132",
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_PROTOCOL_VERSION": "3",
        }  # fmt: skip
        for words in (
            "-d", "server create s", "namespace create n --server=s",
            "namespace set n --server=s --active-thread-percentage=50 --pinned-memory-limit=1G",
        ):  # fmt: skip
            self.order(*words.split())

    def order(self, *words: str) -> None:
        subprocess.run([self.command, *words], env=self.environment, check=True)

    def start(self, where: str) -> subprocess.Popen[str]:
        environment = self.environment | {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe / where)}
        command = [sys.executable, "-c", PROGRAM, str(library_path(SOFT_DRIVER))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.started.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return self.started[-1]


def said(program: subprocess.Popen[str], call: bool = False) -> str:
    assert program.stdin is not None
    assert program.stdout is not None
    if call:
        program.stdin.write("\n")
        program.stdin.flush()
    return program.stdout.readline().strip()


@pytest.fixture
def programs() -> Iterator[Programs]:
    # a short path, because socket addresses are limited to 107 characters
    folder = tempfile.TemporaryDirectory(prefix="cot-")
    made = Programs(Path(folder.name))
    yield made
    for program in made.started:
        program.kill()
        program.communicate()
    subprocess.run([made.command, "--quit"], env=made.environment, check=False, stderr=subprocess.DEVNULL)
    folder.cleanup()


def test_a_namespace_bounds_what_a_program_sees_until_the_server_ends_it(programs: Programs) -> None:
    inside, ended = programs.start("s/n"), programs.start("s/n")
    for program in (inside, ended):
        assert said(program) == "0"
        assert said(program) == "66 768 2048", "the whole GPU is the total; a context takes 256 MiB of the limit"
    astray = programs.start("s/typo")
    assert said(astray) == "0"
    assert said(astray).split()[0] == "132", "a folder without a server: no MPS, no limits, no error"
    programs.order("client", "terminate", str(ended.pid))
    wait_for(lambda: said(ended, call=True) == "810")
    assert said(inside, call=True) == "0"
    programs.order("standin", "fault", "s")
    assert said(programs.start("s/n")) == "807"
    programs.order("--quit")
    wait_for(lambda: said(inside, call=True) == "805")
    assert said(astray, call=True) == "0"
