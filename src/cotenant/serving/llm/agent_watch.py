"""Watches whether the agent whose tenants the models' programs are can be reached, which of these programs would
continue without it, and whether another agent manages the same GPUs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.background import in_daemon_thread
from cotenant.core.errors import WorkError
from cotenant.serving.gateway.pages import Tell
from cotenant.serving.llm.hosts import AGENT_BACK_S

LOG = logging.getLogger(__name__)

LOOK_S = 1.0
ANSWER_WITHIN_S = 10.0  # an agent that accepts a connection and does not answer for this long cannot be reached


class AgentWatch:
    """Reports when the agent can no longer be reached, when it is back, and other agents of its GPUs."""

    def __init__(
        self, folder: Path, tell: Tell, lost: Callable[[bool], None],
        refuse: Callable[[str, frozenset[str]], None],
    ) -> None:  # fmt: skip
        """`tell` gets a sentence when the agent is lost or back, and `lost` whether the agent is away. `refuse` gets
        the reason if the agent has not come back within AGENT_BACK_S, and an empty text when it is back; and the names
        of the tenants whose programs use the GPU without an agent.
        """
        self._folder, self._tell, self._lost, self._refuse = folder, tell, lost, refuse
        self.fault = ""  # why the agent cannot be reached; empty if it can
        self._lasting: frozenset[str] = frozenset()  # the tenants whose programs use the GPU without an agent
        # other agents that manage the same GPUs: those that the last look found, and those that were logged
        self._others: dict[int, str] = {}
        self._told: dict[int, str] = {}
        self._lost_s = 0.0
        self._refusing = False

    @property
    def others(self) -> dict[int, str]:
        """Sentences about other agents that manage the same GPUs, by their process ids."""
        return self._told

    async def run(self) -> None:
        """Look once a second, as long as the server runs."""
        while True:
            self.found(await in_daemon_thread(self._look), time.monotonic())
            await asyncio.sleep(LOOK_S)

    def _look(self) -> str:
        try:
            with ControlClient(self._folder, timeout_s=ANSWER_WITHIN_S) as client:
                answer = client.call("list")
        except WorkError:
            return f"the agent in {self._folder} cannot be reached"
        self._lasting = frozenset(tenant["name"] for tenant in answer["tenants"] if tenant.get("fail") == "open")
        self._others = {other["pid"]: other["text"] for other in answer.get("agent", {}).get("other_agents", ())}
        return ""

    def found(self, fault: str, now_s: float) -> None:
        """Take the result of a look."""
        for pid, text in self._others.items():
            if pid not in self._told:
                LOG.warning("%s; `cotenant serve --dir DIR` uses the agent in DIR", text)
        self._told = self._others
        if fault and not self.fault:
            self._lost_s = now_s
            text = f"{fault}: requests wait at most {AGENT_BACK_S:.0f} s for it, then they are refused"
            self._tell(text, logging.WARNING)
        elif self.fault and not fault:
            self._tell(f"the agent in {self._folder} is back after {now_s - self._lost_s:.0f} s")
        if bool(fault) != bool(self.fault):
            self._lost(bool(fault))
        self.fault = fault
        refusing = bool(fault) and now_s - self._lost_s >= AGENT_BACK_S
        if refusing != self._refusing:
            self._refusing = refusing
            self._refuse(fault, self._lasting)
