"""The software GPU on its own, without the shim."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from native_sources import compile_c, exports
from shim_tenants import Tenants
from waiting import wait_for

PRELUDE = "from cuda_calls import *\n"


def test_it_says_what_it_is(tenants: Tenants) -> None:
    script = PRELUDE + (
        "import ctypes\n"
        "cu('cuInit', 0)\n"
        "name = ctypes.create_string_buffer(64)\n"
        "cu('cuDeviceGetName', name, 64, 0)\n"
        "print(name.value.decode())\n"
    )
    assert tenants.output(tenants.python(None, script)).strip() == "Cotenant Software GPU"


def test_kernels_take_the_time_the_module_says(tenants: Tenants) -> None:
    """Ten kernels of 0.1 ms between two events: 1 ms on the device's clock, to the nanosecond."""
    script = PRELUDE + (
        "import ctypes\n"
        "context = start(); kernel = function(context, b'busy')\n"
        "a, b = c_void_p(), c_void_p()\n"
        "cu('cuEventCreate', byref(a), 0); cu('cuEventCreate', byref(b), 0)\n"
        "timed, ns = function(context, b'timed'), c_uint64()\n"
        "params = (c_void_p * 1)(ctypes.addressof(ns))\n"
        "for ns.value in (5 * 10**8, 10**10):\n"
        "    cu('cuLaunchKernel', timed, 1, 1, 1, 1, 1, 1, 0, None, params, None)\n"
        "    cu('cuEventRecord', a, None)\n"
        "    for _ in range(10): launch(kernel)\n"
        "    cu('cuEventRecord', b, None)\n"
        "    if raw('cuEventQuery', a) == 600: break\n"
        "cu('cuEventSynchronize', b)\n"
        "ms = ctypes.c_float()\n"
        "cu('cuEventElapsedTime', byref(ms), a, b)\n"
        "print(ms.value)\n"
    )
    # The first kernel keeps the device busy while the others are queued. It is longer on a busy machine.
    assert float(tenants.output(tenants.python(None, script))) == pytest.approx(1.0, abs=1e-4)


def test_graph_takes_the_sum_of_its_nodes_and_data_survives(tenants: Tenants) -> None:
    script = PRELUDE + (
        "import ctypes, time\n"
        "kernel = function(start(), b'long')\n"
        "stream, graph, exec_ = c_void_p(), c_void_p(), c_void_p()\n"
        "cu('cuStreamCreate', byref(stream), 1)\n"
        "cu('cuStreamBeginCapture_v2', stream, 0)\n"
        "for _ in range(5): launch(kernel, stream)\n"
        "cu('cuStreamEndCapture', stream, byref(graph))\n"
        "cu('cuGraphInstantiateWithFlags', byref(exec_), graph, c_uint64(0))\n"
        "began = time.monotonic()\n"
        "cu('cuGraphLaunch', exec_, stream); cu('cuStreamSynchronize', stream)\n"
        "took = time.monotonic() - began\n"
        "assert took >= 0.010, took\n"
        "p = c_uint64(); data = (ctypes.c_char * 1000)(*b'x' * 1000); back = (ctypes.c_char * 1000)()\n"
        "cu('cuMemAlloc_v2', byref(p), c_size_t(1000))\n"
        "cu('cuMemcpyHtoD_v2', p, data, c_size_t(1000)); cu('cuMemcpyDtoH_v2', back, p, c_size_t(1000))\n"
        "print(bytes(back) == bytes(data))\n"
    )
    assert tenants.output(tenants.python(None, script)).strip() == "True"


def test_two_processes_share_one_device(tenants: Tenants) -> None:
    """Kernels of 1 ms: the device does 1000 a second and never more, however many processes there are."""
    kernel = {"CLIENT_KERNEL_NS": "1000000"}
    began = time.monotonic()
    both = [tenants.client_run(None, "v2", "rate", "1.0", "8", **kernel) for _ in range(2)]
    counts = [int(tenants.output(process).split()[1]) for process in both]
    assert sum(counts) <= 1000 * (time.monotonic() - began)
    assert min(counts) > 0


def test_killed_process_leaves_no_memory_and_no_work_behind(tenants: Tenants) -> None:
    """One takes 3 of 4 GiB and starts a kernel of an hour; after kill -9 another gets 3 GiB and a free device."""
    hog = PRELUDE + (
        "import time\n"
        "timed = function(start(), b'timed')\n"
        "p = c_uint64(); cu('cuMemAlloc_v2', byref(p), c_size_t(3 << 30))\n"
        "import ctypes\n"
        "ns = c_uint64(3600 * 10**9)\n"
        "params = (c_void_p * 1)(ctypes.addressof(ns))\n"
        "cu('cuLaunchKernel', timed, 1, 1, 1, 1, 1, 1, 0, None, params, None)\n"
        "print('up', flush=True); time.sleep(60)\n"
    )
    process = tenants.python(None, hog)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "up"
    process.send_signal(signal.SIGKILL)
    process.wait()
    heir = PRELUDE + (
        "kernel = function(start(), b'busy')\n"
        "p = c_uint64(); cu('cuMemAlloc_v2', byref(p), c_size_t(3 << 30))\n"
        "launch(kernel); cu('cuCtxSynchronize'); print('free')\n"
    )
    assert tenants.output(tenants.python(None, heir), timeout=60).strip() == "free"


