"""Memory caps by every family of allocation, and a ledger that comes back to nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from fake_agent import FakeAgent
from shim_tenants import Tenants
from waiting import wait_for

from cotenant.abi.protocol import MessageType

Agents = Callable[..., FakeAgent]
MIB = 1 << 20

# For each kind of allocation: code that makes it (and returns its handle), and code that frees it.
FAMILIES = {
    "plain": ("p = c_uint64(); cu('cuMemAlloc_v2', byref(p), c_size_t(size)); return p", "cu('cuMemFree_v2', h)"),
    "pitch": (
        "p, pitch = c_uint64(), c_size_t(); cu('cuMemAllocPitch_v2', byref(p), byref(pitch), c_size_t(1024),"
        " c_size_t(size // 1024), 4); return p",
        "cu('cuMemFree_v2', h)",
    ),
    "managed": (
        "p = c_uint64(); cu('cuMemAllocManaged', byref(p), c_size_t(size), 1); return p",
        "cu('cuMemFree_v2', h)",
    ),
    "array": (
        "d = (c_uint64 * 3)(size // 4096, 1024, 0x20 | 1 << 32); p = c_void_p();"
        " cu('cuArrayCreate_v2', byref(p), d); return p",
        "cu('cuArrayDestroy', h)",
    ),
    "array3d": (
        "d = (c_uint64 * 5)(size // 16384, 64, 64, 0x20 | 1 << 32, 0); p = c_void_p();"
        " cu('cuArray3DCreate_v2', byref(p), d); return p",
        "cu('cuArrayDestroy', h)",
    ),
    "mipmapped": (  # one level, because the software GPU and the shim count such an array alike
        "d = (c_uint64 * 5)(size // 4096, 1024, 0, 0x20 | 1 << 32, 0); p = c_void_p();"
        " cu('cuMipmappedArrayCreate', byref(p), d, 1); return p",
        "cu('cuMipmappedArrayDestroy', h)",
    ),
    "vmm": (
        "prop = (c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0); p = c_uint64();"
        " cu('cuMemCreate', byref(p), c_size_t(size), prop, c_uint64(0)); return p",
        "cu('cuMemRelease', h)",
    ),
    "async": (
        "p = c_uint64(); cu('cuMemAllocAsync', byref(p), c_size_t(size), None); return p",
        "cu('cuMemFreeAsync', h, None)",
    ),
    "pool": (
        "p = c_uint64(); cu('cuMemAllocFromPoolAsync', byref(p), c_size_t(size), pool, None); return p",
        "cu('cuMemFreeAsync', h, None)",
    ),
}
PROGRAM = """
from cuda_calls import *
import sys
start()
pool = c_void_p(); prop = (c_int * 32)(1, 0, 1, 0); cu('cuMemPoolCreate', byref(pool), prop)
def take(size):
    TAKE
def give(h):
    GIVE
held = []
try:
    while len(held) < 100: held.append(take(64 << 20))
    code = 0
except CudaError as error:
    code = error.code
