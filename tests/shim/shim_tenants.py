"""Programs under the real shim, for the tests of the shim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fake_agent import FakeAgent

from cotenant.native.environment import tenant_environment

HERE = Path(__file__).resolve().parent


class Tenants:
    """Starts programs under the shim and sees to it that none outlives the test."""

    def __init__(self, environment: dict[str, str], driver: Path, client: Path) -> None:
        self.environment, self.driver, self.client = environment, driver, client
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, agent: FakeAgent | None, command: list[str], **extra: str) -> subprocess.Popen[str]:
        environment = dict(self.environment)
        if agent is not None:
            added = tenant_environment(agent.path, "token", self.driver)
            environment |= {key: value for key, value in added.items() if key.startswith(("LD_", "COTENANT_"))}
            environment |= {key: value for key, value in self.environment.items() if "SOFTGPU" in key}
        environment |= extra
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def client_run(self, agent: FakeAgent | None, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        if agent is None:
            extra.setdefault("CLIENT_LIBRARY", str(self.driver))
        return self.start(agent, [str(self.client), *arguments], **extra)

    def python(self, agent: FakeAgent | None, script: str, **extra: str) -> subprocess.Popen[str]:
        extra.setdefault("PYTHONPATH", str(HERE))
        if agent is None:
            extra.setdefault("CLIENT_LIBRARY", str(self.driver))
        return self.start(agent, [sys.executable, "-c", script], **extra)

    def output(self, process: subprocess.Popen[str], timeout: float = 120) -> str:
        """Standard output of a process that must end well."""
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"exit {process.returncode}: {out} {err}"
        return out
