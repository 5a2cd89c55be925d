"""A profile of kernels under the scheme orion: what is refused beside LS work is decided kernel by kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from waiting import wait_for

from cotenant.abi.floor import KERNEL, KERNEL_NAME, WorkClass
from cotenant.agent.config import kernel_table
from cotenant.agent.config.colocation import known_kernels
from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.agent.config.kernel_table import compiled, entries_of, hashed, most_class
from cotenant.agent.config.schema import load
from cotenant.agent.gate.client import join_floor
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, register
from cotenant.agent.tenants.registry import spec_from_dict, spec_to_dict
from cotenant.bench.colocation import FILLS_SMS, known_work
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.colocation_virtual import be_work
from cotenant.bench.kernel_profile import measure as profile_kernels
from cotenant.cli.run import app as run_app
from cotenant.core.errors import InputError
from cotenant.profiles.kernels.contention import read_table
from cotenant.profiles.kernels.profile import KernelRow, read_kernel_rows

SOURCE = Path(__file__).resolve().parents[2] / "src"
UNKNOWN, MEMORY, COMPUTE = (int(kind) for kind in (WorkClass.UNKNOWN, WorkClass.MEMORY, WorkClass.COMPUTE))
SHAPE = (132, 1, 1, 1, 1, 1)  # launch shape of the driver's timed kernels
ROWS = [
    KernelRow("timed_memory", SHAPE, 20_000, 132, MEMORY),
    KernelRow("timed_compute", SHAPE, 20_000, 132, COMPUTE),
]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_hash_is_fnv_1a() -> None:
    """Reference values of its authors' test vectors."""
    assert hashed(b"") == 0xCBF29CE484222325
    assert hashed(b"a") == 0xAF63DC4C8601EC8C
    assert hashed(b"foobar") == 0x85944171F73967E8


def rows_of(text: str) -> dict[int, tuple[int, ...]]:
    return {key: tuple(rest) for key, *rest in KERNEL.iter_unpack(entries_of(text))}


def test_a_name_stands_for_what_all_its_shapes_agree_on() -> None:
    same = [KernelRow("k", (n, 1, 1, 64, 1, 1), 1000 * n, 5, MEMORY) for n in (1, 2)]
    mixed = [KernelRow("m", (n, 1, 1, 64, 1, 1), 70, n, kind) for n, kind in ((1, MEMORY), (2, COMPUTE))]
    found = rows_of(compiled([*same, *mixed]))
    assert len(found) == 6
    assert found[hashed(b"k")] == (0, 5, MEMORY)
    assert found[hashed(b"m")] == (0, 0, UNKNOWN)
    exact = b"".join(n.to_bytes(4, "little") for n in (2, 1, 1, 64, 1, 1))
    assert found[hashed(b"m" + exact)] == (70, 2, COMPUTE)


def test_of_too_many_kernels_the_longest_stay() -> None:
    rows = [KernelRow(f"k{n}", (), n + 1, 1, COMPUTE) for n in range(kernel_table.MOST + 10)]
    found = rows_of(compiled(rows))
    assert len(found) == kernel_table.MOST
    assert hashed(b"k9") not in found
    assert hashed(b"k10") in found
    assert len(json.dumps(compiled(rows))) < 60_000  # a request to the control socket may have 64 KiB


def test_of_a_long_name_what_a_profile_keeps_counts() -> None:
    long = "k" * KERNEL_NAME
    rows = [KernelRow(long + "a", (), 30, 1, COMPUTE), KernelRow(long + "b", (), 20, 1, COMPUTE)]
    assert rows_of(compiled(rows)) == {hashed(long.encode()): (0, 1, COMPUTE)}


def test_a_graph_counts_as_what_most_of_the_time_is() -> None:
    short = KernelRow("a", (), 10, 1, COMPUTE, count=3)
    assert most_class([short, KernelRow("b", (), 31, 1, MEMORY)]) == "memory"
    assert most_class([short, KernelRow("b", (), 29, 1, MEMORY)]) == "compute"


