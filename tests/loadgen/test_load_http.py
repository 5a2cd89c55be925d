"""The load generator against a server that does what it is told: nothing lost, nothing hidden, nothing invented."""

from __future__ import annotations

import csv
import io
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from oip_standin import Reply, Seen, standin

from cotenant.core.errors import InputError, WorkError
from cotenant.loadgen.http import HttpTransport
from cotenant.loadgen.loop import Loop
from cotenant.loadgen.options import parse_load_arrivals
from cotenant.loadgen.result import COLUMNS, LoadResult
from cotenant.loadgen.run import LoadTest, ask_forms, make_transport, run_here, run_load
from cotenant.loadgen.schedule import LoadService, parse_service
from cotenant.loadgen.target import parse_target
from cotenant.workloads.requests.arrivals import parse_arrivals


def make(url: str, *services: str, arrivals: str = "constant", slo_ms: float | None = None, **more: object) -> LoadTest:
    process = parse_load_arrivals(arrivals)
    made = tuple(replace(parse_service(x, process), slo_ms=slo_ms) for x in services)
    return replace(LoadTest(parse_target(url), made, 1.0), **more)  # type: ignore[arg-type]


def quick(_: Seen) -> Reply:
    return Reply()


def counts(result: LoadResult, name: str = "a") -> dict[str, int]:
    row = result.summary()["services"][name]
    return {k: row[k] for k in ("sent", "ok", "late", "dropped", "failed")}


def test_every_request_is_sent_once_and_answered() -> None:
    with standin({"a": quick, "b": quick}) as server:
        result = run_here(make(server.url, "a=200", "b=50"))
        ids = [x.id for x in server.seen]
    assert counts(result) == {"sent": 200, "ok": 200, "late": 0, "dropped": 0, "failed": 0}
    assert counts(result, "b")["ok"] == 50
    assert len(ids) == len(set(ids)) == 250
    assert result.wrong == result.stray == 0


def test_a_stall_of_the_server_is_in_the_latencies_of_all_who_came_meanwhile() -> None:
    """What coordinated omission hides: one answer takes 400 ms and holds up nobody's sending; and where connections
    are few, requests that waited for one count from when they were due."""
    stalled = {7: 0.4}
    with standin({"a": lambda x: Reply(0.4 if x.number == 50 else 0.0)}) as server:
        result = run_here(make(server.url, "a=100"))
    # other requests were sent and answered while the slow one was being waited for
    slow = result.rows[int((result.rows["finished"] - result.rows["sent"]).argmax())]
    assert slow["finished"] - slow["sent"] >= 0.4
    assert ((result.rows["sent"] > slow["sent"]) & (result.rows["finished"] < slow["finished"])).any()
    with standin({"a": lambda x: Reply(stalled.get(x.number, 0.0))}) as server:
        one = run_here(make(server.url, "a=100", connections=1))
        assert server.connections == 2  # one connection asks for the model's metadata and one sends requests
    # Request 7 takes at least 400 ms. The requests that are due meanwhile, one every 10 ms, wait that much less each.
    assert np.all(one.latency_ms[7:40] >= 400 - 10 * np.arange(33) - 5)
    assert counts(one)["ok"] == 100


def test_outcomes_are_told_apart() -> None:
    replies = [
        Reply(),
        Reply(2.6),
        Reply(status=503, headers={"Retry-After": "1", "cotenant-outcome": "late"}),
        Reply(status=429, headers={"cotenant-outcome": "full"}),
        Reply(status=500),
        Reply(status=None),
        Reply(status=503, headers={"cotenant-outcome": "unavailable"}),
        Reply(status=503),
        Reply(chunked=True),
        Reply(headers={"cotenant-executed-ms": "2.5"}),
    ]
    with standin({"a": lambda x: replies[int(x.id, 16)]}) as server:
        result = run_here(make(server.url, "a=10", slo_ms=2500.0))
    assert counts(result) == {"sent": 10, "ok": 3, "late": 1, "dropped": 3, "failed": 3}
    assert result.summary()["services"]["a"]["slo_attainment"] == 0.3
    rows = list(csv.DictReader(io.StringIO(result.csv())))
    assert tuple(rows[0]) == COLUMNS
    outcomes = [r["outcome"] for r in rows]
    assert outcomes == ["ok", "late", "dropped", "full", "failed", "failed", "failed", "dropped", "ok", "ok"]
    assert rows[9]["inference_ms"] == "2.5"
    assert rows[0]["inference_ms"] == ""
    assert set(result.reasons) == {"status 500", "status 503", "the server closed the connection"}


@pytest.mark.parametrize("reply", [Reply(id="0badf00d"), Reply(model="b")], ids=["id", "model"])
def test_an_answer_of_another_request_or_model_is_a_failure(reply: Reply) -> None:
    with standin({"a": lambda x: reply if x.number == 3 else Reply()}) as server:
        result = run_here(make(server.url, "a=10"))
    assert result.wrong == 1
    assert counts(result)["failed"] == 1
    assert any("another request" in w for w in result.warnings())


def test_a_second_answer_is_noticed() -> None:
    with standin({"a": lambda x: Reply(twice=x.number == 3)}) as server:
        result = run_here(make(server.url, "a=20", connections=1))
    assert result.stray >= 1
    assert counts(result)["sent"] == 20


