"""An agent with software GPUs of its own and programs that are told what to do, for tests of oversubscription."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from waiting import wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, program_environment, register
from cotenant.core.errors import InputError, WorkError

PROGRAM = Path(__file__).with_name("swap_program.py")
AGENT = (sys.executable, "-m", "cotenant.agent")
MIB = 1 << 20
CONTEXT = 256 * MIB  # memory of one CUDA context on the software GPU
# moving memory may take up to half of the time, so that turns stay short
SETTINGS = {"quota": "50ms", "min_quota": "20ms", "max_quota": "50ms", "most_moving": 0.5}
SETTINGS |= {"context_reserve": CONTEXT, "swap_memory": 2048 * MIB}


class Program:
    """One tenant's (or, without a spec, nobody's) program."""

    def __init__(
        self, node: Node, name: str, spec: TenantSpec | None, join: bool = False, script: Path = PROGRAM
    ) -> None:
        environment = dict(node.environment)
        client = None
        if spec is not None:
            client = ControlClient(node.folder)
            node.clients.append(client)
            answer = register(client, Launch(node.folder, spec, [name], join=join))
            environment |= {
                key: value
                for key, value in program_environment(answer).items()
                if key.startswith(("LD_", "COTENANT_")) and "SOFTGPU" not in key
            }
        else:
            from cotenant.native.libraries import SOFT_DRIVER, library_path

            environment["CLIENT_LIBRARY"] = str(library_path(SOFT_DRIVER))
        self.process = subprocess.Popen(
            [sys.executable, str(script), f"{name}{'-joined' if join else ''}"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        node.programs.append(self)
        if client is not None:
            client.call("started", name=name, pid=self.process.pid)
        assert self.answer() == "ready"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline().strip()
        assert line, self.process.stderr.read()[-1500:]
        return line

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()


class Node:
    """An agent with software GPUs of its own."""

    def __init__(
        self, folder: Path, memory: int, count: int = 1, command: Sequence[str] = AGENT, **settings: Any
    ) -> None:
        """`memory`: bytes of each GPU; `command` starts the agent."""
        self.folder, self.command = folder, command
        self.environment = {
            **os.environ,
            "COTENANT_SOFTGPU_STATE": str(folder / "softgpu"),
            "COTENANT_SOFTGPU_MEMORY": str(memory),
            "COTENANT_SOFTGPU_COUNT": str(count),
        }
        sizes = ("context_reserve", "swap_memory", "gpu_memory")
        written = {k: f"{v}B" if k in sizes else v for k, v in (SETTINGS | settings).items()}
        (folder / "agent.json").write_text(json.dumps(written))
        self.programs: list[Program] = []
        self.clients: list[ControlClient] = []
        self.start()

    def start(self) -> None:
        command = [*self.command, "--dir", str(self.folder), "--gpus", "soft"]
        self.log = open(self.folder / "agent.log", "ab")  # noqa: SIM115
        self.agent = subprocess.Popen(
            [*command, "--config", str(self.folder / "agent.json")],
            env=self.environment,
            stdout=self.log,
            stderr=self.log,
        )

        def up() -> bool:
            assert self.agent.poll() is None, self.said()
            with contextlib.suppress(WorkError):
                ControlClient(self.folder).close()
                return True
            return False

        wait_for(up, what="the agent")

    def said(self) -> str:
        return (self.folder / "agent.log").read_text()

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        with ControlClient(self.folder, timeout_s=60) as client:
            return client.call(op, **order)

    def tenant(self, name: str) -> dict[str, Any]:
        return next(row for row in self.call("list")["tenants"] if row["name"] == name)

    def where(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = self.tenant(name)["gpus"][0]["residency"]
        return row

    def joined(self, name: str) -> Program:
        """One more program of a tenant."""
        return Program(self, name, TenantSpec(name), join=True)

    def program(
        self, name: str, mode: str = "swap", memory: int | None = 520 * MIB, script: Path = PROGRAM, **more: Any
    ) -> Program:
        return Program(self, name, TenantSpec(name, memory_bytes=memory, oversubscribe=mode, **more), script=script)

    def close(self) -> None:
        for program in self.programs:
            program.process.kill()
            program.process.communicate()
        for client in self.clients:
            client.close()
        self.agent.terminate()
        try:
            self.agent.wait(10)
        except subprocess.TimeoutExpired:
            self.agent.kill()
            self.agent.wait()
        self.log.close()


def under_way(here: Node, name: str) -> bool:
    """Whether a tenant is being parked or resumed now."""
    try:
        here.call("resume", name=name, gpu="no such GPU")
    except WorkError as error:
        return "already being parked or resumed" in str(error)
    except InputError:
        pass
    return False


@contextlib.contextmanager
def nodes_in(folder: Path) -> Iterator[Callable[..., Node]]:
    """Makes nodes (memory in bytes, settings), each in a folder of its own below; all are closed in the end."""
    made: list[Node] = []

    def make(memory: int, **settings: Any) -> Node:
        own = folder / f"n{len(made)}"
        own.mkdir()
        made.append(Node(own, memory, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