def test_wrong_profiles_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    good = {"name": "k", "duration_ns": 5, "sms": 1, "work_class": "memory", "grid": [1, 1, 1], "block": [1, 1, 1]}
    path.write_text(json.dumps({"kernels": [good]}))
    assert read_kernel_rows(path) == [KernelRow("k", (1,) * 6, 5, 1, MEMORY)]
    for bad in (
        {"sms": 0},
        {"grid": [1]},
        {"grid": 4},
        {"work_class": "heavy"},
        {"work_class": "none"},
        {"name": None, "sms": []},
        {"duration_ns": 2.5},
        {"count": "3"},
        {"sms": True},
        {"block": [1, 1, 1, 1]},
    ):
        path.write_text(json.dumps({"kernels": [good | bad]}))
        with pytest.raises(InputError, match="kernel 1 "):
            read_kernel_rows(path)
    for text in ("", "[]", '{"kernels": []}', '{"kernels": 3}'):
        path.write_text(text)
        with pytest.raises(InputError):
            read_kernel_rows(path)
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path("/dev/zero")):  # an agent that read such a file again would wait for ever
        with pytest.raises(InputError, match="not a file"):
            read_kernel_rows(endless)


def test_tables_that_are_none_are_refused() -> None:
    for text in ("?", "AAAA", "A" * 64):  # the last text decodes to two rows with the same key and an unknown class
        with pytest.raises(InputError, match="not a kernel table"):
            check_spec(TenantSpec("t", best_effort=True, kernels=text))
    with pytest.raises(InputError, match="only to best-effort"):
        check_spec(TenantSpec("t", kernels=compiled(ROWS)))


def test_the_agents_file_names_a_profile_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("tenants:\n  - {name: t, best_effort: true, kernel_profile: p.json}\n")
    with pytest.raises(InputError, match=r"p\.json: cannot be read"):
        load(str(path))
    (tmp_path / "p.json").write_text(
        json.dumps({"kernels": [{"name": "k", "duration_ns": 5, "sms": 1, "work_class": "memory"}]})
    )
    (spec,) = load(str(path)).tenants
    assert (spec.kernels, spec.work_class) == (compiled([KernelRow("k", (), 5, 1, MEMORY)]), "unknown")
    told = known_kernels("p.json", None, latency_sensitive=True, folder=tmp_path)
    assert told["work_class"] == "memory"


# -- processes ---------------------------------------------------------------------------------------------------------

