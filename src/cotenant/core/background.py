"""Starts background tasks and keeps each until its end, since an event loop holds only weak references to its tasks."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def spawn(kept: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` in a task that is in `kept` until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    kept.add(task)
    task.add_done_callback(kept.discard)
