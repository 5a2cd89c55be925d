"""A tenant that is evicted by checkpoint while its program waits in a driver call is resumed by the agent, because a
frozen program cannot ask for its turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cotenant.abi.protocol import MemoryFamily
from cotenant.agent.memory import checkpoints
from cotenant.agent.memory.checkpoints import Checkpoints
from cotenant.agent.memory.ledger import Ledger
from cotenant.agent.memory.parked import ParkedTable

GPU = "GPU-0"


class Whole:
    """Processes that can always be checkpointed."""

    async def able(self, name: str, tenant: object) -> tuple[int, ...]:
        return (1,)

    async def free_bytes(self, uuids: object) -> int:
        return 0

    async def checkpoint(self, keys: object, size: int, timeout_s: float) -> None:
        pass


@pytest.mark.parametrize("reserving", [True, False])
def test_a_tenant_evicted_while_it_takes_memory_asks_for_a_turn(
    monkeypatch: pytest.MonkeyPatch, reserving: bool
) -> None:
    monkeypatch.setattr(checkpoints, "WISH_S", 0.001)
    wished: list[str] = []
    rounds = 0
    ledger = Ledger()
    ledger.gpu(GPU, 1 << 30)
    ledger.join(7, "c")
    if reserving:
        assert ledger.reserve(7, GPU, MemoryFamily.PLAIN, 8 << 20) is not None
    tenant = SimpleNamespace(name="c", gpus=[SimpleNamespace(uuid=GPU)])

    class Tenants(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            nonlocal rounds
            rounds += 1
            return super().get(name, default)

    broker = SimpleNamespace(
        suspend=lambda *_: None, unsuspend=lambda *_: None, holds=lambda *_: False,
        wish=lambda tenant: wished.append(tenant.name),
    )  # fmt: skip
    registry = SimpleNamespace(tenants=Tenants(c=tenant), gated=lambda _: True)
    host = SimpleNamespace(check_room=lambda *_: None)
    state = SimpleNamespace(save=lambda: None, save_now=lambda: True)
    residents = SimpleNamespace(count=lambda _: SimpleNamespace(add_whole=lambda *_, **__: None))

    async def run() -> None:
        table = ParkedTable()
        parts = (Whole(), table, residents, registry, host, ledger, broker, state)
        desk = Checkpoints(*cast("Any", parts))
        assert await desk.evict(cast("Any", tenant)) is None
        while rounds < 3:
            await asyncio.sleep(0)
        table.rows.clear()  # the tenant is back
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await task

    asyncio.run(run())
    assert bool(wished) == reserving
