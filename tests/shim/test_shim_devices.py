"""Several GPUs in one process: which launch counts where, and a GPU that is not the tenant's."""

from __future__ import annotations

from collections.abc import Callable

from fake_agent import FakeAgent
from shim_tenants import Tenants
from waiting import wait_for

from cotenant.abi.protocol import MemoryFamily, MessageType
from cotenant.abi.tenant_page import SlotFlag

TAKEN = (MessageType.MEMORY_COMMIT, MessageType.MEMORY_RELEASE)
Agents = Callable[..., FakeAgent]
TWO = {"COTENANT_SOFTGPU_COUNT": "2"}
PRELUDE = """
from cuda_calls import *
cu('cuInit', 0)
contexts, kernels = [], []
for device in range(2):
    context, module = c_void_p(), c_void_p()
    cu('cuDevicePrimaryCtxRetain', byref(context), device); cu('cuCtxSetCurrent', context)
    cu('cuModuleLoadData', byref(module), b'cotenant-soft-module\\nbusy 10000\\n')
    contexts.append(context); kernels.append(function(module, b'busy'))
"""


def test_launches_count_on_the_gpu_of_the_current_context(tenants: Tenants, agent: Agents) -> None:
    """A thread that goes to and fro, by set-current and by push and pop: 25 launches on GPU 0, 35 on GPU 1."""
    script = PRELUDE + (
        "for _ in range(5):\n"
        "    cu('cuCtxSetCurrent', contexts[0])\n"
        "    for _ in range(5): launch(kernels[0])\n"
        "    cu('cuCtxPushCurrent_v2', contexts[1])\n"
        "    for _ in range(7): launch(kernels[1])\n"
        "    cu('cuCtxPopCurrent_v2', byref(c_void_p()))\n"
        "for c in contexts: cu('cuCtxSetCurrent', c); cu('cuCtxSynchronize')\n"
    )
    with agent(flags=SlotFlag.UNGATED) as broker:
        tenants.output(tenants.python(broker, script, **TWO))
        client = broker.clients[0]
        assert [client.slot(slot).launches for slot in range(2)] == [25, 35]
        assert client.uuids == [b"cotenant0softgpu", b"cotenant1softgpu"]


def test_gpu_of_others_gives_no_context(tenants: Tenants, agent: Agents) -> None:
    """CUDA_ERROR_NOT_PERMITTED (800) and a sentence; the tenant's own GPU works beside it."""
    script = (
        "from cuda_calls import *\ncu('cuInit', 0); c = c_void_p()\n"
        "print(raw('cuDevicePrimaryCtxRetain', byref(c), 1), raw('cuCtxCreate_v2', byref(c), 0, 1),"
        " raw('cuDevicePrimaryCtxRetain', byref(c), 0))\n"
    )
    with agent(flags=SlotFlag.UNGATED) as broker:
        broker.denied.add(b"cotenant1softgpu")
        process = tenants.python(broker, script, **TWO)
        out, err = process.communicate(timeout=60)
        assert out.split() == ["800", "800", "0"]
        assert "the agent does not allow this tenant to use GPU 1" in err


def test_memory_of_a_gpu_of_others_is_refused_without_a_context_too(tenants: Tenants, agent: Agents) -> None:
    """By handle, by a pool made there, and from its default pool: 800 each, and nothing is taken from it."""
    script = (
        "from cuda_calls import *\nstart(); p, pool = c_uint64(), c_void_p(); there = (c_int * 32)(1, 0, 1, 1)\n"
        "print(raw('cuMemCreate', byref(p), c_size_t(2 << 20), there, c_uint64(0)),"
        " raw('cuMemPoolCreate', byref(pool), there))\n"
        "cu('cuDeviceGetDefaultMemPool', byref(pool), 1)\n"
        "print(raw('cuMemAllocFromPoolAsync', byref(p), c_size_t(2 << 20), pool, None))\n"
        "print(raw('cuMemCreate', byref(p), c_size_t(2 << 20), (c_int * 8)(1, 0, 1, 7), c_uint64(0)))\n"
    )
    with agent(flags=SlotFlag.UNGATED) as broker:
        broker.denied.add(b"cotenant1softgpu")
        assert tenants.output(tenants.python(broker, script, **TWO)).split() == ["800", "800", "800", "101"]
        wait_for(lambda: broker.clients[0].closed, what="all that it said was read")
        counted = {m["family"] for m in broker.clients[0].messages if m.type in TAKEN}
        assert not counted & {MemoryFamily.POOL, MemoryFamily.VMM}


