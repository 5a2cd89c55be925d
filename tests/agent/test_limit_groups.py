"""Which control group a tenant's memory is limited by, and what stays of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from limit_world import GIB, PlainCard, World
from waiting import wait_for

from cotenant.agent.memory_limits import watch
from cotenant.agent.memory_limits.enforcer import card_of
from cotenant.agent.memory_limits.groups import NoGroupError, new_group, own_group, place_group
from cotenant.agent.memory_limits.watch import Watch
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.places import Owner
from cotenant.agent.tenants.tenant import ControlGroup
from cotenant.core.cgroups import Cgroups
from cotenant.core.strength import Strength
from cotenant.devices.cards import NO_LIMIT, Card, NvmlError
from cotenant.devices.cards import MemoryLimits as Limits
from cotenant.devices.registry import device
from cotenant.policy.memory_limits import Detected
from cotenant.softgpu.cgroups import region

CONTAINER = f"cri-containerd-{'ab' * 32}.scope"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> World:
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
    return World(tmp_path, dmem=getattr(request, "param", "dmem") == "dmem")


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child.pid
        child.kill()


def test_containers_processes_are_limited_by_the_whole_container(world, process):
    scope = world.group("kubepods.slice", CONTAINER)
    below = world.group("kubepods.slice", CONTAINER, "made-inside")
    world.groups.enter(below, process)
    tenant = world.tenant()
    tenant.owner = Owner("pod", "uid", "main")
    world.came(tenant, process)
    assert tenant.held == ControlGroup(scope, made=False)
    assert world.limit(scope) == str(GIB)
    assert world.limits.of(tenant, world.gpu).by is Strength.KERNEL
    world.end(tenant)
    assert world.limit(scope) == "max"
    assert scope.exists()  # the group belongs to the container runtime, so the agent must not remove it


def test_container_that_started_again_has_its_limit_again(world, process):
    tenant = world.tenant()
    tenant.owner = Owner("pod", "uid", "main")
    for digit in "ab":
        scope = world.group("kubepods.slice", f"cri-containerd-{digit * 64}.scope")
        world.groups.enter(scope, process)
        world.came(tenant, process)
        assert world.limit(scope) == str(GIB)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (f"/c/kubepods/burstable/pod1/{'ab' * 32}", f"/c/kubepods/burstable/pod1/{'ab' * 32}"),
        (f"/c/kubepods.slice/{CONTAINER}/x/y", f"/c/kubepods.slice/{CONTAINER}"),
        (f"/c/system.slice/docker-{'cd' * 32}.scope", f"/c/system.slice/docker-{'cd' * 32}.scope"),
        ("/c/system.slice/slurmstepd.scope/job_7/step_0/task_0", "/c/system.slice/slurmstepd.scope/job_7"),
        ("/c/user.slice/session-3.scope", None),
        # groups that a container makes below its own may have any name
        (f"/c/kubepods/burstable/pod1/{'ab' * 32}/{'cd' * 32}", f"/c/kubepods/burstable/pod1/{'ab' * 32}"),
    ],
)
def test_group_of_a_container_or_job(path, place):
    assert place_group(Path(path)) == (None if place is None else Path(place))


def test_group_of_a_pod_whose_node_is_a_container():
    uid = "12345678-1234-1234-1234-123456789012"
    pod = Path(f"/c/docker-{'ee' * 32}.scope/kubelet.slice/kubelet-kubepods-pod{uid.replace('-', '_')}.slice")
    group = pod / f"cri-containerd-{'ab' * 32}.scope"
    assert place_group(group / f"job_7/{'cd' * 32}", Owner("pod", uid, "main")) == group


def test_launcher_that_is_alone_in_its_group_stays_there(world, process):
    service = world.group("system.slice", "train.service")
    world.groups.enter(service, process)
    assert own_group(world.groups, process, set()) == service


def test_launcher_among_others_gets_a_group_beside_them(world, process):
    session = world.group("user.slice", "session-3.scope")
    world.groups.enter(session, process)
    world.groups.enter(session, os.getpid())
    assert own_group(world.groups, process, set()) is None
    assert new_group(world.groups, process, "cotenant-x-", "a b") == session.parent / "cotenant-x-a_b-1"
    tenant = world.tenant()
    world.begin(tenant, process)
    assert world.groups.of(process).parent == session.parent


def test_launcher_does_not_leave_bounds_of_its_own_group(world, process):
    session = world.group("user.slice", "session-3.scope")
    (session / "memory.max").write_text("1000000\n")
    world.groups.enter(session, process)
    world.groups.enter(session, os.getpid())
    with pytest.raises(NoGroupError, match=r"has a limit \(memory.max\)"):
        new_group(world.groups, process, "cotenant-x-", "one")
    tenant = world.tenant()
    world.begin(tenant, process)
    assert tenant.held is None
    assert world.limits.of(tenant, world.gpu).by is Strength.SHIM
    assert world.warnings == [tenant.held_not]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a mount namespace")
def test_launcher_in_a_container_stays_in_it(world):
    scope = world.group("system.slice", f"docker-{'cd' * 32}.scope")
    command = ["unshare", "--mount", "sh", "-c", "echo inside; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == b"inside\n"
        world.groups.enter(scope, inside.pid)
        world.groups.enter(scope, os.getpid())
        assert own_group(world.groups, inside.pid, set()) == scope
        with pytest.raises(NoGroupError, match="another tenant already uses"):
            own_group(world.groups, inside.pid, {scope})
        inside.kill()


def test_limit_holds_until_the_last_process_of_a_tenant_has_gone(world):
    tenant = world.tenant()
    with subprocess.Popen(["sleep", "600"]) as left:
        world.begin(tenant, left.pid)
        assert tenant.held is not None
        group = tenant.held.path
        world.registry.remove(tenant)
        world.end(tenant)
        assert world.limit(group) == str(GIB)
        left.kill()
    world.look()
    assert not group.exists()
    assert not [line for line in world.group().iterdir() if line.name.startswith("cotenant-")]


def test_ancestors_sums_are_zero_again_after_a_tenant(world, process):
    session = world.group("user.slice", "session-3.scope")
    world.groups.enter(session, process)
    world.groups.enter(session, os.getpid())
    tenant = world.tenant()
    world.begin(tenant, process)
    assert world.groups.read(session.parent, "dmem.min").split() == [region(0), str(GIB)]
    world.groups.enter(world.groups.root, process)
    world.registry.remove(tenant)
    world.end(tenant)
    assert world.groups.read(session.parent, "dmem.min").split() == [region(0), "0"]


@pytest.mark.parametrize("ended", [False, True], ids=["of a tenant", "of an ended tenant"])
def test_limits_of_the_previous_agent_are_not_those_of_another_program(world, process, ended):
    """The GPUs are examined before the new agent knows the groups of its tenants."""
    group = ControlGroup(world.group("system.slice", "train.service"), made=False)
    world.groups.enter(group.path, process)
    world.groups.delegate(world.groups.root, "dmem")
    world.groups.delegate(group.path.parent, "dmem")
    world.groups.write(group.path, "dmem.max", f"{region(0)} {GIB}")
    (obstacle,) = world.limits.prospect(world.gpu).obstacles
    assert str(group.path) in obstacle
    if ended:
        world.clean([group])
    else:
        tenant = world.tenant()
        world.limits.take_back(tenant, group)
        world.registry.remove(tenant)
        world.end(tenant)
    assert world.limits.prospect(world.gpu).obstacles == ()


def test_without_a_limit_on_memory_nothing_is_made(world, process):
    tenant = world.tenant(memory_bytes=None)
    world.begin(tenant, process)
    assert tenant.held is None
    assert world.limits.of(tenant, world.gpu).by is Strength.NOTHING


def test_what_moves_its_memory_is_limited_by_the_shim(world, process):
    tenant = world.tenant(oversubscribe="managed", mechanism="time")
    world.begin(tenant, process)
    assert tenant.held is None
    assert "have not been measured" in world.limits.of(tenant, world.gpu).why


def test_driver_that_rounds_a_limit_is_not_taken_for_another_program(world, process, monkeypatch):
    """The manual's own example: 4000 MiB set, 4096 MiB shown."""
    exact = Card.set_memory_limits
    step = 128 << 20
    monkeypatch.setattr(
        Card, "set_memory_limits", lambda card, group, soft, hard: exact(card, group, soft, -(-hard // step) * step)
    )
    tenant = world.tenant(memory_bytes=4000 << 20)
    world.begin(tenant, process)
    assert tenant.held is not None
    assert world.limit(tenant.held.path) == str(4096 << 20)
    world.look()
    assert world.warnings == []


def test_limit_that_is_changed_twice_while_it_is_read_is_not_taken_for_another_programs(world, process, monkeypatch):
    """The driver is asked in a thread. Its answer may be of a moment between two changes by the agent."""
    tenant = world.tenant()
    world.begin(tenant, process)
    exact, read = Card.memory_limits, []

    def slow(card: Card, group: Path) -> Limits:
        monkeypatch.setattr(Card, "memory_limits", exact)
        for size in (2 * GIB, GIB):
            tenant.spec = replace(tenant.spec, memory_bytes=size)
            world.limits.follow(tenant)
            read.append(exact(card, group))
        return read[0]

    monkeypatch.setattr(Card, "memory_limits", slow)
    world.look()
    assert [limits.hard_bytes for limits in read] == [2 * GIB, GIB]
    assert world.warnings == []


def test_limit_of_a_containers_group_stays_while_a_process_there_uses_the_gpu(world, process, monkeypatch):
    service = world.group("system.slice", "train.service")
    world.groups.enter(service, process)
    tenant = world.tenant()
    world.begin(tenant, process)
    using = [process]
    monkeypatch.setattr(type(device("soft")), "processes", lambda self, uuids: dict.fromkeys(uuids, using))
    world.end(tenant)
    assert world.limit(service) == str(GIB)
    using.clear()
    world.look()
    assert world.limit(service) == "max"


def test_driver_is_asked_in_a_thread_who_uses_the_group_of_an_ended_tenant(world, process, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.0)
    service = world.group("system.slice", "train.service")
    world.groups.enter(service, process)
    tenant, using, asked = world.tenant(), [process], list[str]()

    def processes(self: object, uuids: Iterable[str]) -> dict[str, list[int]]:
        asked.append(threading.current_thread().name)
        return {world.gpu.uuid: using} if len(asked) < 5 else {}

    monkeypatch.setattr(type(device("soft")), "processes", processes)
    world.begin(tenant, process)
    world.registry.remove(tenant)

    async def watched() -> None:
        world.limits.end(tenant)
        task = asyncio.create_task(world.limits.run())
        while world.limits.closing():
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(watched())
    assert len(asked) == 5
    assert threading.main_thread().name not in asked
    assert world.limit(service) == "max"


def test_processes_that_are_listed_in_the_group_are_not_looked_up_one_by_one(world, process, monkeypatch):
    tenant = world.tenant()
    world.begin(tenant, process)
    tenant.sessions.append(SimpleNamespace(peer=SimpleNamespace(pid=process)))
    looked_up: list[int] = []
    monkeypatch.setattr(Watch, "_check_place", lambda self, tenant, process: looked_up.append(process.pid))
    world.look()
    assert looked_up == []
    world.groups.enter(world.group("elsewhere"), process)
    world.look()
    assert looked_up == [process]


def test_process_that_joins_from_another_group_is_named(world, process):
    service = world.group("system.slice", "train.service")
    world.groups.enter(service, process)
    tenant = world.tenant()
    world.begin(tenant, process)
    tenant.root = ProcessKey(process, 0)
    world.begin(tenant, os.getpid())
    assert tenant.held == ControlGroup(service, made=False)
    assert [text.split(" joined")[0] for text in world.warnings] == [f"process {os.getpid()}"]


@pytest.mark.parametrize("world", ["misc"], indirect=True)
def test_limit_that_cannot_be_set_back_is_named_once_and_tried_again(world, process, monkeypatch):
    tenant = world.tenant()
    world.begin(tenant, process)
    assert tenant.held is not None
    card, raised = card_of(world.gpu), 16 * GIB
    card.set_memory_limits(tenant.held.path, raised, raised)
    with monkeypatch.context() as patch:
        patch.setattr(Card, "set_memory_limits", refuse)
        world.look()
        world.look()
    (refused,) = world.warnings
    said = "on GPU 0 from 1.00 GiB to 16.00 GiB; it cannot be restored: the driver refuses the limit as invalid"
    assert refused.endswith(said)
    assert world.limits.not_enforced(tenant) == [refused]
    assert world.limits.of(tenant, world.gpu).by is Strength.SHIM, "what is said of the limit says so, too"
    world.look()
    assert card.memory_limits(tenant.held.path).hard_bytes == GIB
    assert world.warnings[-1].endswith("on GPU 0 from 1.00 GiB to 16.00 GiB: it was restored")
    world.look()
    assert world.limits.not_enforced(tenant) == []
    assert world.limits.of(tenant, world.gpu).by is Strength.DRIVER


def refuse(*arguments: object) -> None:
    raise NvmlError("nvmlDeviceSetMemoryLimits_v1: 2", 2)


def test_the_kernels_own_groups_are_made_entered_watched_and_removed(tmp_path, monkeypatch):
    """The agent's part over a real hierarchy of version 2, with a card that only takes notes."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    writable = [Path(words[1]) for words in mounts if words[2] == "cgroup2" and os.access(words[1], os.W_OK)]
    if not writable:
        pytest.skip("there is no hierarchy of version 2 here in which groups can be made")
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    card, groups, found = PlainCard(), Cgroups(writable[0]), Detected("615", call=True, cgroup=2, root=True)
    world = World(tmp_path, card=lambda gpu: card, find=lambda gpu: found)
    monkeypatch.setattr(type(device("soft")), "cgroups", lambda self: groups)
    tenant = world.tenant()
    command = ["sh", "-c", "read line; sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as shell:
        home = groups.of(shell.pid)
        world.begin(tenant, shell.pid)
        assert tenant.held is not None, world.warnings
        group = tenant.held.path
        world.limits.expect(shell.pid)
        assert groups.of(shell.pid) == group
        assert group.parent == (home if home == groups.root else home.parent)
        assert card.limits == {group: GIB}
        shell.stdin.write("go\n")
        shell.stdin.flush()
        child = int(shell.stdout.readline())
        assert world.limits.tenant_in(child) is tenant
        groups.enter(home, child)
        tenant.sessions.append(SimpleNamespace(peer=SimpleNamespace(pid=child)))
        world.look()
        assert groups.of(child) == group
        assert world.warnings[0].startswith(f"process {child} left the tenant's control group")
        world.registry.remove(tenant)
        world.end(tenant)
        assert card.limits == {group: GIB}  # two processes are left in the group
        os.kill(child, 9)
        shell.kill()
    wait_for(lambda: (world.look(), not group.exists())[1], 60)
    assert card.limits == {group: NO_LIMIT}
