"""Memory limits beside hostile programs, failing drivers and agents that are killed."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from limit_world import GIB, World
from waiting import wait_for

from cotenant.agent.memory_limits import watch
from cotenant.agent.memory_limits.applied import Applied
from cotenant.agent.memory_limits.enforcer import card_of
from cotenant.agent.memory_limits.groups import NoGroupError, new_group
from cotenant.agent.processes import key_of
from cotenant.agent.tenants.tenant import ControlGroup, Tenant
from cotenant.core.errors import InputError
from cotenant.core.strength import Strength
from cotenant.devices import memory_limit_probe
from cotenant.devices.cards import Card, NvmlError
from cotenant.devices.cards import MemoryLimits as Limits
from cotenant.devices.registry import device
from cotenant.softgpu.cgroups import FolderCgroups, region

LOST = NvmlError("nvmlDeviceSetMemoryLimits_v1: 15", 15)
misc = pytest.mark.parametrize("world", ["misc"], indirect=True)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> World:
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
    return World(tmp_path, dmem=getattr(request, "param", "dmem") == "dmem")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return running[-1]

    yield start
    for each in running:
        os.killpg(each.pid, 9)
        each.communicate()


@pytest.fixture
def process(start) -> int:
    return start("sleep", "600").pid


def started(world: World, pid: int, **spec: object) -> tuple[Tenant, Path]:
    """A tenant whose program is that process, and its group."""
    tenant = world.tenant(**spec)  # type: ignore[arg-type]
    world.begin(tenant, pid)
    tenant.root = key_of(pid)
    assert tenant.held is not None, world.warnings
    return tenant, tenant.held.path


def service(world: World, pid: int, name: str = "train.service") -> Path:
    """A group that goes on, in which only that process is."""
    group = world.group("system.slice", name)
    world.groups.enter(group, pid)
    return group


def ended_process() -> int:
    with subprocess.Popen(["true"]) as child:
        return child.pid


def fail(error: OSError):
    def call(*arguments: object) -> None:
        raise error

    return call


def test_a_launcher_that_joins_and_dies_does_not_release_the_tenants_group(world, process):
    tenant, group = started(world, process)
    world.begin(tenant, ended_process())
    assert tenant.held == ControlGroup(group, made=True)
    world.groups.write(group, "dmem.max", f"{region(0)} {16 * GIB}")
    world.look()
    assert world.limit(group) == str(GIB), "the limit is still watched"


@misc
def test_a_limit_on_a_group_inside_the_tenants_group_is_removed(world, process):
    """The driver charges only the nearest group with a limit, so that one inside takes processes from the tenant's."""
    _, group = started(world, process)
    card = card_of(world.gpu)
    world.groups.create(below := group / "own")
    card.set_memory_limits(below, 0, 16 * GIB)
    world.groups.enter(below, process)
    world.look()
    (said,) = world.warnings
    assert f"limited a control group of its own on GPU 0 ({below})" in said
    assert card.memory_limits(below) == card.memory_limits(group), "only the tenant's limit is left"


def test_a_limit_inside_that_is_as_large_as_the_tenants_is_known_by_its_use(world, process):
    _, group = started(world, process)
    for name in ("one", "two"):
        world.groups.create(group / name)
    used = {group: 3, group / "one": 3, group / "two": 2}
    card = SimpleNamespace(memory_limits=lambda path: Limits(GIB, GIB, used[path]))
    assert list(Applied(lambda gpu: card).below(world.groups, group, world.gpu)) == [group / "two"]


def test_a_process_that_never_connected_and_leaves_the_group_is_put_back_and_named(world, process):
    tenant, group = started(world, process)
    tenant.root = None
    world.look()
    world.groups.enter(world.groups.root, process)
    world.look()
    assert world.groups.of(process) == group
    assert world.warnings[0].startswith(f"process {process} left the tenant's control group and thereby its memory")


def test_what_a_process_started_outside_comes_back_with_it(world, start):
    shell = start("sh", "-c", "sleep 600 & echo $!; wait")
    child = int(shell.stdout.readline())
    _, group = started(world, shell.pid)
    for pid in (shell.pid, child):
        world.groups.enter(world.groups.root, pid)
    world.look()
    assert world.groups.of(child) == group


def test_a_pid_that_another_program_has_now_is_left_alone(world, process):
    tenant, _ = started(world, process)
    before = key_of(process)
    tenant.root = before._replace(start_ticks=before.start_ticks - 1)
    world.look()
    watched = world.limits._watch._inside[tenant.held.path]
    watched[process] = tenant.root
    tenant.root = None
    world.groups.enter(world.groups.root, process)
    world.look()
    assert world.groups.of(process) == world.groups.root


