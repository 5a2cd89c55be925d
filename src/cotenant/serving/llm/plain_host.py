"""What a host of models' programs does, and the host that runs them without a GPU and without an agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cotenant.core.errors import InputError, WorkError
from cotenant.serving.config.models import ModelEntry


@dataclass(frozen=True)
class GpuRoom:
    """A GPU for models, and the memory that they may use."""

    index: int
    uuid: str
    memory_bytes: int
    name: str = ""  # what kind of GPU this is, for people


class Host(Protocol):
    """Starts model processes and moves them between GPU and host memory. Its methods raise WorkError or InputError when
    they fail, with the reason.
    """

    gpus: list[GpuRoom]
    moves: bool  # true: evicted programs are kept in host memory; false: they are stopped

    @property
    def agent(self) -> Path | None:
        """Folder of the agent that runs the programs as its tenants; None if the programs use no agent."""

    async def start(self) -> None:
        """Prepare the host. Afterwards, `gpus` lists the GPUs that the models may use."""

    async def spawn(self, model: ModelEntry, gpu: int, command: list[str], log: Path) -> asyncio.subprocess.Process:
        """Start a program in a process group of its own, with its output in a file."""

    async def evict(self, name: str) -> None:
        """Evict a program from its GPU to host memory."""

    async def bring(self, name: str) -> None:
        """Bring an evicted program back to its GPU."""

    async def exchange(self, name: str, leave: Sequence[str]) -> dict[str, float]:
        """Bring an evicted program back to its GPU, and evict others for it at the same time. Returns in how many
        seconds each of them was evicted; those that are missing could not be evicted.
        """

    async def released(self, name: str) -> None:
        """Wait until the host memory of a program that has ended is free for another one."""

    async def close(self) -> None:
        """Stop everything that the host has started."""


async def spawn(command: list[str], log: Path, environment: Mapping[str, str] | None) -> asyncio.subprocess.Process:
    """Start a program whose output goes to a file. Raises InputError if it cannot be started."""
    with log.open("ab") as out:
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(f"{command[0]}: {reason.lower()}") from None


class PlainHost:
    """A Host without a GPU, with a given amount of host memory. Its programs cannot be evicted."""

    moves = False
    agent = None

    def __init__(self, memory_bytes: int) -> None:
        self.gpus = [GpuRoom(0, "", memory_bytes, "main memory")]

    async def start(self) -> None:
        """See Host."""

    async def spawn(self, model: ModelEntry, gpu: int, command: list[str], log: Path) -> asyncio.subprocess.Process:
        return await spawn(command, log, None)

    async def evict(self, name: str) -> None:
        raise WorkError("a program without a GPU cannot be moved")

    async def bring(self, name: str) -> None:
        """See Host."""

    async def exchange(self, name: str, leave: Sequence[str]) -> dict[str, float]:
        """See Host. Here they are moved one after the other."""
        took_s: dict[str, float] = {}
        for other in leave:
            began_s = time.monotonic()
            await self.evict(other)
            took_s[other] = time.monotonic() - began_s
        await self.bring(name)
        return took_s

    async def released(self, name: str) -> None:
        """See Host."""

    async def close(self) -> None:
        """See Host."""


def last_line(log: Path) -> str:
    """The last line of a program's output, shortened."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip()[:200] if lines else ""
