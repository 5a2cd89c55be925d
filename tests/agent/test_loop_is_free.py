"""The agent's event loop goes on while threads read /proc or wait for the driver."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.agent import __main__ as main
from cotenant.agent import processes
from cotenant.agent.audit import processes as audit
from cotenant.agent.audit.processes import UnseenWatch
from cotenant.agent.config.files import AgentConfig, TenantSpec
from cotenant.agent.control.owner_orders import OwnerOrders
from cotenant.agent.gate.floor import Floors
from cotenant.agent.lifecycle.lives import Lives
from cotenant.agent.lifecycle.reconfigure import Reconfigure
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.owners.owners import Owners
from cotenant.agent.owners.slurm_ended import why_held
from cotenant.agent.processes import ProcessKey, key_of
from cotenant.agent.tenants.places import Owner, Place
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.stopping import kill
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError
from cotenant.devices.base import Gpu
from cotenant.policy.colocation import ColocationSettings

GPU = Gpu("GPU-00000000-0000-0000-0000-000000000001", "soft", 1 << 30, 0, kind="soft")
PATIENCE_S = 20.0


class Gate:
    """What waits in `call` ends only if the event loop runs at the same time, and so comes to open the gate."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._loop = asyncio.get_running_loop()

    def call(self) -> None:
        self._open.clear()
        self._loop.call_soon_threadsafe(self._open.set)
        assert self._open.wait(PATIENCE_S), "the event loop waits, too"


