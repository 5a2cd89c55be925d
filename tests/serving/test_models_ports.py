"""Ports of models' programs: no two servers of a machine give the same one to two programs."""

from __future__ import annotations

import socket

import pytest

from cotenant.serving.llm import program
from cotenant.serving.llm.program import Port


def test_a_port_is_held_until_its_program_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program listens long after its port was chosen. Meanwhile the kernel may offer the port to another server,
    whose program would then answer for this one.
    """
    first = Port()
    offered = [first.number, first.number]
    find = program.free_port
    monkeypatch.setattr(program, "free_port", lambda: offered.pop() if offered else find())
    second = Port()
    assert not offered
    assert second.number != first.number
    with socket.socket() as listener:  # the program can listen there
        listener.bind(("127.0.0.1", first.number))
    second.close()
    number = first.number
    first.close()
    offered.append(number)
    third = Port()
    assert third.number == number
    third.close()