def test_a_tenant_that_a_tenants_program_starts_keeps_its_group(world, start):
    outer, inner = start("sleep", "600").pid, start("sleep", "600").pid
    _, first = started(world, outer)
    world.groups.enter(first, inner)
    world.look()
    _, second = started(world, inner, name="two")
    world.look()
    assert world.groups.of(inner) == second != first
    assert world.warnings == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cpuset.cpus", "0-3\n"),
        ("io.max", "8:16 rbps=2097152 wbps=max riops=max wiops=max\n"),
        ("memory.swap.max", "0\n"),
        ("dmem.max", f"{region(0)} 1073741824\n"),
    ],
)
def test_no_bound_of_the_launchers_group_is_escaped(world, process, name, text):
    session = world.group("user.slice", "session-3.scope")
    for pid in (process, os.getpid()):
        world.groups.enter(session, pid)
    for other in ("cpuset.cpus", "io.max", "dmem.max"):
        (session / other).write_text("" if other != "dmem.max" else f"{region(0)} max\n")
    new_group(world.groups, process, "cotenant-x-", "one")
    (session / name).write_text(text)
    with pytest.raises(NoGroupError, match=rf"has a limit \({name}\)"):
        new_group(world.groups, process, "cotenant-x-", "one")


def test_a_group_that_another_program_removed_is_made_again(world, process):
    tenant, group = started(world, process)
    world.groups.enter(world.groups.root, process)
    world.groups.remove(group)
    world.look()
    assert world.limit(group) == str(GIB)
    assert world.groups.of(process) == group
    assert world.warnings[0] == f"another program removed the tenant's control group {group}: it was made again"
    assert world.limits.of(tenant, world.gpu).by is Strength.KERNEL


def test_the_group_of_a_service_that_has_ended_is_no_alarm(world, process):
    group = service(world, process)
    tenant, held = started(world, process)
    assert held == group
    tenant.root = None  # the program has ended, and the service with it
    world.groups.enter(world.groups.root, process)
    world.groups.remove(group)
    world.look()
    assert tenant.held is None
    assert world.warnings == []


def test_a_lost_gpu_is_not_blamed_on_another_program(world, process, monkeypatch):
    tenant, _ = started(world, process)
    monkeypatch.setattr(Card, "memory_limits", fail(LOST))
    monkeypatch.setattr(Card, "set_memory_limits", fail(LOST))
    world.look()
    assert world.warnings == [
        "the memory limit of the tenant's control group on GPU 0 cannot be read (the GPU is lost); it cannot be "
        "restored: the GPU is lost"
    ]
    assert world.limits.not_enforced(tenant) == world.warnings


def test_a_driver_that_takes_a_limit_and_does_nothing_is_found_out(world, process, monkeypatch):
    world.limits.prospect(world.gpu)
    monkeypatch.setattr(Card, "set_memory_limits", lambda *arguments: None)
    tenant = world.tenant()
    world.begin(tenant, process)
    said = "1.00 GiB were set, and the driver then reported no limit"
    assert tenant.held_not.endswith(said)
    assert world.limits.of(tenant, world.gpu).by is Strength.SHIM
    demanding = world.tenant("two", enforce_memory=Strength.DRIVER)
    with pytest.raises(InputError, match=said):
        world.begin(demanding, process)


def test_a_driver_that_does_not_answer_is_said(world, process, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watch, "PATIENCE_S", 0.05)
    tenant, _ = started(world, process)
    answer = threading.Event()
    exact = Card.memory_limits

    def slow(card: Card, group: Path) -> Limits:
        answer.wait(60)
        return exact(card, group)

    monkeypatch.setattr(Card, "memory_limits", slow)

    async def until(condition) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def watched() -> None:
        task = asyncio.create_task(world.limits.run())
        await asyncio.wait_for(until(lambda: world.limits.not_enforced(tenant)), 60)
        assert "the driver has not answered" in world.limits.not_enforced(tenant)[0]
        answer.set()
        await asyncio.wait_for(until(lambda: not world.limits.not_enforced(tenant)), 60)
        task.cancel()

    asyncio.run(watched())
    assert len(world.warnings) == 1


def test_a_read_only_hierarchy_is_named_with_its_file(world, process, monkeypatch):
    world.limits.prospect(world.gpu)
    monkeypatch.setattr(FolderCgroups, "create", fail(OSError(errno.EROFS, os.strerror(errno.EROFS), "/x/one")))
    tenant = world.tenant()
    world.begin(tenant, process)
    assert tenant.held_not.endswith("by the shim in its processes, because /x/one: Read-only file system")


def test_a_change_whose_effect_cannot_be_read_changes_nothing(world, process, monkeypatch):
    tenant, group = started(world, process)
    exact, reads = Card.memory_limits, iter([fail(LOST)])
    monkeypatch.setattr(Card, "memory_limits", lambda card, path: next(reads, exact)(card, path))
    tenant.spec = tenant.spec.__class__(**{**tenant.spec.__dict__, "memory_bytes": 2 * GIB})
    with pytest.raises(InputError, match="was refused: the GPU is lost"):
        world.limits.follow(tenant)
    assert world.limit(group) == str(GIB)