PROGRAM = f"""
import json, sys, time
sys.path.insert(0, {str(SOURCE)!r})
from cotenant.bench.driver import Driver
cuda = Driver()
cuda.launch(20_000, work="compute")
cuda.synchronise()
stream = cuda.stream()
graph = cuda.graph([20_000] * 3, stream, work="memory")
print("ready", flush=True)
for line in sys.stdin:
    began = time.monotonic()
    if line.strip() == "graph":
        cuda.call("cuGraphLaunch", graph, stream)
    else:
        cuda.launch(20_000, work=line.strip())
    ended = time.monotonic()
    cuda.synchronise()
    print(began, ended, flush=True)
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("soft", together=True) as started:
        started.scheme("orion", heartbeat_timeout_ms=int(HEARTBEAT_S * 1000))
        yield started


class Program:
    """A tenant that launches one kernel for each line, and says when the launch began and when it returned."""

    def __init__(self, rig: Rig, spec: TenantSpec, source: str = PROGRAM) -> None:
        command = [sys.executable, "-c", source]
        self._client = ControlClient(rig.bench.folder)
        environment = rig.bench.with_shim(register(self._client, Launch(rig.bench.folder, spec, command)))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self._client.call("started", name=spec.name, pid=self._process.pid)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def launch(self, work: str) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        began, ended = self._line().split()
        return float(began), float(ended)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._client.close()


HEARTBEAT_S = 60.0
REFUSED_S = 0.3


def passes_beside(rig: Rig, program: Program, work: str, shown: WorkClass) -> bool:
    """Whether a launch returns while LS work of that class is active; the kernel itself may wait on the device."""
    floor = join_floor(rig.bench.folder, rig.uuid)
    raised = time.monotonic()
    floor.raise_(shown)
    _, ended = program.launch(work)
    floor.lower()
    floor.close()
    return ended < raised + HEARTBEAT_S


def refused_beside(rig: Rig, program: Program, work: str, shown: WorkClass) -> bool:
    """Whether a launch waits as long as LS work of that class is active; one that comes late is not seen to pass."""
    floor = join_floor(rig.bench.folder, rig.uuid)
    floor.raise_(shown)
    lowered: list[float] = []
    lowering = threading.Timer(REFUSED_S, lambda: (lowered.append(time.monotonic()), floor.lower()))
    lowering.start()
    _, ended = program.launch(work)
    lowering.join()
    floor.close()
    return ended >= lowered[0]


def test_the_memory_bound_kernels_wait_for_memory_bound_ls_work(rig: Rig) -> None:
    program = Program(rig, TenantSpec("be", mechanism="mps", best_effort=True, kernels=compiled(ROWS)))
    for shown, held in ((WorkClass.MEMORY, "memory"), (WorkClass.COMPUTE, "compute"), (WorkClass.UNKNOWN, "")):
        # the kernel `mixed` is not in the profile, so its class is unknown
        for work in ("memory", "compute", "mixed", "memory"):
            expected = refused_beside if work == held else passes_beside
            assert expected(rig, program, work, shown), (shown, work)
    program.close()


def test_kernels_that_fill_more_sms_than_the_threshold_wait(rig: Rig) -> None:
    narrow = [KernelRow("timed_memory", SHAPE, 20_000, 8, MEMORY), ROWS[1]]
    program = Program(rig, TenantSpec("wide", mechanism="mps", best_effort=True, kernels=compiled(narrow)))
    rig.scheme("orion", sm_threshold=100)
    assert refused_beside(rig, program, "compute", WorkClass.UNKNOWN)
    assert passes_beside(rig, program, "memory", WorkClass.UNKNOWN)
    rig.scheme("orion", sm_threshold=0)
    program.close()


def test_without_a_threshold_it_is_the_sms_of_the_gpu(rig: Rig) -> None:
    """As in Orion, whose threshold beside inference is all SMs: what fills more of them waits."""
    sm_count = read_table().sm_count
    rows = [
        KernelRow("timed_memory", SHAPE, 20_000, sm_count + 1, MEMORY),
        KernelRow("timed_compute", SHAPE, 20_000, sm_count, COMPUTE),
    ]
    program = Program(rig, TenantSpec("waves", mechanism="mps", best_effort=True, kernels=compiled(rows)))
    assert refused_beside(rig, program, "memory", WorkClass.UNKNOWN)
    assert passes_beside(rig, program, "compute", WorkClass.UNKNOWN)
    program.close()


def test_the_scheme_tidal_asks_for_no_class(rig: Rig) -> None:
    program = Program(rig, TenantSpec("plain", mechanism="mps", best_effort=True, kernels=compiled(ROWS)))
    rig.scheme("tidal")
    assert refused_beside(rig, program, "compute", WorkClass.MEMORY)
    rig.scheme("orion")
    assert passes_beside(rig, program, "compute", WorkClass.MEMORY)
    program.close()


# a name as long as libraries have them, longer than a profile stores
TEMPLATE = "_ZN7cutlass13device_kernel" + "I4LongE" * 80
TEMPLATES = f"""
import ctypes, sys, time
sys.path.insert(0, {str(SOURCE)!r})
from cotenant.bench.driver import Driver
cuda = Driver()
module, function = ctypes.c_void_p(), ctypes.c_void_p()
image = b"cotenant-soft-module\\n{TEMPLATE} 20000 132 memory\\n\\0"
cuda.call("cuModuleLoadData", ctypes.byref(module), image)
cuda.call("cuModuleGetFunction", ctypes.byref(function), module, b"{TEMPLATE}")

def launch():
    cuda._launch(function, 132, 1, 1, 1, 1, 1, 0, None, cuda._params, None)
    cuda.synchronise()

launch()
print("ready", flush=True)
for line in sys.stdin:
    began = time.monotonic()
    launch()
    print(began, time.monotonic(), flush=True)
