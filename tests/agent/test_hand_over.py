"""Device memory that goes from a tenant that leaves to one that comes: contents are right, and nothing stays taken."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swap_node import CONTEXT, MIB, Node, Program, nodes_in
from waiting import WITHIN_S, wait_for

from cotenant.agent.config.files import AgentConfig, InForce, TenantSpec
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.memory.residency import Residency
from cotenant.agent.memory.swap_orders import HandleTransfer
from cotenant.agent.tenants.places import Owner
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError, WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
FREE = "(raw('cuMemGetInfo_v2', byref(free := c_size_t()), byref(c_size_t())), free.value)[1]"


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def handed(here: Node, name: str) -> int:
    return int(here.where(name)["handed_over_bytes"])


def test_two_tenants_in_turns_on_a_full_card(node: Callable[..., Node]) -> None:
    """Each takes over what the other leaves, in blocks of its own sizes; both find their contents every time."""
    here = node(2 * CONTEXT + 320 * MIB, most_moving=0.5, swap_hand=True, swap_piece=16 * MIB)
    a, b = here.program("a"), here.program("b")
    assert a.ask("take(192, 64)") == a.ask("take(16)") == "0"
    assert b.ask("take(192, 32)") == b.ask("take(24, 24)") == "0"
    for program in (a, b):
        program.tell("work(3)")
    assert [program.answer().split()[1] for program in (a, b)] == ["intact", "intact"]
    assert handed(here, "a") > 16 * MIB
    assert handed(here, "b") > 16 * MIB


FORK = "(pid := __import__('os').fork()) or (__import__('time').sleep(60), __import__('os')._exit(0))"


def memory_kept(pid: int) -> int:
    """Descriptors of memory from other processes that a process has: they stand above the program's own."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor was closed after the folder was listed
            found += int(entry.name) >= 600 and "memfd:soft" in os.readlink(entry)
    return found


def test_a_forked_child_does_not_keep_what_its_parent_gives_back(node: Callable[..., Node]) -> None:
    here = node(2 * CONTEXT + 288 * MIB, swap_hand=True, swap_piece=16 * MIB)
    a, b = here.program("a"), here.program("b")
    assert a.ask("take(256, 32)") == b.ask("take(256, 32)") == "0"
    assert a.ask("check()") == "intact"  # b has left the GPU to make room
    here.call("exchange", out=["a"], **{"in": ["b"]})
    kept = memory_kept(b.process.pid)
    assert kept > 0, "on a full card it needs what the other one leaves"
    child = int(b.ask(FORK))
    try:
        wait_for(lambda: memory_kept(child) == 0, what="the child to let go")
        here.call("exchange", out=["b"])
        wait_for(lambda: memory_kept(b.process.pid) == 0, what="b to give back all of it")
        here.call("exchange", **{"in": ["b"]})
        assert b.ask("check()") == "intact"
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_nobody_takes_is_free(node: Callable[..., Node]) -> None:
    """A large one leaves and a small one comes: the driver has all of the rest again."""
    here = node(2048 * MIB, swap_hand=True, swap_piece=16 * MIB)
    large, small = here.program("large"), here.program("small")
    assert large.ask("take(256, 32)") == small.ask("take(32, 32)") == "0"
    witness = Program(here, "witness", None)
    all_free = int(witness.ask(FREE)) + (256 + 32) * MIB
    here.call("exchange", out=["small"])
    here.call("exchange", out=["large"], **{"in": ["small"]})
    wait_for(lambda: int(witness.ask(FREE)) == all_free - 32 * MIB, what="the memory that was left")
    here.call("exchange", out=["small"], **{"in": ["large"]})
    wait_for(lambda: int(witness.ask(FREE)) == all_free - 256 * MIB, what="the memory that was left")
    here.call("exchange", **{"in": ["small"]})
    assert large.ask("check()") == small.ask("check()") == "intact"


