"""Orders of other threads for the controller: carried out once, or refused, and never both."""

from __future__ import annotations

import threading

import pytest

from cotenant.core.errors import WorkError
from cotenant.fleet.controller.inbox import Inbox


def test_an_order_that_was_given_up_is_not_carried_out_later() -> None:
    """Its caller was told so, and gives it again."""
    inbox, done = Inbox(), []
    with pytest.raises(WorkError, match="nothing was done"):
        inbox.call(lambda: done.append(1), timeout_s=0.0)
    inbox.serve(0.0)
    assert not done


def test_an_order_in_progress_is_waited_for() -> None:
    inbox, begun, go_on = Inbox(), threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        go_on.wait(60)
        return "done"

    answers: list[str] = []
    put = inbox._orders.put

    class Taken:
        """The queue, which returns when the controller has begun: the caller's time is over after that."""

        def put(self, item: object) -> None:
            put(item)  # type: ignore[arg-type]
            assert begun.wait(60)

        def __getattr__(self, name: str) -> object:
            return getattr(orders, name)

    orders, inbox._orders = inbox._orders, Taken()  # type: ignore[assignment]
    caller = threading.Thread(target=lambda: answers.append(inbox.call(slow, timeout_s=0.05)))
    serving = threading.Thread(target=inbox.serve, args=(60.0,))
    serving.start()
    caller.start()
    assert begun.wait(60)
    caller.join(0.5)
    assert caller.is_alive()
    go_on.set()
    caller.join(60)
    serving.join(60)
    assert answers == ["done"]


def test_an_order_that_was_carried_out_as_the_controller_ended_has_its_answer() -> None:
    inbox = Inbox()
    put = inbox._orders.put

    class Last:
        """The loop's last round, and its end, as soon as the order is there."""

        def put(self, item: object) -> None:
            put(item)  # type: ignore[arg-type]
            inbox.serve(0.0)
            inbox.close()

        def __getattr__(self, name: str) -> object:
            return getattr(orders, name)

    orders, inbox._orders = inbox._orders, Last()  # type: ignore[assignment]
    assert inbox.call(lambda: "done", 60.0) == "done"
    inbox._orders = orders
    with pytest.raises(WorkError, match="has ended"):
        inbox.call(lambda: "done", 60.0)


def test_orders_that_nobody_carries_out_are_refused_at_the_end() -> None:
    inbox = Inbox()
    inbox.wake()
    said: list[str] = []

    def call() -> None:
        try:
            inbox.call(lambda: None, 60.0)
        except WorkError as error:
            said.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    inbox.close()
    caller.join(60)
    assert said == ["the controller has ended"]
