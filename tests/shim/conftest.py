"""Real processes under the real shim on the software GPU, with a tiny agent in the test's own process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from fake_agent import FakeAgent  # noqa: E402
from native_sources import compile_c  # noqa: E402
from shim_tenants import Tenants  # noqa: E402

from cotenant.native.libraries import DRIVER_SHIM, SOFT_DRIVER, library_path  # noqa: E402


@pytest.fixture(scope="session")
def soft_library() -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return library_path(SOFT_DRIVER)


@pytest.fixture(scope="session")
def shim_library(soft_library: Path) -> Path:
    return library_path(DRIVER_SHIM)


@pytest.fixture(scope="session")
def client_program(soft_library: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "client"
        compile_c(["-O1", "-w", HERE / "client.c", "-o", target, "-ldl", "-lpthread"])
        yield target


@pytest.fixture
def soft_environment(tmp_path: Path) -> dict[str, str]:
    """A software GPU of the test's own: 4 GiB, its state in the test's folder."""
    return {
        **os.environ,
        "COTENANT_SOFTGPU_STATE": str(tmp_path / "softgpu"),
        "COTENANT_SOFTGPU_MEMORY": str(4 << 30),
    }


@pytest.fixture
def tenants(soft_environment: dict[str, str], soft_library: Path, client_program: Path) -> Iterator[Tenants]:
    started = Tenants(soft_environment, soft_library, client_program)
    yield started
    for process in started.processes:
        with contextlib.suppress(ProcessLookupError):
            # kill the children too, because one that hangs would keep the pipes open
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


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