def test_a_list_of_visible_devices_changes_no_identity(tenants: Tenants, agent: Agents) -> None:
    """Device 0 of a program that sees the second card only is that card (HAMi-core#319: limits went by index)."""
    script = (
        "from cuda_calls import *\nkernel = function(start(), b'busy'); launch(kernel); cu('cuCtxSynchronize')\n"
        "p = c_uint64(); print(raw('cuMemAlloc_v2', byref(p), c_size_t(600 << 20)), mem_info()[1] >> 20)\n"
    )
    with agent(flags=SlotFlag.UNGATED, memory_limit=512 << 20) as broker:
        out = tenants.output(tenants.python(broker, script, **TWO, CUDA_VISIBLE_DEVICES="1"))
        assert out.split() == ["2", "512"]
        assert broker.clients[0].uuids == [b"cotenant1softgpu"]


def test_memory_counts_on_the_device_of_the_allocation(tenants: Tenants, agent: Agents) -> None:
    """Freed while another device is current, it is given back where it was taken (HAMi-core#310)."""
    script = PRELUDE + (
        "p = c_uint64(); cu('cuCtxSetCurrent', contexts[0]); cu('cuMemAlloc_v2', byref(p), c_size_t(1 << 20))\n"
        "cu('cuCtxSetCurrent', contexts[1]); cu('cuMemFree_v2', p)\n"
    )
    with agent(flags=SlotFlag.UNGATED) as broker:
        tenants.output(tenants.python(broker, script, **TWO))
        wait_for(lambda: broker.clients[0].closed, what="all that it said was read")
        plain = [m for m in broker.clients[0].messages if m.type in TAKEN and m["family"] == MemoryFamily.PLAIN]
        taken = [(m.type, m.slot, m["bytes"]) for m in plain]
        assert taken == [(6, 0, 1 << 20), (7, 0, 1 << 20)]


def test_pools_count_on_their_own_device(tenants: Tenants, agent: Agents) -> None:
    """GPU 0 is current; memory comes from GPU 1: from a pool made there, from its default pool, and by one of its
    streams. What a pool of pinned host memory gives counts on no GPU."""
    script = PRELUDE + (
        "def allocate(call, *a):\n"
        "    p = c_uint64(); cu(call, byref(p), c_size_t(32 << 20), *a); return p\n"
        "cu('cuCtxSetCurrent', contexts[1]); stream = c_void_p(); cu('cuStreamCreate', byref(stream), 1)\n"
        "cu('cuCtxSetCurrent', contexts[0])\n"
        "made, default, host = c_void_p(), c_void_p(), c_void_p()\n"
        "cu('cuMemPoolCreate', byref(made), (c_int * 32)(1, 0, 1, 1))\n"
        "cu('cuDeviceGetDefaultMemPool', byref(default), 1)\n"
        "cu('cuMemPoolCreate', byref(host), (c_int * 32)(1, 0, 2, 0))\n"
        "a = allocate('cuMemAllocFromPoolAsync', made, None); b = allocate('cuMemAllocFromPoolAsync', default, None)\n"
        "c = allocate('cuMemAllocAsync', stream); d = allocate('cuMemAllocFromPoolAsync', host, None)\n"
        "cu('cuMemFreeAsync', a, None); cu('cuMemPoolTrimTo', made, c_size_t(0))\n"
    )
    with agent(flags=SlotFlag.UNGATED) as broker:
        tenants.output(tenants.python(broker, script, **TWO))
        wait_for(lambda: broker.clients[0].closed, what="all that it said was read")
        pools = [m for m in broker.clients[0].messages if m.type in TAKEN and m["family"] == MemoryFamily.POOL]
        told = [(m.type, m.slot, m["bytes"]) for m in pools]
        assert told == [(6, 1, 32 << 20)] * 3 + [(7, 1, 32 << 20)]
