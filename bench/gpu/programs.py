"""Ordinary GPU programs, one per way of reaching the driver; each checks its own result and prints one JSON line.

python programs.py NAME [ARGUMENT]
"""

from __future__ import annotations

import json
import os
import sys
import time


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def torch_eager() -> None:
    import torch

    torch.manual_seed(0)
    head = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten()]
    model = torch.nn.Sequential(*head, torch.nn.LazyLinear(10)).cuda()
    data = torch.randn(32, 3, 32, 32, device="cuda")
    target = torch.randint(0, 10, (32,), device="cuda")
    model(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    say(ok=losses[-1] < losses[0], first=losses[0], last=losses[-1])


PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
"""


def cudart12() -> None:
    """Test CUDA 12's runtime library ($CUDART12) on this driver: memory, a kernel from PTX, a graph of it."""
    import ctypes
    from ctypes import byref, c_size_t, c_uint, c_void_p

    class Dim3(ctypes.Structure):
        _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]

    runtime = ctypes.CDLL(os.environ["CUDART12"])

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"cudart error {code}")

    memory, library, kernel, stream, graph, run = (c_void_p() for _ in range(6))
    version, back = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    check(runtime.cudaRuntimeGetVersion(byref(version)))
    check(runtime.cudaMalloc(byref(memory), c_size_t(1 << 20)))
    check(runtime.cudaMemset(memory, 7, c_size_t(1 << 20)))
    check(runtime.cudaMemcpy(back, memory, c_size_t(16), 2))
    check(runtime.cudaLibraryLoadData(byref(library), PTX, None, None, 0, None, None, 0))
    check(runtime.cudaLibraryGetKernel(byref(kernel), library, b"nothing"))
    check(runtime.cudaStreamCreate(byref(stream)))
    one = Dim3(1, 1, 1)
    for _ in range(100):
        check(runtime.cudaLaunchKernel(kernel, one, one, None, c_size_t(0), stream))
    check(runtime.cudaStreamBeginCapture(stream, 0))
    for _ in range(10):
        check(runtime.cudaLaunchKernel(kernel, one, one, None, c_size_t(0), stream))
    check(runtime.cudaStreamEndCapture(stream, byref(graph)))
    check(runtime.cudaGraphInstantiate(byref(run), graph, ctypes.c_ulonglong(0)))
    for _ in range(20):
        check(runtime.cudaGraphLaunch(run, stream))
    check(runtime.cudaStreamSynchronize(stream))
    say(ok=bytes(back) == bytes([7] * 16), version=version.value)