def test_a_group_with_groups_inside_is_removed(world, process):
    tenant, group = started(world, process)
    world.groups.create(group / "own")
    world.groups.enter(world.groups.root, process)
    world.registry.remove(tenant)
    world.end(tenant)
    assert not group.exists()


def test_a_limit_that_cannot_be_cleared_is_tried_again(world, process, monkeypatch):
    group = service(world, process)
    tenant, _ = started(world, process)
    world.registry.remove(tenant)
    with monkeypatch.context() as patch:
        patch.setattr(Card, "set_memory_limits", fail(LOST))
        world.end(tenant)
    assert world.limit(group) == str(GIB)
    world.look()
    assert world.limit(group) == "max"


def test_a_process_that_ends_meanwhile_does_not_keep_the_limit(world, process, monkeypatch):
    group = service(world, process)
    tenant, _ = started(world, process)
    gone = ended_process()
    monkeypatch.setattr(type(device("soft")), "processes", lambda self, uuids: {uuid: [gone] for uuid in uuids})
    exact = FolderCgroups.of

    def of(self: FolderCgroups, pid: int) -> Path:
        if pid == gone:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return exact(self, pid)

    monkeypatch.setattr(FolderCgroups, "of", of)
    world.registry.remove(tenant)
    world.end(tenant)
    assert world.limit(group) == "max"


def test_a_tenant_without_processes_leaves_no_limit_on_a_group_that_goes_on(world, process):
    group = service(world, process)
    tenant, _ = started(world, process)
    tenant.root = None
    world.rest(tenant)
    assert world.limit(group) == "max"


def test_the_next_run_in_another_group_clears_the_first(world, process):
    first = service(world, process)
    tenant, _ = started(world, process)
    tenant.root = None
    second = service(world, process, "again.service")
    world.begin(tenant, process)
    world.look()
    assert (world.limit(first), world.limit(second)) == ("max", str(GIB))


@pytest.mark.parametrize("moment", ["before the limit is set", "after the tenant has ended"])
def test_an_agent_that_was_killed_leaves_no_limit_on_a_group_that_goes_on(
    world, process, tmp_path, monkeypatch, moment
):
    group, saved = service(world, process), list[ControlGroup]()

    def save() -> None:  # writes what the next agent finds in the state file
        held = [tenant.held for tenant in world.registry.tenants.values() if tenant.held is not None]
        saved[:] = [*held, *world.limits.closing()]

    world.limits._save = save
    tenant, _ = started(world, process)
    using = [process]
    monkeypatch.setattr(type(device("soft")), "processes", lambda self, uuids: dict.fromkeys(uuids, using))
    if moment.startswith("after"):
        world.registry.remove(tenant)
        world.end(tenant)
        save()  # removing a tenant writes the state
    assert world.limit(group) == str(GIB)
    using.clear()
    assert saved == [ControlGroup(group, made=False)]
    monkeypatch.setattr(FolderCgroups, "make", lambda *arguments, **named: world.groups)
    World(tmp_path).clean(saved)
    assert world.limit(group) == "max"


def test_a_limit_that_could_not_be_taken_back_is_set_later(world, process, monkeypatch):
    tenant, group = started(world, process)
    world.limits._applied.forget(group)
    with monkeypatch.context() as patch:
        patch.setattr(Card, "set_memory_limits", fail(LOST))
        world.limits.take_back(tenant, ControlGroup(group, made=True))
    world.groups.write(group, "dmem.max", f"{region(0)} max")
    world.look()
    assert world.limit(group) == str(GIB)


def test_groups_of_trials_that_were_killed_do_not_prevent_the_next(world, monkeypatch):
    left = world.group(f"cotenant-trial-{os.getpid()}")  # an agent in a container has the same pid after each start
    assert world.limits.prospect(world.gpu).by is Strength.KERNEL
    assert not left.exists()
    left = world.group("cotenant-trial-999999999")
    monkeypatch.setattr(memory_limit_probe, "OLD_S", -1.0)
    memory_limit_probe.detect(device("soft"), world.gpu)
    assert not left.exists()


def test_a_card_that_no_longer_answers_does_not_keep_the_agents_groups(world, process, monkeypatch):
    tenant, group = started(world, process)
    world.groups.enter(world.groups.root, process)
    world.registry.remove(tenant)
    monkeypatch.setattr(Card, "set_memory_limits", fail(LOST))
    world.end(tenant)
    assert group.exists(), "its soft limit would stay in the sums above"
    wait_for(lambda: (world.look(), not group.exists())[1], 60)


