"""Agents as real processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from agent_harness import AgentProcess


@pytest.fixture
def short_folder(tmp_path: Path) -> Path:
    """A folder whose path is short enough for a unix socket."""
    if len(str(tmp_path)) < 70:
        return tmp_path
    return Path(tempfile.mkdtemp(prefix="cot-"))


@pytest.fixture
def start_agent(short_folder: Path) -> Iterator[Callable[..., AgentProcess]]:
    """Starts agents; stops them at the end."""
    started: list[AgentProcess] = []

    def start(**options: Any) -> AgentProcess:
        folder = short_folder / f"a{len(started)}"
        folder.mkdir()
        started.append(AgentProcess(folder, **options))
        return started[-1]

    yield start
    for agent in started:
        agent.close()


@pytest.fixture
def agent(start_agent: Callable[..., AgentProcess]) -> AgentProcess:
    """An agent with one GPU of 8 GiB and the default settings."""
    return start_agent()
