"""Drills over machines with addresses, clocks and disks of their own: namespaces of this one. Many seeds: bench."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import machine_drill
import pytest
from netlab import Lab
from postgres_server import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab(("c0", "c1", "db", "db2", *machine_drill.NODES))
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
        assert set(attempts.values()) == {1}  # the jobs ran on without a restart


@pytest.mark.extras
@pytest.mark.parametrize("how", ["killed", "cut"])
def test_jobs_outlive_the_machine_of_their_database(lab: Lab, tmp_path: Path, how: str) -> None:
    """Two servers, of which the second confirms every commit and is promoted."""
    servers = []
    try:
        for name in ("db", "db2"):
            machine = lab.machines[name]
            servers.append(PostgresServer(machine.address, machine.inside(), *servers))
        first, second = servers
        first.database("fleet")
        first.follow(second)

        def fail() -> None:
            if how == "killed":
                first.stop(signal.SIGQUIT)
            else:
                lab.isolate("db")
            second.promote()

        hosts = ",".join(f"{server.address}:{server.port}" for server in servers)
        url = f"postgresql://fleet@{hosts}/fleet?target_session_attrs=read-write"
        took_s, attempts = machine_drill.fail_over(lab, tmp_path / "d", 3, url, fail)
        print(f"\n{how}: a controller led on the second server after {took_s:.1f} s; attempts {attempts}")
        assert {attempts[name] for name in attempts if name.startswith("w")} == {1}  # the jobs ran on without a restart
    finally:
        for server in servers:
            server.end()
