"""Measures the rate that one sender reaches, and how late its requests leave.

pytest -q -s bench/test_load_bench.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.loadgen.run import LoadTest, run_here
from cotenant.loadgen.schedule import parse_service
from cotenant.loadgen.target import parse_target
from cotenant.workloads.requests.arrivals import parse_arrivals

SERVER = Path(__file__).with_name("canned_server.py")


@pytest.fixture
def url() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def test_one_sender_does_thousands_of_requests_per_second(url: str) -> None:
    rows = []
    for rate in (500, 2000, 4000, 6000, 10_000):
        test = LoadTest(parse_target(url), (parse_service(f"a={rate}", parse_arrivals("poisson")),), 3.0)
        began = time.process_time()
        result = run_here(test)
        cpu = time.process_time() - began
        rows.append(
            {
                "asked_rps": rate,
                "rps": round(result.answered_rps),
                "cpu_us_per_request": round(cpu * 1e6 / len(result.rows), 1),
                "lateness_ms": {k: round(v or 0.0, 3) for k, v in result.lateness().items()},
            }
        )
        assert result.summary()["total"]["failed"] == 0
    print(json.dumps(rows, indent=1))
    at = {row["asked_rps"]: row for row in rows}
    assert at[4000]["rps"] > 3900
    assert at[4000]["lateness_ms"]["p50"] < 0.5  # type: ignore[index]
    assert at[4000]["cpu_us_per_request"] < 150
