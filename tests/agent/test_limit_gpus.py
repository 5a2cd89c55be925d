"""Memory limits of tenants with several GPUs, and of tenants that move to another GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from limit_world import GIB, PlainCard, World

from cotenant.agent.lifecycle.accounts import Accounts
from cotenant.core.errors import InputError
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu
from cotenant.devices.cards import NO_LIMIT
from cotenant.devices.registry import device
from cotenant.policy.memory_limits import Detected

FOUND = Detected("615", call=True, cgroup=2, root=True)


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child.pid
        child.kill()


class Pair:
    """An agent with two GPUs, a card for each, and a launcher in a group that another program made."""

    def __init__(self, folder: Path, process: int) -> None:
        first = device("soft").gpus()[0]
        second = replace(first, uuid=first.uuid[:-1] + "0", index=1)
        self.cards = {first.uuid: PlainCard(), second.uuid: PlainCard()}
        self.world = World(folder, more=(second,), card=self._card, find=lambda gpu: FOUND)
        self.gpus = (first, second)
        self.group = self.world.group("system.slice", "train.service")
        self.world.groups.enter(self.group, process)

    def _card(self, gpu: Gpu) -> PlainCard:
        return self.cards[gpu.uuid]

    def on(self, gpu: Gpu) -> int:
        """The limit of the launcher's group on a GPU."""
        return self.cards[gpu.uuid].limits.get(self.group, NO_LIMIT)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: int) -> Pair:
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
    return Pair(tmp_path, process)


def test_each_gpu_is_reported_with_its_own_fault(pair: Pair, process: int) -> None:
    world, (first, second) = pair.world, pair.gpus
    tenant = world.tenant(gpu_count=2)
    world.begin(tenant, process)
    assert (pair.on(first), pair.on(second)) == (GIB, GIB)
    pair.cards[second.uuid].lost = True
    world.look()
    assert world.limits.of(tenant, first).by is Strength.DRIVER
    pair.cards[first.uuid].lost = True
    world.look()
    for gpu in pair.gpus:
        found = world.limits.of(tenant, gpu)
        assert (found.by, f"on GPU {gpu.index} " in found.why) == (Strength.SHIM, True)


def test_a_limit_that_could_not_be_cleared_on_the_gpu_it_left_is_cleared_at_the_end(pair: Pair, process: int) -> None:
    world, (first, second) = pair.world, pair.gpus
    tenant = world.tenant(gpus=(first.uuid,))
    world.begin(tenant, process)
    pair.cards[first.uuid].lost = True
    world.registry.replace(tenant, second)
    world.leave(tenant, first)
    world.limits.follow(tenant)
    assert (pair.on(first), pair.on(second)) == (GIB, GIB)
    world.look()
    assert world.warnings == [], "the tenant does not use that GPU any more"
    pair.cards[first.uuid].lost = False
    world.registry.remove(tenant)
    world.end(tenant)
    assert (pair.on(first), pair.on(second)) == (NO_LIMIT, NO_LIMIT)


def test_a_tenant_stays_where_it_is_if_the_driver_refuses_its_limit_on_the_other_gpu(pair: Pair, process: int) -> None:
    world, (first, second) = pair.world, pair.gpus
    tenant = world.tenant(gpus=(first.uuid,))
    world.begin(tenant, process)
    parts = {name: Mock() for name in ("ledger", "pages", "residents", "broker", "copies", "slices")}
    accounts = Accounts(world.registry, **parts, limits=world.limits)
    pair.cards[second.uuid].lost = True
    with pytest.raises(InputError, match="GPU 1"):
        accounts.move(tenant, second.uuid)
    assert tenant.gpus == (first,)
    assert [part.method_calls for part in parts.values()] == [[]] * 6
    assert (pair.on(first), pair.on(second)) == (GIB, NO_LIMIT)
    pair.cards[second.uuid].lost = False
    world.limits.precede(tenant, second)
    assert pair.on(second) == GIB
