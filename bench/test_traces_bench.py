"""Measures reading and generating a million jobs, compared with plain Python that does only the same basic work."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

JOBS = 1_000_000


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def plain_read(path: Path) -> list[tuple[str, float, float, float, str]]:
    """Read the five columns with a loop over the csv module, without any check."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [(r["id"], float(r["arrival_s"]), float(r["gpus"]), float(r["duration_s"]), r["model"]) for r in rows]


def peak_mib(code: str, *args: str) -> float:
    """Peak resident memory in MiB of a new Python process that runs `code`. VmHWM is read, because the peak in rusage
    starts at that of the parent process."""
    measure = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    command = [sys.executable, "-c", f"{code}\n{measure}", *args]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1024


def test_a_million_jobs(tmp_path: Path) -> None:
    from cotenant.workloads.jobs.generate import Workload, generate
    from cotenant.workloads.jobs.registry import read_trace
    from cotenant.workloads.jobs.write import write_native

    classes = {"image": ("alexnet", "res18"), "language": ("gnmt", "lstm"), "speech": ("m5",)}
    generate(Workload(1000), classes)  # a first call without measurement, which includes imports
    made_s, made = timed(lambda: generate(Workload(JOBS), classes))
    jobs = made.trace.jobs  # type: ignore[attr-defined]
    csv_path, parquet_path = tmp_path / "t.csv", tmp_path / "t.parquet"
    wrote_s, _ = timed(lambda: write_native(csv_path, lambda: jobs))
    write_native(parquet_path, lambda: jobs)
    plain_s, plain = timed(lambda: plain_read(csv_path))
    csv_s, trace = timed(lambda: read_trace(str(csv_path)))
    parquet_s, _ = timed(lambda: read_trace(str(parquet_path)))
    assert trace.jobs.arrival_s.tolist() == [row[1] for row in plain]  # type: ignore[attr-defined]
    read = "import sys; from cotenant.workloads.jobs.registry import read_trace; read_trace(sys.argv[1])"
    imports = peak_mib("from cotenant.workloads import native")
    csv_mib, parquet_mib = peak_mib(read, str(csv_path)), peak_mib(read, str(parquet_path))
    print(
        f"\n{JOBS:,} jobs: generate {made_s:.2f} s, write CSV {wrote_s:.2f} s; read with checks: CSV {csv_s:.2f} s, "
        f"Parquet {parquet_s:.2f} s; plain csv loop without checks {plain_s:.2f} s "
        f"(ratio {plain_s / csv_s:.1f} and {plain_s / parquet_s:.1f}); peak memory of reading: CSV {csv_mib:.0f} MiB, "
        f"Parquet {parquet_mib:.0f} MiB ({imports:.0f} MiB of it imports)"
    )
    assert csv_s < plain_s
    assert max(csv_mib, parquet_mib) < 2048
