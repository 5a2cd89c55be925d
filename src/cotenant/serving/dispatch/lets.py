"""State of a gpulet (a part of a GPU that one worker serves) at run time, and of the loaded model of a service."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from cotenant.core.serving import Gpulet
from cotenant.serving.dispatch.calls import Unit
from cotenant.serving.protocol.tensors import ModelInfo
from cotenant.serving.worker import Job, Worker


@dataclass(eq=False)
class Let:
    """A gpulet with its worker. `index`: position in the current plan, -1 once it is being drained; `running`: units of
    the current job; `parts`: units of the same batch that run after the current job; `free` is set when nothing runs.
    """

    spec: Gpulet
    worker: Worker | None
    index: int = -1
    job: Job | None = None
    running: list[Unit] = field(default_factory=list)
    parts: deque[list[Unit]] = field(default_factory=deque)
    started_ms: float = 0.0
    hung_ms: float = math.inf
    busy_ms: float = 0.0
    free: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.free.set()

    @property
    def seats(self) -> set[str]:
        return {seat.service for seat in self.spec.seats}


@dataclass
class Loaded:
    """The loaded model of a service: its description and its version."""

    info: ModelInfo
    version: str
