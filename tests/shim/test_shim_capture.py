"""Graphs: nothing the shim does may touch a capture, and a graph launch is gated like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_agent import FakeAgent, Message
from shim_tenants import Tenants
from waiting import stays, wait_for

from cotenant.abi.protocol import MessageType

Agents = Callable[..., FakeAgent]
MS = 1_000_000


@pytest.mark.parametrize("resolve", ["v2", "ptds"])
@pytest.mark.parametrize("turn_ms", [20, 100])
def test_capture_survives_ends_of_turns(tenants: Tenants, agent: Agents, resolve: str, turn_ms: int) -> None:
    """300 launches captured over 150 ms while turns of 20 ms end, work is queued beside it and fences come and go: the
    graph holds exactly the 300 nodes (nvshare#22, HAMi-core PR#192)."""
    with agent(turn_ns=turn_ms * MS) as broker:
        process = tenants.client_run(broker, resolve, "capture", "300", "150", CLIENT_KERNEL_NS="20000")
        assert tenants.output(process).strip() == "capture nodes 300"
        assert broker.clients[0].slot().graph_launches == 20


def test_capture_needs_no_turn_and_is_not_charged(tenants: Tenants, agent: Agents) -> None:
    """Captured launches are not executed: they pass while the gate is closed, and count as no launch."""
    script = (
        "from cuda_calls import *\nimport sys\n"
        "kernel = function(start(), b'busy'); stream, graph, run = c_void_p(), c_void_p(), c_void_p()\n"
        "cu('cuStreamCreate', byref(stream), 1)\n"
        "cu('cuStreamBeginCapture_v2', stream, 0)\n"
        "for _ in range(50): launch(kernel, stream)\n"
        "cu('cuStreamEndCapture', stream, byref(graph))\n"
        "cu('cuGraphInstantiateWithFlags', byref(run), graph, c_uint64(0)); print('captured', flush=True)\n"
        "cu('cuGraphLaunch', run, stream); cu('cuStreamSynchronize', stream); print('ran', flush=True)\n"
    )
    with agent() as broker:
        broker.pause()
        process = tenants.python(broker, script)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "captured"
        client = broker.clients[0]
        wait_for(lambda: client.of(MessageType.TOKEN_REQUEST), what="the graph launch asks for a turn")
        stays(lambda: len(client.of(MessageType.TOKEN_REQUEST)) == 1)
        broker.resume()
        assert process.stdout.readline().strip() == "ran"
        process.wait(timeout=60)
        assert client.slot().launches == 1
        assert client.slot().graph_launches == 1


GRAPHS = (
    "from cuda_calls import *\n"
    "kernel = function(start(), b'busy'); stream, graph, run = c_void_p(), c_void_p(), c_void_p()\n"
    "cu('cuStreamCreate', byref(stream), 1); cu('cuStreamBeginCapture_v2', stream, 0)\n"
    "for _ in range(100): launch(kernel, stream)\n"
    "cu('cuStreamEndCapture', stream, byref(graph))\n"
    "cu('cuGraphInstantiateWithFlags', byref(run), graph, c_uint64(0))\n"
    "for _ in range(100): cu('cuGraphLaunch', run, stream)\n"
    "cu('cuStreamSynchronize', stream)\n"
)


def graph_turns(tenants: Tenants, agent: Agents) -> list[Message]:
    """100 launches of graphs of 10 ms: the turns of 50 ms that they took."""
    with agent(turn_ns=50 * MS) as broker:
        tenants.output(tenants.python(broker, GRAPHS))
        wait_for(lambda: broker.clients[0].closed, what="all that it said was read")
        return broker.releases()


def test_graph_launches_are_bounded_and_charged(tenants: Tenants, agent: Agents) -> None:
    """A loop of graph launches is held to its turns (HAMi#1445: cores had no effect on graphs)."""
    releases = graph_turns(tenants, agent)
    assert len(releases) > 1
    used = sum(m["used_ns"] for m in releases)
    launched = sum(m["launches"] for m in releases)
    assert launched <= 100
    assert launched * 10 * MS <= used * 1.001


@pytest.mark.timed
def test_turns_of_graph_launches_end_on_time(tenants: Tenants, agent: Agents) -> None:
    releases = graph_turns(tenants, agent)
    assert len(releases) >= 8
    assert sorted(m["overuse_ns"] for m in releases)[len(releases) // 2] < 12 * MS
