"""Kernels of several processes at once on the software GPU: the arithmetic of share.c; the clock stands still."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from native_sources import NATIVE, SOFTGPU, compile_c

NOW = 1_000_000
STUB = (
    f"#define NOW {NOW}"
    + """
#include "softgpu.h"
static struct soft_state state;
uint64_t soft_now_ns(void) { return NOW; }
int soft_mps_client(void) { return -1; }
unsigned soft_mps_sms(void) { return 0; }
struct soft_state *soft_state(void) { return &state; }
void put(int i, uint64_t tail, uint64_t kernel, uint32_t permille, uint32_t work)
{
    atomic_store(&state.processes[i].owner, 7);
    atomic_store(&state.processes[i].tail_ns[0], tail);
    atomic_store(&state.processes[i].shape[0], kernel << 16 | permille << 2 | work);
}
uint64_t ask(uint64_t not_before, uint64_t length, uint32_t kernels, uint32_t sms, uint32_t work)
{
    struct soft_unit unit = {.length_ns = length, .kernels = kernels, .sms = sms, .work = work};
    return soft_share(0, &state.processes[0], not_before, unit);
}
"""
)

UNKNOWN, MEMORY, COMPUTE = 1, 2, 3


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], ctypes.CDLL]:
    """share.c in a library of the test's own, for a process that may use so many percent of the SMs."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def make(percent: float) -> ctypes.CDLL:
        monkeypatch.setitem(os.environ, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(percent))
        stub, target = tmp_path / "stub.c", tmp_path / f"share{percent}.so"
        stub.write_text(STUB)
        sources = [str(stub), str(SOFTGPU / "share.c")]
        compile_c(["-O1", "-shared", "-fPIC", f"-I{NATIVE}", f"-I{SOFTGPU}", *sources, "-o", str(target)])
        library = ctypes.CDLL(str(target))
        library.ask.restype = ctypes.c_uint64
        library.ask.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32]
        library.put.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]
        return library

    return make


def test_alone_a_unit_takes_its_length_and_units_follow_each_other(share: Callable[[float], ctypes.CDLL]) -> None:
    library = share(100)
    assert library.ask(0, 1000, 1, 0, COMPUTE) == NOW + 1000
    assert library.ask(0, 500, 1, 0, COMPUTE) == NOW + 1500
    assert library.ask(NOW + 5000, 500, 1, 0, COMPUTE) == NOW + 5500


def test_on_a_part_of_the_sms_a_full_kernel_takes_longer_and_a_small_one_does_not(
    share: Callable[[float], ctypes.CDLL],
) -> None:
    library = share(25)
    assert library.ask(0, 1000, 1, 0, COMPUTE) == NOW + 4000
    assert library.ask(NOW + 10_000, 1000, 1, 33, COMPUTE) == NOW + 11_000


def test_a_memory_bound_kernel_reaches_its_speed_with_a_third_of_the_sms(share: Callable[[float], ctypes.CDLL]) -> None:
    """The card's figure: 1.34 times as long on a quarter as on three quarters."""
    assert share(75).ask(0, 100_000, 1, 0, MEMORY) == NOW + 100_000
    assert share(25).ask(0, 100_000, 1, 0, MEMORY) == NOW + 134_000


def test_two_memory_bound_kernels_share_the_bandwidth_by_their_sms(share: Callable[[float], ctypes.CDLL]) -> None:
    """On three quarters, beside one on the rest: three quarters of the bandwidth where 0.95 were asked for."""
    library = share(75)
    library.put(1, NOW + 10_000_000, 1_400_000, 250, MEMORY)
    assert library.ask(0, 100_000, 1, 0, MEMORY) - NOW == pytest.approx(100_000 * 0.95 / 0.75, abs=2)


def test_each_kernel_waits_for_one_of_a_neighbour_that_fills_the_gpu(share: Callable[[float], ctypes.CDLL]) -> None:
    library = share(100)
    library.put(1, NOW + 5000, 1600, 1000, COMPUTE)
    assert library.ask(0, 300, 3, 0, UNKNOWN) == NOW + 300 + 3 * 1600


def test_it_waits_no_longer_than_the_neighbour_has_work(share: Callable[[float], ctypes.CDLL]) -> None:
    library = share(100)
    library.put(1, NOW + 2000, 1600, 1000, COMPUTE)
    assert library.ask(0, 300, 3, 0, UNKNOWN) == NOW + 300 + 2000


def test_a_dead_or_idle_neighbour_does_not_count(share: Callable[[float], ctypes.CDLL]) -> None:
    library = share(100)
    library.put(1, NOW - 1, 1600, 1000, COMPUTE)
    assert library.ask(0, 300, 1, 0, UNKNOWN) == NOW + 300


@pytest.mark.parametrize(("work", "slower"), [(MEMORY, 3.2), (COMPUTE, 1.0)])
def test_disjoint_sms_do_not_isolate_from_memory_bound_neighbours(
    share: Callable[[float], ctypes.CDLL], work: int, slower: float
) -> None:
    """The figures of the card: a small service on 32 SMs beside copies on the others, and beside products."""
    library = share(25)
    library.put(1, NOW + 10_000_000, 1_400_000, 757, work)
    took = library.ask(0, 1_000_000, 60, 32, UNKNOWN) - NOW
    assert took / 1e6 == pytest.approx(slower, rel=0.1)


def test_it_is_slowed_only_while_the_neighbour_works(share: Callable[[float], ctypes.CDLL]) -> None:
    library = share(25)
    library.put(1, NOW + 320_000, 320_000, 757, MEMORY)
    took = library.ask(0, 1_000_000, 60, 32, UNKNOWN) - NOW
    assert took == pytest.approx(1_000_000 + 320_000 * (1 - 1 / 3.2), rel=0.03)
