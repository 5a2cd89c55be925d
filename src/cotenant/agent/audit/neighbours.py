"""Detects other agents of this machine that own the same GPUs.

Each agent announces itself by the names of abstract unix sockets, which every user can list and which end with their
process: `cotenant/RUN/FOLDER`, and `cotenant-gpu/GPU/RUN` for each GPU, where RUN is the agent's pid and a random
number. Agents in another network namespace (in a container without the host's network) are not seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device_of

AGENT, OWNED = "cotenant/", "cotenant-gpu/"  # beginnings of the sockets' names
# the list may have many thousands of lines, and turns wait while Python handles each
ANNOUNCED = re.compile(rb" @(cotenant[-/][^\n]*)")
NAMES = Path("/proc/net/unix")
ANSWER_S = 2.0  # time for another agent to answer


class Neighbour(NamedTuple):
    """Another agent that owns some of this agent's GPUs. `gpus`: their UUIDs. `folder`: empty if it is too long for the
    name of a socket.
    """

    pid: int
    folder: str
    gpus: tuple[str, ...]


class Neighbours:
    """The other agents that own some of this agent's GPUs."""

    def __init__(self, folder: Path, gpus: Iterable[Gpu], names: Path = NAMES) -> None:
        """Announce this agent. `names`: the kernel's list of unix sockets."""
        self._names, self._folder = names, folder.absolute()
        self._run = f"{os.getpid()}-{secrets.token_hex(2)}"
        self._gpus = {_digest(gpu): gpu for gpu in gpus}
        self._flags: list[socket.socket] = []
        self._known: dict[str, Neighbour] = {}
        for name in (f"{AGENT}{self._run}/{self._folder}", *(f"{OWNED}{each}/{self._run}" for each in self._gpus)):
            flag = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._flags.append(flag)
            with contextlib.suppress(OSError):  # the folder's path may be too long for a name
                flag.bind(b"\0" + os.fsencode(name))

    def close(self) -> None:
        """Withdraw the announcement."""
        for flag in self._flags:
            flag.close()

    @property
    def now(self) -> list[Neighbour]:
        """The other agents that the last look found."""
        return list(self._known.values())

    def look(self) -> list[str]:
        """Find the other agents. Returns a sentence for each that the last look did not find."""
        try:
            names = ANNOUNCED.findall(self._names.read_bytes())
        except OSError:
            return []
        folders: dict[str, str] = {}
        owned: dict[str, set[str]] = {}
        for name in map(os.fsdecode, names):
            if name.startswith(AGENT):
                run, _, folder = name.removeprefix(AGENT).partition("/")
                folders[run] = folder
            elif name.startswith(OWNED):
                gpu, _, run = name.removeprefix(OWNED).partition("/")
                if run != self._run and run.partition("-")[0].isdecimal() and gpu in self._gpus:
                    owned.setdefault(run, set()).add(self._gpus[gpu].uuid)
        before = self._known
        self._known = {
            run: Neighbour(int(run.partition("-")[0]), folders.get(run, ""), tuple(sorted(gpus)))
            for run, gpus in sorted(owned.items())
        }
        return [self._text(each) for run, each in self._known.items() if run not in before]

    def rows(self) -> list[dict[str, Any]]:
        """The other agents in JSON types, each with a sentence about it, as the operation `status` reports them."""
        return [
            {"pid": each.pid, "folder": each.folder or None, "gpus": list(each.gpus), "text": self._text(each)}
            for each in self.now
        ]

    def _text(self, other: Neighbour) -> str:
        numbers = sorted(gpu.index for gpu in self._gpus.values() if gpu.uuid in other.gpus)
        gpus = f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        return (
            f"{gpus}: managed by this agent (pid {os.getpid()}, {self._folder}) and by another one (pid {other.pid}, "
            f"{other.folder or 'folder not known'}); neither knows the shares of the other's tenants: stop one of "
            "them, or give them different GPUs with --gpus"
        )

    def tenants(self) -> frozenset[int]:
        """Pids of the tenants' processes of those other agents that belong to root or to this agent's user, as these
        agents report them. Blocks, at most ANSWER_S per agent.
        """
        pids: set[int] = set()
        for each in self.now:
            with contextlib.suppress(WorkError, InputError, OSError, ValueError):
                if not each.folder:
                    continue
                with ControlClient(Path(each.folder), ANSWER_S) as client:
                    if client.server_uid() in (0, os.geteuid()):
                        pids |= {pid for tenant in client.call("list")["tenants"] for pid in tenant["pids"]}
        return frozenset(pids)


def _digest(gpu: Gpu) -> str:
    """A short text that differs between the GPUs of this machine, software GPUs included."""
    return hashlib.sha256(device_of(gpu).identity(gpu.uuid).encode(errors="surrogateescape")).hexdigest()[:16]