def torch_graph() -> None:
    import torch

    x = torch.ones(1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            y = x * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(200):
            y = y + 1
    for _ in range(500):
        graph.replay()
    torch.cuda.synchronize()
    say(ok=bool((y == 201).all()))


def torch_memory(pieces_mib: int = 256) -> None:
    """Allocates memory until an allocation is refused; reports the amount, and what NVML and the driver report
    meanwhile."""
    import torch

    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    held = []
    refused = ""
    try:
        for _ in range(1000):
            held.append(torch.empty(pieces_mib << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        refused = str(error)[:160]
    free_after, _ = torch.cuda.mem_get_info()
    held.clear()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    again = torch.empty(pieces_mib << 20, dtype=torch.uint8, device="cuda")
    say(
        ok=bool(refused) and again.numel() > 0,
        refused=refused,
        free_mib=free >> 20,
        total_mib=total >> 20,
        taken_mib=torch.cuda.max_memory_reserved() >> 20
        if "Async" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        else torch.cuda.max_memory_allocated() >> 20,
        free_after_mib=free_after >> 20,
    )


def jax_program() -> None:
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda x: jnp.tanh(x @ x) * 0.5)
    x = jnp.ones((512, 512)) * 0.01
    for _ in range(50):
        x = step(x)
    x.block_until_ready()
    say(ok=bool(jnp.isfinite(x).all()), device=str(jax.devices()[0]))


def cupy_program() -> None:
    import cupy

    x = cupy.arange(1 << 20, dtype=cupy.float64)
    total = float((x * 2).sum())
    source = 'extern "C" __global__ void twice(double *x) { x[blockIdx.x * 256 + threadIdx.x] *= 2; }'
    kernel = cupy.RawKernel(source, "twice")
    kernel(((1 << 20) // 256,), (256,), (x,))
    say(ok=total == float((1 << 20) * ((1 << 20) - 1)) and float(x[3]) == 6.0)


def triton_program() -> None:
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def add_one(pointer, count, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        mask = at < count
        tl.store(pointer + at, tl.load(pointer + at, mask) + 1, mask)

    x = torch.zeros(10000, device="cuda")
    for _ in range(20):
        add_one[(triton.cdiv(10000, 256),)](x, 10000, 256)
    torch.cuda.synchronize()
    say(ok=bool((x == 20).all()))


def numba_program() -> None:
    import numpy

    if not hasattr(numpy, "row_stack"):
        numpy.row_stack = numpy.vstack  # numba-cuda still uses the old name
    from numba import cuda

    @cuda.jit
    def add_one(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] += 1

    x = cuda.to_device(numpy.zeros(10000))
    for _ in range(20):
        add_one[40, 256](x)
    say(ok=bool((x.copy_to_host() == 20).all()))


def nvml_program() -> None:
    """Print what NVML and the driver report about the same GPU in one process."""
    import pynvml
    import torch

    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    free, total = torch.cuda.mem_get_info()
    mine = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
    say(
        ok=held.numel() == 1 << 30,
        nvml_total_mib=info.total >> 20,
        nvml_used_mib=info.used >> 20,
        nvml_free_mib=info.free >> 20,
        cuda_total_mib=total >> 20,
        cuda_free_mib=free >> 20,
        own_process_mib=[m >> 20 if m else None for m in mine],
    )


def products(seconds: float) -> None:
    """Multiplies 8192^3 bf16 matrices for a given time; prints the number of products in each tenth of a second."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(5):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    wait_for_start()
    began = time.monotonic()
    marks: list[tuple[float, int]] = [(began, 0)]
    events: list[object] = []
    count = 0
    while time.monotonic() - began < seconds:
        torch.mm(a, b, out=out)
        event = torch.cuda.Event()
        event.record()
        events.append(event)
        if len(events) >= 4:
            events.pop(0).synchronize()  # type: ignore[attr-defined]
            count += 1
            if time.monotonic() - marks[-1][0] >= 0.1:
                marks.append((time.monotonic(), count))
    torch.cuda.synchronize()
    say(ok=True, count=count + len(events), began=began, ended=time.monotonic(), marks=marks)


def products_timed(seconds: float) -> None:
    """As `products`, with the GPU time of each product: the fraction of the wall time in which the GPU worked for this
    process."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(400):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    lengths_ms: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mm(a, b, out=out)
        end.record()
        pending.append((start, end))
        if len(pending) >= 4:
            first, last = pending.pop(0)
            last.synchronize()
            lengths_ms.append(first.elapsed_time(last))
    wall_ms = (time.monotonic() - began) * 1e3
    count = len(lengths_ms)
    # a product that waited for its turn between its two events seems to take longer, so such products are left out
    usual = sorted(lengths_ms)[count // 2]
    mean_ms = sum(ms for ms in lengths_ms if ms < 1.3 * usual) / sum(ms < 1.3 * usual for ms in lengths_ms)
    say(ok=True, busy_share=count * mean_ms / wall_ms, ms_per_product=mean_ms, rate=count / wall_ms * 1e3)


def wait_for_start() -> None:
    """Wait for a file, so that several tenants start together."""
    gate = os.environ.get("START_FILE")
    if gate:
        open(f"{gate}.ready.{os.getpid()}", "w").close()
        while not os.path.exists(gate):
            time.sleep(0.002)


def segments() -> None:
    """Reads lines `WORKLOAD COUNT` and answers with the seconds that many iterations took; for paired comparison."""
    import torch

    small = torch.zeros(64, 64, device="cuda")
    big = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    torch.mm(big, big)
    with torch.cuda.graph(graph):
        y = small
        for _ in range(100):
            y = y + 1
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(256, 1024, device="cuda")

    def launch_bound() -> None:
        for _ in range(500):
            small.add_(1)

    def training() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    work = {"launch_bound": launch_bound, "graph_replay": graph.replay, "training": training}
    for function in work.values():
        for _ in range(20):
            function()
    torch.cuda.synchronize()
    say(ready=True)
    for line in sys.stdin:
        name, count = line.split()
        began = time.perf_counter()
        for _ in range(int(count)):
            work[name]()
        torch.cuda.synchronize()
        say(seconds=time.perf_counter() - began)


def main() -> None:
    name = sys.argv[1]
    argument = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    if name in ("products", "products_timed"):
        (products if name == "products" else products_timed)(argument)
    else:
        {
            "torch_eager": torch_eager,
            "torch_graph": torch_graph,
            "torch_memory": torch_memory,
            "jax": jax_program,
            "cupy": cupy_program,
            "triton": triton_program,
            "numba": numba_program,
            "nvml": nvml_program,
            "segments": segments,
            "cudart12": cudart12,
        }[name]()


if __name__ == "__main__":
    main()