def tenant(pids: Iterable[int] = (), owner: Owner | None = None) -> Tenant:
    made: Any = SimpleNamespace(name="a", spec=TenantSpec("a"), owner=owner, root=None, group=None)
    made.sessions = [SimpleNamespace(peer=SimpleNamespace(pid=pid), process=key_of(pid)) for pid in pids]
    made.orphans = frozenset()
    found: Tenant = made
    return found


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_processes_are_found_and_killed_by_threads(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[set[ProcessKey]] = []

    async def run() -> set[ProcessKey]:
        gate, second = Gate(), asyncio.Event()
        loop, descendants = asyncio.get_running_loop(), processes.descendants

        def search(roots: set[ProcessKey]) -> set[ProcessKey]:
            gate.call()
            searches.append(roots)
            if len(searches) == 2:
                loop.call_soon_threadsafe(second.set)
            return descendants(roots)

        monkeypatch.setattr(processes, "descendants", search)
        keys = await kill(tenant([sleeper.pid]), grace_s=0.0)
        await asyncio.wait_for(second.wait(), PATIENCE_S)
        return keys

    keys = asyncio.run(run())
    assert searches == [keys, keys]
    assert sleeper.wait(PATIENCE_S) == -15


def test_jobs_are_looked_for_by_a_thread() -> None:
    async def run(job: str) -> str:
        gate = Gate()

        def locate(pid: int) -> Place | None:
            gate.call()
            return Place("slurm", "7")

        return await why_held(tenant(owner=Owner("slurm", job, "", "")), locate)

    assert "Slurm job 7, which runs" in asyncio.run(run("7"))
    assert asyncio.run(run("8")) == ""


class Clocked:
    """Gates of a GPU with latency-sensitive and best-effort work, whose clock takes a given time to read."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.followed = asyncio.Event()
        card = SimpleNamespace(part=read)
        settings = ColocationSettings(duty_cycle=0.5, clock=0.9)
        self.floors = Floors(Path("nowhere"), [GPU.uuid], settings, lambda pid: None, clock_of=lambda gpu: card)
        self.layout.tenants = 1
        follow = self.floors._follow

        def followed(*arguments: Any) -> None:
            follow(*arguments)
            self.followed.set()

        self.floors._follow = followed  # type: ignore[method-assign]

    @property
    def layout(self) -> Any:
        return self.floors.pages[GPU.uuid].layout


def test_clocks_are_read_by_a_thread() -> None:
    async def run() -> None:
        gate = Gate()

        def read() -> float:
            gate.call()
            return 0.7

        node = Clocked(read)
        node.floors._look_at_clocks()
        assert node.layout.duty_cycle_permille == 1000
        await asyncio.wait_for(node.followed.wait(), PATIENCE_S)
        assert node.layout.duty_cycle_permille < 1000
        node.floors.close()

    asyncio.run(run())


@pytest.mark.parametrize("end", ["close", "configure"])
def test_a_clock_that_was_read_too_late_changes_nothing(end: str) -> None:
    async def run() -> None:
        opened, loop, answered = threading.Event(), asyncio.get_running_loop(), asyncio.Event()
        looks = 0

        def read() -> float:
            nonlocal looks
            looks += 1
            assert opened.wait(PATIENCE_S)
            return 0.7

        node = Clocked(read)
        has_read = node.floors._has_read

        def answer(*arguments: Any) -> None:
            has_read(*arguments)
            loop.call_soon(answered.set)

        node.floors._has_read = answer  # type: ignore[method-assign]
        node.floors._look_at_clocks()
        node.floors._look_at_clocks()
        if end == "close":
            node.floors.close()
        else:
            node.floors.configure(ColocationSettings())
        opened.set()
        await asyncio.wait_for(answered.wait(), PATIENCE_S)
        assert not node.followed.is_set()
        assert looks == 1
        if end != "close":
            node.floors.close()

    asyncio.run(run())


def test_a_process_that_connects_while_it_is_looked_at_is_not_reported(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, looks = Registry((GPU,), {}), 0
    watch = UnseenWatch(registry, Owners(lambda pid: None))
    watch.expect([key_of(sleeper.pid)])
    monkeypatch.setattr(audit, "_has_shim", lambda proc, key: looks < 2)

    async def run() -> None:
        gate, done = Gate(), asyncio.Event()
        loop = asyncio.get_running_loop()
        watch.next_look_s = 0.0
        judge = watch._judge

        def using(gpus: Iterable[Gpu]) -> dict[str, list[int]]:
            nonlocal looks
            gate.call()
            looks += 1
            if looks == 3:  # the process was found unconnected twice
                loop.call_soon_threadsafe(registry.tenants.update, {"a": tenant([sleeper.pid])})
                gate.call()
            return {GPU.uuid: [sleeper.pid]}

        def judged(*arguments: Any) -> Any:
            new = judge(*arguments)
            assert new == [], f"look {looks}"
            watch.next_look_s = 0.0
            if looks == 3:
                done.set()
            return new

        monkeypatch.setattr(audit, "using", using)
        monkeypatch.setattr(watch, "_judge", judged)
        running = asyncio.create_task(watch.run(lambda tenant, text: None, strict=False))
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        running.cancel()

    asyncio.run(run())
    assert watch.now == []


def part(kind: type[Any], **known: Any) -> Any:
    """An object of that class with these attributes only."""
    made = object.__new__(kind)
    made.__dict__.update(known)
    return made


def test_a_changed_file_is_read_by_a_thread() -> None:
    in_force = SimpleNamespace(fault="")

    async def run() -> None:
        gate = Gate()

        def load() -> AgentConfig:
            gate.call()
            raise InputError("no such setting", field="limt")

        await part(Reconfigure, _load=load, _in_force=in_force).reload()

    asyncio.run(run())
    assert in_force.fault.startswith("field limt: no such setting")


class Owned:
    """Orders for jobs on a GPU whose mechanism takes a while to prepare."""

    def __init__(self, refuses: str = "") -> None:
        self.gate, self.refuses, self.events = Gate(), refuses, list[str]()
        self.registry: Any = SimpleNamespace(tenants={}, gpu_named=lambda gpu, field: GPU)
        self.registry.preparing = lambda spec: (self, (GPU,))
        lives = part(Lives, _registry=self.registry, add=self.add, give_up=self.give_up)
        self.orders = OwnerOrders(Owners(), self.registry, lives, lambda *_: None, lambda: True)
        self.caller: Any = SimpleNamespace(trusted=True, peer=SimpleNamespace(uid=0))

    def prepare(self, spec: TenantSpec, gpus: object) -> None:
        self.events.append("prepare")
        self.gate.call()

    def settle(self, spec: TenantSpec, gpus: object) -> None:
        self.events.append("settle")

    def add(self, spec: TenantSpec, uid: int) -> Tenant:
        if self.refuses:
            raise InputError(self.refuses)
        self.events.append("add")
        made = self.registry.tenants[spec.name] = Tenant(spec, (GPU,), "token", uid, Enforcement())
        return made

    def give_up(self, tenant: Tenant) -> None:
        self.events.append("give up")
        del self.registry.tenants[tenant.name]

    async def hold(self) -> dict[str, Any]:
        return await self.orders.hold(self.caller, {"kind": "slurm", "id": "7", "tenant": {"name": "job-7"}})

    async def let_go(self) -> dict[str, Any]:
        return await self.orders.let_go(self.caller, {"kind": "slurm", "id": "7"})


def test_the_share_of_a_job_is_prepared_by_a_thread_and_held_once() -> None:
    async def run() -> None:
        node = Owned()
        first, second = await asyncio.gather(node.hold(), node.hold())
        assert first == second
        assert node.events == ["prepare", "add"]

    asyncio.run(run())


def test_a_job_that_ends_while_its_share_is_prepared_holds_nothing() -> None:
    async def run() -> None:
        node = Owned()
        _, gone = await asyncio.gather(node.hold(), node.let_go())
        assert gone == {"let_go": ["job-7"]}
        assert node.events == ["prepare", "add", "give up"]
        assert node.registry.tenants == {}

    asyncio.run(run())


def test_what_was_prepared_for_a_refused_job_is_undone() -> None:
    async def run() -> None:
        node = Owned(refuses="no room")
        with pytest.raises(InputError, match="no room"):
            await node.hold()
        assert node.events == ["prepare", "settle"]

    asyncio.run(run())


def test_an_agent_lets_other_threads_not_hold_up_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent:
        gpus = ()

        def __init__(self, options: object) -> None:
            pass

        async def run(self, ready: Callable[[], None]) -> None:
            ready()

    monkeypatch.setattr(main, "Agent", Agent)
    before, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    options: Any = SimpleNamespace(folder=Path("nowhere"))
    try:
        asyncio.run(main.serve(options))
        assert sys.getswitchinterval() == pytest.approx(main.SWITCH_S)
        assert gc.get_freeze_count() > frozen
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
