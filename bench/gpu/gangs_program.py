"""One gang of bench/gpu/gangs.py, data-parallel training on two GPUs: `gangs_program.py torch|soft STOP_FILE`.

`torch` is a rank that torchrun starts; `soft` is both ranks, on the software GPU. A step is four products of 4096^3 and
the average of 64 MiB over both ranks (`soft`: kernels, then a wait in the stream for the peer's). Every rank prints
`rank R pid P` once it is set up, then `at R TIME_S STEPS`, on the clock of time.monotonic, and `done R STEPS`. Both
stop at the same step once STOP_FILE exists. Exit code 3: an average came out wrong.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

SAY_S = 0.05
SIZE, PRODUCTS, REDUCED_BYTES = 4096, 4, 64 << 20
AHEAD = 8  # number of steps that the host enqueues between two waits
SOFT_KERNEL_NS, SOFT_COLLECTIVE_NS = 500_000, 200_000


class Rank:
    """Prints the lines of one rank."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._said_s = 0.0
        self._say(f"rank {number} pid {os.getpid()}")

    def _say(self, line: str) -> None:
        os.write(1, f"{line}\n".encode())  # written in one piece, because both ranks write to one pipe

    def at(self, steps: int) -> None:
        """Report the number of steps that have ended."""
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_S:
            self._say(f"at {self.number} {now_s:.6f} {steps}")
            self._said_s = now_s

    def done(self, steps: int) -> None:
        """Report that the rank has stopped."""
        self._say(f"done {self.number} {steps}")


def torch_rank(stop: Path) -> int:
    """Run a rank that uses NCCL."""
    import torch
    import torch.distributed as dist

    number = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", device_id=torch.device("cuda", number))
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    gradient = torch.ones(REDUCED_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    ending = torch.zeros(1, device="cuda")

    def step() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, a, out=out)
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)

    step()
    torch.cuda.synchronize()
    rank, steps = Rank(number), 0
    while True:
        for _ in range(AHEAD):
            step()
        if number == 0 and stop.exists():
            ending.fill_(1)
        dist.all_reduce(ending, op=dist.ReduceOp.MAX)
        steps += AHEAD
        stopped = bool(ending.item())
        rank.at(steps)
        if stopped:
            break
    right = bool((gradient == 1).all())
    dist.destroy_process_group()
    rank.done(steps)
    return 0 if right else 3


def soft_rank(number: int, board: mmap.mmap, stop: Path) -> int:
    """Run a rank on the software GPU. Its stream waits for the other rank's step. `board`: a page that both ranks have
    mapped."""
    from cotenant.bench.driver import SOFT_IMAGE

    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, kernel, stream = (ctypes.c_void_p() for _ in range(4))
    device, words = ctypes.c_int(), ctypes.c_uint64()

    def must(code: int) -> None:
        if code != 0:
            raise SystemExit(f"the driver says {code}")

    base = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(board)))
    last = ctypes.c_uint32.from_buffer(board, 2048)
    must(cuda.cuInit(0))
    must(cuda.cuDeviceGet(ctypes.byref(device), number))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    must(cuda.cuCtxSetCurrent(context))
    must(cuda.cuModuleLoadData(ctypes.byref(module), SOFT_IMAGE))
    must(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"timed"))
    must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    must(cuda.cuMemHostRegister_v2(base, ctypes.c_size_t(4096), 2))
    must(cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(words), base, 0))

    def parameters(length_ns: int) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(ctypes.c_uint64(length_ns)), ctypes.c_void_p))

    lengths = [parameters(SOFT_KERNEL_NS)] * PRODUCTS + [parameters(SOFT_COLLECTIVE_NS)]
    rank, steps = Rank(number), 0
    while not last.value or steps < last.value:
        for _ in range(AHEAD):
            steps += 1
            for length in lengths:
                must(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, length, None))
            must(cuda.cuStreamWriteValue32_v2(stream, ctypes.c_uint64(words.value + 64 * number), steps, 0))
            must(cuda.cuStreamWaitValue32_v2(stream, ctypes.c_uint64(words.value + 64 * (1 - number)), steps, 0))
        must(cuda.cuStreamSynchronize(stream))
        rank.at(steps)
        if number == 0 and not last.value and stop.exists():
            # the other rank may be ahead by at most one wait, so both can stop at this step
            last.value = steps + 2 * AHEAD
    rank.done(steps)
    return 0


def main() -> int:
    """Run until the stop file exists."""
    kind, stop = sys.argv[1], Path(sys.argv[2])
    if kind == "torch":
        return torch_rank(stop)
    board, children = mmap.mmap(-1, 4096), []
    for number in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = soft_rank(number, board, stop)
            finally:
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
