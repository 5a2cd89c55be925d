"""Who is on the floor while the agent, or what it is told, changes under it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_harness import AgentProcess, declare
from fake_shim import FakeShim
from waiting import WITHIN_S, wait_for

from cotenant.abi.floor import WorkClass
from cotenant.abi.protocol import FLOOR_SOCKET
from cotenant.agent.gate import client
from cotenant.agent.gate.client import Floor, join_floor


def test_who_lowers_while_another_agent_is_found_stays_down(agent: AgentProcess) -> None:
    """The thread that goes over to the next agent's page has just read that the floor is up."""

    class Racing(Floor):
        up, reads = 0, -1

        @property  # type: ignore[override]
        def _class(self) -> int:
            up, self.reads = self.up, self.reads - 1
            if self.reads == 0:
                self.lower()  # as another thread would
            return up

        @_class.setter
        def _class(self, up: int) -> None:
            self.up = up

    floor = Racing(agent.folder / FLOOR_SOCKET, str(agent.call("status")["gpus"][0]["uuid"]))
    floor.raise_()
    assert floor.mapping.raised[0] == WorkClass.UNKNOWN
    floor.reads = 1
    floor._moved_to(floor.mapping)
    assert floor.mapping.raised[0] == 0
    floor.close()


def test_a_gate_that_is_closed_while_another_agent_is_found_is_left(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that joins the next agent's gate has just joined it: the process must not stay there."""
    floor = join_floor(agent.folder, str(agent.call("status")["gpus"][0]["uuid"]))
    joined, closed, connect = threading.Event(), threading.Event(), client._connect

    def late(path: Path, uuid: str) -> client._Mapping:
        fresh = connect(path, uuid)
        joined.set()
        closed.wait(WITHIN_S)
        return fresh

    monkeypatch.setattr(client, "_connect", late)
    floor.mapping.connection.shutdown(socket.SHUT_RDWR)  # as if the agent had ended
    assert joined.wait(WITHIN_S)
    floor.close()
    closed.set()
    wait_for(lambda: [gpu["holders"] for gpu in agent.call("colocation")["gpus"].values()] == [[]])


def test_a_class_that_changes_under_a_running_program_is_said(
    start_agent: Callable[..., AgentProcess], tmp_path: Path
) -> None:
    """Its processes have joined the floor as what they were: a table that calls them something else would be wrong."""
    text = "gpus: soft\ntenants: [{name: t, %s: true, mechanism: mps}]\n"
    agent = start_agent(config=declare(tmp_path, text % "best_effort"))
    answer = agent.call("register", tenant={"name": "t"})
    shim = FakeShim(agent.folder, answer["token"])
    declare(tmp_path, text % "latency_sensitive")
    wait_for(lambda: agent.tenant("t")["class"] == "latency-sensitive")
    (said,) = agent.tenant("t")["warnings"]
    assert said == "the tenant is latency-sensitive from its next start on: its running processes stay best-effort"
    shim.close()


def test_who_is_not_believed_any_more_is_not_said_to_be_up(agent: AgentProcess) -> None:
    floor = join_floor(agent.folder, str(agent.call("status")["gpus"][0]["uuid"]))

    def up() -> bool:
        ((holder,),) = ([h["up"] for h in gpu["holders"]] for gpu in agent.call("colocation")["gpus"].values())
        return bool(holder)

    def raised() -> bool:
        floor.raise_()
        return up()

    wait_for(raised)
    wait_for(lambda: not up(), what="it has not raised again for half a second, and best-effort work goes on")
    wait_for(raised)
    floor.close()
