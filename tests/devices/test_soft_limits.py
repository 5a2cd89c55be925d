"""The stand-in for driver 615 and the kernel's dmem controller keeps the rules of the manual, gaps included."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from cotenant.devices.cards import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_LIMIT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    Card,
    Cards,
    NvmlError,
)
from cotenant.native.libraries import SOFT_DRIVER, SOFT_NVML, library_path
from cotenant.softgpu.cgroups import FolderCgroups, region

MIB = 1 << 20
CARD = 4096 * MIB
CONTEXT = 256  # MiB that a context takes, from native/abi/contention.toml
# Takes the MiB that each input line asks for, and makes a context first. Answers each line with the status, the free
# MiB and the MiB of the card.
PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
context = ctypes.c_void_p()
for line in sys.stdin:
    if not context:
        cuda.cuInit(0), cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
    pointer, free, total = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
    code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(line) << 20)) if int(line) else 0
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    print(code, free.value >> 20, total.value >> 20, flush=True)
"""


class Machine:
    """A software GPU of 4 GiB under a hierarchy of its own, and programs in its groups."""

    def __init__(self, folder: Path, *, dmem: bool, version: int = 2) -> None:
        self.groups = FolderCgroups.make(folder / "cgroup", dmem=dmem, memory_bytes=CARD, version=version)
        copy = folder / "nvml.so"  # a separate copy of the library, which keeps its own state file open
        shutil.copy(library_path(SOFT_NVML), copy)
        self.card: Card = Cards(str(copy)).all()[0]
        self.programs: list[subprocess.Popen[str]] = []

    def group(self, name: str, *, delegate: bool = True) -> Path:
        path = self.groups.root / name
        if delegate and (self.groups.root / "dmem.capacity").exists():
            self.groups.delegate(path.parent, "dmem")
        self.groups.create(path)
        return path

    def start(self, group: Path, *before: str) -> subprocess.Popen[str]:
        """A program that is in the group before it asks for anything."""
        command = [*before, sys.executable, "-c", PROGRAM, str(library_path(SOFT_DRIVER))]
        program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.programs.append(program)
        self.groups.enter(group, program.pid)
        return program

    def limit(self, group: Path, mib: int) -> None:
        self.card.set_memory_limits(group, mib * MIB, mib * MIB)

    def refusal(self, *arguments: object) -> int:
        with pytest.raises(NvmlError) as raised:
            self.card.set_memory_limits(*arguments)  # type: ignore[arg-type]
        return raised.value.code


def take(program: subprocess.Popen[str], mib: int) -> list[int]:
    """Let a program take that much: CUresult, MiB free, MiB of the card as it sees it."""
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(f"{mib}\n")
    program.stdin.flush()
    return [int(word) for word in program.stdout.readline().split()]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    made: list[Machine] = []

    def machine(**how: object) -> Machine:
        monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
        monkeypatch.setenv("COTENANT_SOFTGPU_MEMORY", str(CARD))
        monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
        made.append(Machine(tmp_path, **how))  # type: ignore[arg-type]
        return made[-1]

    yield machine
    for program in (program for each in made for program in each.programs):
        program.kill()
        program.communicate()


def test_kernel_limit_on_the_leaf_holds_and_is_what_the_program_sees(make):
    machine = make(dmem=True)
    leaf = machine.group("tenant")
    machine.limit(leaf, CONTEXT + 100)
    program = machine.start(leaf)
    assert take(program, 60) == [0, 40, CONTEXT + 100]
    assert take(program, 60)[0] == 2  # CUDA_ERROR_OUT_OF_MEMORY
    machine.limit(leaf, CONTEXT + 200)  # the limit is raised while the program runs
    assert take(program, 60) == [0, 80, CONTEXT + 200]
    machine.limit(leaf, 50)  # the limit is below what the program holds, so it gets no more
    assert take(program, 1)[0] == 2
    assert machine.card.memory_limits(leaf) == (50 * MIB, 50 * MIB, (CONTEXT + 120) * MIB)


def test_kernel_limit_on_a_parent_holds_and_the_program_sees_the_whole_card(make):
    machine = make(dmem=True)
    parent = machine.group("slice")
    leaf = machine.group("slice/tenant")
    machine.limit(parent, CONTEXT + 100)
    program = machine.start(leaf)
    assert take(program, 60)[::2] == [0, 4096]
    assert take(program, 60)[0] == 2


def test_drivers_limit_counts_nothing_that_was_there_before_it(make):
    machine = make(dmem=False)
    leaf = machine.group("tenant")
    program = machine.start(leaf)
    assert take(program, 60)[::2] == [0, 4096]
    machine.limit(leaf, 40)  # the program holds 60 MiB and a context, and the limit is accepted all the same
    assert machine.card.memory_limits(leaf).used_bytes == 0
    assert take(program, 40)[0] == 0
    assert take(program, 1)[0] == 2
    # 40 MiB are charged, so a limit of 30 MiB is refused
    assert machine.refusal(leaf, 30 * MIB, 30 * MIB) == INVALID_ARGUMENT


