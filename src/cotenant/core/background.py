"""Starts background tasks and keeps each until its end, since an event loop holds only weak references to its tasks.
Runs functions that block in threads.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def spawn(kept: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` in a task that is in `kept` until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    kept.add(task)
    task.add_done_callback(kept.discard)


async def in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread of its own and return its result, or raise its exception. The end of the process does not
    wait for the thread, as it would for the threads of an executor.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result | None, error: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        done.set_exception(error) if error is not None else done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result = fault = None
        try:
            result = work()
        except BaseException as error:
            fault = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, fault)

    threading.Thread(target=run, daemon=True, name="blocking").start()
    return await done