SLOW_TO_FIND_THE_DEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>
int kill(pid_t pid, int number)
{
    int result = ((int (*)(pid_t, int))dlsym(RTLD_NEXT, "kill"))(pid, number), why = errno;
    if (result != 0 && why == ESRCH) {
        close(open("%s/found", O_CREAT | O_WRONLY, 0600));
        while (access("%s/go", F_OK) != 0)
            usleep(1000);
    }
    errno = why;
    return result;
}
"""


def test_who_clears_up_after_a_dead_process_leaves_its_successor_alone(tenants: Tenants, tmp_path: Path) -> None:
    """Two find it dead. One frees its entry, which a new process takes, before the other one goes on."""
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW_TO_FIND_THE_DEAD % (tmp_path, tmp_path))
    compile_c(["-shared", "-fPIC", "-w", source, "-o", library, "-ldl"])
    take = PRELUDE + (
        "import sys\n"
        "start(); p = c_uint64(); cu('cuMemAlloc_v2', byref(p), c_size_t(64 << 20)); print('up', flush=True)\n"
        "sys.stdin.readline(); print(mem_info()[0] >> 20, flush=True); sys.stdin.readline()\n"
    )

    def started(**extra: str) -> subprocess.Popen[str]:
        process = tenants.python(None, take, **extra)
        assert process.stdout is not None
        if not extra:
            assert process.stdout.readline() == "up\n"
        return process

    dead = started()
    dead.kill()
    dead.wait()
    slow = started(LD_PRELOAD=str(library))
    wait_for((tmp_path / "found").exists)
    heir = started()
    (tmp_path / "go").touch()
    assert slow.stdout is not None
    assert slow.stdout.readline() == "up\n"
    for process in (heir, slow):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        # of 4 GiB, each has 64 MiB and a context of 256 MiB
        assert int(process.stdout.readline()) == 4096 - 2 * (64 + 256)


def test_entry_points_depend_on_version_and_flags(tenants: Tenants) -> None:
    """What CUDA 13's documentation says of cuGetProcAddress; symbolStatus 1 = not found, 2 = version not sufficient."""
    script = PRELUDE + (
        "import ctypes\n"
        "def ask(name, version, flags=0):\n"
        "    p, status = c_void_p(), c_int(-1)\n"
        "    code = raw('cuGetProcAddress_v2', name, byref(p), version, c_uint64(flags), byref(status))\n"
        "    return code, p.value, status.value\n"
        "def export(name): return ctypes.cast(getattr(library, name), c_void_p).value\n"
        "assert ask(b'cuMemAlloc', 3020) == (0, export('cuMemAlloc_v2'), 0)\n"
        "assert ask(b'cuMemAlloc', 2000)[1:] == (None, 2)\n"
        "assert ask(b'cuCtxCreate', 11040)[1] == export('cuCtxCreate_v2')\n"
        "assert ask(b'cuCtxCreate', 12050)[1] == export('cuCtxCreate_v4')\n"
        "assert ask(b'cuLaunchKernel', 7000, 2)[1] == export('cuLaunchKernel_ptsz')\n"
        "assert ask(b'cuLaunchKernel', 7000, 0)[1] == export('cuLaunchKernel')\n"
        "assert ask(b'cuGetProcAddress', 11030)[1] == export('cuGetProcAddress')\n"
        "assert ask(b'cuGetProcAddress', 12000)[1] == export('cuGetProcAddress_v2')\n"
        "assert ask(b'cuNoSuchThing', 12000) == (0, None, 1)\n"
        "assert ask(b'', 12000)[0] == 0\n"
        "assert ask(b'cuInit', 99000)[0] == 1\n"
        "print('good')\n"
    )
    assert tenants.output(tenants.python(None, script)).strip() == "good"


@pytest.mark.parametrize(
    "breaker", ["cu('cuCtxSynchronize')", "cu('cuStreamQuery', stream)", "cu('cuEventQuery', event)"]
)
def test_capture_is_broken_by_what_breaks_it_on_a_real_driver(tenants: Tenants, breaker: str) -> None:
    script = PRELUDE + (
        "kernel = function(start(), b'busy')\n"
        "stream, graph, event = c_void_p(), c_void_p(), c_void_p()\n"
        "cu('cuStreamCreate', byref(stream), 1); cu('cuEventCreate', byref(event), 2)\n"
        "cu('cuStreamBeginCapture_v2', stream, 0)\n"
        "launch(kernel, stream)\n"
        f"try: {breaker}\n"
        "except CudaError as error: assert error.code == 900, error\n"
        "print(raw('cuStreamEndCapture', stream, byref(graph)))\n"
    )
    assert tenants.output(tenants.python(None, script)).strip() == "901"


def test_library_does_not_pass_for_a_real_driver(soft_library: Path) -> None:
    assert soft_library.name == "libcotenant-softgpu.so"
    assert {"cuInit", "cuLaunchKernel", "cuGraphLaunch"} <= exports(soft_library)
    assert b"libcuda.so" not in soft_library.read_bytes()


def test_a_state_file_on_a_full_disk_is_said(tenants: Tenants, tmp_path: Path) -> None:
    """No room for the file: no device, and a sentence; not a signal when its pages are touched."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=8k tmpfs {disk} && exec {tenants.client} v2 launches 1"
    probe = ["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs tmpfs {disk}"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace of one's own here")
    extra = {"COTENANT_SOFTGPU_STATE": str(disk / "state"), "CLIENT_LIBRARY": str(tenants.driver)}
    process = tenants.start(None, ["unshare", "-Urm", "sh", "-c", mount], **extra)
    _, err = process.communicate(timeout=60)
    assert process.returncode > 0
    assert "cannot be used: No space left on device" in err
