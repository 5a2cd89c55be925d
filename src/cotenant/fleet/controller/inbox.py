"""Orders of other threads, which the controller's thread executes between two steps."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from cotenant.core.errors import WorkError

T = TypeVar("T")


class Inbox:
    """The queue of orders of one controller. Other threads use `call`, the controller's thread uses `serve`."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._closed = False

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Have the controller's thread execute `work`, and return the result. Raises WorkError if the controller has
        ended or has not begun `work` after `timeout_s`; then `work` is never executed.
        """
        future: Future[T] = Future()
        self._orders.put((work, future))
        if self._closed:
            self._refuse()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if not future.cancel():  # the controller is executing the order already, so its result must be awaited
                return future.result()
            raise WorkError("the controller is busy and did not answer: nothing was done") from None

    def wake(self) -> None:
        """End the wait of `serve` for orders."""
        self._orders.put((lambda: None, Future()))

    def serve(self, patience_s: float) -> None:
        """Execute the orders in the queue. Waits up to `patience_s` for the first one."""
        with suppress(queue.Empty):
            while True:
                work, future = self._orders.get(timeout=max(0.0, patience_s))
                patience_s = 0.0
                if not future.set_running_or_notify_cancel():
                    continue  # the caller of the order has given up waiting, so the order is not executed
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

    def close(self) -> None:
        """Refuse all orders in the queue, and all later ones."""
        self._closed = True
        self._refuse()

    def _refuse(self) -> None:
        with suppress(queue.Empty):
            while True:
                future = self._orders.get_nowait()[1]
                if future.set_running_or_notify_cancel():
                    future.set_exception(WorkError("the controller has ended"))