free, total = mem_info()
print(len(held), code, free >> 20, total >> 20, flush=True)
sys.stdin.readline()
for h in held: give(h)
cu('cuCtxSynchronize')
print(mem_info()[0] >> 20, flush=True)
sys.stdin.readline()
"""


def program(family: str) -> str:
    take, give = FAMILIES[family]
    return PROGRAM.replace("TAKE", take).replace("GIVE", give)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_cap_holds_and_everything_comes_back(tenants: Tenants, agent: Agents, family: str) -> None:
    """512 MiB cap, 100 MiB of it the context: six pieces of 64 MiB and then OUT_OF_MEMORY (2); after the frees, all is
    back (HAMi-core#93, #257, #306, #310: families that were not counted, or counted wrongly)."""
    with agent(memory_limit=512 * MIB, context_bytes=100 * MIB) as broker:
        process = tenants.python(broker, program(family))
        assert process.stdout is not None
        assert process.stdin is not None
        got, code, free, total = map(int, process.stdout.readline().split())
        assert (got, code) == (6, 2)
        assert (free, total) == (512 - 100 - 6 * 64, 512)
        process.stdin.write("\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) == 412
        assert broker.total_used == 100 * MIB
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(timeout=60)
        assert process.returncode == 0


def test_two_processes_share_one_budget(tenants: Tenants, agent: Agents) -> None:
    """The cap is the tenant's, not the process's (k8s-device-plugin#594, HAMi-core#191)."""
    with agent(memory_limit=512 * MIB) as broker:
        got = []
        for _ in range(2):
            process = tenants.python(broker, program("plain"))
            assert process.stdout is not None
            got.append(int(process.stdout.readline().split()[0]))
        assert got == [8, 0]
        assert broker.total_used == 512 * MIB


def test_killed_process_gives_its_memory_back(tenants: Tenants, agent: Agents) -> None:
    with agent(memory_limit=512 * MIB) as broker:
        process = tenants.python(broker, program("plain"))
        assert process.stdout is not None
        process.stdout.readline()
        assert broker.total_used == 512 * MIB
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: broker.total_used == 0)


def test_driver_that_refuses_leaves_no_charge(tenants: Tenants, agent: Agents) -> None:
    """The agent says yes, the device (4 GiB) says no: the reservation is given back (HAMi-core#306)."""
    script = (
        "from cuda_calls import *\nstart(); p = c_uint64()\n"
        "print(raw('cuMemAlloc_v2', byref(p), c_size_t(5 << 30)), flush=True)\n"
        "cu('cuMemAlloc_v2', byref(p), c_size_t(1 << 20)); print('ok')\n"
    )
    with agent() as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["2", "ok"]
        wait_for(lambda: broker.clients[0].closed, what="all that it said was read")
        commits = [m["bytes"] for m in broker.clients[0].of(MessageType.MEMORY_COMMIT) if m["family"] == 1]
        assert commits == [0, MIB]


def test_unknown_pointers_are_the_drivers_business(tenants: Tenants, agent: Agents) -> None:
    """Freeing what the shim never saw gives the driver's answer (HAMi-core PR#217), and NULL is allowed where it is."""
    script = (
        "from cuda_calls import *\nstart()\n"
        "print(raw('cuMemFree_v2', c_uint64(12345)), raw('cuMemFree_v2', c_uint64(0)),"
        " raw('cuMemFreeAsync', c_uint64(12345), None), raw('cuMemGetInfo_v2', None, None))\n"
    )
    with agent(memory_limit=512 * MIB) as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["1", "0", "1", "0"]


def test_what_the_driver_refuses_to_free_is_held_on(tenants: Tenants, agent: Agents) -> None:
    """Unregistering what was allocated is refused; freed as it was taken, nothing is left charged."""
    script = (
        "from cuda_calls import *\nimport sys\nstart(); h = c_void_p()\n"
        "cu('cuMemHostAlloc', byref(h), c_size_t(1 << 20), 0); print(raw('cuMemHostUnregister', h), flush=True)\n"
        "sys.stdin.readline(); cu('cuMemFreeHost', h); print('freed', flush=True); sys.stdin.readline()\n"
    )
    with agent() as broker:
        process = tenants.python(broker, script)
        assert process.stdin is not None
        assert process.stdout is not None
        assert int(process.stdout.readline()) != 0
        assert broker.clients[0].of(MessageType.MEMORY_RELEASE) == []
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "freed\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(timeout=60) == 0
        wait_for(lambda: broker.clients[0].closed, what="all that it said was read")
        assert [m["bytes"] for m in broker.clients[0].of(MessageType.MEMORY_RELEASE)] == [MIB]


def test_vmm_handle_lives_until_the_last_mapping(tenants: Tenants, agent: Agents) -> None:
    """Released but mapped memory is still held; host memory by the same call is not the device's (HAMi#2125)."""
    script = (
        "from cuda_calls import *\nimport sys\nstart()\n"
        "prop = (c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0); host = (c_int * 8)(1, 0, 2, 0, 0, 0, 0, 0); n = 64 << 20\n"
        "h, g, a, again = c_uint64(), c_uint64(), c_uint64(), c_uint64()\n"
        "cu('cuMemCreate', byref(h), c_size_t(n), prop, c_uint64(0))\n"
        "cu('cuMemCreate', byref(g), c_size_t(n), host, c_uint64(0))\n"
        "cu('cuMemAddressReserve', byref(a), c_size_t(n), c_size_t(0), c_uint64(0), c_uint64(0))\n"
        "cu('cuMemMap', a, c_size_t(n), c_size_t(0), h, c_uint64(0))\n"
        "cu('cuMemSetAccess', a, c_size_t(n), None, c_size_t(1)); cu('cuMemsetD8_v2', a, 3, c_size_t(100))\n"
        "def show(): print(mem_info()[0] >> 20)\n"
        "show(); cu('cuMemRelease', h); show()\n"
        "cu('cuMemRetainAllocationHandle', byref(again), c_void_p(a.value)); cu('cuMemUnmap', a, c_size_t(n)); show()\n"
        "cu('cuMemRelease', again); show()\n"
    )
    with agent(memory_limit=512 * MIB) as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["448", "448", "448", "512"]


def test_memory_of_graphs_is_counted(tenants: Tenants, agent: Agents) -> None:
    """An allocation node takes its memory at the launch; over the cap, the next launch is refused."""
    script = (
        "from cuda_calls import *\nstart(); stream, graph, run, p = c_void_p(), c_void_p(), c_void_p(), c_uint64()\n"
        "cu('cuStreamCreate', byref(stream), 1); cu('cuStreamBeginCapture_v2', stream, 0)\n"
        "cu('cuMemAllocAsync', byref(p), c_size_t(SIZE << 20), stream)\n"
        "cu('cuStreamEndCapture', stream, byref(graph))\n"
        "cu('cuGraphInstantiateWithFlags', byref(run), graph, c_uint64(0))\n"
        "codes = [raw('cuGraphLaunch', run, stream)]; cu('cuStreamSynchronize', stream); free = mem_info()[0] >> 20\n"
        "codes.append(raw('cuGraphLaunch', run, stream)); print(free, *codes)\n"
    )
    with agent(memory_limit=512 * MIB) as broker:
        assert tenants.output(tenants.python(broker, script.replace("SIZE", "128"))).split() == ["384", "0", "0"]
    with agent(memory_limit=512 * MIB) as broker:
        assert tenants.output(tenants.python(broker, script.replace("SIZE", "640"))).split() == ["0", "0", "2"]


def test_total_is_never_above_the_card(tenants: Tenants, agent: Agents) -> None:
    """A limit above what the card has shows the card (HAMi-core#181)."""
    script = (
        "from cuda_calls import *\nstart(); t = c_size_t(); cu('cuDeviceTotalMem_v2', byref(t), 0)\n"
        "print(t.value >> 20, mem_info()[1] >> 20)\n"
    )
    with agent(memory_limit=1 << 40) as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["4096", "4096"]
    with agent(memory_limit=300 * MIB) as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["300", "300"]


def test_context_reset_gives_everything_back(tenants: Tenants, agent: Agents) -> None:
    script = (
        "from cuda_calls import *\nstart(); p = c_uint64(); cu('cuMemAlloc_v2', byref(p), c_size_t(1 << 20))\n"
        "cu('cuDevicePrimaryCtxReset_v2', 0); print('reset', flush=True); import sys; sys.stdin.readline()\n"
    )
    with agent(memory_limit=512 * MIB, context_bytes=100 * MIB) as broker:
        process = tenants.python(broker, script)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "reset"
        wait_for(lambda: broker.total_used == 0)
        assert {m["family"] for m in broker.clients[0].of(MessageType.MEMORY_RESERVE)} == {1, 7}


def test_pools_made_and_destroyed_do_not_wear_out_the_count(tenants: Tenants, agent: Agents) -> None:
    """After 1,100 short-lived pools the next one is still held to the cap of 512 MiB: 8 pieces of 64."""
    script = (
        "from cuda_calls import *\nstart(); prop = (c_int * 32)(1, 0, 1, 0); pool, p = c_void_p(), c_uint64()\n"
        "for i in range(1100):\n"
        "    cu('cuMemPoolCreate', byref(pool), prop)\n"
        "    cu('cuMemAllocFromPoolAsync', byref(p), c_size_t(1 << 20), pool, None)\n"
        "    cu('cuMemFreeAsync', p, None); cu('cuMemPoolDestroy', pool)\n"
        "cu('cuMemPoolCreate', byref(pool), prop)\n"
        "codes = [raw('cuMemAllocFromPoolAsync', byref(p), c_size_t(64 << 20), pool, None) for i in range(10)]\n"
        "print(codes.count(0), codes[-1])\n"
    )
    with agent(memory_limit=512 * MIB) as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["8", "2"]


def test_a_context_made_again_counts_its_graphs_memory_again(tenants: Tenants, agent: Agents) -> None:
    """The charge goes with the context; after the next one's launch it is again what the driver has reserved."""
    script = (
        "from cuda_calls import *\nreserved = c_uint64()\nfor turn in range(2):\n"
        "    start(); stream, graph, run, p = c_void_p(), c_void_p(), c_void_p(), c_uint64()\n"
        "    cu('cuStreamCreate', byref(stream), 1); cu('cuStreamBeginCapture_v2', stream, 0)\n"
        "    cu('cuMemAllocAsync', byref(p), c_size_t(128 << 20), stream)\n"
        "    cu('cuStreamEndCapture', stream, byref(graph))\n"
        "    cu('cuGraphInstantiateWithFlags', byref(run), graph, c_uint64(0))\n"
        "    cu('cuGraphLaunch', run, stream); cu('cuStreamSynchronize', stream)\n"
        "    cu('cuDeviceGetGraphMemAttribute', 0, 2, byref(reserved))\n"
        "    print((512 << 20) - mem_info()[0] - reserved.value, reserved.value >= 128 << 20)\n"
        "    cu('cuDevicePrimaryCtxReset_v2', 0)\n"
    )
    with agent(memory_limit=512 * MIB) as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["0", "True"] * 2
