"""The agent's side of the keeper, the process that lets all tenants run if the agent dies or is suspended.

The agent starts the keeper with the first channel group, sends it all groups, and restarts it when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotenant.devices.meters import Held

LOG = logging.getLogger(__name__)
BEAT_S = 0.15
SEND_PATIENCE_S = 0.5


class KeeperLink:
    """One keeper process, for all channel groups of GPUs with one driver."""

    def __init__(self, release: str, library: str, on_pause: Callable[[], None]) -> None:
        """`on_pause` is called after the agent was suspended for so long that the keeper has let all tenants run."""
        self._hello = {"controls": release, "library": library}
        self._on_pause = on_pause
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, tuple[Held, int]] = {}
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._last_beat = 0.0

    @property
    def pid(self) -> int | None:
        """Pid of the keeper; None before its start."""
        return self._process.pid if self._process is not None else None

    def hold(self, number: int, held: Held, slice_us: int) -> None:
        """Send a channel group to the keeper. `slice_us`: time slice to set when the agent has ended."""
        self._held[number] = held, slice_us
        if self._socket is None:
            self._start()
        else:
            self._send_group(number)

    def drop(self, number: int) -> None:
        """Tell the keeper that a channel group has ended."""
        if self._held.pop(number, None) is not None:
            self._send({"drop": number})

    def close(self) -> None:
        """End the keeper process, which then lets all tenants run."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cotenant.agent.slices.keeper", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        theirs.close()
        ours.settimeout(SEND_PATIENCE_S)
        self._socket = ours
        self._loop.add_reader(ours, self._ended)
        self._send(self._hello)
        for number in self._held:
            self._send_group(number)
        if self._beat is None:
            self._last_beat = self._loop.time()
            self._beat = self._loop.call_later(BEAT_S, self._live)

    def _live(self) -> None:
        from cotenant.agent.slices.keeper import SILENCE_S

        now = self._loop.time()
        late, self._last_beat = now - self._last_beat > SILENCE_S, now
        self._send({})
        if late:
            self._on_pause()
        self._beat = self._loop.call_later(BEAT_S, self._live)

    def _send_group(self, number: int) -> None:
        held, slice_us = self._held[number]
        group = held.group
        handles = [group.client, group.device, group.subdevice, group.group, list(group.channels), group.compute]
        self._send({"hold": number, "pid": held.pid, "group": handles, "slice_us": slice_us}, held.fd)

    def _send(self, order: dict[str, Any], fd: int = -1) -> None:
        if self._socket is None:
            return
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode()], [fd] if fd >= 0 else [])
        except OSError:
            return  # the keeper process has ended; `_ended` starts another one and sends it all channel groups

    def _ended(self) -> None:
        if self._socket is None:
            return
        try:
            if self._socket.recv(16, socket.MSG_DONTWAIT):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        if self._process is not None:
            self._process.poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        LOG.warning("the keeper, which lets all tenants run if the agent dies, has ended: starting it again")
        self._start()
