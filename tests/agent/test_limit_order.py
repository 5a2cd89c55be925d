"""The event loop does not wait for the driver to change memory limits, and the changes keep their order."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from limit_world import GIB, PlainCard, World
from waiting import WITHIN_S

from cotenant.agent.tenants.tenant import Tenant
from cotenant.devices.cards import NO_LIMIT
from cotenant.devices.registry import device
from cotenant.policy.memory_limits import Detected


class SlowCard(PlainCard):
    """A card that begins a change of a limit only when it may. `calls`: the limits as they were set."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.waits = threading.Event(), threading.Event()
        self.calls: list[int] = []
        self.threads: set[str] = set()

    def set_memory_limits(self, group: Path, soft: int, hard: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.waits.set()
        assert self.may.wait(WITHIN_S)
        self.calls.append(hard)
        super().set_memory_limits(group, soft, hard)


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child.pid
        child.kill()


@pytest.fixture
def card() -> SlowCard:
    return SlowCard()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: SlowCard) -> World:
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
    found = Detected("615", call=True, cgroup=2, root=True)
    return World(tmp_path, card=lambda gpu: card, find=lambda gpu: found)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0)


def in_service(world: World, process: int) -> Path:
    group = world.group("system.slice", "train.service")
    world.groups.enter(group, process)
    return group


def next_tenant(world: World, tenant: Tenant, name: str) -> Tenant:
    world.registry.remove(tenant)
    return world.tenant(name, memory_bytes=2 * GIB)


def test_a_start_and_an_end_leave_the_event_loop_free(world: World, card: SlowCard, process: int) -> None:
    tenant, group = world.tenant(), in_service(world, process)

    async def run() -> None:
        begins = asyncio.create_task(world.limits.begin(tenant, process))
        await until(card.waits.is_set)  # the driver waits, and this loop runs
        assert not begins.done()
        card.may.set()
        await begins
        assert card.limits == {group: GIB}
        card.may.clear()
        card.waits.clear()
        world.registry.remove(tenant)
        world.limits.end(tenant)
        await until(card.waits.is_set)
        assert card.limits == {group: GIB}
        assert [each.path for each in world.limits.closing()] == [group], "the next agent must clear it"
        card.may.set()
        await until(lambda: not world.limits.closing())

    asyncio.run(run())
    assert card.calls == [GIB, NO_LIMIT]
    assert threading.current_thread().name not in card.threads


def test_a_tenant_that_ends_while_it_starts_leaves_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: int
) -> None:
    """It has two GPUs, and ends while the limit on the first one is being set: nothing would clear the second one."""
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
    first, second = SlowCard(), SlowCard()
    more = replace(device("soft").gpus()[0], index=1, uuid="GPU-second")
    found = Detected("615", call=True, cgroup=2, root=True)
    world = World(tmp_path, more=(more,), card=lambda gpu: second if gpu == more else first, find=lambda gpu: found)
    second.may.set()
    tenant = world.tenant(gpus=(world.gpu.uuid, more.uuid))
    in_service(world, process)

    async def run() -> None:
        begins = asyncio.create_task(world.limits.begin(tenant, process))
        await until(first.waits.is_set)
        world.registry.remove(tenant)
        world.limits.end(tenant)
        sweeps = list(world.limits._sweeps)
        await asyncio.sleep(0)  # the order to clear the limits is given
        first.may.set()
        await asyncio.gather(begins, *sweeps)

    asyncio.run(run())
    assert (first.calls, second.calls) == ([GIB, NO_LIMIT], [NO_LIMIT])
    assert world.limits.closing() == []


def test_the_next_tenant_in_a_group_keeps_its_limit(world: World, card: SlowCard, process: int) -> None:
    """The limit of its predecessor is still being cleared when it starts."""
    card.may.set()
    tenant, group = world.tenant(), in_service(world, process)

    async def run() -> None:
        await world.limits.begin(tenant, process)
        card.may.clear()
        card.waits.clear()
        following = next_tenant(world, tenant, "two")
        world.limits.end(tenant)
        await until(card.waits.is_set)
        begins = asyncio.create_task(world.limits.begin(following, process))
        await until(lambda: following.held is not None)
        card.may.set()
        await begins
        await asyncio.gather(*world.limits._sweeps)
        await world.limits._watch.look()
        assert world.limits.not_enforced(following) == []

    asyncio.run(run())
    assert card.calls == [GIB, NO_LIMIT, 2 * GIB]
    assert card.limits == {group: 2 * GIB}
    assert world.warnings == []


def test_a_group_that_is_used_again_before_its_limit_was_cleared_is_not_cleared(
    world: World, card: SlowCard, process: int
) -> None:
    """The order to clear it waits behind another order when the next tenant starts."""
    card.may.set()
    tenant, group = world.tenant(), in_service(world, process)
    elsewhere = world.group("elsewhere")

    async def run() -> None:
        await world.limits.begin(tenant, process)
        card.may.clear()
        card.waits.clear()
        before = world.limits._applied.give(world.limits._applied.set, elsewhere, world.gpu, GIB)
        following = next_tenant(world, tenant, "two")
        world.limits.end(tenant)
        await until(card.waits.is_set)
        begins = asyncio.create_task(world.limits.begin(following, process))
        await until(lambda: following.held is not None)
        card.may.set()
        await begins
        await asyncio.gather(*world.limits._sweeps)
        assert before.done()

    asyncio.run(run())
    assert card.calls == [GIB, GIB, 2 * GIB]
    assert card.limits == {group: 2 * GIB, elsewhere: GIB}


def test_a_limit_that_is_being_changed_is_not_taken_for_another_programs(
    world: World, card: SlowCard, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has the new limit already, and the agent does not know yet that the driver has taken it."""
    card.may.set()
    tenant, group = world.tenant(), in_service(world, process)
    may, took = threading.Event(), threading.Event()

    def set_memory_limits(path: Path, soft: int, hard: int) -> None:
        card.limits[path] = hard
        took.set()
        assert may.wait(WITHIN_S)

    async def run() -> None:
        await world.limits.begin(tenant, process)
        monkeypatch.setattr(card, "set_memory_limits", set_memory_limits)
        applied = world.limits._applied
        given = applied.give(applied.change, group, world.gpu, 2 * GIB)
        await until(took.is_set)
        await world.limits._watch.look()
        may.set()
        await asyncio.wrap_future(given)

    asyncio.run(run())
    assert card.limits == {group: 2 * GIB}
    assert world.warnings == []


def test_a_share_that_keeps_its_memory_limit_does_not_ask_the_driver(
    world: World, card: SlowCard, process: int
) -> None:
    card.may.set()
    tenant = world.tenant()
    in_service(world, process)
    world.begin(tenant, process)
    world.limits.follow(tenant)
    assert card.calls == [GIB]
    tenant.spec = replace(tenant.spec, memory_bytes=2 * GIB)
    world.limits.follow(tenant)
    assert card.calls == [GIB, 2 * GIB]
