"""Orders to processes to move memory: whose report ends which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fake_shim import FakeShim

from cotenant.abi.protocol import MessageType, Status
from cotenant.agent.memory.swap_orders import MoveEnd, SwapOrders


class Process:
    """A session of which only the sent messages matter."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: bytes, fd: int = -1) -> None:
        self.sent.append(data)

    def number(self) -> int:
        return int(FakeShim.parse(self.sent[-1])["sequence"])


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def ordered(orders: SwapOrders, process: Any, heard: list[int]) -> asyncio.Task[MoveEnd]:
    values = {"bytes": 100, "base": 0, "span_bytes": 0}
    order = asyncio.create_task(orders.give(process, 0, MessageType.MOVE_OUT, values, 100, heard.append))
    await asyncio.sleep(0)
    return order


def test_a_report_of_another_process_ends_no_order() -> None:
    async def test() -> None:
        orders, heard = SwapOrders(lambda: 60.0), list[int]()
        mine: Any = Process()
        other: Any = Process()
        order = await ordered(orders, mine, heard)
        orders.progress(other, mine.number(), 40)
        orders.done(other, mine.number(), MoveEnd(Status.OK, 100))
        await asyncio.sleep(0)
        assert (heard, order.done()) == ([], False)
        orders.progress(mine, mine.number(), 40)
        orders.done(mine, mine.number(), MoveEnd(Status.OK, 60))
        assert (await order).moved_bytes == 60
        assert heard == [40, 60]

    run(test)


def test_a_report_on_an_order_of_the_previous_agent_ends_no_order() -> None:
    """The process has come back to a restarted agent in the middle of a move."""

    async def test() -> None:
        process: Any = Process()
        before = await ordered(SwapOrders(lambda: 60.0), process, [])
        old = process.number()
        orders = SwapOrders(lambda: 60.0)
        order = await ordered(orders, process, [])
        assert process.number() != old
        orders.done(process, old, MoveEnd(Status.OK, 100))
        await asyncio.sleep(0)
        assert not order.done()
        for task in (before, order):
            task.cancel()

    run(test)
