"""The launcher, `cotenant run`: registers a tenant with the agent, starts the tenant's program with the shim, forwards
signals to the program, and enforces its timeout.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cotenant.native
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.registry import spec_to_dict
from cotenant.core.errors import InputError, LostServerError, WorkError
from cotenant.core.folders import CONTROL_SOCKET, STATE_FILE
from cotenant.devices.registry import device

LOG = logging.getLogger(__name__)

KILL_AFTER_S = 10.0
AGENT_BACK_S = 10.0  # how long `cotenant run` waits for an agent that is being restarted
JUST_NOW_S = 60.0
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


@dataclass(frozen=True)
class Launch:
    """The options of one `cotenant run`."""

    folder: Path
    spec: TenantSpec
    command: list[str]
    limit_given: bool = True
    join: bool = False
    timeout_s: float | None = None
    empty_cache: str = "off"


def program_environment(answer: dict[str, Any]) -> dict[str, str]:
    """Environment of a tenant's program, from the agent's answer to the order `register`. Raises WorkError if there is
    no CUDA driver.
    """
    from cotenant.native.environment import tenant_environment

    kind = device(answer["device"])
    added = tenant_environment(answer["socket"], answer["token"], kind.driver(), nvml=kind.tenant_nvml())
    mine: dict[str, str] = answer["environment"]
    return os.environ | mine | added


def environment_changes(answer: dict[str, Any]) -> dict[str, str]:
    """Return the variables of `program_environment` that differ from those of this process."""
    return {name: value for name, value in program_environment(answer).items() if os.environ.get(name) != value}


def cache_hook(mode: str) -> dict[str, str]:
    """Environment that makes PyTorch in the program release its cached memory (see native/hooks)."""
    if mode == "off":
        return {}
    folder = str(Path(cotenant.native.__file__).parent / "hooks")
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    return {"COTENANT_EMPTY_CACHE": mode, "PYTHONPATH": path}


def register(client: ControlClient, launch: Launch, *, launches: bool = False) -> dict[str, Any]:
    """Register the tenant; returns the agent's answer. `launches`: this process starts only the tenant's program, so
    the agent may move it into the tenant's control group.
    """
    tenant = spec_to_dict(launch.spec)
    if not launch.limit_given:
        tenant["limit"] = None
    order = {"tenant": tenant, "join": launch.join, "timeout_s": launch.timeout_s, "launches": launches}
    return client.call("register", **order)


def _register_at_agent(launch: Launch) -> tuple[ControlClient, dict[str, Any]]:
    """Connect to the agent and register the tenant. If the agent has just ended, wait for its restart; a registration
    whose answer was lost may be repeated.
    """
    end, told = time.monotonic() + AGENT_BACK_S, False
    while True:
        client = None
        try:
            client = ControlClient(launch.folder)
            return client, register(client, launch, launches=True)
        except BaseException as error:
            if client is not None:
                client.close()
            lost = isinstance(error, LostServerError) and _has_just_ended(launch.folder)
            if not lost or time.monotonic() > end:
                raise
        if not told:
            what = "the agent in %s does not answer: waiting up to %g s for its restart"
            LOG.warning(what, launch.folder, AGENT_BACK_S)
            told = True
        time.sleep(0.1)


def _has_just_ended(folder: Path) -> bool:
    """Whether an agent was killed in this folder, so that its socket is left, or was stopped there within the last
    minute, when it wrote its state file.
    """
    if (folder / CONTROL_SOCKET).exists():
        return True
    try:
        return time.time() - (folder / STATE_FILE).stat().st_mtime < JUST_NOW_S
    except OSError:
        return False


def run(launch: Launch) -> int:
    """Run the tenant's program to its end. Returns its exit code, 128 + N for signal N as a shell does, 124 after a
    timeout.
    """
    if launch.empty_cache != "off" and launch.spec.oversubscribe == "none" and not launch.join:
        raise InputError(
            "the memory of this tenant is never evicted: add --oversubscribe swap, or leave out --empty-cache",
            field="--empty-cache",
        )
    client, answer = _register_at_agent(launch)
    with client:
        environment = program_environment(answer) | cache_hook(launch.empty_cache)
        if answer.get("parked"):  # without this message the user could not know why the program does not proceed
            name = answer["name"]
            LOG.warning("%s is parked: its GPU work waits for `cotenant resume %s`", name, name)
        # On a terminal the program stays in this process's group, so that Ctrl-C, Ctrl-Z and fg work as usual.
        # Elsewhere the program gets its own process group, and this process forwards its signals to that group.
        group = None if _on_terminal() else 0
        with _Signals(own_group=group == 0) as signals:
            try:
                child = subprocess.Popen(launch.command, env=environment, process_group=group)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                raise InputError(f"{launch.command[0]}: cannot be started: {reason}") from None
            signals.forward_to(child)
            # if the program has already ended, the agent need not know of its start
            with contextlib.suppress(WorkError):
                client.call("started", name=answer["name"], pid=child.pid)
            code = _wait(child, launch.timeout_s, name=answer["name"], folder=launch.folder)
    _report_warnings(launch.folder, answer["name"])
    return code


def _on_terminal() -> bool:
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


class _Signals:
    """Context manager: forwards this process's signals to the program. Signals that arrive while the program is being
    started are forwarded as soon as it has started; without that, they would end the launcher and not the program.
    """

    def __init__(self, *, own_group: bool) -> None:
        self._own_group = own_group
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        # a signal that this process ignores (nohup) stays ignored here, so that the program ignores it, too
        self._take(number for number in PASSED_SIGNALS if signal.getsignal(number) != signal.SIG_IGN)
        return self

    def _take(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._before[number] = signal.signal(number, self._came)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward_to(self, child: subprocess.Popen[bytes]) -> None:
        """Forward all signals, also those that have arrived, to the program."""
        self._child = child
        self._take(number for number in PASSED_SIGNALS if number not in self._before)
        while self._early:
            self._came(self._early.pop(0), None)

    def _came(self, number: int, _frame: object) -> None:
        child = self._child
        if child is None:
            self._early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            if self._own_group:
                os.killpg(child.pid, number)
            # signals of a terminal reach the program itself, too, so the launcher does not forward them
            elif number not in TERMINAL_SIGNALS:
                child.send_signal(number)


def _wait(child: subprocess.Popen[bytes], timeout_s: float | None, *, name: str, folder: Path) -> int:
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        LOG.warning("timeout of %g s: stopping the program", timeout_s)
        _stop(child, name, folder)
        return 124  # the exit code of timeout(1) in this case
    return code if code >= 0 else 128 - code


def _stop(child: subprocess.Popen[bytes], name: str, folder: Path) -> None:
    """Let the agent end all processes of the tenant. If the agent does not answer, end only the program."""
    try:
        with ControlClient(folder, timeout_s=KILL_AFTER_S + 10) as client:
            client.call("stop", name=name, grace_s=KILL_AFTER_S)
    except (WorkError, InputError):
        child.terminate()
    try:
        child.wait(KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _report_warnings(folder: Path, name: str) -> None:
    """Print the agent's warnings about the tenant."""
    try:
        with ControlClient(folder, timeout_s=5.0) as client:
            warnings: list[str] = client.call("warnings", name=name)["warnings"]
    except (WorkError, InputError):
        return
    for text in warnings:
        LOG.warning("%s: %s", name, text)
