"""Plans that change under load: what moves, what stays, and that nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from heard import heard
from serve_setup import ask, deployment, infer, plan
from server_thread import Running, running
from waiting import wait_for

from cotenant.core.serving import ServingPlan
from cotenant.serving.backends.timed import offset
from cotenant.serving.planning.crew import Crew
from cotenant.serving.workers import local


class Load:
    """Requests one after another on a few threads; keeps every answer."""

    def __init__(self, server: Running, services: tuple[str, ...], threads: int = 2) -> None:
        self.answers: list[tuple[str, int]] = []
        self.wrong: list[Any] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(server.http_url, name, i))
            for i in range(threads) for name in services
        ]  # fmt: skip

    def _run(self, url: str, name: str, number: int) -> None:
        value = float(number)
        while not self._stop.is_set():
            value += 1.0
            status, _, body = infer(url, name, (value,))
            self.answers.append((name, status))
            if status != 200 or body["model_name"] != name or body["outputs"][0]["data"] != [value + offset(name)]:
                self.wrong.append((name, status, body))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def put(server: Running, made: Any) -> None:
    """Put a plan in force while the server runs."""
    asyncio.run_coroutine_threadsafe(server.server.crew.apply(made), server.loop).result(240)


def pids(server: Running) -> dict[str, int]:
    return {let["name"]: let["pid"] for let in server.status()["gpulets"] if let["state"] == "serving"}


def test_plans_change_under_load_and_no_request_is_lost(tmp_path: Path) -> None:
    services = deployment([{"name": n, "slo_ms": 60_000} for n in "abc"], tmp_path, gpus=2)
    first = plan({"a": 4, "b": 4}, {"c": 4}, gpus=2)
    with running(services, plan=first) as server:
        with Load(server, ("a", "b", "c")) as load:
            for made in (
                plan({"a": 4}, {"b": 4, "c": 2}, gpus=2),
                plan({"a": 8}, {"b": 4, "c": 8}, gpus=2),  # only the batches differ, so no worker is restarted
                plan({"c": 1, "a": 1}, {"b": 2}, {"a": 2}, gpus=2),
                first,
            ):
                time.sleep(0.4)
                put(server, made)
            time.sleep(0.3)
        assert not load.wrong
        counted = Counter(load.answers)
        assert set(counted) == {("a", 200), ("b", 200), ("c", 200)}
        status = server.status()
        assert {s["name"]: s["received"] for s in status["services"]} == {n: counted[n, 200] for n in "abc"}
        assert status["worker_deaths"] == 0
        assert status["switches"] == 5
        wait_for(lambda: len(server.status()["gpulets"]) == 2)  # the old workers have ended


def test_other_batches_keep_the_workers(tmp_path: Path) -> None:
    services = deployment([{"name": "a", "slo_ms": 60_000}, {"name": "b", "slo_ms": 60_000}], tmp_path)
    with running(services, plan=plan({"a": 2, "b": 2}, {"b": 4})) as server:
        before = pids(server)
        put(server, plan({"a": 8, "b": 1}, {"b": 2}))
        assert pids(server) == before
        # b is gone from one gpulet; the worker there stays, but gets no requests for b
        put(server, plan({"a": 8}, {"b": 2}))
        assert pids(server) == before


def test_a_worker_that_does_not_answer_keeps_its_share_and_the_plan_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs a long batch, or ends just now: the planner went on no more."""
    monkeypatch.setattr(local, "RESIZE_WITHIN_S", 0.1)
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path, mechanism="green")
    with heard() as said, running(services, plan=plan({"a": 2})) as server:
        before = pids(server)
        os.kill(before["0/50%/0"], signal.SIGSTOP)
        try:
            put(server, plan({"a": 2}, partition="100%"))
        finally:
            os.kill(before["0/50%/0"], signal.SIGCONT)
        assert infer(server.http_url, "a")[0] == 200
        assert list(pids(server).values()) == list(before.values())
        worker = server.server.pool.lets[0].worker
        assert isinstance(worker, local.LocalWorker)
        os.kill(before["0/50%/0"], signal.SIGKILL)
        wait_for(lambda: worker._channel is not None and worker._channel.fileno() < 0, what="the socket is closed")
        coroutine = worker.resize(0.5)
        assert asyncio.run_coroutine_threadsafe(coroutine, server.loop).result(60) == "the worker has ended"
    assert any("could not be changed: the worker did not answer within 0.1 s" in line for line in said)


def test_rates_drive_plans_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner process plans for the file's rates, then for what is asked: fewer GPUs after three periods."""
    services = deployment(
        [{"name": "a", "slo_ms": 100, "rate_rps": 400}, {"name": "b", "slo_ms": 100, "rate_rps": 100}],
        tmp_path, gpus=4, replan={"period": "0.6s", "headroom": 1.1}, least_rate=0.02, verify=False, forecast="ewma",
    )  # fmt: skip
    log = tmp_path / "gpus.csv"
    used: list[int] = []
    apply = Crew.apply

    async def noted(crew: Crew, made: ServingPlan) -> None:
        used.append(made.gpus_used)
        await apply(crew, made)

    # the first plan may have been replaced before this process runs again
    monkeypatch.setattr(Crew, "apply", noted)
    with running(services, gpus_log=log) as server:
        assert used[0] >= 2
        assert not server.status()["note"]
        with Load(server, ("b",), threads=1) as load:
            wait_for(lambda: server.status()["gpus_in_use"] < used[0])
        # An SLO of 100 ms is not met on a busy machine. Such requests are answered with 503, and nothing else may go
        # wrong.
        assert not [wrong for wrong in load.wrong if wrong[1] != 503]
        wait_for(lambda: server.status()["replans"] > 3)
    rows = [line.split(",") for line in log.read_text().splitlines()]
    assert rows[0] == ["time_s", "gpus_in_use", "gpus_held", "gpulets", "allocated"]
    assert int(rows[-1][1]) < used[0]


