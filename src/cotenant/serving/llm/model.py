"""The state of one language model in a server."""

from __future__ import annotations

import asyncio
from collections import deque

from cotenant.policy.residency import ModelRow
from cotenant.serving.config.models import ModelEntry
from cotenant.serving.llm.program import Program
from cotenant.serving.llm.stats import ModelStats
from cotenant.serving.llm.tickets import Ticket


class Model:
    """One language model: its queue of requests, its program, its counters."""

    __slots__ = (
        "acting", "entry", "estimated", "failures", "fault", "moves_failed", "program", "queue", "row", "stats",
    )  # fmt: skip

    def __init__(self, entry: ModelEntry, row: ModelRow) -> None:
        self.entry, self.row = entry, row
        self.queue: deque[Ticket] = deque()
        self.program: Program | None = None
        self.stats = ModelStats()
        self.failures = self.moves_failed = 0
        self.estimated = False  # the number of tokens of some answers was not known
        self.fault = ""  # why the model is unavailable; empty if it is available
        # held by the action in progress: an order about a program that has ended must not reach the program's next run
        self.acting = asyncio.Lock()
