"""Programs of one tenant that share GPU memory by CUDA IPC while the tenant's memory moves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swap_node import CONTEXT, MIB, Node, nodes_in

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def test_memory_shared_between_processes_stays_and_the_rest_makes_room(node: Callable[..., Node]) -> None:
    """A program hands one of its blocks to another of the same tenant (CUDA IPC), beside a tenant that needs room."""
    here = node(3 * CONTEXT + 320 * MIB)
    owner = here.program("a")
    assert owner.ask("take(160, 32)") == "0"
    guest, other = here.joined("a"), here.program("b")
    handle = owner.ask("share(2)")
    assert guest.ask(f"open_shared({handle!r}, 32)") == owner.ask("contents(2)")
    assert other.ask("take(200)") == "0"
    for program in (owner, other):
        program.tell("work(1.5)")
    assert [program.answer().split()[1] for program in (owner, other)] == ["intact", "intact"]
    assert guest.ask("shared_contents()") == owner.ask("contents(2)")
    row = here.where("a")
    assert row["movable_bytes"] == 128 * MIB
    assert row["can_leave"]
    assert row["moves_out"] > 0
    assert here.where("b")["moves_out"] > 0
    assert any("32 MiB" in text for text in here.tenant("a")["warnings"])
    owner.process.kill()
    # the memory lives as long as any process has it open
    assert guest.ask("shared_contents()") == guest.ask("first_contents")


# Calls each function by which memory or events pass between processes, and prints its result and its seconds.
DOORS = """
import ctypes, json, sys, time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

class Handle(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 64)]
cuda, results = ctypes.CDLL(None), {}
context, memory, address, pool, event = c_void_p(), c_uint64(), c_uint64(), c_void_p(), c_void_p()
data, fd, physical, none = ctypes.create_string_buffer(64), c_int(-1), c_uint64(), c_uint64(0)
assert cuda.cuInit(0) == cuda.cuCtxCreate_v2(byref(context), 0, 0) == 0
assert cuda.cuMemAlloc_v2(byref(memory), c_size_t(4 << 20)) == cuda.cuEventCreate(byref(event), 6) == 0
assert cuda.cuDeviceGetDefaultMemPool(byref(pool), 0) == 0

def door(name, *given):
    began = time.monotonic()
    results[name] = getattr(cuda, name)(*given), time.monotonic() - began

door("cuIpcGetMemHandle", data, memory)
for name in ("cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"):
    door(name, byref(address), Handle.from_buffer_copy(b"x" * 64), 1)
door("cuIpcCloseMemHandle", c_uint64(64 << 20))
door("cuIpcGetEventHandle", data, event)
door("cuIpcOpenEventHandle", byref(event), Handle.from_buffer_copy(b"x" * 64))
door("cuMemPoolExportToShareableHandle", byref(fd), pool, 1, none)
door("cuMemPoolImportFromShareableHandle", byref(pool), c_void_p(99), 1, none)
door("cuMemPoolExportPointer", data, memory)
door("cuMemPoolImportPointer", byref(address), pool, data)
door("cuMemGetHandleForAddressRange", byref(fd), memory, c_size_t(4 << 20), 1, none)
door("cuMemRetainAllocationHandle", byref(physical), memory)
door("cuMemExportToShareableHandle", byref(fd), physical, 1, none)
door("cuMemImportFromShareableHandle", byref(physical), c_void_p(fd.value if fd.value >= 0 else 99), 1)
print(json.dumps(results))
"""
NOT_FOUND, NOT_SUPPORTED = 500, 801  # the first: what the software GPU does not have, and what a junk handle names
STAYS = "memory of this process stays on the GPU: the program "
REGISTERS = STAYS + "registers memory with the network (cuMemGetHandleForAddressRange)"
MANAGED = STAYS + "shares memory with other processes (cuIpcGetMemHandle), which is not possible for managed memory"


@pytest.mark.parametrize(
    ("options", "handle", "said"),
    [
        ((), NOT_FOUND, ()),
        (("--oversubscribe", "park"), NOT_FOUND, ()),
        (("--oversubscribe", "swap"), 0, ("(CUDA IPC) stays on the GPU, 4 MiB so far", REGISTERS)),
        (("--oversubscribe", "managed"), NOT_SUPPORTED, (MANAGED,)),
    ],
)
def test_each_door_between_processes_answers_at_once(
    node: Callable[..., Node], options: tuple[str, ...], handle: int, said: tuple[str, ...]
) -> None:
    """The driver's own answer, or a sentence on the program's standard error before its memory stops to move."""
    here = node(2 * CONTEXT)
    run = [sys.executable, "-m", "cotenant.cli.main", "run", "--dir", str(here.folder), "--memory", "320MiB", *options]
    command = [*run, "--", sys.executable, "-c", DOORS]
    done = subprocess.run(command, env=here.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    codes = {name: code for name, (code, _) in json.loads(done.stdout).items()}
    assert max(seconds for _, seconds in json.loads(done.stdout).values()) < 5
    assert codes["cuIpcGetMemHandle"] == handle
    elsewhere = {name for name in codes if name.startswith(("cuIpcOpen", "cuMemPool", "cuIpcGetEvent", "cuIpcClose"))}
    assert {codes[name] for name in elsewhere} == {NOT_FOUND}
    for text in said:
        assert text in done.stderr
    if not said:
        assert "stays on the GPU" not in done.stderr