@pytest.mark.slow
def test_what_does_not_fit_is_said_and_the_rest_is_served(tmp_path: Path) -> None:
    services = deployment(
        [{"name": "a", "slo_ms": 100, "rate_rps": 50, "priority": 1}, {"name": "b", "slo_ms": 100, "rate_rps": 5000}],
        tmp_path, verify=False,
    )  # fmt: skip
    with running(services) as server:
        assert infer(server.http_url, "a")[0] == 200
        assert "not enough GPUs: b" in server.status()["note"]


def test_new_files_are_loaded_beside_the_old_ones(tmp_path: Path) -> None:
    """Hot reload: a new version is served after `load`; one that cannot be loaded leaves the old one in service."""
    folder = tmp_path / "models" / "a"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "timed.json").write_text("{}")
    services = deployment([{"name": "a", "model": str(folder), "slo_ms": 60_000}], tmp_path)
    with running(services, plan=plan({"a": 4})) as server:
        assert infer(server.http_url, "a")[2]["model_version"] == "1"
        (folder / "2").mkdir()
        (folder / "2" / "timed.json").write_text('{"faults": {"on_load": "error"}}')
        with Load(server, ("a",)) as load:
            status, _, body = ask(server.http_url, "/v2/repository/models/a/load", {}, "POST", timeout=60)
            assert status == 400
            assert "as the drill requested" in body["error"]
            assert infer(server.http_url, "a")[2]["model_version"] == "1"
            (folder / "2" / "timed.json").write_text("{}")
            assert ask(server.http_url, "/v2/repository/models/a/load", {}, "POST", timeout=60)[0] == 200
            assert infer(server.http_url, "a")[2]["model_version"] == "2"
        assert not load.wrong
        assert ask(server.http_url, "/v2/models/a/versions/1/ready")[0] == 404


@pytest.mark.parametrize("priority", [0, -1])
def test_lower_priorities_are_refused_first(tmp_path: Path, priority: int) -> None:
    """A server that has nearly all that it takes has room for those above priority 0 only."""
    services = deployment(
        [{"name": "a", "slo_ms": 60_000, "priority": priority}, {"name": "b", "slo_ms": 60_000, "priority": 1}],
        tmp_path, listen={"max_in_flight": 10},
    )  # fmt: skip
    with running(services, plan=plan({"a": 1, "b": 1})) as server:
        server.call(lambda: setattr(server.server.gateway, "open", 9))
        assert infer(server.http_url, "a")[0] == 429
        assert infer(server.http_url, "b")[0] == 200
        server.call(lambda: setattr(server.server.gateway, "open", 0))


@pytest.mark.slow
def test_a_trouble_of_the_planner_leaves_the_plan_in_force(tmp_path: Path) -> None:
    services = deployment(
        [{"name": "a", "slo_ms": 100, "rate_rps": 50}], tmp_path, replan={"period": "0.5s"}, verify=False
    )
    with running(services) as server:
        process = server.server.replanner.process._process
        assert process is not None
        process.kill()
        end = time.monotonic() + 60
        while server.status()["replans"] < 4:  # the planner is started again and answers
            assert infer(server.http_url, "a")[0] == 200
            assert time.monotonic() < end
            time.sleep(0.1)


def test_what_is_unloaded_holds_no_memory(tmp_path: Path) -> None:
    """The worker that had it goes, although what is left of its gpulet could have stayed there."""
    services = deployment([{"name": "a", "slo_ms": 60_000}, {"name": "b", "slo_ms": 60_000}], tmp_path)
    with running(services, plan=plan({"a": 2, "b": 2}, {"a": 2})) as server:
        before = pids(server)
        assert ask(server.http_url, "/v2/repository/models/b/unload", {}, "POST", timeout=60)[0] == 200
        after = pids(server)
        assert set(after.values()) & set(before.values()) == {before["0/50%/1"]}
        assert infer(server.http_url, "a")[0] == 200
        assert infer(server.http_url, "b")[0] == 503


def test_a_gpu_that_goes_away_leaves_the_plan(tmp_path: Path) -> None:
    """As when a node is lost: its gpulets are gone at once, nobody is blamed, the rest serves."""
    from cotenant.serving.workers.local import LocalWorkers

    class Losing(LocalWorkers):
        left: tuple[int, ...] = (0, 1)

        def gpus(self) -> tuple[int, ...]:
            return self.left

    factory = Losing("mps", 2, timed=True)
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path, gpus=2)
    with running(services, plan=plan({"a": 2}, {"a": 2}, {"a": 2}, gpus=2), workers=factory) as server:
        gone = pids(server)["1/50%/0"]
        factory.left = (0,)
        os.kill(gone, signal.SIGKILL)
        wait_for(lambda: set(pids(server)) == {"0/50%/0", "0/50%/1"})
        assert infer(server.http_url, "a")[0] == 200
        factory.left = (0, 1)  # when the GPU comes back, it is used again
        wait_for(lambda: len(pids(server)) == 3)
