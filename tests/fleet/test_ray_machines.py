"""The fleet over Ray with a head and two nodes at addresses of their own: links that are slow, cut and half open."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_drill import JOB
from netlab import Lab

from cotenant.core.errors import WorkError
from cotenant.fleet.client import FleetClient
from cotenant.fleet.executors import ray_head

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(900)]
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=0",
       "--object-store-memory=80000000", "--disable-usage-stats")  # fmt: skip


def _until(check: Callable[[], Any], what: str, within_s: float = 180.0) -> None:
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


class Cluster:
    """Ray in the namespaces h, n0, n1, and a controller at h."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        for machine in lab.machines.values():  # Ray asks which of its addresses leads away
            subprocess.run(["ip", "-n", machine.space, "route", "add", "default", "via", "10.77.0.254"], check=True)
        address = {name: machine.address for name, machine in lab.machines.items()}
        head = f"{address['h']}:6379"
        self._start("h", *RAY, "--head", "--port=6379", f"--node-ip-address={address['h']}",
                    "--include-dashboard=false", word="Ray runtime started")  # fmt: skip
        for name in ("n0", "n1"):
            self._start(name, *RAY, f"--address={head}", f"--node-ip-address={address[name]}",
                        word="Ray runtime started")  # fmt: skip
        self._start("h", sys.executable, "-m", "cotenant.cli.main", "fleet", "up", "--foreground", "--executor", "ray",
                    "--address", head, "--nodes", "3", "--lease", "1s", "--keep", "20s", "--grace", "1s", "--fleet",
                    str(folder / "f"), word="the fleet is up")  # fmt: skip

    def _start(self, where: str, *command: str, word: str) -> None:
        log = self.folder / f"{where}-{len(list(self.folder.iterdir()))}.log"
        with log.open("ab") as out:
            self.lab.machines[where].start(*command, stdout=out, stderr=out, env=ray_head.environment())
        _until(lambda: word in log.read_text(errors="replace"), f"{word} in {log}")

    def ask(self, op: str, **order: Any) -> dict[str, Any]:
        """One order to the controller."""
        deadline = time.monotonic() + 60
        while True:
            try:
                with FleetClient(self.folder / "f", 20.0) as client:
                    return client.call(op, **order)
            except WorkError:
                assert time.monotonic() < deadline
                time.sleep(0.3)

    def silent(self) -> list[str]:
        """Nodes that do not answer."""
        return [node["name"] for node in self.ask("status")["nodes"] if not node["reachable"]]

    def attempts(self) -> dict[str, int]:
        """How often each job was started."""
        return {row["id"]: row["attempts"] for row in self.ask("queue", all=True)["jobs"]}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    lab = Lab(("h", "n0", "n1"))
    try:
        yield Cluster(lab, tmp_path)
    finally:
        lab.end()


def test_links_that_fail_for_less_than_a_lease_restart_nothing(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    env = {"S": "0", "GO": "1", "D": str(tmp_path / "out")}
    jobs = [{"name": f"j{i}", "command": ["sh", "-c", JOB], "gpus": gpus, "env": env}
            for i, gpus in enumerate((1.0, 2.0, 2.0))]  # fmt: skip
    ids = cluster.ask("submit", jobs=jobs)["ids"]
    _until(lambda: {row["state"] for row in cluster.ask("queue")["jobs"]} == {"running"}, "all run")
    lab = cluster.lab
    for link in lab.both("h", "n0"):
        link.delay_s, link.loss = 0.2, 0.05
    time.sleep(5.0)  # through several rounds
    lab.heal()
    lab.isolate("n1")
    _until(cluster.silent, "a node that is cut off is missed")
    lab.heal()
    _until(lambda: not cluster.silent(), "it is back")
    lab.link("n0", "h").cut = True
    _until(cluster.silent, "a node whose answers are lost is missed")
    lab.heal()
    _until(lambda: not cluster.silent(), "it is back")
    assert cluster.attempts() == dict.fromkeys(ids, 1)
    lab.isolate("n1")  # for longer than its leases: what ran there runs elsewhere, after it has ended there
    _until(
        lambda: 2 in cluster.attempts().values()
        or "waiting" in {row["state"] for row in cluster.ask("queue")["jobs"]},
        "the jobs of a lost node are taken back",
    )  # fmt: skip
    (tmp_path / "out" / "go").touch()
    _until(lambda: {row["state"] for row in cluster.ask("queue", all=True)["jobs"]} == {"finished"}, "all finish")
    assert not (tmp_path / "out" / "twice").exists()
