"""The shim sees contexts as the driver's channel groups and hands them, with the driver's file, to the agent."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from fake_agent import Client, FakeAgent, Message
from shim_tenants import Tenants
from waiting import wait_for

from cotenant.abi.protocol import MessageType
from cotenant.devices.channel_groups import SOFTWARE, ChannelControls, ChannelGroup
from cotenant.softgpu.controls import SoftIoctl

Agents = Callable[..., FakeAgent]
WAITS = "import sys\nfrom cuda_calls import *\nstart()\nprint('there', flush=True)\n"


def groups(client: Client) -> list[Message]:
    return client.of(MessageType.CHANNEL_GROUP)


def group_of(message: Message) -> ChannelGroup:
    count = message["channel_count"]
    channels = struct.unpack_from(f"={count}I", message.fields["channels"])
    return ChannelGroup(message["client"], message["device"], message["subdevice"], message["group"], channels)


def test_a_context_comes_with_a_file_that_controls_it(tenants: Tenants, agent: Agents) -> None:
    with agent() as broker:
        program = tenants.python(broker, WAITS + "sys.stdin.readline()\n")
        assert program.stdout is not None
        program.stdout.readline()
        wait_for(lambda: groups(broker.clients[0])[-1:] != [] and groups(broker.clients[0])[-1]["channel_count"] == 2)
        message = groups(broker.clients[0])[-1]
        controls = ChannelControls(SOFTWARE, SoftIoctl())
        assert controls.check(message.fd, group_of(message)) == ""
        assert controls.slice_us(message.fd, group_of(message)) == 2048
        uuid = broker.clients[0].uuids[0].hex()
        assert controls.gpu_uuid(message.fd, group_of(message)).removeprefix("GPU-").replace("-", "") == uuid
        program.communicate("\n", timeout=60)


def test_later_contexts_and_their_ends_are_followed(tenants: Tenants, agent: Agents) -> None:
    script = WAITS + (
        "second = c_void_p()\n"
        "sys.stdin.readline(); cu('cuCtxCreate_v2', byref(second), 0, 0); print('made', flush=True)\n"
        "sys.stdin.readline(); cu('cuCtxDestroy_v2', second); print('gone', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with agent() as broker:
        program = tenants.python(broker, script)
        assert program.stdin is not None
        client = lambda: groups(broker.clients[0])  # noqa: E731
        wait_for(lambda: bool(broker.clients and client()))
        first = client()[-1]["group"]
        program.stdin.write("\n")
        program.stdin.flush()
        wait_for(lambda: any(m["group"] != first for m in client()))
        second = client()[-1]
        program.stdin.write("\n")
        program.stdin.flush()
        wait_for(lambda: client()[-1]["channel_count"] == 0)
        assert client()[-1]["group"] == second["group"] != first
        assert client()[-1].fd == -1
        program.communicate("\n", timeout=60)


def test_an_agent_that_comes_back_hears_of_all_groups(tenants: Tenants, agent: Agents) -> None:
    with agent() as broker:
        program = tenants.python(broker, WAITS + "sys.stdin.readline()\n")
        wait_for(lambda: bool(broker.clients and groups(broker.clients[0])))
    with FakeAgent(broker.path) as broker:
        wait_for(lambda: bool(broker.clients and groups(broker.clients[0])))
        assert group_of(groups(broker.clients[0])[0]).channels
        program.communicate("\n", timeout=60)


def test_a_forked_child_has_groups_of_its_own(tenants: Tenants, agent: Agents) -> None:
    script = (
        "import os\nfrom cuda_calls import *\n"
        "end, write = os.pipe()\n"
        "pid = os.fork()\n"
        "start()\n"
        "os.close(write) if pid == 0 else input()\n"
        "assert os.read(end, 1) == b'' if pid == 0 else (os.close(write), os.waitpid(pid, 0)[1])[1] == 0\n"
    )
    with agent() as broker:
        program = tenants.python(broker, script)
        wait_for(lambda: len({m["client"] for client in broker.clients for m in groups(client)[-1:]}) == 2)
        program.communicate("\n", timeout=60)
        assert program.returncode == 0


def test_groups_of_both_kinds_are_told(tenants: Tenants, agent: Agents) -> None:
    """Allocations as libcuda makes them, in both layouts of the call: a refused one, a copy engine's group, a group
    whose channels grow, and a client that ends with all it has. Other calls pass untouched, errno included."""
    script = """
import ctypes, errno, os, struct, sys
from cuda_calls import *
start()
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(os.environ['COTENANT_SOFTGPU_STATE'], os.O_RDWR)
def call(number, data):
    held = ctypes.create_string_buffer(data, len(data))
    assert libc.ioctl(fd, ctypes.c_ulong(3 << 30 | len(data) << 16 | ord('F') << 8 | number), held) == 0
def make(parent, handle, kind, status=0, old=False):
    head = struct.pack('=IIII', 0 if kind == 0x41 else 0xc1dff000, parent, handle, kind) + bytes(8)
    call(0x2b, head + (struct.pack('=II', 0, status) if old else struct.pack('=QIIII', 0, 0, 0, status, 0)))
def free(parent, handle):
    call(0x29, struct.pack('=IIII', 0xc1dff000, parent, handle, 0))
client = 0xc1dff000
make(0, client, 0x41)
make(client, 0x10, 0x80); make(0x10, 0x11, 0x2080)
make(0x10, 0x20, 0xa06c, old=True); make(0x20, 0x21, 0xc96f, old=True); make(0x21, 0x22, 0xcdc0)   # compute
make(0x10, 0x30, 0xa06c); make(0x30, 0x31, 0xc86f)                                                # copies only
make(0x10, 0x40, 0xa06c, status=0x1f); make(0x40, 0x41, 0xc86f); make(0x41, 0x42, 0xcbc0)         # refused group
input(); make(0x20, 0x23, 0xc96f)
input(); free(client, client)
ctypes.set_errno(0)
assert libc.ioctl(fd, ctypes.c_ulong(0x5401), None) == -1 and ctypes.get_errno() == errno.ENOTTY
input()
"""

    def said() -> list[tuple[int, int, tuple[int, ...]]]:
        told = [m for client in broker.clients for m in groups(client) if m["client"] == 0xC1DFF000]
        return [(m["group"], m["compute"], group_of(m).channels) for m in told]

    with agent() as broker:
        program = tenants.python(broker, script)
        assert program.stdin is not None
        for seen in (
            {(0x20, 1, (0x21,)), (0x30, 0, (0x31,))},
            {(0x20, 1, (0x21, 0x23))},
            {(0x20, 1, ()), (0x30, 0, ())},
        ):
            wait_for(lambda: seen <= set(said()))  # noqa: B023 - called in this round
            program.stdin.write("\n")
            program.stdin.flush()
        program.communicate(timeout=60)
        assert program.returncode == 0
        told = [m for m in groups(broker.clients[0]) if m["client"] == 0xC1DFF000]
        messages = said()
        assert messages.count((0x30, 0, (0x31,))) == 1
        ends = [s for s in messages if not s[2]]
        assert sorted(ends) == [(0x20, 1, ()), (0x30, 0, ())]
        grown = [s for s in messages if s[0] == 0x20 and s[2]]
        assert grown[-2:] == [(0x20, 1, (0x21,)), (0x20, 1, (0x21, 0x23))]
        assert {m["subdevice"] for m in told} == {0x11}
        assert os.fstat(told[0].fd).st_size > 0
