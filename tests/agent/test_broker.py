"""The broker with processes that are one end of a socket: whose turn it is, without an agent around it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_shim import FakeShim

from cotenant.abi.protocol import MESSAGE_BYTES, MessageType, ReleaseReason
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.page import Page
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.processes import Peer
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.agent.turns.hold import PARKED, RETRY, SPACE
from cotenant.devices.base import Gpu
from cotenant.policy.shares import SECOND_NS, QuotaSettings

GPU = Gpu("GPU-00000000-0000-0000-0000-000000000001", "Test GPU", 8 << 30, 0, kind="soft")
GRANT = MessageType.TOKEN_GRANT


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn ends by itself, however long a busy machine stops a test."""
    now_ns = time.monotonic_ns()
    monkeypatch.setattr("cotenant.agent.turns.broker.time", SimpleNamespace(monotonic_ns=lambda: now_ns))


class Process:
    """A process of a tenant that has attached the GPU."""

    numbers = itertools.count(1)

    def __init__(self, broker: Broker, tenant: Tenant) -> None:
        here, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        self.socket.setblocking(False)
        self.broker = broker
        self.session = Session(here, Peer(os.getpid(), 0, 0), next(self.numbers), lambda session, why: None)
        self.session.tenant, self.session.page = tenant, Page(self.session.number, 0)
        self.session.slots[0] = GPU.uuid
        self.session.welcome = True
        tenant.sessions.append(self.session)

    def told(self) -> list[dict[str, Any]]:
        """Messages that have come to it since the last call."""
        found = []
        while True:
            try:
                found.append(FakeShim.parse(self.socket.recv(MESSAGE_BYTES)))
            except BlockingIOError:
                return found

    def granted(self) -> dict[str, Any] | None:
        """The turn that it was given, if it was."""
        return next((message for message in self.told() if message["type"] == GRANT), None)

    def take(self) -> dict[str, Any]:
        self.ask()
        grant = self.granted()
        assert grant is not None
        return grant

    def ask(self) -> None:
        self.broker.request(self.session, 0, 0)

    def release(self, epoch: int, *, drained: bool = True) -> None:
        self.broker.release(self.session, 0, epoch, time.monotonic_ns(), ReleaseReason.IDLE, drained, False)

    def close(self) -> None:
        self.session.close_fds()
        self.socket.close()


class Node:
    """A broker and the processes on its GPU; `present` is whether tenants have their memory there."""

    def __init__(self) -> None:
        self.present = True
        nothing: Callable[..., None] = lambda *given: None  # noqa: E731
        self.broker = Broker(
            [GPU.uuid], QuotaSettings(), inflight_ns=10**6, residents=self, on_turn=nothing, on_fault=nothing
        )
        self.processes: list[Process] = []

    def ready(self, tenant: Tenant, gpu: str) -> bool:
        return self.present

    def patience_ns(self, tenant: Tenant, gpu: str) -> int:
        return 0

    def tenant(self, name: str, processes: int = 1) -> list[Process]:
        tenant = Tenant(TenantSpec(name), (GPU,), name, 0, Enforcement())
        self.broker.join(tenant)
        made = [Process(self.broker, tenant) for _ in range(processes)]
        self.processes += made
        return made

    def close(self) -> None:
        self.broker.close()
        for process in self.processes:
            process.close()


def on_node(test: Callable[[Node], None]) -> None:
    """Run a test on a node of its own, in an event loop."""

    async def run() -> None:
        node = Node()
        try:
            test(node)
        finally:
            node.close()

    asyncio.run(run())


def test_processes_of_a_tenant_share_its_turn() -> None:
    def test(node: Node) -> None:
        (one, two), (other,) = node.tenant("a", processes=2), node.tenant("b")
        first, second = one.take(), two.take()
        assert first["deadline_ns"] == second["deadline_ns"]
        other.ask()
        one.release(first["epoch"])
        assert other.granted() is None, "the tenant's other process still holds the turn"
        two.release(second["epoch"])
        assert other.granted()

    on_node(test)


def test_a_drain_that_fails_keeps_the_turn_until_it_ends() -> None:
    def test(node: Node) -> None:
        (one,), (other,) = node.tenant("a"), node.tenant("b")
        grant = one.take()
        other.ask()
        one.release(grant["epoch"], drained=False)
        assert one.session.page.slots[0].epoch == 0
        assert other.granted() is None
        one.release(grant["epoch"])
        assert other.granted()

    on_node(test)


def test_a_process_that_goes_gives_its_turn_to_the_next() -> None:
    def test(node: Node) -> None:
        (one,), (other,) = node.tenant("a"), node.tenant("b")
        one.take()
        other.ask()
        one.session.tenant.sessions.remove(one.session)
        node.broker.drop(one.session)
        assert other.granted()

    on_node(test)