"""


def test_a_kernel_with_a_long_name_is_found_in_its_profile(rig: Rig, tmp_path: Path) -> None:
    found = profile_kernels("soft", [sys.executable, "-c", TEMPLATES], classes=False)
    (row,) = found["kernels"]
    assert TEMPLATE.startswith(row["name"])
    assert len(row["name"]) == KERNEL_NAME < len(TEMPLATE)
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"kernels": [row | {"work_class": "memory"}]}))
    told = compiled(read_kernel_rows(path))
    program = Program(rig, TenantSpec("long", mechanism="mps", best_effort=True, kernels=told), TEMPLATES)
    assert refused_beside(rig, program, "", WorkClass.MEMORY)
    assert passes_beside(rig, program, "", WorkClass.COMPUTE)
    program.close()


def shown_classes(rig: Rig, program: Program, work: str) -> set[int]:
    """Classes that the floor showed while the program ran a kernel."""
    floor = join_floor(rig.bench.folder, rig.uuid)
    seen: set[int] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.update(bytes(floor.mapping.raised))

    wait_for(lambda: not any(bytes(floor.mapping.raised)), what="the flag of earlier kernels is cleared")
    watching = threading.Thread(target=look)
    watching.start()
    for _ in range(20):
        program.launch(work)
    wait_for(lambda: program.launch(work) and seen - {0}, what="the program's kernels are seen")
    over.set()
    watching.join()
    floor.close()
    return seen - {0}


@pytest.mark.parametrize("stated", ["unknown", "compute"])
def test_an_ls_program_shows_the_class_of_what_it_runs(rig: Rig, stated: str) -> None:
    kind: dict[str, Any] = {"mechanism": "mps", "latency_sensitive": True, "work_class": stated}
    program = Program(rig, TenantSpec(f"ls-{stated}", kernels=compiled(ROWS), **kind))
    assert shown_classes(rig, program, "memory") == {MEMORY}
    assert shown_classes(rig, program, "compute") == {COMPUTE}
    assert shown_classes(rig, program, "mixed") == {UNKNOWN}
    assert shown_classes(rig, program, "graph") == {COMPUTE if stated == "compute" else UNKNOWN}
    program.close()
    plain = Program(rig, TenantSpec(f"plain-{stated}", **kind))
    assert shown_classes(rig, plain, "memory") == {COMPUTE if stated == "compute" else UNKNOWN}
    plain.close()


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--best-effort", "--kernel-profile", "{folder}/none.json"], "cannot be read"),
        (
            ["--best-effort", "--kernel-profile", "{folder}/bad.json"],
            "is not JSON",
        ),
        (
            ["--best-effort", "--kernel-profile", "{folder}/other.json"],
            "not what `cotenant profile kernels --out` writes",
        ),
        (["--kernel-profile", "{folder}/bad.json"], "only to --best-effort or --latency-sensitive"),
    ],
)
def test_run_says_what_is_wrong_with_a_profile(tmp_path: Path, options: list[str], sentence: str) -> None:
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "other.json").write_text("[]")
    done = CliRunner().invoke(run_app, [*(o.format(folder=tmp_path) for o in options), "--", "true"])
    assert isinstance(done.exception, InputError)
    assert done.exception.field == "--kernel-profile"
    assert sentence in str(done.exception)


def test_a_tenant_keeps_its_profile_where_it_is_written_down() -> None:
    spec = TenantSpec("t", best_effort=True, kernels=compiled(ROWS))
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec


@pytest.mark.parametrize(("fills", "kind"), [(True, "mm4096"), (True, "add256"), (False, "train-resnet50")])
def test_the_bench_tells_orion_on_the_software_gpu_what_the_simulator_is_told(fills: bool, kind: str) -> None:
    """Classes, and whether a kernel fills more than all SMs: the threshold."""
    table, sm_count = rows_of(known_work(True, fills)["kernels"]), read_table().sm_count
    for work in be_work(kind, sm_count):
        name = {COMPUTE: b"timed_compute", MEMORY: b"timed_memory"}[work.work_class]
        _, sms, work_class = table[hashed(name)]
        assert work_class == work.work_class
        assert (sms > sm_count) == (work.sms > sm_count) == fills


def test_on_a_card_without_a_profile_only_the_size_of_grids_is_known() -> None:
    assert known_work(False, True) == {"work_sms": FILLS_SMS}
    assert known_work(False, False) == {"work_sms": 0}
