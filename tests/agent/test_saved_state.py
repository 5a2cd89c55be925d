"""The state file of an earlier agent, as it may be found."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import AgentProcess, declare, gpu_uuid
from fake_shim import FakeShim, register
from waiting import wait_for

from cotenant.abi.protocol import MessageType
from cotenant.agent.lifecycle.state import load, load_swap_budget
from cotenant.core.errors import TakenNameError


@pytest.mark.parametrize(
    "change",
    [{"spec": {"name": "b", "enforce_memory": "by-magic"}}, {"spec": {"name": "b", "priority": float("inf")}},
     {"token": None, "processes": [[1]]}, {"moves": {"unknown": 1}}, {"holder": ["pod"]}, {"root": "x"}],
)  # fmt: skip
def test_a_tenant_that_cannot_be_read_takes_no_other_with_it(tmp_path: Path, change: dict[str, Any]) -> None:
    """Left by an agent of another version."""
    good: dict[str, Any] = {"spec": {"name": "a"}, "token": "t", "uid": 1, "root": None, "processes": []}
    file = tmp_path / "state.json"
    file.write_text(json.dumps({"version": 1, "tenants": [good | change, good, 7, None]}))
    assert [saved.spec.name for saved in load(file)] == ["a"]


def test_a_file_that_is_none_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for text in ("", "{", "[]", "7", '{"tenants": 7}', '{"version": 1}'):
        file.write_text(text)
        assert load(file) == []
    assert load(tmp_path / "nowhere") == []


@contextlib.contextmanager
def program(token: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a tenant's token in its environment, which has not used the GPU yet."""
    with subprocess.Popen(["sleep", "600"], env=os.environ | {"COTENANT_TOKEN": token}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_registered_tenant_is_known_to_the_next_agent(agent: AgentProcess) -> None:
    """The agent is killed as soon as it has answered: the launcher starts the program and cannot report it any more."""
    with agent.client() as launcher:
        token = register(launcher, "a")["token"]
        agent.kill()
        with program(token) as process:
            agent.start()
            shim = FakeShim(agent.folder, token)
            assert shim.answer["type"] == MessageType.HELLO_REPLY
            shim.close()
            wait_for(lambda: agent.tenant("a")["state"] != "starting", what="the program is found by its token")
            process.kill()
            process.wait()
            wait_for(lambda: not agent.call("list")["tenants"], what="with its program the tenant goes")


def test_a_tenant_whose_launcher_has_ended_too_is_not_taken_over(agent: AgentProcess) -> None:
    script = "import sys; from pathlib import Path; from cotenant.agent.ipc.client import ControlClient\n"
    script += "ControlClient(Path(sys.argv[1])).call('register', tenant={'name': 'a'}); print(flush=True); input()"
    arguments = [sys.executable, "-c", script, str(agent.folder)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        agent.kill()
        agent.start()
        assert agent.tenant("a")["state"] == "starting"
        launcher.kill()
        wait_for(lambda: not agent.call("list")["tenants"])


def test_a_launcher_that_got_no_answer_registers_again(agent: AgentProcess) -> None:
    with agent.client() as launcher:
        lost = register(launcher, "a")["token"]
        agent.kill()
    agent.start()
    with agent.client() as launcher:
        assert register(launcher, "a")["token"] != lost
        with pytest.raises(TakenNameError):
            register(launcher, "a")


def test_a_changed_share_is_known_to_the_next_agent(agent: AgentProcess) -> None:
    with agent.client() as launcher, program(register(launcher, "a")["token"]) as process:
        launcher.call("started", name="a", pid=process.pid)
        agent.call("set", name="a", limit=0.25, priority=3)
        agent.kill()
        agent.start()
        row = agent.tenant("a")
        assert (row["limit"], row["priority"], row["state"]) == (0.25, 3, "no GPU yet")


def test_the_next_agent_has_as_much_host_memory_for_the_same_tenants(agent: AgentProcess) -> None:
    """Half of the available memory may be less by now, since the tenants' programs use memory: it would not do for
    them."""
    with agent.client() as launcher:
        half = agent.call("status")["swap_memory"]["budget_bytes"]
        answer = register(launcher, "a", memory_bytes=half // 4, oversubscribe="swap")
        with program(answer["token"]) as process:
            launcher.call("started", name="a", pid=process.pid)
            agent.kill()
            agent.start()
            assert agent.call("status")["swap_memory"]["budget_bytes"] == half
            agent.kill()
            assert load_swap_budget(agent.folder / "state.json") == half
            process.kill()
            process.wait()
            assert load_swap_budget(agent.folder / "state.json") is None, "nobody needs it any more"


def test_the_next_agent_measures_a_share_over_a_whole_window(start_agent: Callable[..., AgentProcess]) -> None:
    """At first the tenant has a turn all the time, although its limit is 30 % of the window."""
    with tempfile.TemporaryDirectory(prefix="cot-") as name:
        config = declare(Path(name), "window: 1h\ntenants: [{name: a, limit: 30%}]\n")
        agent = start_agent(config=config)

        def share(shim: FakeShim) -> dict[str, Any]:
            shim.attach(gpu_uuid(0))
            shim.take()
            (row,) = agent.tenant("a")["gpus"]
            return row

        with agent.client() as launcher:
            token = register(launcher, "a", limit=None)["token"]
            row = share(FakeShim(agent.folder, token))
            assert (row["holding"], row["got"], row["measuring"]) == (True, None, True)
            agent.kill()
            agent.start()
            shim = FakeShim(agent.folder, token)
            row = share(shim)
            assert (row["holding"], row["got"], row["measuring"]) == (True, None, True)
            declare(Path(name), "window: 100ms\nquota: 100ms\ntenants: [{name: a, limit: 30%}]\n")
            wait_for(lambda: agent.tenant("a")["gpus"][0]["got"] is not None, what="a whole window has passed")
            assert not agent.tenant("a")["gpus"][0]["measuring"]
            shim.close()
