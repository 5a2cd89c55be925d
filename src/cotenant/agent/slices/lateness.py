"""Measures how late the agent is when it stops and resumes tenants, because other work delayed its event loop."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from cotenant.observability import metrics as names
from cotenant.observability.exposition import Histogram

LOG = logging.getLogger(__name__)
LATE_NS = 20_000_000  # delays from this one on are logged: 1 % of the window of 2 s over which shares hold
SAY_EVERY_NS = 10_000_000_000  # least time between two log lines about a GPU


@dataclass
class _Gpu:
    """What is known of one GPU. `late`, `worst_ns`: number of long delays since the last log line, and the longest."""

    delays: Histogram = field(default_factory=lambda: Histogram(names.AGENT_SWITCH_DELAY.buckets))
    late: int = 0
    worst_ns: int = 0
    said_ns: int | None = None


class Lateness:
    """The delays of each GPU, as histograms; long ones are logged."""

    def __init__(self) -> None:
        self._gpus: dict[str, _Gpu] = {}

    def delays(self, uuid: str) -> Histogram:
        """The delays of a GPU in seconds."""
        return self._gpus.setdefault(uuid, _Gpu()).delays

    def acted(self, uuid: str, due_ns: int | None, now_ns: int) -> None:
        """Record that the agent looks now whether tenants of a GPU must be stopped or resumed, which was due at
        `due_ns` (None: not at any time).
        """
        if due_ns is None or now_ns < due_ns:
            return
        gpu, late_ns = self._gpus.setdefault(uuid, _Gpu()), now_ns - due_ns
        gpu.delays.observe(late_ns / 1e9)
        if late_ns < LATE_NS:
            return
        gpu.late, gpu.worst_ns = gpu.late + 1, max(gpu.worst_ns, late_ns)
        if gpu.said_ns is None or now_ns - gpu.said_ns >= SAY_EVERY_NS:
            LOG.warning(
                "GPU %s: tenants were stopped or resumed up to %.0f ms late; delays of %.0f ms or more: %d; the agent "
                "or the machine is busy",
                uuid, gpu.worst_ns / 1e6, LATE_NS / 1e6, gpu.late,
            )  # fmt: skip
            gpu.late, gpu.worst_ns, gpu.said_ns = 0, 0, now_ns