def test_drivers_limit_further_up_is_not_charged(make):
    machine = make(dmem=False)
    parent, leaf = machine.group("slice"), machine.group("slice/tenant")
    machine.limit(parent, CONTEXT + 40)
    machine.limit(leaf, CONTEXT + 80)
    program = machine.start(leaf)
    assert take(program, 60)[0] == 0


def test_children_are_charged_with_their_parents(make):
    machine = make(dmem=True)
    leaf = machine.group("tenant")
    machine.limit(leaf, CONTEXT + 100)
    program = machine.start(leaf, "sh", "-c", '"$@"; :', "sh")
    assert take(program, 120)[0] == 2
    assert take(program, 60)[0] == 0


def test_a_leaf_that_goes_with_its_soft_limit_leaves_it_in_the_sums(make):
    machine = make(dmem=True)
    parent, one, two = machine.group("slice"), machine.group("slice/one"), machine.group("slice/two")
    machine.limit(one, 30)
    machine.limit(two, 50)
    assert machine.groups.read(parent, "dmem.min").split() == [region(0), str(80 * MIB)]
    machine.card.set_memory_limits(one, 0, NO_LIMIT)
    machine.groups.remove(one)
    machine.groups.remove(two)
    assert machine.groups.read(parent, "dmem.min").split() == [region(0), str(50 * MIB)]


def test_refusals(make, tmp_path, monkeypatch):
    machine = make(dmem=True)
    bare = machine.group("bare", delegate=False)
    assert machine.refusal(bare, 0, MIB) == NOT_FOUND  # its parent does not delegate dmem
    assert machine.refusal(machine.groups.root, 0, MIB) == NOT_SUPPORTED
    assert machine.refusal(tmp_path / "cgroup/none", 0, MIB) == INVALID_ARGUMENT
    with pytest.raises(NvmlError) as raised:
        machine.card.memory_limits(bare)
    # no group up to the root has limits; this error must not be read as "there are no limits"
    assert raised.value.code == NOT_SUPPORTED
    monkeypatch.delenv("COTENANT_SOFTGPU_CGROUPS")
    assert machine.refusal(bare, 0, MIB) == FUNCTION_NOT_FOUND  # what driver 580 answers


def test_version_1_has_no_limits(make):
    machine = make(dmem=False, version=1)
    assert machine.refusal(machine.groups.root, 0, MIB) == NOT_SUPPORTED


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give the folder to another user")
def test_only_the_machines_root_sets_limits(make):
    machine = make(dmem=True)
    leaf = machine.group("tenant")
    os.chown(machine.groups.root, 65534, 65534)
    assert machine.refusal(leaf, 0, MIB) == NO_PERMISSION


def test_groups_with_processes_are_neither_removed_nor_divided(make):
    machine = make(dmem=True)
    leaf = machine.group("tenant")
    program = machine.start(leaf)
    for change in (lambda: machine.groups.remove(leaf), lambda: machine.groups.delegate(leaf, "dmem")):
        with pytest.raises(OSError) as raised:
            change()
        assert raised.value.errno == errno.EBUSY
    program.kill()
    program.wait()
    machine.groups.remove(leaf)
    assert not leaf.exists()


def test_machine_without_the_controller_cannot_delegate_it(make):
    machine = make(dmem=False)
    with pytest.raises(OSError) as raised:
        machine.groups.delegate(machine.groups.root, "dmem")
    assert raised.value.errno == errno.ENOENT


def test_changes_of_several_processes_are_seen_completely_or_not_at_all(make):
    machine = make(dmem=True)
    one, two = machine.group("one"), machine.group("two")
    machine.limit(one, 100)
    program = machine.start(one)
    changed, over = threading.Event(), threading.Event()

    def change() -> None:
        while not over.is_set():
            for group in (two, one):
                machine.groups.enter(group, program.pid)
            machine.groups.write(one, "dmem.max", f"{region(0)} {100 * MIB}")
            machine.limit(one, 100)
            changed.set()

    def look() -> None:
        while not over.is_set():
            assert machine.groups.of(program.pid) in (one, two)
            assert machine.groups.read(one, "dmem.max") == f"{region(0)} {100 * MIB}\n"
            assert machine.card.memory_limits(one).hard_bytes == 100 * MIB

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work) for work in (change, look, change, look)]
        assert changed.wait(60)
        first = wait(working, timeout=1, return_when="FIRST_COMPLETED").done
        over.set()
        for work in first:
            work.result()
        assert [work.result() for work in working] == [None] * 4
