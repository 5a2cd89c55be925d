"""Keeps the agent's periodic checks running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

LOG = logging.getLogger(__name__)
AGAIN_S = 1.0


async def lasting(work: Callable[[], Awaitable[None]], again_s: float = AGAIN_S) -> None:
    """Run `work`, a check that should run as long as the agent. If `work` raises an exception, the exception is logged
    and `work` is started again, because otherwise nothing would report tenants that evade their limits. An exception
    that repeats is logged once.
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
