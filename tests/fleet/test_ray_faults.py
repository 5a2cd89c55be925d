"""What Ray may lose while jobs go on: a node's actor, the head, a whole node. Real Ray, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_for

from cotenant.agent.processes import descendants, key_of
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.session import Fleet, FleetOptions

LONG_S = 240.0
pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(1200)]


def _waits(tmp_path: Path, name: str) -> JobSpec:
    """A job that runs until a file appears, and tells every start of it."""
    script = f"echo run >> {tmp_path}/{name}.runs; while [ ! -e {tmp_path}/{name}.go ]; do sleep 0.1; done; echo done"
    return JobSpec(name, ("sh", "-c", script), gpus=2.0, processes="node", workdir=str(tmp_path))


def _below(pid: int, word: str) -> list[int]:
    """Processes below `pid` whose command line has the word."""
    found = []
    for key in descendants({key_of(pid)}):
        try:
            if word in Path(f"/proc/{key.pid}/cmdline").read_bytes().decode(errors="replace"):
                found.append(key.pid)
        except OSError:
            continue
    return found


def test_jobs_outlive_their_actor_and_rays_head(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    options = FleetOptions(folder=tmp_path / "f", nodes=2, executor="ray", lease_s=1.0, keep_s=600.0, grace_s=2.0)
    with Fleet(options) as fleet:
        fleet.submit(_waits(tmp_path, "job"))
        # Wait until the controller knows it, too: a report that is lost together with its actor is repeated only after
        # the next exchange.
        wait_for(lambda: fleet.job("job")["state"] == "running", LONG_S, "the job runs")
        head = json.loads((tmp_path / "f" / "ray.json").read_text())["pid"]
        for actor in _below(head, "ray::NodeActor"):
            os.kill(actor, signal.SIGKILL)
        time.sleep(1.0)
        fleet.submit(JobSpec("after-actor", ("true",)))
        wait_for(lambda: fleet.job("after-actor")["state"] == "finished", LONG_S, "a job after the actors were killed")
        for server in _below(head, "gcs_server"):
            os.kill(server, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: fleet.status()["faults"], LONG_S, "the fault is told")
        assert fleet.job("job")["state"] == "running"
        fleet.submit(JobSpec("after-head", ("true",)))
        wait_for(lambda: fleet.job("after-head")["state"] == "finished", LONG_S, "a job after the head was killed")
        print(f"\nafter the head was killed, a new job was done within {time.monotonic() - killed:.1f} s")
        wait_for(lambda: fleet.status()["faults"] == [], LONG_S, "no fault is left")
        (tmp_path / "job.go").touch()
        wait_for(lambda: fleet.job("job")["state"] == "finished", LONG_S, "the job that saw it all")
        assert fleet.job("job")["attempts"] == 1
        assert (tmp_path / "job.runs").read_text() == "run\n"
    assert not _below(head, "ray")


def test_a_lost_node_of_a_cluster_that_is_there(tmp_path: Path) -> None:
    """Two machines of one Ray cluster; one dies. Its job's lease ends, then the job runs on the other."""
    pytest.importorskip("ray")
    from cotenant.fleet.executors import ray_head

    cluster = tmp_path / "cluster"
    cluster.mkdir()
    address = ray_head.ensure(cluster)
    with open(tmp_path / "second.log", "wb") as log:
        second = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block", "--num-cpus=1",
             "--node-ip-address=127.0.0.1", "--object-store-memory=80000000", "--disable-usage-stats"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=ray_head.environment(cluster),
        )  # fmt: skip
    try:
        wait_for(lambda: "Ray runtime started" in (tmp_path / "second.log").read_text(), LONG_S, "the second node")
        from cotenant.fleet.executors.on_ray import RayExecutor
        from cotenant.fleet.nodes import pretend_nodes

        executor = RayExecutor(
            tmp_path / "f", pretend_nodes(2, 2, "A100-40GB", 40 << 30, 6.0, 10**11), address, cluster
        )
        options = FleetOptions(folder=tmp_path / "f", lease_s=1.0, keep_s=20.0, grace_s=1.0)
        with Fleet(options, executor) as fleet:
            assert sorted(node["name"] for node in fleet.status()["nodes"]) == ["node-0", "node-1"]
            fleet.submit(_waits(tmp_path, "a"))
            fleet.submit(_waits(tmp_path, "b"))
            wait_for(lambda: {fleet.job(job)["state"] for job in ("a", "b")} == {"running"}, LONG_S, "both run")
            where = {job: fleet.job(job)["nodes"][0]["node"] for job in ("a", "b")}
            assert sorted(where.values()) == ["node-0", "node-1"]
            for pid in _below(second.pid, "raylet"):
                os.kill(pid, signal.SIGKILL)
            silent = wait_for(
                lambda: [n["name"] for n in fleet.status()["nodes"] if not n["reachable"]], LONG_S, "a node is missed"
            )
            lost, kept = ("a", "b") if where["a"] == silent[0] else ("b", "a")
            (tmp_path / f"{kept}.go").touch()
            wait_for(lambda: fleet.job(kept)["state"] == "finished", LONG_S, "the other job")
            wait_for(
                lambda: (tmp_path / f"{lost}.runs").read_text() == "run\nrun\n", LONG_S, "the lost job runs elsewhere"
            )
            (tmp_path / f"{lost}.go").touch()
            wait_for(lambda: fleet.job(lost)["state"] == "finished", LONG_S, "the job that was lost")
            assert fleet.job(lost)["attempts"] == 2
            assert fleet.job(lost)["failures"] == 0
    finally:
        second.terminate()
        try:
            second.wait(10)
        except subprocess.TimeoutExpired:
            second.kill()
        ray_head.stop(cluster)