def test_a_gang_runs_at_once_when_its_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has used up its limit and waits; no other event follows."""
    clock = SimpleNamespace(now_ns=time.monotonic_ns())
    monkeypatch.setattr("cotenant.agent.turns.broker.time", SimpleNamespace(monotonic_ns=lambda: clock.now_ns))
    gpus = (GPU, dataclasses.replace(GPU, uuid=GPU.uuid[:-1] + "2"))

    def test(node: Node) -> None:
        nothing: Callable[..., None] = lambda *given: None  # noqa: E731
        broker = Broker(
            [g.uuid for g in gpus], QuotaSettings(window_ns=SECOND_NS), inflight_ns=10**6, residents=node,
            on_turn=nothing, on_fault=nothing,
        )  # fmt: skip
        tenant = Tenant(TenantSpec("gang", limit=0.2), gpus, "gang", 0, Enforcement())
        broker.join(tenant)
        broker.wish(tenant)
        clock.now_ns += SECOND_NS // 2
        for gpu, machine in broker.turns.gpus.items():
            assert machine.turn is not None
            broker.turns.release(gpu, "gang", machine.turn.epoch, clock.now_ns)
        broker.wish(tenant)
        assert not broker.turns.holders()
        tenant.spec = dataclasses.replace(tenant.spec, limit=1.0)
        broker.join(tenant)
        assert list(broker.turns.holders().values()) == ["gang", "gang"]
        broker.close()

    on_node(test)


@pytest.mark.parametrize("comes", [True, False])
def test_a_turn_waits_for_its_tenants_memory(comes: bool) -> None:
    """It lies in the queue, and the GPU is nobody's, until the memory has come or cannot come."""

    def test(node: Node) -> None:
        (one,), (other,) = node.tenant("a"), node.tenant("b")
        node.present = False
        one.ask()
        other.ask()
        paused = node.broker.paused.get_nowait()
        assert (paused.tenant.name, paused.gpu) == ("a", GPU.uuid)
        assert node.broker.paused.empty()
        assert one.granted() is None
        node.present = True
        if comes:
            node.broker.resume_turn(paused, floor_ns=0)
            assert one.granted()
            assert other.granted() is None
        else:
            node.broker.suspend(paused.tenant)
            assert other.granted()
            assert one.granted() is None

    on_node(test)


@pytest.mark.parametrize("parked", [False, True])
def test_a_turn_without_end_waits_for_its_tenants_memory(parked: bool) -> None:
    """A tenant that takes no turns runs when all its memory is on the GPU, and then only if it is not suspended."""

    def test(node: Node) -> None:
        tenant = Tenant(TenantSpec("a", oversubscribe="swap"), (GPU,), "a", 0, Enforcement())
        one, two = Process(node.broker, tenant), Process(node.broker, tenant)
        node.processes += [one, two]
        node.present = False
        one.ask()
        two.ask()
        paused = node.broker.paused.get_nowait()
        assert node.broker.paused.empty()
        assert one.granted() is None
        assert node.broker.waits(paused)
        node.present = True
        if parked:
            node.broker.suspend(tenant)
        node.broker.resume_turn(paused, floor_ns=0)
        if parked:
            assert one.granted() is None
            node.broker.unsuspend(tenant)
        assert one.granted()
        assert two.granted()
        assert node.broker.holds(tenant, GPU.uuid)

    on_node(test)


def test_a_tenant_suspended_for_two_reasons_has_turns_when_both_have_ended() -> None:
    """One order ends while the other goes on: for instance, an attempt to restore memory while the tenant is parked."""

    def test(node: Node) -> None:
        tenant = Tenant(TenantSpec("a", oversubscribe="swap"), (GPU,), "a", 0, Enforcement())
        for first, second in ((PARKED, RETRY), (RETRY, PARKED), (SPACE, PARKED)):
            one = Process(node.broker, tenant)
            node.processes.append(one)
            node.broker.suspend(tenant, first)
            node.broker.suspend(tenant, second)
            one.ask()
            node.broker.unsuspend(tenant, first)
            assert one.granted() is None
            node.broker.unsuspend(tenant, second)
            assert one.granted()

    on_node(test)


def test_a_tenant_gets_turns_whose_namesake_ended_while_it_waited() -> None:
    """The switch of memory for the ended one begins only later."""

    def test(node: Node) -> None:
        node.present = False
        made = []
        for _ in range(2):
            tenant = Tenant(TenantSpec("a", oversubscribe="swap"), (GPU,), "a", 0, Enforcement())
            made.append(Process(node.broker, tenant))
            node.processes.append(made[-1])
            made[-1].ask()
        ended, one = made
        node.broker.drop(ended.session)
        ended.session.tenant.sessions.clear()
        node.present = True
        while not node.broker.paused.empty():
            paused = node.broker.paused.get_nowait()
            if node.broker.waits(paused):
                node.broker.resume_turn(paused, floor_ns=0)
        assert one.granted()

    on_node(test)
