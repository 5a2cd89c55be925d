"""A real agent with a live port, on the software GPU, for the tests of the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for


class LiveAgent:
    """The agent's process, its folder and its port."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.config = folder / "agent.json"
        self.config.write_text(json.dumps(config))
        self.environment = {**os.environ, "COTENANT_SOFTGPU_STATE": str(folder / "state"), "COTENANT_DIR": str(folder)}
        self.log = folder / "agent.log"
        command = [sys.executable, "-m", "cotenant.agent", "--dir", str(folder), "--gpus", "soft"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(self.config), "--http", "127.0.0.1:0"], env=self.environment, stderr=log
            )
        try:
            self.url = self._find_url()
        except BaseException:
            self.close()
            raise

    def _find_url(self) -> str:
        def found() -> str:
            assert self.process.poll() is None, self.log.read_text()
            said = self.log.read_text()
            lines = [line for line in said.splitlines() if "live page and metrics at " in line]
            return lines[0].rpartition(" ")[2] if lines and "ready in" in said else ""

        return str(wait_for(found, what="the agent's live page"))

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def cotenant(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line against this agent."""
        command = [sys.executable, "-m", "cotenant.cli.main", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=60)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def live_agent(tmp_path: Path) -> Iterator[Callable[..., LiveAgent]]:
    """Makes agents; they end with the test."""
    made: list[LiveAgent] = []

    def make(**config: Any) -> LiveAgent:
        folder = tmp_path / f"agent{len(made)}"
        folder.mkdir()
        made.append(LiveAgent(folder, config))
        return made[-1]

    yield make
    for agent in made:
        agent.close()