def test_a_request_without_an_answer_fails_in_time() -> None:
    with standin({"a": lambda x: Reply(30.0 if x.number == 2 else 0.0)}) as server:
        result = run_here(make(server.url, "a=10", timeout_s=2.5))
    assert counts(result) == {"sent": 10, "ok": 9, "late": 0, "dropped": 0, "failed": 1}
    assert result.reasons == {"no answer within 2.5 s": 1}


def test_a_closed_loop_keeps_its_number_of_clients() -> None:
    together: list[int] = []
    with standin({"a": lambda x: Reply(0.02)}) as server:
        result = run_here(make(server.url, "a", arrivals="closed:4"))
        together = [x.number for x in server.seen]
    sent = counts(result)["sent"]
    assert 4 <= sent <= 204  # 4 clients, 20 ms per request, one second; fewer if this machine is slow
    assert counts(result)["ok"] == sent == len(together)
    starts = np.sort(result.rows["sent"])
    ends = np.sort(result.rows["finished"])
    running = np.searchsorted(starts, starts, side="right") - np.searchsorted(ends, starts, side="left")
    assert running.max() <= 4


def test_a_closed_loop_does_not_storm_a_server_that_refuses() -> None:
    with standin({"a": lambda x: Reply(status=429)}) as server:
        result = run_here(make(server.url, "a", arrivals="closed:2", duration_s=0.5))
    assert counts(result)["dropped"] == counts(result)["sent"] <= 202


def test_a_run_that_is_stopped_was_as_long_as_it_was() -> None:
    """What was never sent is no failure."""

    def stop_soon(loop: Loop) -> None:
        def watch() -> None:
            while loop.next < 20:
                time.sleep(0.01)
            loop.stop()

        threading.Thread(target=watch, daemon=True).start()

    with standin({"a": lambda x: Reply(0.05)}) as server:
        result = run_here(make(server.url, "a=100", duration_s=60.0), on_loop=stop_soon)
    found = counts(result)
    assert 0 < found["sent"] == found["ok"] < 3000
    assert result.duration_s < 30.0


def test_senders_share_one_schedule() -> None:
    with standin({"a": quick}) as server:
        test = make(server.url, "a=300", arrivals="poisson", senders=2)
        result = run_load(test)
        again = run_here(replace(test, senders=1))
    assert np.allclose(result.rows["scheduled"], again.rows["scheduled"])
    assert counts(result)["ok"] == len(again.rows)


def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(WorkError, match=r"cannot reach http://127\.0\.0\.1:9"):
        run_here(make("http://127.0.0.1:9", "a=10"))


def test_an_unknown_model_is_wrong_input() -> None:
    with standin({"a": quick}) as server, pytest.raises(InputError, match="no model 'z'"):
        run_here(make(server.url, "z=10"))


@pytest.mark.timed
def test_requests_leave_on_time() -> None:
    """At 1,000 requests per second the typical request leaves within a few milliseconds, on a busy machine too."""
    with standin({"a": quick}) as server:
        result = run_load(make(server.url, "a=1000", arrivals="poisson", duration_s=2.0))
    late = result.lateness()
    assert late["p50"] is not None
    assert late["p50"] < 5.0
    assert counts(result)["ok"] == counts(result)["sent"] > 1800


def test_rates_in_steps_follow_each_other() -> None:
    from cotenant.loadgen.schedule import build_schedule

    found = build_schedule([parse_service("a=10,0,30", parse_arrivals("constant"))], 5.0, 0, step_s=1.0)
    assert np.bincount(found.times_s.astype(int)).tolist() == [10, 0, 30, 10]


@pytest.mark.parametrize("change", [{"duration_s": 0.0}, {"timeout_s": 0.0}, {"senders": 0}])
def test_nothing_runs_for_no_time(change: dict[str, float]) -> None:
    with standin({"a": quick}) as server, pytest.raises(InputError):
        run_load(make(server.url, "a=10", **change))


@pytest.mark.parametrize("name", ["a b", "ä/ö", "x\r\nHost: y", 'q"uote', "app:stage"])
def test_any_name_of_a_model_is_a_path(name: str) -> None:
    """What a name holds never becomes part of the request's head."""
    from urllib.parse import quote

    with standin({quote(name, safe=":"): quick}) as server:
        test = LoadTest(parse_target(server.url), (LoadService(name, (20.0,), parse_arrivals("constant")),), 0.5)
        result = run_here(replace(test, check=False))
    assert result.summary()["services"][name]["ok"] == 10


def test_a_server_that_takes_no_more_connections_holds_up_nobody() -> None:
    """The queue of a socket that nobody accepts from is full: what waits for a connection fails alone, in time."""
    import socket

    with standin({"a": lambda x: Reply(0.3)}) as server, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        test = make(server.url, "a=100", timeout_s=1.5)
        forms = ask_forms(test)
        transport = make_transport(test, forms)
        assert isinstance(transport, HttpTransport)

        def turn_deaf(loop: Loop) -> None:
            """Connections beyond the first ones go to where nobody answers."""
            opening = transport.open

            def open_then(into: Loop) -> None:
                opening(into)
                assert transport.peer is not None
                transport.peer = (transport.peer[0], deaf.getsockname())

            transport.open = open_then  # type: ignore[method-assign]

        result = run_here(test, forms, on_loop=turn_deaf, transport=transport)
    found = counts(result)
    assert found["ok"] >= 8  # the first connections stay in use
    assert found["failed"] > 0
    assert found["ok"] + found["failed"] == 100
    late = (result.rows["sent"] - result.rows["scheduled"])[result.rows["outcome"] == 1]
    # if requests waited for one connection to be made, they would be later; and dozens are made
    assert np.median(late) < 5
