"""Measures single techniques of co-location: green contexts, a persisting L2 window, kernel profiles.

Run as a program it is one of the helpers: `colocation_parts.py green|l2`.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, register
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.kernel_profile import measure as profile_kernels
from cotenant.bench.networks import resnet50
from cotenant.devices.nvidia import DRIVER

Found = dict[str, Any]
L2_LIMIT = "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT"
SOURCE = sys.path[0]
GPU = os.environ.get("COTENANT_TEST_GPU") or os.environ.get("CUDA_VISIBLE_DEVICES") or "all"
PROGRAM = f"""
import sys
sys.path.insert(0, {SOURCE!r})
import torch
from cotenant.bench.networks import training_step
step = training_step(torch, "train-transformer", 16)
for _ in range(12):
    step()
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
x = torch.zeros(64 << 19, device="cuda", dtype=torch.bfloat16)
for _ in range(30):
    torch.mm(a, a)
    x.add_(1.0)
torch.cuda.synchronize()
"""


def helper(name: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, name],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        return {"error": done.stderr[-1500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def green(found: dict[str, Any]) -> None:
    """Check green contexts on the device: their sizes, and that they are disjoint."""
    found |= helper("green")


def l2_window(found: Found) -> None:
    """Measure LS with memory-bound BE work without a gate (MPS), with and without the weights of LS in the persisting
    part of L2."""
    found["alone without MPS"] = helper("l2")
    for percent in ("100", "50", ""):
        tried = found[f"MPS, {percent or 'no'} limit"] = {}
        try:
            l2_under_mps(tried, percent)
            break
        # the MPS server, or its clients, may fail under this limit; the error is recorded and the run continues
        except Exception as error:
            tried["error"] = repr(error)[-600:]


def mps_environment(rig: Rig) -> dict[str, str]:
    """Return the environment with which a program that this module starts runs concurrently with the rig's programs."""
    client = ControlClient(rig.bench.folder)
    rig.bench.clients.append(client)
    spec = TenantSpec(f"own-{len(rig.bench.clients)}", mechanism=rig.mechanism)
    return dict(register(client, Launch(rig.bench.folder, spec, ["own"]))["environment"])


def l2_under_mps(found: Found, percent: str) -> None:
    """Set the limit of persisting L2 lines. Clients of MPS cannot set it; only the server's environment can."""
    if percent:
        os.environ[L2_LIMIT] = percent
    try:
        with Rig(GPU, together=GPU != "soft") as rig:
            os.environ.pop(L2_LIMIT, None)
            try:
                hog = rig.be_native("mover").wait_ready()
                hog.ask("load add64", 60)
                pipes = {k: v for k, v in mps_environment(rig).items() if k.startswith("CUDA_MPS")}
                for beside in (False, True):
                    if beside:
                        hog.tell("run 30")
                        time.sleep(0.2)
                    found["beside" if beside else "alone"] = helper("l2", **pipes, CUDA_VISIBLE_DEVICES="0")
                hog.process.kill()
            finally:
                logs = sorted(rig.bench.folder.glob("mps-*/log/*.log"))
                found["said"] = {log.name: log.read_text(errors="replace")[-600:] for log in logs}
    finally:
        os.environ.pop(L2_LIMIT, None)


def kernels(found: dict[str, Any]) -> None:
    """Find the work classes of the kernels of a transformer's training, a matrix product and an addition."""
    profile = profile_kernels(GPU, [sys.executable, "-c", PROGRAM], timeout_s=60)
    rows = profile.pop("kernels")
    found |= profile | {"kinds": len(rows), "most": rows[:14]}
    found["classes"] = {name: sum(r["work_class"] == name for r in rows) for name in ("memory", "compute", "unknown")}


def green_helper() -> dict[str, Any]:
    import torch
    from sm_sets import check_contexts

    torch.zeros(1, device="cuda")
    return {
        "quarters": check_contexts([0.0, 0.25, 0.5, 0.75], [0.25] * 4),
        "one and the rest": check_contexts([0.0, 0.25], [0.25, 0.75]),
        "the same twice": check_contexts([0.0, 0.0], [0.5, 0.5]),
    }


