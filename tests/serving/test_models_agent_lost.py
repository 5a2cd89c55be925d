"""An agent that cannot be reached: the log says so once and again when it is back, and after a while requests are
refused."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from models_door import door, model
from rich.console import Console
from waiting import stays, wait_for

from cotenant.cli.top_models import screen
from cotenant.core.errors import LostServerError
from cotenant.core.folders import CONTROL_SOCKET
from cotenant.serving.llm import agent_watch
from cotenant.serving.llm.agent_watch import AgentWatch
from cotenant.serving.llm.hosts import AGENT_BACK_S
from cotenant.serving.llm.plain_host import PlainHost
from cotenant.serving.llm.server import ModelServer


def test_each_change_is_told_once_and_requests_are_refused_after_a_while(tmp_path: Path) -> None:
    told: list[str] = []
    lost: list[bool] = []
    refused: list[str] = []
    watch = AgentWatch(
        tmp_path, lambda text, _=0: told.append(text), lost.append, lambda why, lasting: refused.append(why)
    )  # fmt: skip
    fault = f"the agent in {tmp_path} cannot be reached"
    watch.found("", 99.0)
    for now_s in (100.0, 101.0, 100.0 + AGENT_BACK_S - 0.1):
        watch.found(fault, now_s)
    assert (len(told), refused, watch.fault) == (1, [], fault)
    for now_s in (100.0 + AGENT_BACK_S, 140.0):
        watch.found(fault, now_s)
    assert (len(told), refused) == (1, [fault])
    watch.found("", 142.0)
    assert (told[1:], refused, watch.fault) == ([f"the agent in {tmp_path} is back after 42 s"], [fault, ""], "")
    # one that is back soon refuses nothing
    watch.found(fault, 150.0)
    watch.found("", 151.0)
    assert (len(told), refused) == (4, [fault, ""])
    assert lost == [True, False, True, False]


def test_another_agent_of_the_gpus_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other: dict[str, Any] = {"pid": 7, "text": "GPU 0: managed by this agent and by another one"}
    answer: dict[str, Any] = {"tenants": [], "agent": {"other_agents": [other]}}

    class Client:
        def __init__(self, folder: Path, timeout_s: float) -> None:
            assert folder == tmp_path

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing to close."""

        def call(self, op: str) -> dict[str, Any]:
            assert op == "list"
            return answer

    monkeypatch.setattr(agent_watch, "ControlClient", Client)
    decisions: list[str] = []
    watch = AgentWatch(
        tmp_path, lambda text, _=0: decisions.append(text), lambda lost: None, lambda why, lasting: None
    )  # fmt: skip
    for others in ([other], [other], [], [other]):
        answer["agent"]["other_agents"] = others
        watch.found(watch._look(), 0.0)
        assert watch.others == {row["pid"]: row["text"] for row in others}
    assert not decisions
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    wanted = f"{other['text']}; `cotenant serve --dir DIR` uses the agent in DIR"
    assert caplog.messages == [wanted] * 2, "again when it is back"


class Lost(PlainHost):
    """A host that has an agent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(4 << 30)
        self.agent: Any = folder


def test_requests_get_503_and_pages_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_watch, "AGENT_BACK_S", 0.0)
    monkeypatch.setattr(agent_watch, "LOOK_S", 0.01)
    answers = [True]
    fault = f"the agent in {tmp_path} cannot be reached"
    monkeypatch.setattr(AgentWatch, "_look", lambda self: "" if answers[0] else fault)
    monkeypatch.setattr(ModelServer, "_make_host", lambda self, keeper: Lost(tmp_path))
    with door(tmp_path, model("a")) as it:
        assert it.chat("a")[0] == 200
        answers[0] = False
        wait_for(lambda: it.ask(None, "/cotenant/status")[2]["agent_fault"] == fault)
        status, headers, answer = it.chat("a")
        assert (status, answer["error"]["message"], answer["error"]["code"]) == (503, fault, "model_unavailable")
        assert int(headers["retry-after"]) >= 1
        state = it.ask(None, "/state.json")[2]
        assert [(row["ok"], row["note"]) for row in state["sources"]] == [(False, fault)]
        assert any(fault in row["text"] for row in state["decisions"])
        console = Console(width=200)
        with console.capture() as shown:
            console.print(screen(it.ask(None, "/cotenant/status")[2], "http://it"))
        assert "cannot be reached" in shown.get()
        answers[0] = True
        wait_for(lambda: it.ask(None, "/cotenant/status")[2]["agent_fault"] == "")
        stays(lambda: it.chat("a")[0] == 200)


def test_an_agent_without_a_socket_cannot_be_reached(tmp_path: Path) -> None:
    watch = AgentWatch(tmp_path, print, print, print)
    assert watch._look() == f"the agent in {tmp_path} cannot be reached"
    (tmp_path / CONTROL_SOCKET).touch()
    assert watch._look()


def test_an_agent_that_does_not_answer_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel accepts connections to a process that is stopped."""
    monkeypatch.setattr(agent_watch, "ANSWER_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / CONTROL_SOCKET))
        listener.listen()
        assert AgentWatch(tmp_path, print, print, print)._look() == f"the agent in {tmp_path} cannot be reached"


def test_resident_models_whose_programs_need_no_agent_keep_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the models a, b and c, the agent's list says of a and c that they continue. Of these only a is resident."""
    monkeypatch.setattr(agent_watch, "AGENT_BACK_S", 0.0)
    monkeypatch.setattr(agent_watch, "LOOK_S", 0.01)
    fault = f"the agent in {tmp_path} cannot be reached"
    rows = [{"name": name, "fail": fail} for name, fail in (("a", "open"), ("b", "closed"), ("c", "open"))]
    reached = [True]

    def call(self: Any, op: str) -> Any:
        if not reached[0]:
            raise LostServerError("lost")
        return {"tenants": rows} if op == "list" else {}

    monkeypatch.setattr(agent_watch, "ControlClient", lambda folder, timeout_s: Answering(call))
    monkeypatch.setattr(ModelServer, "_make_host", lambda self, keeper: Lost(tmp_path))
    gone = tmp_path / "gone"
    with door(tmp_path, model("a", max_concurrency=1), model("b"), model("c")) as it:
        assert [it.chat(name)[0] for name in "ab"] == [200, 200]
        answers: list[Any] = []
        asks = [threading.Thread(target=lambda: answers.append(it.chat("a", f"until {gone}"))) for _ in range(2)]
        for each in asks:
            each.start()
        it.until("a", lambda row: (row["open"], row["waiting"]) == (1, 1))
        reached[0] = False
        wait_for(lambda: it.chat("b")[0] == 503)
        assert it.chat("c")[2]["error"]["message"] == fault
        gone.touch()
        assert it.chat("a")[0] == 200
        for each in asks:
            each.join(60)
        assert [status for status, _, _ in answers] == [200, 200]
        reached[0] = True
        wait_for(lambda: it.chat("b")[0] == 200)
        assert it.chat("c")[0] == 200


class Answering:
    """A client of an agent that answers by this function."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def call(self, op: str) -> Any:
        return self._call(self, op)

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        pass
