"""Signals that reach the launcher while it starts a program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.tenants import launcher
from cotenant.agent.tenants.launcher import Launch, run

SLEEP = ["sleep", "60"]
IGNORED = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True)"


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """Signals that this process handled itself, instead of the launcher."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def launched(monkeypatch: pytest.MonkeyPatch, command: list[str], on: Callable[[str], None]) -> int:
    """Run a command with an agent that answers every order; `on` is called with each order's name before it does."""

    class Agent:
        def __init__(self, *_given: Any, **_named: Any) -> None: ...

        def __enter__(self) -> Agent:
            return self

        def __exit__(self, *_: object) -> None: ...

        def call(self, op: str, **_order: Any) -> dict[str, Any]:
            on(op)
            return {"name": "a", "warnings": []}

    monkeypatch.setattr(launcher, "ControlClient", Agent)
    monkeypatch.setattr(launcher, "program_environment", lambda answer: dict(os.environ))
    return run(Launch(Path("nowhere"), TenantSpec("a"), command))


def test_a_signal_before_the_agent_knows_of_the_program_reaches_it(
    monkeypatch: pytest.MonkeyPatch, signals: list[int]
) -> None:
    """An agent that answers late must not leave the program without the launcher, which the signal would have ended."""

    def on(op: str) -> None:
        if op == "started":
            os.kill(os.getpid(), signal.SIGTERM)

    assert launched(monkeypatch, SLEEP, on) == 128 + signal.SIGTERM
    assert signals == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals == [signal.SIGTERM], "the handlers of before are back"


def test_a_signal_while_the_program_is_being_started_reaches_it(
    monkeypatch: pytest.MonkeyPatch, signals: list[int]
) -> None:
    start = launcher.subprocess.Popen

    def interrupted(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*given, **named)

    monkeypatch.setattr(launcher.subprocess, "Popen", interrupted)
    assert launched(monkeypatch, SLEEP, lambda op: None) == 128 + signal.SIGTERM
    assert signals == []


def test_a_signal_that_the_launcher_ignores_is_ignored_by_the_program(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launched(monkeypatch, [sys.executable, "-c", IGNORED], lambda op: None) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().out == "True\n"
