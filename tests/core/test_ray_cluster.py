"""The connection to Ray over a stand-in of Ray: answers, errors of every kind, and the end of either side."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from waiting import wait_for

from cotenant.core.errors import WorkError
from cotenant.core.ray_cluster import FailedCallError, LostCallError, RayCluster

RAY = """
import os
import threading
from concurrent.futures import Future
from types import SimpleNamespace


class RayTaskError(Exception):
    def __init__(self, cause):
        self.cause = cause


class RayActorError(Exception):
    pass


class ActorUnavailableError(RayActorError):
    pass


exceptions = SimpleNamespace(
    RayTaskError=RayTaskError, RayActorError=RayActorError, ActorUnavailableError=ActorUnavailableError
)


def init(address, **_):
    if address == "nowhere":
        raise ConnectionError("no route to it\\nand much more")
    if address == "end":
        os._exit(3)
    if address == "silent":
        threading.Event().wait()


def nodes():
    row = lambda id_, host, alive: {"NodeID": id_, "NodeManagerHostname": host, "Alive": alive}
    return [row("2", "b", True), row("3", "c", False), row("1", "a", True)]


class Handle:
    def __init__(self, instance):
        self.instance = instance

    def __getattr__(self, method):
        def remote(*arguments):
            future = Future()
            try:
                if method == "exit":
                    os._exit(3)
                if method == "dead":
                    raise RayActorError("the actor died")
                if method == "away":
                    raise ActorUnavailableError("try again")
                try:
                    future.set_result(getattr(self.instance, method)(*arguments))
                except Exception as error:
                    raise RayTaskError(error)
            except Exception as error:
                future.set_exception(error)
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=remote)


def remote(class_):
    def options(**given):
        made = lambda *arguments: Handle(class_(*arguments))
        return SimpleNamespace(remote=made)

    return SimpleNamespace(options=options)


def kill(handle):
    handle.instance.clear()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables with which a process finds the stand-in."""
    (tmp_path / "ray" / "util").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text(RAY)
    (tmp_path / "ray" / "util" / "__init__.py").touch()
    affinity = "class NodeAffinitySchedulingStrategy:\n    def __init__(self, node, soft): self.node = node\n"
    (tmp_path / "ray" / "util" / "scheduling_strategies.py").write_text(affinity)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return dict(os.environ) | {"PYTHONPATH": path}


@pytest.fixture
def cluster(environment: dict[str, str]) -> Iterator[RayCluster]:
    made = RayCluster("here", environment=environment)
    yield made
    made.close(10.0)
    assert made.lost.is_set()


def test_calls_are_answered_in_order_and_errors_are_of_their_kind(cluster: RayCluster) -> None:
    assert [node["NodeID"] for node in cluster.nodes().result(60)] == ["1", "2"]
    cluster.actor("list", list, ([3, 1],), "1", max_concurrency=2).result(60)
    appended = [cluster.call("list", "append", number) for number in range(50)]
    assert cluster.call("list", "copy").result(60) == [3, 1, *range(50)]
    assert {one.result(0) for one in appended} == {None}
    with pytest.raises(FailedCallError, match=r"^pop index out of range$"):
        cluster.call("list", "pop", 99).result(60)
    for method, dead in (("dead", True), ("away", False)):
        with pytest.raises(LostCallError) as lost:
            cluster.call("list", method).result(60)
        assert lost.value.dead is dead
    cluster.kill("list").result(60)
    with pytest.raises(LostCallError, match="no such actor") as gone:
        cluster.call("list", "copy").result(60)
    assert gone.value.dead


def test_the_end_of_the_process_ends_every_call(cluster: RayCluster) -> None:
    cluster.actor("list", list, ([],), "1").result(60)
    calls = [cluster.call("list", "exit"), *(cluster.call("list", "copy") for _ in range(20))]
    wait(calls, 60)
    assert all(isinstance(call.exception(0), LostCallError) for call in calls)
    wait_for(cluster.lost.is_set)
    assert isinstance(cluster.nodes().exception(0), LostCallError), "nothing is sent any more"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nowhere", "cannot reach Ray at nowhere: no route to it"),
        ("end", "the process that connects to Ray at end ended at once"),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_one_sentence(environment: dict[str, str], address: str, why: str) -> None:
    with pytest.raises(WorkError) as error:
        RayCluster(address, environment=environment)
    assert str(error.value).startswith(why)
    assert "\n" not in str(error.value)


def test_who_gives_up_does_not_wait_for_the_cluster(environment: dict[str, str]) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(WorkError, match="does not answer"):
        RayCluster("silent", environment=environment, cancelled=cancelled)
