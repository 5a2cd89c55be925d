"""Real processes under the real shim on the software GPU, with a tiny agent in the test's own process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from fake_agent import FakeAgent  # noqa: E402

from cotenant.shim import build as shim_build  # noqa: E402
from cotenant.softgpu import build as soft_build  # noqa: E402


@pytest.fixture(scope="session")
def soft_library() -> Path:
    if shutil.which(shim_build.compiler()) is None:
        pytest.skip("no C compiler")
    return soft_build.build()


@pytest.fixture(scope="session")
def shim_library(soft_library: Path) -> Path:
    return shim_build.build(soft_library)


@pytest.fixture(scope="session")
def client_program(soft_library: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "client"
        shim_build.run_compiler(["-O1", "-w", str(HERE / "client.c"), "-o", str(target), "-ldl", "-lpthread"])
        yield target


@pytest.fixture
def soft_environment(tmp_path: Path) -> dict[str, str]:
    """A software GPU of the test's own: 1 GiB, its state in the test's folder."""
    return {
        **os.environ,
        "COTENANT_SOFTGPU_STATE": str(tmp_path / "softgpu"),
        "COTENANT_SOFTGPU_MEMORY": str(4 << 30),
    }


class Tenants:
    """Starts programs under the shim and sees to it that none outlives the test."""

    def __init__(self, environment: dict[str, str], driver: Path, client: Path) -> None:
        self.environment, self.driver, self.client = environment, driver, client
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, agent: FakeAgent | None, command: list[str], **extra: str) -> subprocess.Popen[str]:
        environment = dict(self.environment)
        if agent is not None:
            added = shim_build.tenant_environment(agent.path, "token", self.driver)
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

    def output(self, process: subprocess.Popen[str], timeout: float = 30) -> str:
        """Standard output of a process that must end well."""
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"exit {process.returncode}: {out} {err}"
        return out


@pytest.fixture
def tenants(soft_environment: dict[str, str], soft_library: Path, client_program: Path) -> Iterator[Tenants]:
    started = Tenants(soft_environment, soft_library, client_program)
    yield started
    for process in started.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children too: one that hangs would keep the pipes open
        process.communicate(timeout=20)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., FakeAgent]]:
    """Makes agents; they are closed after the test."""
    made: list[FakeAgent] = []

    def make(**settings: object) -> FakeAgent:
        made.append(FakeAgent(tmp_path / f"agent{len(made)}.sock", **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
