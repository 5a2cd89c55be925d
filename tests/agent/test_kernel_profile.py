"""`cotenant profile kernels` on the software GPU, and what its figures mean."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from native_sources import compile_c

from cotenant.abi.floor import WorkClass
from cotenant.bench.kernel_profile import Timed, classify, measure, parse_times, same_kind
from cotenant.core.errors import WorkError
from cotenant.native.libraries import SOFT_DRIVER, library_path
from cotenant.profiles.kernels.profile import KernelWork, read_kernel_rows, read_kernels

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROGRAM = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from cotenant.bench.driver import Driver
cuda = Driver()
for _ in range(30):
    cuda.launch(50_000, work="memory")
    cuda.launch(20_000, work="compute")
    cuda.launch(20_000, work="compute")
    cuda.synchronise()
"""


def test_every_kernel_is_timed_and_told_by_name(tmp_path: Path) -> None:
    found = measure("soft", [sys.executable, "-c", PROGRAM])
    rows = {row["name"]: row for row in found["kernels"]}
    assert set(rows) == {"timed_memory", "timed_compute"}
    assert rows["timed_memory"]["count"] == 30
    assert rows["timed_compute"]["count"] == 60
    assert rows["timed_memory"]["least_ns"] == pytest.approx(50_000, rel=0.02)
    assert rows["timed_compute"]["least_ns"] == pytest.approx(20_000, rel=0.02)
    assert rows["timed_compute"]["narrow_over_wide"] == pytest.approx(3.0, rel=0.05)
    assert rows["timed_compute"]["work_class"] == "compute"
    assert rows["timed_memory"]["narrow_over_wide"] == pytest.approx(1.34, rel=0.05)
    # memory, if the process that moves memory got a processor
    assert rows["timed_memory"]["work_class"] in ("memory", "unknown")
    assert {row["sms"] for row in rows.values()} == {132}
    assert found["missed"] == 0
    assert next(iter(rows)) == "timed_memory"  # the kernel with most of the time comes first
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(found))
    # read it as `run --kernel-profile` does
    known = {row.name: (row.shape, row.work_class) for row in read_kernel_rows(path)}
    assert known["timed_compute"] == ((132, 1, 1, 1, 1, 1), WorkClass.COMPUTE)


def test_every_run_gets_what_came_on_standard_input() -> None:
    """As it comes, without waiting for its end; else the runs would be of different programs."""
    profiled = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from cotenant.bench.kernel_profile import measure
import json
print(json.dumps(measure("soft", [sys.executable, "-m", "cotenant.bench.workload", "launch"])["kernels"]))
"""
    program = subprocess.Popen(
        [sys.executable, "-c", profiled], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdin is not None
    program.stdin.write(b"run 0.1\n")
    program.stdin.flush()
    time.sleep(0.2)
    said, errors = program.communicate(b"run 0.1\n", timeout=240)
    assert program.returncode == 0, errors.decode()[-2000:]
    (row,) = json.loads(said)
    assert row["count"] > 0
    # these two are there only if the other runs launched the kernel, too
    assert {"narrow_over_wide", "beside_memory_over_alone"} <= set(row)


def test_a_program_that_fails_or_uses_no_gpu_is_an_error() -> None:
    with pytest.raises(WorkError, match="failed with code 3: no"):
        measure("soft", [sys.executable, "-c", "import sys; print('no', file=sys.stderr); sys.exit(3)"], classes=False)
    with pytest.raises(WorkError) as failed:
        measure("soft", [sys.executable, "-c", "import sys; sys.exit(3)"], classes=False)
    assert str(failed.value) == "the program failed with code 3"
    with pytest.raises(WorkError, match="no kernel was seen"):
        measure("soft", [sys.executable, "-c", "pass"], classes=False)


@pytest.mark.parametrize(
    ("narrow", "beside", "expected"),
    [(3.0, 1.0, "compute"), (1.3, 1.8, "memory"), (3.0, 1.5, "memory"), (1.0, 1.0, "unknown")],
)
def test_classes(narrow: float, beside: float, expected: str) -> None:
    assert classify(narrow, beside) == expected


def test_a_kernel_whose_grid_follows_the_sms_is_found_again_by_name() -> None:
    def timed(name: str, grid: str, block: str = "1,1,1") -> Timed:
        return Timed(name, grid, block, 0, 1, 1.0, 1.0, 1)

    rows = [timed("gemm", "2,50,1"), timed("add", "4,1,1"), timed("add", "8,1,1")]
    times = {row.key: row for row in rows}
    assert same_kind(times, timed("gemm", "2,66,1")) == rows[0]
    assert same_kind(times, timed("add", "8,1,1")) == rows[2]
    assert same_kind(times, timed("add", "16,1,1")) is None  # two kernels fit, and it is not known which of them it is
    assert same_kind(times, timed("gemm", "2,66,1", "64,1,1")) is None


def test_names_keep_their_tabs_and_commas() -> None:
    text = "2\t1500\t1400\t66\t4,2,1\t128,1,1\t0\tvoid f<int, 3>(a\tb)\nmissed\t7\n"
    assert parse_times(text) == ([Timed("void f<int, 3>(a\tb)", "4,2,1", "128,1,1", 0, 2, 1500.0, 1400.0, 66)], 7)


def test_a_profile_becomes_a_cycle_with_kernels_as_often_as_they_were_launched(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(
        '{"kernels": [{"name": "a", "duration_ns": 10, "sms": 3, "work_class": "compute", "count": 400},'
        ' {"name": "b", "duration_ns": 20, "sms": 3, "work_class": "compute", "count": 200}]}'
    )
    a, b = KernelWork("a", 10, 3, WorkClass.COMPUTE), KernelWork("b", 20, 3, WorkClass.COMPUTE)
    assert read_kernels(path) == [a, b, a]


# the software GPU's driver, but the thread pauses for 20 ms after the first of the two events of every tenth launch
SLOW_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int cuEventRecord(void *event, void *stream)
{
    static int count;
    int result = ((int (*)(void *, void *))dlsym(RTLD_NEXT, "cuEventRecord"))(event, stream);
    if (++count % 20 == 19)
        usleep(20000);
    return result;
}
"""


def test_the_time_in_which_the_program_gets_no_processor_is_no_time_of_its_kernels(tmp_path: Path) -> None:
    """A pause between the two events of a launch looks like a slower kernel, and so like one that needs memory."""
    source, driver = tmp_path / "slow.c", library_path(SOFT_DRIVER)
    source.write_text(SLOW_DRIVER)
    slow = tmp_path / "slow.so"
    compile_c(["-shared", "-fPIC", source, "-o", slow, "-Wl,--no-as-needed", driver, f"-Wl,-rpath,{driver.parent}"])
    found = measure("soft", ["env", f"COTENANT_DRIVER={slow}", sys.executable, "-c", PROGRAM], classes=False)
    rows = {row["name"]: row for row in found["kernels"]}
    assert [rows[name]["count"] for name in ("timed_memory", "timed_compute")] == [30, 60]
    assert rows["timed_memory"]["duration_ns"] == pytest.approx(50_000, rel=0.5)
    assert rows["timed_compute"]["duration_ns"] == pytest.approx(20_000, rel=0.5)
