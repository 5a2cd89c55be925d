"""Who may do what on an agent that several users can reach."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess, declare
from fake_shim import FakeShim, register

from cotenant.model.errors import InputError
from cotenant.node.wire import Type


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="cot-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_other_users_have_what_the_configuration_gives_them(open_folder: Path) -> None:
    """User 65534 talks to root's agent: its own tenant yes, others no, the kernel's word against a stolen token."""
    text = "tenants: [{name: mine, request: 20%, user: 65534}, {name: theirs, request: 20%}]\n"
    agent = AgentProcess(open_folder, config=declare(open_folder, text))
    for name in ("agent.sock", "control.sock"):
        os.chmod(agent.folder / name, 0o666)
    with agent.client() as launcher:
        stolen = register(launcher, "theirs", limit=None)["token"]
    os.seteuid(65534)
    try:
        client = agent.client()
        with client:
            token = register(client, "mine", limit=None)["token"]
            own = FakeShim(agent.folder, token)
            assert own.answer["type"] == Type.HELLO_REPLY
            thief = FakeShim(agent.folder, stolen)
            assert thief.answer["type"] == Type.ERROR
            assert "user 65534 may not run as tenant theirs" in thief.answer["text"]
            with pytest.raises(InputError, match="belongs to another user"):
                register(client, "theirs", limit=None)
            with pytest.raises(InputError, match="may only start tenants declared"):
                register(client, "new")
            with pytest.raises(InputError, match="may not change shares"):
                client.call("set", name="mine", limit=0.9)
            with pytest.raises(InputError, match="belongs to another user"):
                client.call("stop", name="theirs")
            assert len(client.call("list")["tenants"]) == 2
    finally:
        os.seteuid(0)
        agent.close()
