"""The fleet over Ray with a head and two nodes at addresses of their own, clocks apart by minutes: links that are slow,
cut and half open, a disk that is full, a head that dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_drill import JOB
from ray_lab import LONG_S, RayLab
from waiting import wait_for

from cotenant.core.errors import WorkError
from cotenant.fleet.client import FleetClient

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(1800)]


class Fleet:
    """Ray in the namespaces h, n0, n1, and a controller at h, which lets jobs go on alone for `keep_s`."""

    def __init__(self, folder: Path, keep_s: int) -> None:
        self.cluster = RayLab(folder, ("h", "n0", "n1"), offsets_s={"n0": -600, "n1": 5400}, small="n1")
        self.folder = folder
        self.lab = self.cluster.lab
        (folder / "out").mkdir()
        self.cluster.ours(
            "h", "fleet", "up", "--foreground", "--executor", "ray", "--address", self.cluster.address, "--nodes", "3",
            "--lease", "1s", "--keep", f"{keep_s}s", "--grace", "1s", "--fleet", str(folder / "f"),
            word="the fleet is up",
        )  # fmt: skip

    def ask(self, op: str, **order: Any) -> dict[str, Any]:
        """One order to the controller."""
        deadline = time.monotonic() + LONG_S
        while True:
            try:
                with FleetClient(self.folder / "f", 20.0) as client:
                    return client.call(op, **order)
            except WorkError:
                assert time.monotonic() < deadline
                time.sleep(0.3)

    def submit(self) -> list[str]:
        """Three jobs that run on all GPUs until there is a file; all run now."""
        env = {"S": "0", "GO": "1", "D": str(self.folder / "out")}
        jobs = [{"name": f"j{i}", "command": ["sh", "-c", JOB], "gpus": gpus, "env": env}
                for i, gpus in enumerate((1.0, 2.0, 2.0))]  # fmt: skip
        ids = list(self.ask("submit", jobs=jobs)["ids"])
        wait_for(lambda: self.states() == {"running"}, LONG_S, "all run")
        return ids

    def states(self) -> set[str]:
        """Of all jobs."""
        return {row["state"] for row in self.ask("queue", all=True)["jobs"]}

    def silent(self) -> list[str]:
        """Nodes that do not answer."""
        return [node["name"] for node in self.ask("status")["nodes"] if not node["reachable"]]

    def attempts(self) -> dict[str, int]:
        """How often each job was started."""
        return {row["id"]: row["attempts"] for row in self.ask("queue", all=True)["jobs"]}

    def finish(self) -> None:
        """Let the jobs end; none ran twice at once."""
        (self.folder / "out" / "go").touch()
        wait_for(lambda: self.states() == {"finished"}, LONG_S, "all finish")
        assert not (self.folder / "out" / "twice").exists()


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    made = Fleet(tmp_path, request.param)
    try:
        yield made
    finally:
        made.cluster.end()


@pytest.mark.parametrize("fleet", [90], indirect=True)
def test_links_that_fail_for_less_than_a_lease_restart_nothing(fleet: Fleet) -> None:
    ids = fleet.submit()
    lab = fleet.lab
    for link in lab.both("h", "n0"):
        link.delay_s, link.loss = 0.2, 0.05
    rounds = fleet.ask("status")["rounds"]
    wait_for(lambda: fleet.ask("status")["rounds"] >= rounds + 5, LONG_S, "rounds over slow links")
    lab.heal()
    filler = fleet.cluster.filler()  # fills Ray's disk; test_machines.py fills that of a job's node
    rounds = fleet.ask("status")["rounds"]
    wait_for(lambda: fleet.ask("status")["rounds"] >= rounds + 5, LONG_S, "rounds over a full disk")
    filler.unlink()
    lab.isolate("n1")
    wait_for(fleet.silent, LONG_S, "a node that is cut off is missed")
    lab.heal()
    wait_for(lambda: not fleet.silent(), LONG_S, "it is back")
    lab.link("n0", "h").cut = True
    wait_for(fleet.silent, LONG_S, "a node whose answers are lost is missed")
    lab.heal()
    wait_for(lambda: not fleet.silent(), LONG_S, "it is back")
    assert fleet.attempts() == dict.fromkeys(ids, 1)
    lab.isolate("n1")  # longer than its leases: the jobs of n1 are run elsewhere, after they have ended on n1
    wait_for(
        lambda: 2 in fleet.attempts().values() or "waiting" in fleet.states(), LONG_S,
        "the jobs of a lost node are taken back",
    )  # fmt: skip
    fleet.finish()


@pytest.mark.parametrize("fleet", [1200], indirect=True)
def test_jobs_outlive_a_cluster_whose_head_died(fleet: Fleet) -> None:
    ids = fleet.submit()
    cluster = fleet.cluster
    cluster.kill("h", "gcs_server")
    wait_for(lambda: fleet.ask("status")["faults"], LONG_S, "the fault is told")
    for name in cluster.names:
        cluster.rays[name].wait(LONG_S)  # Ray ends itself on all nodes a minute after its head has gone
        assert fleet.states() == {"running"}
    for name in cluster.names:
        cluster.ray(name)
    wait_for(lambda: not fleet.silent() and not fleet.ask("status")["faults"], LONG_S, "all nodes are back")
    fleet.finish()
    assert fleet.attempts() == dict.fromkeys(ids, 1)
