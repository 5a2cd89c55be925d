"""An agent as a real process, for the tests of the node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import wait_for

from cotenant.agent.ipc.client import ControlClient

# The unix socket path must stay under 108 bytes, which pytest's own temporary folders do not promise.
AGENT = """
import asyncio, json, sys
from pathlib import Path
from cotenant.agent.__main__ import serve
from cotenant.agent.daemon import AgentOptions
from cotenant.devices.base import Gpu, uuid_text
import cotenant.agent.__main__ as main
folder, source, trace, count = sys.argv[1:5]
gpus = tuple(Gpu(uuid_text(bytes([i + 1]) * 16), "Test GPU", 8 << 30, i, kind="soft") for i in range(int(count)))
options = AgentOptions(Path(folder), source or None, Path(trace) if trace else None, gpus=gpus)
sys.argv = sys.argv[:1]
from cotenant.core.errors import InputError, WorkError
try:
    asyncio.run(serve(options))
except (InputError, WorkError) as error:
    print(error, file=sys.stderr)
    sys.exit(2 if isinstance(error, InputError) else 1)
"""


def gpu_uuid(index: int) -> bytes:
    """UUID bytes of the agent fixture's GPUs."""
    return bytes([index + 1]) * 16


class AgentProcess:
    """An agent in a folder of its own."""

    def __init__(self, folder: Path, config: str = "", trace: str = "", gpus: int = 1) -> None:
        self.folder = folder
        self.arguments = [str(folder), config, trace, str(gpus)]
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        self.log = open(self.folder / "agent.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, *self.arguments], stderr=self.log, stdout=self.log, start_new_session=True
        )
        wait_for(self.up, what="the agent listens")

    def up(self) -> bool:
        """The agent answers. AssertionError: it has ended."""
        if self.process.poll() is not None:
            raise AssertionError(f"the agent ended: {self.said()}")
        try:
            self.client().close()
        except Exception:
            return False
        return True

    def said(self) -> str:
        return (self.folder / "agent.log").read_text()

    def client(self) -> ControlClient:
        return ControlClient(self.folder, timeout_s=60)

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        with self.client() as client:
            return client.call(op, **order)

    def tenant(self, name: str) -> dict[str, Any]:
        rows = [t for t in self.call("list")["tenants"] if t["name"] == name]
        assert rows, f"no tenant {name}"
        return rows[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


def declare(folder: Path, text: str) -> str:
    """Write an agent config file, or replace it at once, so that no agent reads a part of it; returns its path."""
    path, fresh = folder / "agent.yaml", folder / "agent.yaml.new"
    fresh.write_text(text)
    fresh.replace(path)
    return str(path)


def saved(folder: Path, name: str) -> dict[str, Any]:
    """A tenant as the agent's state file has it, which the agent writes soon after a change; {} if it has none."""
    try:
        rows = json.loads((folder / "state.json").read_text())["tenants"]
    except FileNotFoundError:
        return {}
    return next((row for row in rows if row["spec"]["name"] == name), {})


def state_cannot_be_written(folder: Path) -> None:
    """From here on the agent's state file stays as it is: a folder is where the new one would be written."""

    def blocked() -> bool:
        try:
            (folder / "state.new").mkdir()
        except FileExistsError:  # the agent is writing
            return (folder / "state.new").is_dir()
        return True

    wait_for(blocked)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
