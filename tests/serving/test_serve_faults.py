"""What goes wrong with workers, models and clients: the right answer for those concerned, nothing for anybody else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serve_setup import ask, deployment, drill, infer, plan
from server_thread import running
from waiting import wait_for

from cotenant.core.errors import WorkError
from cotenant.serving.backends.timed import offset

LONG = {"slo_ms": 60_000}


def pids(server: Any) -> list[int]:
    return [let["pid"] for let in server.status()["gpulets"] if let["pid"]]


def test_a_killed_worker_loses_no_request(tmp_path: Path) -> None:
    """kill -9 mid-batch: its requests are answered by the other gpulet, and a new worker comes."""
    model = drill(tmp_path, "a", latency_ms={"1": 60.0, "8": 90.0})
    services = deployment([{"name": "a", "model": model, **LONG}], tmp_path)
    with running(services, plan=plan({"a": 8}, {"a": 8})) as server, ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(infer, server.http_url, "a", (float(i), 0.0)) for i in range(12)]
        time.sleep(0.05)
        victim = pids(server)[0]
        os.kill(victim, signal.SIGKILL)
        for i, answer in enumerate(answers):
            status, _, body = answer.result()
            assert status == 200
            assert body["outputs"][0]["data"] == [offset("a") + i, offset("a")]
        wait_for(lambda: len(pids(server)) == 2 and victim not in pids(server))
        assert server.status()["worker_deaths"] == 1
        # each request was answered once and counted once
        outcomes = server.status()["services"][0]["outcomes"]
        assert sum(outcomes.values()) == 12
        assert outcomes["ok"] + outcomes["late"] == 12


def test_one_input_that_kills_takes_no_other_request_with_it(tmp_path: Path) -> None:
    """It is tried twice, the second time alone; what shared its batch is answered."""
    model = drill(tmp_path, "a", latency_ms={"1": 20.0, "8": 30.0}, faults={"on_value": {"666": "crash"}})
    services = deployment([{"name": "a", "model": model, **LONG}], tmp_path)
    with running(services, plan=plan({"a": 8}, {"a": 8})) as server, ThreadPoolExecutor(10) as pool:
        values = [1.0, 2.0, 3.0, 666.0, 4.0, 5.0, 6.0, 7.0]
        answers = [pool.submit(infer, server.http_url, "a", (v, 0.0)) for v in values]
        for value, answer in zip(values, answers, strict=True):
            status, headers, body = answer.result()
            if value == 666.0:
                assert status == 500
                assert headers["cotenant-outcome"] == "failed"
                assert "SIGABRT" in body["error"]
            else:
                assert status == 200, body
        assert server.status()["worker_deaths"] == 2


def test_a_worker_that_has_lost_its_device_ends_and_one_is_started_afresh(tmp_path: Path) -> None:
    """As when the MPS server died: the process could only fail whatever came next, so it must not stay."""
    model = drill(tmp_path, "a", latency_ms={"1": 20.0, "8": 30.0}, faults={"on_value": {"666": "lost"}})
    services = deployment([{"name": "a", "model": model, **LONG}], tmp_path)
    with running(services, plan=plan({"a": 8})) as server, ThreadPoolExecutor(4) as pool:
        first = pids(server)
        values = [1.0, 666.0, 2.0, 3.0]
        answers = [pool.submit(infer, server.http_url, "a", (v, 0.0)) for v in values]
        for value, answer in zip(values, answers, strict=True):
            assert answer.result()[0] == (500 if value == 666.0 else 200)
        assert server.status()["worker_deaths"] == 2  # once with the whole batch, and once more alone
        assert infer(server.http_url, "a", (4.0, 0.0))[0] == 200
        assert not set(first) & set(pids(server))


def test_an_input_that_fails_says_so_and_its_batch_goes_on(tmp_path: Path) -> None:
    model = drill(tmp_path, "a", latency_ms={"1": 20.0, "8": 30.0}, faults={"on_value": {"7": "error", "8": "memory"}})
    services = deployment([{"name": "a", "model": model, **LONG}], tmp_path)
    with running(services, plan=plan({"a": 8})) as server, ThreadPoolExecutor(8) as pool:
        answers = {v: pool.submit(infer, server.http_url, "a", (float(v), 0.0)) for v in range(1, 9)}
        found = {v: answer.result() for v, answer in answers.items()}
        assert [found[v][0] for v in range(1, 9)] == [200] * 6 + [500, 500]
        assert found[7][2]["error"] == "failed, as the drill requested"
        assert found[8][2]["error"].startswith("out of memory")
        assert server.status()["worker_deaths"] == 0


def test_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    """Two SLOs (a second at least) without an answer: the worker is killed, the request failed after its second try."""
    hung = drill(tmp_path, "a", latency_ms={"1": 5.0, "8": 9.0}, faults={"on_value": {"1": "hang"}})
    services = deployment([{"name": "a", "model": hung, "slo_ms": 300}, {"name": "b", **LONG}], tmp_path)
    with running(services, plan=plan({"a": 8}, {"b": 8})) as server, ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(infer, server.http_url, "a", (1.0, 0.0))
        assert infer(server.http_url, "b")[0] == 200  # the other service is not disturbed
        status, headers, _body = stuck.result()
        assert status == 503  # its deadline had passed when it could have been tried again
        assert headers["cotenant-outcome"] == "late"
        assert int(headers["retry-after"]) >= 1
        wait_for(lambda: len(pids(server)) == 2)
        wait_for(lambda: infer(server.http_url, "a", (2.0, 0.0))[0] == 200)


@pytest.mark.parametrize(
    ("kind", "said"), [("crash", "SIGABRT"), ("memory", "out of memory"), ("error", "failed, as the drill requested")]
)
def test_a_model_that_cannot_be_loaded_leaves_the_others_alone(tmp_path: Path, kind: str, said: str) -> None:
    bad = drill(tmp_path, "a", faults={"on_load": kind})
    services = deployment([{"name": "a", "model": bad, **LONG}, {"name": "b", **LONG}], tmp_path)
    with running(services, plan=plan({"a": 8, "b": 8})) as server:
        assert infer(server.http_url, "b")[0] == 200
        status, headers, body = infer(server.http_url, "a")
        assert status == 503
        assert headers["cotenant-outcome"] == "unavailable"
        assert said in body["error"]
        assert ask(server.http_url, "/v2/health/ready")[0] == 503
        index = ask(server.http_url, "/v2/repository/index", {}, "POST")[2]
        assert [(x["name"], x["state"]) for x in index] == [("a", "UNAVAILABLE"), ("b", "READY")]


def test_a_model_that_hangs_on_load_is_given_up(tmp_path: Path) -> None:
    bad = drill(tmp_path, "a", faults={"on_load": "hang"})
    services = deployment([{"name": "a", "model": bad, **LONG}], tmp_path, load_timeout="1s")
    with pytest.raises(WorkError, match="a: loading took longer than 1 s"), running(services, plan=plan({"a": 8})):
        pass


@contextlib.contextmanager
def standing(server: Any, gpulet: int = 0) -> Iterator[None]:
    """The worker of a gpulet stands still: its batch does not end inside the block."""
    pid = server.status()["gpulets"][gpulet]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def received(server: Any) -> int:
    """Requests to the first service that the server has received."""
    count: int = server.status()["services"][0]["received"]
    return count


def test_full_queues_and_lost_deadlines_are_told_apart(tmp_path: Path) -> None:
    services = deployment([{"name": "a", "slo_ms": 60_000, "max_queue": 2}], tmp_path)
    with running(services, plan=plan({"a": 1})) as server, ThreadPoolExecutor(6) as pool:
        with standing(server):
            answers = [pool.submit(infer, server.http_url, "a") for _ in range(6)]
            wait_for(lambda: received(server) == 6)
        found = [answer.result() for answer in answers]
        # one request runs, two wait, and three find the queue full
        assert sorted(status for status, _, _ in found) == [200, 200, 200, 429, 429, 429]
        full = next(headers for status, headers, _ in found if status == 429)
        assert full["cotenant-outcome"] == "full"
        assert int(full["retry-after"]) >= 1
        status, headers, body = infer(server.http_url, "a", headers={"cotenant-deadline-ms": "5"})
        assert (status, headers["cotenant-outcome"]) == (503, "late")
        assert "within 5 ms" in body["error"]
        outcomes = server.status()["services"][0]["outcomes"]
        assert (outcomes["ok"], outcomes["full"], outcomes["dropped"]) == (3, 3, 1)


def test_concurrency_limits_are_per_service(tmp_path: Path) -> None:
    services = deployment([{"name": "a", "max_concurrency": 2, **LONG}, {"name": "b", **LONG}], tmp_path)
    with running(services, plan=plan({"a": 1}, {"b": 8})) as server, ThreadPoolExecutor(8) as pool:
        with standing(server):
            mine = [pool.submit(infer, server.http_url, "a") for _ in range(5)]
            other = [pool.submit(infer, server.http_url, "b") for _ in range(3)]
            assert [answer.result()[0] for answer in other] == [200] * 3
            wait_for(lambda: received(server) == 5)
        codes = [answer.result()[0] for answer in mine]
        assert (codes.count(200), codes.count(429)) == (2, 3)


def test_a_slow_client_is_cut_off_and_disturbs_nobody(tmp_path: Path) -> None:
    listen = {"read_timeout": 5.0}
    services = deployment([{"name": "a", **LONG}], tmp_path, listen=listen)
    with running(services, plan=plan({"a": 8})) as server:
        address = ("127.0.0.1", int(server.http_url.rsplit(":", 1)[1]))
        with socket.create_connection(address) as slow:
            slow.sendall(b"POST /v2/models/a/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            assert infer(server.http_url, "a")[0] == 200
            slow.settimeout(60.0)
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
            assert slow.recv(4096) == b""


def test_a_client_that_goes_away_costs_nothing(tmp_path: Path) -> None:
    services = deployment([{"name": "a", **LONG}], tmp_path)
    with running(services, plan=plan({"a": 8})) as server:
        address = ("127.0.0.1", int(server.http_url.rsplit(":", 1)[1]))
        body = json.dumps({"inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}).encode()
        for _ in range(20):
            with socket.create_connection(address) as gone:
                head = f"POST /v2/models/a/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
                gone.sendall(head.encode() + body)
        wait_for(lambda: server.status()["in_flight"] == 0)
        assert infer(server.http_url, "a")[0] == 200


def test_ten_thousand_idle_connections(tmp_path: Path) -> None:
    """As many as this system lets one process have at both ends; they cost the others nothing."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(10_000, (hard - 200) // 2)
    services = deployment([{"name": "a", **LONG}], tmp_path)
    idle: list[socket.socket] = []
    try:
        with running(services, plan=plan({"a": 8})) as server:
            address = ("127.0.0.1", int(server.http_url.rsplit(":", 1)[1]))
            for _ in range(count):
                idle.append(socket.create_connection(address))
            wait_for(lambda: len(server.server.front.connections) >= count)
            assert infer(server.http_url, "a")[0] == 200
    finally:
        for one in idle:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stopped_server_answers_what_it_has(tmp_path: Path) -> None:
    slow = drill(tmp_path, "a", latency_ms={"1": 100.0, "8": 300.0})
    services = deployment([{"name": "a", "model": slow, **LONG}], tmp_path)
    with ThreadPoolExecutor(6) as pool:
        with running(services, plan=plan({"a": 4}), drain_s=60.0) as server:
            workers = pids(server)
            answers = [pool.submit(infer, server.http_url, "a") for _ in range(6)]
            wait_for(lambda: received(server) == 6)
        assert [answer.result()[0] for answer in answers] == [200] * 6
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
