"""Movable memory that other processes open (CUDA IPC): it stays on the GPU, and all else moves as before."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from fake_agent import FakeAgent
from shim_tenants import Tenants
from test_shim_swap import EVERYTHING, MIB, OK, Agents, Program, closed, moved, started
from waiting import wait_for

from cotenant.abi.protocol import MessageType, MoveFlag

INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE = 1, 201, 400

HELPERS = """
class Handle(ctypes.Structure): _fields_ = [('bytes', ctypes.c_char * 64)]
opened = {}
def export(name, offset=0):
    handle = ctypes.create_string_buffer(64)
    code = raw('cuIpcGetMemHandle', handle, c_uint64(held[name].value + offset))
    return code or handle.raw.hex()
def open_(text, name='opened', entry='cuIpcOpenMemHandle_v2'):
    address = c_uint64()
    handle = Handle.from_buffer_copy(bytes.fromhex(text))
    code = raw(entry, byref(address), handle, 1)
    opened[name] = address
    return code or 'opened'
def close_(name='opened'):
    return raw('cuIpcCloseMemHandle', opened[name])
def digest(address, size):
    data = ctypes.create_string_buffer(size)
    cu('cuMemcpyDtoH_v2', data, address, c_size_t(size))
    return hashlib.sha256(data.raw).hexdigest()
def write(address, size, seed):
    cu('cuMemcpyHtoD_v2', address, random.Random(seed).randbytes(size), c_size_t(size))
    return 'written'
"""


def helped(program: Program) -> Program:
    assert program.ask(f"exec({HELPERS!r}, globals())") == "None"
    return program


def pair(tenants: Tenants, agent: Agents, **settings: object) -> tuple[FakeAgent, Program, Program]:
    """A program with memory, and another one of the same tenant."""
    broker, owner = started(tenants, agent, **settings)
    guest = helped(Program(tenants, broker))
    broker.resume()
    return broker, helped(owner), guest


def descriptors(pid: int) -> int:
    """Descriptors of a process for device memory."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:soft" in os.readlink(entry) and int(entry.name) >= 600
    return found


def test_another_process_sees_and_changes_it(tenants: Tenants, agent: Agents) -> None:
    _, owner, guest = pair(tenants, agent)
    handle = owner.ask("export('large')")
    assert guest.ask(f"open_({handle!r})") == "opened"
    assert guest.ask(f"digest(opened['opened'], {10 * MIB})") == owner.ask("expected['large']")
    assert guest.ask(f"write(opened['opened'], {10 * MIB}, 'new')") == "written"
    assert owner.ask(f"digest(held['large'], {10 * MIB})") == guest.ask(f"digest(opened['opened'], {10 * MIB})")
    assert guest.ask("close_()") == "0"
    assert owner.ask("give('large')") == "0"
    assert owner.ask("check()") == "intact"


def test_what_is_shared_stays_and_the_rest_moves(tenants: Tenants, agent: Agents) -> None:
    broker, owner, guest = pair(tenants, agent)
    handle = owner.ask("export('large')")
    assert guest.ask(f"open_({handle!r})") == "opened"
    client = broker.clients[0]
    wait_for(lambda: client.of(MessageType.MOVE_STATE)[-1]["staying_bytes"] == 10 * MIB)
    assert not client.of(MessageType.MOVE_STATE)[-1]["flags"] & MoveFlag.FIXED
    said = lambda: [m.fields["text"] for m in client.of(MessageType.WARNING)]  # noqa: E731
    wait_for(lambda: sum(b"10 MiB" in text and b"stays on the GPU" in text for text in said()) == 1)
    closed(broker)
    assert moved(broker.move(MessageType.MOVE_OUT, EVERYTHING)) == (OK, 8 * MIB, 0, 8 * MIB)
    broker.resume()  # the guest owns no memory that can move, so it runs on and still sees the owner's memory
    assert guest.ask(f"digest(opened['opened'], {10 * MIB})") == owner.ask("expected['large']")
    closed(broker)
    assert moved(broker.move(MessageType.MOVE_IN, EVERYTHING)) == (OK, 8 * MIB, 8 * MIB, 0)
    broker.resume()
    assert owner.ask("check()") == "intact"
    assert owner.ask("give('large')") == "0"
    assert owner.ask("take('next', 4 << 20)") == "0"
    closed(broker)
    assert moved(broker.move(MessageType.MOVE_OUT, EVERYTHING))[:3] == (OK, 12 * MIB, 0)
    assert client.of(MessageType.MOVE_DONE)[-1]["staying_bytes"] == 0


def test_memory_that_is_away_comes_back_before_it_is_shared(tenants: Tenants, agent: Agents) -> None:
    broker, owner, guest = pair(tenants, agent)
    closed(broker)
    broker.move(MessageType.MOVE_OUT, EVERYTHING)
    owner.tell("export('odd')")
    broker.move(MessageType.MOVE_IN, EVERYTHING)
    broker.resume()
    handle = owner.answer()
    assert guest.ask(f"open_({handle!r})") == "opened"
    assert guest.ask(f"digest(opened['opened'], {3 * MIB + 17})") == owner.ask("expected['odd']")