def persisting_limit(cuda: ctypes.CDLL) -> int:
    """Bytes of L2 that this context may persist; if the driver refuses to tell, its error code, negated."""
    size = ctypes.c_size_t()
    code = cuda.cuCtxGetLimit(ctypes.byref(size), 6)
    return -code if code else size.value


class Window(ctypes.Structure):
    """CUaccessPolicyWindow, in the space of a CUstreamAttrValue."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("hit_ratio", ctypes.c_float),
        ("hit", ctypes.c_int),
        ("miss", ctypes.c_int),
        ("rest", ctypes.c_char * 36),
    ]


def l2_helper() -> dict[str, Any]:
    """Measure the service time of ResNet-50 with all weights in one buffer, without and with a persisting window over
    it."""
    import torch

    found: dict[str, Any] = {}
    torch.backends.cudnn.benchmark = True
    net = resnet50(torch).cuda().half().eval().to(memory_format=torch.channels_last)
    parameters = [p for p in net.parameters() if p.dim() == 4]
    flat = torch.empty(sum(p.numel() for p in parameters), device="cuda", dtype=torch.half)
    at = 0
    for p in parameters:
        piece = flat[at : at + p.numel()].as_strided(p.shape, p.stride())
        piece.copy_(p.data)
        p.data = piece
        at += p.numel()
    images = torch.randn(4, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
    cuda = ctypes.CDLL(DRIVER)
    size, most = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(size), 108, 0)  # CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE
    cuda.cuDeviceGetAttribute(ctypes.byref(most), 109, 0)  # CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE
    found |= {"weights_bytes": flat.numel() * 2, "persisting_bytes": size.value, "window_bytes": most.value}
    found["own_limit_bytes"] = persisting_limit(cuda)
    found["set_limit_code"] = cuda.cuCtxSetLimit(6, ctypes.c_size_t(size.value))  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    found["limit_bytes"] = persisting_limit(cuda)
    for persist in (False, True):
        stream = torch.cuda.Stream()
        if persist:
            covered = min(flat.numel() * 2, most.value)
            window = Window(flat.data_ptr(), covered, min(1.0, size.value / max(1, covered)), 2, 1)
            found["set_window_code"] = cuda.cuStreamSetAttribute(
                ctypes.c_void_p(stream.cuda_stream), 1, ctypes.byref(window)
            )
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(5):
                net(images)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                net(images)
        times = []
        for _ in range(400):
            time.sleep(0.004)
            began = time.perf_counter()
            with torch.cuda.stream(stream):
                graph.replay()
            stream.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        found["persisting" if persist else "plain"] = {
            "p50_ms": statistics.median(times),
            "p99_ms": sorted(times)[395],
        }
    return found


def pages(found: Found) -> None:
    """Find out whether the driver can pin a page of another process that is mapped read-only."""
    found |= helper("pages")


def pages_helper() -> dict[str, Any]:
    import mmap

    import torch

    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL(DRIVER)
    supported = ctypes.c_int(-1)
    cuda.cuDeviceGetAttribute(ctypes.byref(supported), 113, 0)  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    fd = os.memfd_create("page")
    os.ftruncate(fd, 4096)
    read_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    codes = {}
    for name, of, access, flags in (
        ("writable", fd, mmap.PROT_READ | mmap.PROT_WRITE, 3),
        ("read only", read_fd, mmap.PROT_READ, 3),
        ("read only, said so", read_fd, mmap.PROT_READ, 3 | 8),
    ):
        at = libc.mmap(None, 4096, access, mmap.MAP_SHARED, of, 0)
        codes[name] = cuda.cuMemHostRegister_v2(ctypes.c_void_p(at), ctypes.c_size_t(4096), flags)
    return {"attribute": supported.value, "codes": codes}


if __name__ == "__main__":
    print(json.dumps({"green": green_helper, "l2": l2_helper, "pages": pages_helper}[sys.argv[1]]()))
