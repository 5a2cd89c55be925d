"""What is found of memory limits on machines of each kind, and the kernel's own control groups."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from waiting import wait_for

from cotenant.core.cgroups import Cgroups, delegate_down
from cotenant.core.strength import Strength
from cotenant.devices.cards import NOT_SUPPORTED, NvmlError
from cotenant.devices.memory_limit_probe import detect
from cotenant.devices.registry import device
from cotenant.policy.memory_limits import GroupLimit, prospect
from cotenant.softgpu.cgroups import FolderCgroups, region

GIB = 1 << 30


@pytest.fixture
def soft(tmp_path, monkeypatch):
    """A software GPU, and a machine of a kind under it."""
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))

    def make(**how):
        monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
        groups = FolderCgroups.make(tmp_path / "cgroup", memory_bytes=16 * GIB, **how)
        return groups, device("soft"), device("soft").gpus()[0]

    return make


def test_machine_with_the_kernels_limits(soft):
    groups, kind, gpu = soft(dmem=True)
    found = detect(kind, gpu)
    assert (found.call, found.cgroup, found.dmem, found.trial) == (True, 2, True, "")
    # the trial removes its control group
    assert [child.name for child in groups.root.iterdir() if child.is_dir()] == []


def test_machine_with_the_drivers_limits(soft):
    _, kind, gpu = soft(dmem=False)
    found = detect(kind, gpu)
    assert (found.call, found.dmem, found.trial) == (True, False, "")


def test_machine_with_control_groups_of_version_1(soft):
    _, kind, gpu = soft(dmem=False, version=1)
    assert "version 1" in prospect(detect(kind, gpu)).why


def test_machine_with_mig(soft, monkeypatch):
    groups, kind, gpu = soft(dmem=True)
    monkeypatch.setenv("COTENANT_SOFTGPU_MIG", "1")
    found = detect(kind, gpu)
    assert (found.call, found.mig) == (True, True)
    held = prospect(found)
    assert held.by is Strength.SHIM
    assert held.obstacles[0].startswith("MIG is on")
    group = groups.root / "one"
    groups.create(group)
    with pytest.raises(NvmlError) as refused:
        kind.card(gpu.uuid).set_memory_limits(group, 0, GIB)
    assert refused.value.code == NOT_SUPPORTED


def test_machine_with_driver_580():
    kind = device("soft")
    assert "COTENANT_SOFTGPU_CGROUPS" not in os.environ
    found = prospect(detect(kind, kind.gpus()[0]))
    assert found.by is Strength.SHIM
    assert found.obstacles[0].startswith("driver 580 (software) has no memory limits, which need release 615: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give the folder to another user")
def test_agent_that_may_not_set_limits(soft):
    groups, kind, gpu = soft(dmem=True)
    os.chown(groups.root, 65534, 65534)
    assert "only root" in prospect(detect(kind, gpu)).why


def test_somebody_else_who_limits_groups_is_found(soft):
    groups, kind, gpu = soft(dmem=True)
    group = groups.root / "user.slice"
    groups.delegate(groups.root, "dmem")
    groups.create(group)
    groups.write(group, "dmem.max", f"{region(0)} {4 * GIB}")
    assert detect(kind, gpu).foreign == (GroupLimit(group, 4 * GIB),)


def mounts() -> list[Path]:
    """Where the kernel's hierarchy of version 2 is, and a group can be made."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(words[1]) for words in lines if words[2] == "cgroup2" and os.access(words[1], os.W_OK)]


@pytest.fixture
def kernel():
    """The kernel's own hierarchy, with a group of the test in it."""
    if not mounts():
        pytest.skip("there is no hierarchy of version 2 here in which groups can be made")
    groups = Cgroups(mounts()[0])
    top = groups.root / f"cotenant-test-{os.getpid()}"
    groups.create(top)
    yield groups, top
    for group in reversed(list(groups.groups(top))):
        groups.remove(group)


def test_the_kernels_groups_take_processes_and_their_children(kernel):
    groups, top = kernel
    leaf = top / "leaf"
    groups.create(leaf)
    with subprocess.Popen(["sh", "-c", "read line; sleep 60 & echo $!; wait"], stdin=-1, stdout=-1, text=True) as shell:
        groups.enter(leaf, shell.pid)
        assert groups.of(shell.pid) == leaf
        groups.quicken(shell.pid)
        assert groups.of(shell.pid) == leaf
        shell.stdin.write("go\n")
        shell.stdin.flush()
        child = int(shell.stdout.readline())
        assert groups.of(child) == leaf
        assert set(groups.processes(leaf)) == {shell.pid, child}
        with pytest.raises(OSError):
            groups.remove(leaf)
        shell.kill()
        os.kill(child, 9)
    wait_for(lambda: not groups.processes(leaf))


def test_the_kernels_dmem_controller_is_passed_down(kernel):
    groups, top = kernel
    controllers = groups.root / "cgroup.controllers"
    if "dmem" not in controllers.read_text().split():
        pytest.skip("this kernel has no dmem controller for version 2")
    leaf = top / "leaf"
    delegate_down(groups, leaf, "dmem")
    groups.create(leaf)
    assert {"dmem.max", "dmem.min", "dmem.low", "dmem.current"} <= {path.name for path in leaf.iterdir()}


@pytest.mark.parametrize(
    ("made", "version", "what"),
    [
        ((), 0, "this system has no control groups"),
        (("memory", "unified"), 1, "control groups here are of version 1, and the driver's limits need version 2"),
        (("system.slice", "cgroup.controllers"), 2, ""),
    ],
)
def test_the_machines_control_groups_are_named_also_on_a_gpu_without_limits(
    tmp_path, monkeypatch, made, version, what
):
    """The plain software GPU has no hierarchy of its own; the reason must still be true of the machine."""
    monkeypatch.delenv("COTENANT_SOFTGPU_CGROUPS", raising=False)
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    mount = tmp_path / "mount"
    for name in made:
        (mount / name).mkdir(parents=True)
    monkeypatch.setattr("cotenant.devices.memory_limit_probe.MOUNT", mount)
    found = detect(device("soft"), device("soft").gpus()[0])
    assert (found.cgroup, found.call, Cgroups(mount).version) == (version, False, version)
    about = [text for text in prospect(found).obstacles if "control groups" in text]
    assert len(about) == (version != 2)
    assert all(text.startswith(what) for text in about)
    assert prospect(found).by is Strength.SHIM
