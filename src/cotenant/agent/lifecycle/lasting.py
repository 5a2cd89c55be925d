"""Keeps the agent's periodic checks running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

LOG = logging.getLogger(__name__)
AGAIN_S = 1.0


async def lasting(work: Callable[[], Awaitable[None]], again_s: float = AGAIN_S) -> None:
    """Do work that is expected to run as long as the agent. If it raises an exception, it is logged once and the work
    starts again: without the check, nothing would report tenants that evade their limits.
    """
    said = ""
    while True:
        try:
            await work()
            return
        except Exception as error:
            if said != repr(error):
                said = repr(error)
                LOG.exception("a background task of the agent failed and is started again")
        await asyncio.sleep(again_s)
