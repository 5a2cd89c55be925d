"""Drills over machines with addresses, clocks and disks of their own: namespaces of this one. Many seeds: bench."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import machine_drill
import pytest
from netlab import Lab
from postgres_server import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab(("c0", "c1", "db", *machine_drill.NODES))
    yield made
    made.end()


@pytest.mark.parametrize("seed", [1, 9, 11])
def test_whatever_fails_no_job_is_lost_or_runs_twice(lab: Lab, tmp_path: Path, seed: int) -> None:
    print("\n" + ", ".join(machine_drill.run(lab, tmp_path / "d", seed)))


@pytest.fixture(scope="module")
def server(lab: Lab) -> Iterator[PostgresServer]:
    machine = lab.machines["db"]
    made = PostgresServer(machine.address, machine.inside())
    yield made
    made.end()


@pytest.mark.extras
@pytest.mark.parametrize("how", ["killed", "frozen", "cut", "split"])
def test_a_second_controller_takes_over(lab: Lab, server: PostgresServer, tmp_path: Path, how: str) -> None:
    url = server.database(how)
    took_s, attempts = machine_drill.take_over(lab, tmp_path / "d", 3, how, url)
    print(f"\n{how}: the second controller led after {took_s:.1f} s; attempts {attempts}")
    if how != "split":
        assert set(attempts.values()) == {1}  # jobs never noticed
