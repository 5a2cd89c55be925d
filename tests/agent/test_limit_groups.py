"""Which control group a tenant's memory is limited by, and what stays of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.limits.enforcer import MemoryLimits
from cotenant.agent.limits.groups import NoGroupError, new_group, own_group, place_group
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.tenants.places import Owner
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import ControlGroup, Tenant
from cotenant.core.strength import Strength
from cotenant.devices.registry import device
from cotenant.softgpu.cgroups import FolderCgroups, region

GIB = 1 << 30
CONTAINER = f"cri-containerd-{'ab' * 32}.scope"


class World:
    """The part of an agent that limits memory, on a software GPU of a machine with driver 615."""

    def __init__(self, folder: Path) -> None:
        self.groups = FolderCgroups.make(folder / "cgroup", dmem=True, memory_bytes=16 * GIB)
        self.gpu = device("soft").gpus()[0]
        self.registry = Registry([self.gpu], mechanisms.make(folder, Use.TENANT))
        self.warnings: list[str] = []
        self.limits = MemoryLimits(folder, self.registry, lambda tenant, text: self.warnings.append(text))

    def tenant(self, name: str = "one", **spec: object) -> Tenant:
        return self.registry.admit(TenantSpec(name, **{"memory_bytes": GIB} | spec), 0)  # type: ignore[arg-type]

    def group(self, *names: str) -> Path:
        path = self.groups.root
        for name in names:
            path = path / name
            if not path.exists():
                self.groups.create(path)
        return path

    def limit(self, group: Path) -> str:
        return self.groups.read(group, "dmem.max").split()[1]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
    return World(tmp_path)


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
    world.limits.came(tenant, process)
    assert tenant.held == ControlGroup(scope, made=False)
    assert world.limit(scope) == str(GIB)
    assert world.limits.of(tenant, world.gpu).by is Strength.KERNEL
    world.limits.end(tenant)
    assert world.limit(scope) == "max"
    assert scope.exists()  # it is the container runtime's


def test_container_that_started_again_has_its_limit_again(world, process):
    tenant = world.tenant()
    tenant.owner = Owner("pod", "uid", "main")
    for digit in "ab":
        scope = world.group("kubepods.slice", f"cri-containerd-{digit * 64}.scope")
        world.groups.enter(scope, process)
        world.limits.came(tenant, process)
        assert world.limit(scope) == str(GIB)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (f"/c/kubepods/burstable/pod1/{'ab' * 32}", f"/c/kubepods/burstable/pod1/{'ab' * 32}"),
        (f"/c/kubepods.slice/{CONTAINER}/x/y", f"/c/kubepods.slice/{CONTAINER}"),
        (f"/c/system.slice/docker-{'cd' * 32}.scope", f"/c/system.slice/docker-{'cd' * 32}.scope"),
        ("/c/system.slice/slurmstepd.scope/job_7/step_0/task_0", "/c/system.slice/slurmstepd.scope/job_7"),
        ("/c/user.slice/session-3.scope", None),
    ],
)
def test_group_of_a_container_or_job(path, place):
    assert place_group(Path(path)) == (None if place is None else Path(place))


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
    world.limits.begin(tenant, process)
    assert world.groups.of(process).parent == session.parent


def test_launcher_does_not_leave_bounds_of_its_own_group(world, process):
    session = world.group("user.slice", "session-3.scope")
    (session / "memory.max").write_text("1000000\n")
    world.groups.enter(session, process)
    world.groups.enter(session, os.getpid())
    with pytest.raises(NoGroupError, match=r"has a memory.max of its own"):
        new_group(world.groups, process, "cotenant-x-", "one")
    tenant = world.tenant()
    world.limits.begin(tenant, process)
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
        with pytest.raises(NoGroupError, match="another tenant already has"):
            own_group(world.groups, inside.pid, {scope})
        inside.kill()


def test_limit_holds_until_the_last_process_of_a_tenant_has_gone(world):
    tenant = world.tenant()
    with subprocess.Popen(["sleep", "600"]) as left:
        world.limits.begin(tenant, left.pid)
        assert tenant.held is not None
        group = tenant.held.path
        world.registry.remove(tenant)
        world.limits.end(tenant)
        assert world.limit(group) == str(GIB)
        left.kill()
    world.limits.look()
    assert not group.exists()
    assert not [line for line in world.group().iterdir() if line.name.startswith("cotenant-")]


def test_ancestors_sums_are_zero_again_after_a_tenant(world, process):
    session = world.group("user.slice", "session-3.scope")
    world.groups.enter(session, process)
    world.groups.enter(session, os.getpid())
    tenant = world.tenant()
    world.limits.begin(tenant, process)
    assert world.groups.read(session.parent, "dmem.min").split() == [region(0), str(GIB)]
    world.groups.enter(world.groups.root, process)
    world.registry.remove(tenant)
    world.limits.end(tenant)
    assert world.groups.read(session.parent, "dmem.min").split() == [region(0), "0"]


def test_without_a_limit_on_memory_nothing_is_made(world, process):
    tenant = world.tenant(memory_bytes=None)
    world.limits.begin(tenant, process)
    assert tenant.held is None
    assert world.limits.of(tenant, world.gpu).by is Strength.NOTHING


def test_what_moves_its_memory_is_limited_by_the_shim(world, process):
    tenant = world.tenant(oversubscribe="managed", mechanism="time")
    world.limits.begin(tenant, process)
    assert tenant.held is None
    assert "has not been measured" in world.limits.of(tenant, world.gpu).why


def test_driver_that_rounds_a_limit_is_not_taken_for_another_program(world, process, monkeypatch):
    class Rounding:
        """The manual's own example: 4000 MiB set, 4096 MiB shown."""

        def __init__(self, card):
            self.card, self.memory_limits = card, card.memory_limits

        def set_memory_limits(self, group, soft, hard):
            self.card.set_memory_limits(group, soft, -(-hard // (128 << 20)) * (128 << 20))

    card = world.limits._card
    monkeypatch.setattr(world.limits, "_card", lambda gpu: Rounding(card(gpu)))
    tenant = world.tenant(memory_bytes=4000 << 20)
    world.limits.begin(tenant, process)
    assert tenant.held is not None
    assert world.limit(tenant.held.path) == str(4096 << 20)
    world.limits.look()
    assert world.warnings == []