def test_memory_goes_on_and_on(node: Callable[..., Node]) -> None:
    """To and fro: who got memory from another process hands it on, although the driver does not export it again."""
    here = node(2 * CONTEXT + 288 * MIB, swap_hand=True, swap_piece=16 * MIB)
    programs = {name: here.program(name) for name in ("a", "b")}
    assert [program.ask("take(256, 32)") for program in programs.values()] == ["0", "0"]
    assert programs["a"].ask("check()") == "intact"  # b has left the GPU to make room
    here.call("exchange", out=["b"])
    last = {"a": handed(here, "a"), "b": handed(here, "b")}
    for leaves, comes in (("a", "b"), ("b", "a")) * 3:
        here.call("exchange", out=[leaves], **{"in": [comes]})
        now = {name: handed(here, name) for name in last}
        # The card has room for two more chunks. Memory that is freed during the exchange may be taken through either
        # path.
        assert now[comes] - last[comes] >= 128 * MIB
        assert now[leaves] - last[leaves] >= 128 * MIB
        assert programs[comes].ask("check()") == "intact"
        last = now


def test_a_restore_waits_for_an_eviction_that_is_slow(node: Callable[..., Node]) -> None:
    """A process that finds no memory gives up after a second. The other one may get no processor for longer."""
    here = node(2 * CONTEXT + 288 * MIB, swap_hand=True, swap_piece=16 * MIB)
    a, b = here.program("a"), here.program("b")
    assert a.ask("take(256, 32)") == b.ask("take(256, 32)") == "0"
    here.call("exchange", out=["b"])
    here.call("exchange", **{"in": ["a"]}, release=False)  # from here on it has no turn
    moves, last = here.where("b")["moves_in"], handed(here, "b")
    a.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(here.call, "exchange", out=["a"], **{"in": ["b"]})
        wait_for(lambda: here.where("b")["moves_in"] > moves, what="b to find only 32 MiB free, and to give up")
        a.process.send_signal(signal.SIGCONT)
        done.result()
    assert handed(here, "b") - last >= 128 * MIB
    assert b.ask("check()") == "intact"


@pytest.mark.parametrize("killed", ["leaves", "comes"])
def test_one_of_them_killed_in_the_middle(node: Callable[..., Node], killed: str) -> None:
    """Its memory is free, also what was on its way; the other one's contents are whole."""
    here = node(2048 * MIB, swap_hand=True, swap_piece=16 * MIB)
    programs = {name: here.program(name) for name in ("leaves", "comes")}
    for program in programs.values():
        assert program.ask("take(256, 32)") == "0"
    witness = Program(here, "witness", None)
    both = int(witness.ask(FREE))
    here.call("exchange", out=["comes"])
    dead = programs.pop(killed).process
    ((survivor, alive),) = programs.items()
    dead.send_signal(signal.SIGSTOP)  # a stopped process neither takes nor gives memory

    def exchange() -> None:
        with contextlib.suppress(WorkError, InputError):  # InputError if the tenant has already ended
            here.call("exchange", out=["leaves"], **{"in": ["comes"]})

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join(0.3)
    dead.kill()
    dead.wait()
    thread.join(WITHIN_S)
    assert not thread.is_alive()
    here.call("exchange", **{"in": [survivor]})
    assert alive.ask("check()") == "intact"
    freed = 256 * MIB + CONTEXT
    # the software GPU looks for dead processes when an allocation does not fit
    assert witness.ask("raw('cuMemAlloc_v2', byref(c_uint64()), c_size_t(2047 << 20))") == "2"
    wait_for(lambda: int(witness.ask(FREE)) == both + freed, what="the memory of the one that was killed")


class Transfers:
    """A residency of tenants that may hand memory on; nothing of them runs."""

    def __init__(self, **users: int) -> None:
        self.tenants = {
            name: Tenant(TenantSpec(name, oversubscribe="swap"), (), "", uid, Enforcement())
            for name, uid in users.items()
        }
        self.in_force = InForce(AgentConfig())
        nothing: Any = SimpleNamespace(gpus={}, tenants=self.tenants)
        self._residency = Residency(nothing, nothing, nothing, nothing, nothing, nothing, self.in_force, nothing)

    def between(self, leave: list[str], come: str) -> HandleTransfer | None:
        return self._residency.handle_transfer(leave, self.tenants[come])

    def connect(self, name: str, user: int) -> None:
        """A process of a tenant runs as that user, and no other one."""
        process: Any = SimpleNamespace(peer=SimpleNamespace(uid=user))
        self.tenants[name].sessions = [process]


