"""What counts as a share that does not hold, from what servers, devices and shims say."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import wait_for

from cotenant.agent.audit import shares
from cotenant.agent.audit.shares import ShareProof
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms.base import Enforcement, Mechanism
from cotenant.agent.mechanisms.proof import Client, Look, Place, Sms
from cotenant.agent.processes import variable as variable_of
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Session, Tenant
from cotenant.devices.base import Gpu

GPU = Gpu("GPU-1", "H100", 80 << 30, 3)
MINE, OTHER = Place("agent", "a"), Place("agent", "b")


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that belongs to tenant a and has not come to the agent."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def world(pid: int, sms: int = 0, contexts: int = 1, given: int = 66) -> tuple[ShareProof, Tenant]:
    """A tenant with that process; `sms`: what its shim said that it sees, where it came; `given`: the most that its
    share had then."""
    registry = Registry((GPU,), {"mps": cast(Mechanism, SimpleNamespace(name="mps"))})
    tenant = Tenant(TenantSpec("a", mechanism="mps"), (GPU,), "token", 0, Enforcement(sms={GPU.uuid: Sms(40, 66)}))
    registry.tenants["a"] = tenant
    if sms:
        page = SimpleNamespace(slots=[SimpleNamespace(contexts=contexts)])
        session: Any = SimpleNamespace(
            slots={0: GPU.uuid}, sms={0: sms}, sms_given={0: given}, peer=SimpleNamespace(pid=pid), page=page
        )
        tenant.sessions.append(cast(Session, session))
    return ShareProof(registry, lambda found: tenant if found == pid else None), tenant


def test_a_daemon_that_does_not_answer_is_said_and_asked_once(sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "PATIENCE_S", 0.02)
    monkeypatch.setattr(shares, "LOOK_EVERY_S", 0.01)
    proof, tenant = world(sleeper)
    answer, asked = threading.Event(), []

    def hangs() -> Look:
        asked.append(1)
        answer.wait(60)
        return look()

    tenant_mps: Any = proof._registry.mechanisms["mps"]
    tenant_mps.look = hangs
    monkeypatch.setattr(shares, "using", lambda gpus: {})

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def watched() -> None:
        said: list[str] = []
        task = asyncio.create_task(proof.run(lambda _, text: said.append(text)))
        await asyncio.wait_for(until(lambda: bool(said)), 60)
        assert said[0].endswith("is not known: the MPS control daemon has not answered for 0.02 s")
        await asyncio.sleep(0.1)
        assert len(asked) == 1, "a second thread would hang as well"
        answer.set()
        await asyncio.wait_for(until(lambda: not tenant.not_enforced), 60)
        task.cancel()

    asyncio.run(watched())


def look(*clients: Client, **put_right: str) -> Look:
    return Look(clients, {"a": MINE}, put_right)


def test_a_process_on_the_gpu_and_no_client_is_named_at_the_second_look(sleeper: int) -> None:
    proof, _ = world(sleeper)
    running = {GPU.uuid: [sleeper, os.getpid()]}
    assert proof.judge(look(), running) == {"a": []}, "it may be on its way"
    (text,) = proof.judge(look(), running)["a"]
    assert text.startswith(f"process {sleeper} uses GPU 3 outside its MPS server")
    assert "nvidia-smi -i 3 -c EXCLUSIVE_PROCESS" in text
    assert proof.judge(look(Client(sleeper, MINE)), running) == {"a": []}, "now it is one"
    assert proof.judge(look(), running) == {"a": []}, "and counts anew"
    assert proof.judge(look(), {}) == {"a": []}, "it has left the GPU"


def test_a_process_that_only_its_shim_shows_counts_too(sleeper: int) -> None:
    """Later, because a shim announces a context before a server that starts lets it in."""
    proof, _ = world(sleeper, sms=66)
    assert [len(proof.judge(look(), {})["a"]) for _ in range(11)] == [0] * 9 + [1, 1]
    asking, _ = world(sleeper, sms=66, contexts=0)
    assert [len(asking.judge(look(), {})["a"]) for _ in range(11)] == [0] * 11, "it asks NVML and has no context"


def test_a_client_in_another_place_is_named_at_once(sleeper: int) -> None:
    proof, _ = world(sleeper)
    (text,) = proof.judge(look(Client(sleeper, OTHER)), {})["a"]
    assert text.startswith(f"process {sleeper} is in namespace b of server agent, not in namespace a of server agent: ")


@pytest.mark.parametrize(
    ("sms", "text"),
    [(66, ""), (40, ""), (68, "sees 68 SMs, its share has at most 66"), (38, "sees 38 SMs, 40 are reserved for it")],
)
def test_the_sms_that_a_program_sees_are_those_it_was_given(sleeper: int, sms: int, text: str) -> None:
    proof, _ = world(sleeper, sms=sms)
    found = proof.judge(look(Client(sleeper, MINE)), {})["a"]
    assert [line.partition(":")[0].partition(" ")[2].partition(" ")[2] for line in found] == [text] * bool(text)


def test_a_process_past_its_server_that_sees_too_many_sms_is_one_sentence_at_once(sleeper: int) -> None:
    proof, _ = world(sleeper, sms=132)
    (text,) = proof.judge(look(), {})["a"]
    begin = f"process {sleeper} uses GPU 3 outside its MPS server and may use the whole GPU (it sees 132 "
    assert text.startswith(begin)
    assert "its share has at most 66" in text


@pytest.mark.parametrize(("given", "why"), [(132, "the limit was lowered after it started"), (66, "the environment")])
def test_a_limit_that_was_lowered_is_no_escape(sleeper: int, given: int, why: str) -> None:
    """Its program was started rightly, so its environment is not what is wrong."""
    proof, _ = world(sleeper, sms=132, given=given)
    (text,) = proof.judge(look(Client(sleeper, MINE)), {})["a"]
    assert text.startswith(f"process {sleeper} sees 132 SMs, its share has at most 66: ")
    assert why in text


@pytest.mark.parametrize(
    ("own", "text"),
    [("40", ""), ("10", ""), ("41", "=41, its share has at most 40"), ("much", "=much"), ("", "=(unset), its share")],
)
def test_a_percentage_of_its_own_is_named_where_the_server_takes_it(own: str, text: str) -> None:
    """With protocol 2 the server takes the percentage from the program's environment."""
    variable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    environment = {"PATH": os.environ["PATH"]} | ({variable: own} if own else {})
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            wait_for(lambda: variable_of(process.pid, "PATH"), what="its program is loaded")
            proof, tenant = world(process.pid)
            assert proof.judge(look(Client(process.pid, MINE)), {})["a"] == [], "with protocol 3 it has no effect"
            tenant.enforcement = Enforcement({variable: "40"})
            found = proof.judge(look(Client(process.pid, MINE)), {})["a"]
            assert [text in line for line in found] == [True] * bool(text)
        finally:
            process.kill()


def test_what_was_put_right_stays_named_for_a_while(sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, _ = world(sleeper)
    now = [100.0]
    monkeypatch.setattr("cotenant.agent.audit.shares.time.monotonic", lambda: now[0])
    (text,) = proof.judge(look(a="its namespace was gone: it was set again"), {})["a"]
    assert text.startswith("its namespace was gone: it was set again (")
    now[0] += 29
    assert proof.judge(look(), {})["a"] == [text]
    now[0] += 2
    assert proof.judge(look(), {})["a"] == []


def test_since_when_is_kept_and_only_news_are_warned_of(sleeper: int) -> None:
    proof, tenant = world(sleeper)
    assert proof.take(tenant, ["one"]) == ["one"]
    since = tenant.not_enforced["one"]
    assert proof.take(tenant, ["one", "two"]) == ["two"]
    assert tenant.not_enforced["one"] == since
    assert proof.take(tenant, []) == []
    assert tenant.not_enforced == {}
