"""Finds the SMs that a green context really has: a kernel records on which SMs its blocks ran."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from cotenant.core.errors import WorkError
from cotenant.devices.green import GreenContexts
from cotenant.devices.nvidia import DRIVER

MOST_SMS = 1024
BLOCKS, TURNS = 4096, 3
# each block records the SM on which it runs, and keeps running for a while, so that blocks reach every SM of the
# partition
PTX_IMAGE = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry where(.param .u64 seen)
{
    .reg .u64 %rd<8>;
    .reg .u32 %r<3>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [seen];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %smid;
    mul.wide.u32 %rd3, %r1, 4;
    add.u64 %rd4, %rd2, %rd3;
    mov.u32 %r2, 1;
    st.global.u32 [%rd4], %r2;
    mov.u64 %rd5, %globaltimer;
again:
    mov.u64 %rd6, %globaltimer;
    sub.u64 %rd7, %rd6, %rd5;
    setp.lt.u64 %p1, %rd7, 20000;
    @%p1 bra again;
    ret;
}
\0"""


class SmSets:
    """Finds the SMs of streams. Needs a current CUDA context, such as torch's primary one."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(DRIVER)
        self._module, self._kernel, self._seen = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuModuleLoadData", ctypes.byref(self._module), PTX_IMAGE)
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), self._module, b"where")
        self._call("cuMemAlloc_v2", ctypes.byref(self._seen), ctypes.c_size_t(4 * MOST_SMS))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise WorkError(f"{name} failed with CUDA error {code}")

    def of_stream(self, stream: int) -> frozenset[int]:
        """The SMs on which work of a stream runs, by hardware number; under MPS the numbers are virtual."""
        self._call("cuMemsetD8_v2", self._seen, ctypes.c_ubyte(0), ctypes.c_size_t(4 * MOST_SMS))
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(self._seen), ctypes.c_void_p))
        launch = self._cuda.cuLaunchKernel
        launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        for _ in range(TURNS):
            if launch(self._kernel, BLOCKS, 1, 1, 32, 1, 1, 0, stream, parameters, None) != 0:
                raise WorkError("the kernel that looks for its SM could not be launched")
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
        seen = (ctypes.c_uint32 * MOST_SMS)()
        self._call("cuMemcpyDtoH_v2", seen, self._seen, ctypes.c_size_t(4 * MOST_SMS))
        return frozenset(number for number, was_there in enumerate(seen) if was_there)


def overlaps(sets: Sequence[frozenset[int]]) -> list[tuple[int, int, int]]:
    """Pairs of groups that share SMs: (first, second, number of shared SMs). Empty: the groups are disjoint."""
    found = []
    for i, first in enumerate(sets):
        for j in range(i + 1, len(sets)):
            common = len(first & sets[j])
            if common:
                found.append((i, j, common))
    return found


def check_contexts(starts: Sequence[float], fractions: Sequence[float]) -> dict[str, object]:
    """Create green contexts that begin at `starts` and have `fractions` of the SMs. Returns their sizes, and which of
    them share SMs."""
    sets_of = SmSets()
    pools = [GreenContexts(0, start) for start in starts]
    contexts = [pool.of(fraction) for pool, fraction in zip(pools, fractions, strict=True)]
    sets = [sets_of.of_stream(context.stream) for context in contexts]
    return {
        "sms": pools[0].sms,
        "asked": [context.sms for context in contexts],
        "got": [len(found) for found in sets],
        "overlaps": overlaps(sets),
    }