def test_memory_never_goes_from_one_user_to_another() -> None:
    here = Transfers(a=1000, b=1000, c=1001)
    assert here.between(["a"], "c") is here.between(["a", "c"], "b") is None
    assert here.between([], "b") is here.between(["gone"], "b") is None
    way = here.between(["a"], "b")
    assert isinstance(way, HandleTransfer)
    way.close()
    for name, user in (("a", 1001), ("b", 1000)):  # `a` was the tenant of another user whose process still runs
        here.connect(name, user)
    assert here.between(["a"], "b") is here.between(["b"], "a") is None
    here.connect("a", 1000)
    here.in_force.config = AgentConfig(swap_hand=False)
    assert here.between(["a"], "b") is None


def test_the_end_of_those_who_come_closes_the_way() -> None:
    """What is sent after that is refused to the sender, who then gives it back."""
    way = HandleTransfer()
    giver = socket.socket(fileno=os.dup(way.giver))
    way.all_taken()
    with pytest.raises(BrokenPipeError):
        giver.send(b"x")
    giver.close()
    way.close()


def test_memory_never_goes_from_one_namespace_to_another() -> None:
    """The agent holds all pods' tenants itself, and in most pods programs are root: neither says whose they are."""
    here = Transfers(**{"team/x/main": 0, "team/y/main": 0, "other/x/main": 0, "plain": 0})
    for name, tenant in here.tenants.items():
        if name != "plain":
            tenant.owner = Owner("pod", f"uid-of-{name}", "main")
        here.connect(name, 0)
    for one, other in (("other/x/main", "team/x/main"), ("plain", "team/x/main")):
        assert here.between([one], other) is here.between([other], one) is None
    way = here.between(["team/y/main"], "team/x/main")
    assert isinstance(way, HandleTransfer)
    way.close()
    here.connect("team/y/main", 1000)
    assert here.between(["team/y/main"], "team/x/main") is None


@pytest.mark.parametrize("end", [HandleTransfer.all_taken, HandleTransfer.close])
def test_a_process_that_is_stopped_keeps_nothing_that_lies_there(end: Callable[[HandleTransfer], None]) -> None:
    """It has its end of the socket, or will find it: what was sent is free although nobody closes that."""
    way = HandleTransfer()
    giver, stopped = (socket.socket(fileno=os.dup(fd)) for fd in (way.giver, way.taker))
    reader, memory = os.pipe()  # the reader sees the end of the pipe when no descriptor is left
    for _ in range(3):
        socket.send_fds(giver, [bytes(8)], [memory])
    os.close(memory)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    end(way)
    assert os.read(reader, 1) == b""
    with pytest.raises(BrokenPipeError):
        giver.send(b"x")
    assert stopped.recv(8) == b""
    for one in (giver, stopped):
        one.close()
    os.close(reader)
    way.close()


def test_memory_never_goes_from_one_gpu_to_another(node: Callable[..., Node]) -> None:
    """Two that change places on two GPUs: what leaves the one is no memory of the other."""
    here = node(1024 * MIB, count=2, swap_hand=True, swap_piece=16 * MIB)
    first, second = (gpu["uuid"] for gpu in here.call("status")["gpus"])
    a = here.program("a", gpus=(first,))
    here.environment["CUDA_VISIBLE_DEVICES"] = second
    b = here.program("b", gpus=(second,))
    assert a.ask("take(256, 32)") == b.ask("take(256, 32)") == "0"
    here.call("exchange", out=["b"])
    here.call("exchange", out=["a"], **{"in": ["b"]})
    here.call("exchange", **{"in": ["a"]})
    assert handed(here, "a") == handed(here, "b") == 0
    assert a.ask("check()") == b.ask("check()") == "intact"