def test_allocations_of_many_pieces_small_ones_and_addresses_inside(tenants: Tenants, agent: Agents) -> None:
    """A handle of an address inside an allocation is one of the allocation, as the driver's own."""
    _, owner, guest = pair(tenants, agent)
    assert owner.ask("take('huge', 600 << 20)") == "0"
    assert owner.ask(f"write(c_uint64(held['huge'].value + (520 << 20)), {MIB}, 'end')") == "written"
    for name, handle in [(name, owner.ask(f"export({name!r}, 8)")) for name in ("huge", "small", "tiny")]:
        assert guest.ask(f"open_({handle!r}, {name!r})") == "opened", handle
    assert guest.ask("digest(opened['small'], 1000)") == owner.ask("expected['small']")
    assert guest.ask("digest(opened['tiny'], 16)") == owner.ask("expected['tiny']")
    there = f"digest(c_uint64(opened['huge'].value + (520 << 20)), {MIB})"
    assert guest.ask(there) == owner.ask(f"digest(c_uint64(held['huge'].value + (520 << 20)), {MIB})")
    within = "c_uint64(opened['huge'].value + 9)"
    extent = f"(b := c_uint64(), s := c_size_t(), raw('cuMemGetAddressRange_v2', byref(b), byref(s), {within}))"
    assert guest.ask(f"[{extent} and (b.value == opened['huge'].value, s.value >> 20)]") == "[(True, 600)]"
    assert [guest.ask(f"close_({name!r})") for name in ("huge", "small", "tiny")] == ["0", "0", "0"]


def test_opened_twice_is_the_same_memory_until_closed_twice(tenants: Tenants, agent: Agents) -> None:
    _, owner, guest = pair(tenants, agent)
    handle = owner.ask("export('large')")
    # exporting again gives the same handle, because libraries remember opened memory by its handle
    assert owner.ask("export('large')") == handle
    assert guest.ask(f"open_({handle!r}, 'one')") == "opened"
    assert guest.ask(f"open_({handle!r}, 'two', 'cuIpcOpenMemHandle')") == "opened"
    assert guest.ask("opened['one'].value == opened['two'].value") == "True"
    assert guest.ask("close_('one')") == "0"
    assert guest.ask(f"digest(opened['two'], {10 * MIB})") == owner.ask("expected['large']")
    assert guest.ask("close_('two')") == "0"
    assert guest.ask("close_('two')") != "0"


def test_handles_that_lead_nowhere_are_errors_at_once(tenants: Tenants, agent: Agents) -> None:
    _, owner, guest = pair(tenants, agent)
    handle = owner.ask("export('large')")
    # a process cannot open memory that it exported itself, as with the driver
    assert owner.ask(f"open_({handle!r})") == str(INVALID_CONTEXT)
    assert owner.ask("give('large')") == "0"
    assert guest.ask(f"open_({handle!r})") == str(INVALID_HANDLE)
    other = owner.ask("export('odd')")
    os.kill(owner.process.pid, signal.SIGKILL)
    owner.process.wait(60)
    began = time.monotonic()
    assert guest.ask(f"open_({other!r})") == str(INVALID_HANDLE)
    assert time.monotonic() - began < 5
    assert guest.ask("raw('cuIpcGetMemHandle', ctypes.create_string_buffer(64), c_uint64(4096))") != "0"


def test_memory_lives_on_in_the_process_that_has_opened_it(tenants: Tenants, agent: Agents) -> None:
    _, owner, guest = pair(tenants, agent)
    wanted = owner.ask("expected['large']")
    assert guest.ask(f"open_({owner.ask('''export('large')''')!r})") == "opened"
    os.kill(owner.process.pid, signal.SIGKILL)
    owner.process.wait(60)
    assert guest.ask(f"digest(opened['opened'], {10 * MIB})") == wanted


def test_a_stopped_owner_costs_a_bounded_wait(tenants: Tenants, agent: Agents) -> None:
    _, owner, guest = pair(tenants, agent)
    handle = owner.ask("export('large')")
    os.kill(owner.process.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{owner.process.pid}/task")
    stopped = lambda: {(each / "stat").read_text().rsplit(")", 1)[1].split()[0] for each in threads.iterdir()} == {"T"}  # noqa: E731
    wait_for(stopped)
    # the owner does not answer for ten seconds, and then the open fails
    assert guest.ask(f"open_({handle!r})") == str(INVALID_HANDLE)
    os.kill(owner.process.pid, signal.SIGCONT)
    assert guest.ask(f"open_({handle!r})") == "opened"


def test_a_forked_child_keeps_nothing_of_it(tenants: Tenants, agent: Agents) -> None:
    """Otherwise memory that the parent frees would stay in use as long as the child lives."""
    _, owner, guest = pair(tenants, agent)
    assert guest.ask(f"open_({owner.ask('''export('large')''')!r})") == "opened"
    assert descriptors(owner.process.pid) == 1
    child = int(owner.ask("(pid := __import__('os').fork()) or __import__('time').sleep(60)"))
    try:
        wait_for(lambda: descriptors(child) == 0, what="the child to let go")
        assert descriptors(owner.process.pid) == 1
        assert owner.ask("give('large')") == "0"
        wait_for(lambda: descriptors(owner.process.pid) == 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_managed_memory_cannot_be_shared_and_says_what_can(tenants: Tenants, agent: Agents) -> None:
    broker = agent(oversubscribe=2, turn_ns=2_000_000)
    program = helped(Program(tenants, broker))
    assert program.ask("take('large', 4 << 20)") == "0"
    assert program.ask("export('large')") == "801"
    said = lambda: b"".join(m.fields["text"] for m in broker.clients[0].of(MessageType.WARNING))  # noqa: E731
    wait_for(lambda: b"--oversubscribe swap" in said())
