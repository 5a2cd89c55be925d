"""Memory that comes from another process while something happens to the one that it comes to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from pathlib import Path

from shim_tenants import Tenants
from test_shim_swap import EVERYTHING, MIB, OK, Agents, Program, closed, moved
from waiting import wait_for

from cotenant.abi.protocol import MessageType


def memory_from_others(pid: int) -> int:
    """Descriptors of a process for memory that the test has handed to it."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor was closed after the folder was listed
            found += "memfd:handed" in os.readlink(entry)
    return found


def test_a_child_that_is_forked_while_memory_comes_keeps_none_of_it(tenants: Tenants, agent: Agents) -> None:
    """Pieces of another size lie ready while the way in waits for room: the child would keep them taken as it lives."""
    broker = agent(oversubscribe=1, backing_bytes=226 * MIB, turn_ns=2_000_000)
    program = Program(tenants, broker)
    for name, size in (("first", 40 * MIB), ("second", 20 * MIB)):
        assert program.ask(f"take({name!r}, {size})") == "0"
        program.ask(f"fill({name!r}, {size}, {size})")
    closed(broker)
    assert moved(broker.move(MessageType.MOVE_OUT, EVERYTHING))[0] == OK
    client = broker.clients[0]
    giver, taker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for _ in range(3):
        memory = os.memfd_create("handed")
        os.ftruncate(memory, 24 * MIB)
        socket.send_fds(giver, [struct.pack("=Q", 24 * MIB)], [memory])
        os.close(memory)
    client.send(MessageType.MOVE_IN, fd=taker.fileno(), slot=0, sequence=7, bytes=41 * MIB)
    taker.close()
    wait_for(lambda: memory_from_others(program.process.pid) == 3, what="the memory of others")
    child = int(program.ask("(pid := __import__('os').fork()) or __import__('time').sleep(60)"))
    try:
        wait_for(lambda: memory_from_others(child) == 0, what="the child to let go")
        assert memory_from_others(program.process.pid) == 3
        client.send(MessageType.MOVE_ALLOW, slot=0, bytes=EVERYTHING)
        wait_for(lambda: len(client.of(MessageType.MOVE_DONE)) == 2, what="the end of the move")
        wait_for(lambda: memory_from_others(program.process.pid) == 0)
        broker.resume()
        assert program.ask("check()") == "intact"
    finally:
        os.kill(child, signal.SIGKILL)
        giver.close()
