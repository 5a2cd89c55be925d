"""CUDA_VISIBLE_DEVICES on the software GPU: which devices a program sees, and in which order."""

from __future__ import annotations

import pytest
from shim_tenants import Tenants

NO_DEVICE = 100
UUIDS = [f"GPU-636f7465-6e61-6e74-{0x30 + i:02x}73-6f6674677075" for i in range(3)]
SCRIPT = """
from cuda_calls import *
code = raw('cuInit', 0); n = c_int()
if code:
    print(code)
else:
    cu('cuDeviceGetCount', byref(n))
    for ordinal in range(n.value):
        device, raw16 = c_int(), (c_uint64 * 2)()
        cu('cuDeviceGet', byref(device), ordinal); cu('cuDeviceGetUuid', raw16, device)
        print(bytes(raw16)[8] - ord('0'), end=' ')
    assert raw('cuDeviceGet', byref(device), n.value) == 101
    print()
"""


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, "0 1 2"),
        ("0", "0"),
        ("2,0", "2 0"),
        (" 1 , 2 ", "1 2"),
        (UUIDS[1], "1"),
        (f"{UUIDS[2]},{UUIDS[0]}", "2 0"),
        (UUIDS[1].upper().replace("GPU", "GPU")[:26], "1"),  # a prefix that only one UUID has
        ("GPU-636f", f"{NO_DEVICE}"),  # a prefix that all UUIDs have
        (f"1,{UUIDS[0]}", "1 0"),
        ("0,7,1", "0"),  # the list ends before the first index that does not exist
        ("1,-1,2", "1"),
        ("1,1", "1"),
        ("-1", f"{NO_DEVICE}"),
        ("", f"{NO_DEVICE}"),
        ("soft", f"{NO_DEVICE}"),
    ],
)
def test_what_is_seen(tenants: Tenants, visible: str | None, seen: str) -> None:
    extra = {"COTENANT_SOFTGPU_COUNT": "3"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert tenants.output(tenants.python(None, SCRIPT, **extra)).split() == seen.split()


def test_what_is_done_on_the_first_visible_device_is_done_there(tenants: Tenants) -> None:
    """With devices 2 and 1 visible, memory of ordinal 0 is taken from device 2, by every way to take it."""
    script = (
        "from cuda_calls import *\nimport ctypes\n"
        "start(); free = [mem_info()[0]]; p, q, pool = c_uint64(), c_uint64(), c_void_p()\n"
        "cu('cuMemAlloc_v2', byref(p), c_size_t(64 << 20)); free.append(mem_info()[0])\n"
        "cu('cuMemCreate', byref(q), c_size_t(32 << 20), (c_int * 8)(1, 0, 1, 0), c_uint64(0))\n"
        "free.append(mem_info()[0])\n"
        "cu('cuMemPoolCreate', byref(pool), (c_int * 32)(1, 0, 1, 0))\n"
        "cu('cuMemAllocFromPoolAsync', byref(p), c_size_t(32 << 20), pool, None); free.append(mem_info()[0])\n"
        "device = c_int(9); cu('cuCtxGetDevice', byref(device)); graph = c_uint64()\n"
        "cu('cuDeviceGetGraphMemAttribute', device, 2, byref(graph))\n"
        "other = c_void_p(); cu('cuDevicePrimaryCtxRetain', byref(other), 1); cu('cuCtxSetCurrent', other)\n"
        "print(device.value, [(a - b) >> 20 for a, b in zip(free, free[1:])], (free[0] - mem_info()[0]) >> 20)\n"
    )
    extra = {"COTENANT_SOFTGPU_COUNT": "3", "CUDA_VISIBLE_DEVICES": "2,1"}
    out = tenants.output(tenants.python(None, script, **extra))
    assert out.strip() == "0 [64, 32, 32] 0"
