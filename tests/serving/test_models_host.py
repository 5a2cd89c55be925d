"""Orders to an agent that restarts, or that still knows a program which has just ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.agent.config.files import TenantSpec
from cotenant.core.errors import InputError, NoHostMemoryError, NothingToDoError, TakenNameError, WorkError
from cotenant.core.folders import CONTROL_SOCKET
from cotenant.core.lines import encode, failure
from cotenant.serving.config.models import ModelGpusEntry
from cotenant.serving.llm import hosts
from cotenant.serving.llm.hosts import AgentHost
from cotenant.serving.llm.keeper import Keeper
from cotenant.serving.llm.plain_host import GpuRoom


@contextlib.contextmanager
def answering(folder: Path, *answers: Exception | str | dict[str, Any]) -> Iterator[AgentHost]:
    """A host whose agent gives one of these answers per connection: an error, "lost" (none), "done", or values."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / CONTROL_SOCKET))
    listener.listen()
    left = list(answers)

    def serve() -> None:
        while left:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                answer = left.pop(0)
                more = answer if isinstance(answer, dict) else {}
                if answer != "lost":
                    failed = isinstance(answer, Exception)
                    connection.sendall(encode(failure(answer) if failed else {"ok": True} | more))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=1), (), folder, keeper)
    try:
        yield host
        thread.join(60)
        assert not left
    finally:
        asyncio.run(host.close())
        keeper.close()
        listener.close()


def test_an_order_whose_answer_was_lost_may_have_been_carried_out(tmp_path: Path) -> None:
    with answering(tmp_path, "lost", NothingToDoError("a is already parked")) as host:
        asyncio.run(host.evict("a"))
    (tmp_path / CONTROL_SOCKET).unlink()
    with answering(tmp_path, "lost", "done") as host:
        asyncio.run(host.bring("a"))
    (tmp_path / CONTROL_SOCKET).unlink()
    with answering(tmp_path, "lost", NothingToDoError("a is not parked")) as host:
        assert asyncio.run(host.exchange("a", ["b"])) == {}, "b is then evicted by an order of its own"


def test_an_exchange_says_which_models_are_evicted(tmp_path: Path) -> None:
    """An agent of an earlier version does not know exchanges, and only brings the model back."""
    parked = {"parked": [{"name": "b", "seconds": 0.5}], "failed": {"c": "it does not answer"}}
    with answering(tmp_path, parked, "done") as host:
        assert asyncio.run(host.exchange("a", ["b", "c"])) == {"b": 0.5}
        assert asyncio.run(host.exchange("a", ["b", "c"])) == {}


@pytest.mark.parametrize("error", [NothingToDoError("a is not parked"), InputError("no a"), WorkError("it has gone")])
def test_a_refused_order_is_not_repeated(tmp_path: Path, error: Exception) -> None:
    with answering(tmp_path, error) as host, pytest.raises(type(error), match=str(error)):
        asyncio.run(host.bring("a"))


def test_a_program_waits_until_its_name_is_free(tmp_path: Path) -> None:
    with answering(tmp_path, TakenNameError("a tenant named a is running"), WorkError("not now"), "done") as host:
        client, answer = host._register(TenantSpec("a"))
        client.close()
        assert answer == {"ok": True}


def test_a_name_that_stays_taken_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "NAME_FREE_S", -1.0)
    said = f"is the tenant a of the agent in {tmp_path}: rename the model"
    taken = TakenNameError("a tenant named a is running")
    with answering(tmp_path, taken) as host, pytest.raises(WorkError, match=said):
        host._register(TenantSpec("a"))


@pytest.mark.parametrize(
    ("row", "taken"),
    [
        ({}, True), ({"name": "c"}, False), ({"declared": True}, False), ({"declared": True, "pids": [7]}, True),
        ({"holder": {"name": "pod"}}, False), ({"declared": True, "root_pid": 7}, True),
        ({"declared": True, "state": "starting"}, True),
    ],
)  # fmt: skip
def test_a_server_does_not_start_beside_one_with_a_model_of_the_same_name(
    row: dict[str, Any], taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "NAME_FREE_S", -1.0)
    tenant = {"name": "b", "declared": False, "holder": None, "root_pid": None, "pids": [], "state": "no GPU yet"} | row
    gpus = [{"index": 0, "uuid": "GPU-a", "name": "X", "memory_bytes": 6 << 30}]
    monkeypatch.setattr(AgentHost, "_call_once", lambda *_: {"gpus": gpus, "tenants": [tenant]})
    models: Any = tuple(SimpleNamespace(name=name, memory=1 << 30) for name in "ab")
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=1), models, tmp_path, keeper)
    try:
        if taken:
            with pytest.raises(InputError, match=rf"models\[1\]\.name: .* is the tenant b of the agent in {tmp_path}"):
                asyncio.run(host.start())
        else:
            asyncio.run(host.start())
    finally:
        asyncio.run(host.close())
        keeper.close()


def test_a_program_waits_for_the_end_of_one_of_an_earlier_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"name": "a", "declared": False, "holder": None, "root_pid": 7, "pids": [], "state": "running"}]
    lists = [rows, rows, []]
    gpus = [{"index": 0, "uuid": "GPU-a", "name": "X", "memory_bytes": 6 << 30}]
    monkeypatch.setattr(
        AgentHost, "_call_once", lambda _, op: {"gpus": gpus, "tenants": lists.pop(0) if op == "list" else []}
    )
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=1), (SimpleNamespace(name="a", memory=1 << 30),), tmp_path, keeper)  # type: ignore[arg-type]
    asyncio.run(host.start())
    asyncio.run(host.close())
    keeper.close()
    assert not lists


def test_host_memory_is_released_when_the_agent_has_forgotten_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised = [{"a": 7, "b": 7}, {"a": 7}, {"b": 7}]
    monkeypatch.setattr(AgentHost, "_call_once", lambda *_: {"swap_memory": {"promised_bytes": promised.pop(0)}})
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=1), (), tmp_path, keeper)
    asyncio.run(host.released("a"))
    asyncio.run(host.close())
    keeper.close()
    assert not promised


def test_a_lack_of_host_memory_is_told_at_once(tmp_path: Path) -> None:
    with answering(tmp_path, NoHostMemoryError("a needs 8 GiB")) as host, pytest.raises(NoHostMemoryError, match="GiB"):
        host._register(TenantSpec("a"))


def test_a_program_is_known_to_the_keeper_before_the_agent_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed in between left the program running."""
    asked, answer = threading.Event(), threading.Event()
    monkeypatch.setattr(hosts, "program_environment", lambda _: {})

    class Client:
        def call(self, op: str, **_: Any) -> None:
            asked.set()
            assert answer.wait(60)

        def close(self) -> None:
            pass

    monkeypatch.setattr(AgentHost, "_register", lambda *_: (Client(), {}))
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=1), (), tmp_path, keeper)
    host.gpus = [GpuRoom(0, "GPU-0", 1 << 30)]
    host._call_once = lambda _: {"gpus": [{"uuid": "GPU-0", "auto": "time"}]}  # type: ignore[method-assign]
    model: Any = SimpleNamespace(name="a", memory=1, priority=0, class_="latency-sensitive", request=0.0)

    async def play() -> None:
        starting = asyncio.create_task(host.spawn(model, 0, ["/bin/sleep", "600"], tmp_path / "log"))
        assert await asyncio.to_thread(asked.wait, 60)
        (group,) = keeper.groups
        answer.set()
        process = await starting
        assert process.pid == group
        keeper.ended(group)
        await process.wait()
        await host.close()

    asyncio.run(play())
    keeper.close()


@pytest.mark.parametrize(
    ("wanted", "here", "got"),
    [("auto", "slices", "slices"), ("auto", "time", "time"), ("time", "slices", "time"), ("slices", "time", "slices")],
)
def test_models_that_swap_have_the_mechanism_of_tenants_that_do_not(
    tmp_path: Path, wanted: str, here: str, got: str
) -> None:
    """An agent gives `auto` with swap turns, which the models of a server do not need."""
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=1, mechanism=wanted), (), tmp_path, keeper)
    host.gpus = [GpuRoom(0, "GPU-0", 1 << 30)]
    rows = [{"uuid": "GPU-9", "auto": "mps"}, {"uuid": "GPU-0", "auto": here}]
    host._call_once = lambda _: {"gpus": rows}  # type: ignore[method-assign]
    assert asyncio.run(host._swapping(0)) == got
    keeper.close()


def test_models_that_host_memory_never_holds_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models: Any = [SimpleNamespace(name=name, memory=gib << 30) for name, gib in (("a", 1), ("b", 3), ("c", 4))]
    gpus = [{"index": 0, "uuid": "GPU-a", "name": "X", "memory_bytes": 6 << 30}]
    keeper = Keeper()
    for most in (2 << 30, 4 << 30, None):
        host = AgentHost(ModelGpusEntry(count=1), tuple(models), tmp_path, keeper, most)
        host._call_once = lambda _: {"gpus": gpus, "swap_memory": {"budget_bytes": 9 << 30}, "tenants": []}  # type: ignore[method-assign]
        asyncio.run(host.start())
    keeper.close()
    said = "host_memory: 2.0 GiB is less than the memory of b, c: stopped, never evicted"
    assert [r.message for r in caplog.records] == [said]


@pytest.mark.parametrize(
    ("visible", "count", "used"),
    [
        (None, 1, ["GPU-a"]), ("GPU-b", 1, ["GPU-b"]), ("1, 0", 2, ["GPU-b", "GPU-a"]),
        ("GPU-b", 2, "CUDA_VISIBLE_DEVICES leaves 1 GPU, not 2"),
        ("", 1, "CUDA_VISIBLE_DEVICES is empty"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("own", [False, True])
def test_models_use_the_gpus_of_cuda_visible_devices(
    own: bool, visible: str | None, count: int, used: list[str] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent that the server starts also leaves the other GPUs alone."""
    every = [{"index": i, "uuid": f"GPU-{name}", "name": "X", "memory_bytes": 1 << 30} for i, name in enumerate("ab")]
    started: list[str] = []

    def answer(host: AgentHost, _: str) -> dict[str, Any]:
        if own and not started:
            raise WorkError("no agent runs here")
        names = started[0].split(",") if own else ["all"]
        return {"gpus": [g for g in every if names == ["all"] or {g["uuid"], str(g["index"])} & set(names)]}

    async def spawn(command: list[str], log: Path, environment: dict[str, str]) -> asyncio.subprocess.Process:
        started.append(command[command.index("--gpus") + 1])
        return await asyncio.create_subprocess_exec("/bin/sleep", "600", start_new_session=True)

    monkeypatch.setattr(AgentHost, "_call_once", answer)
    monkeypatch.setattr(hosts, "spawn", spawn)
    monkeypatch.setattr(hosts, "agent_folder", lambda: tmp_path)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=count), (), None, keeper)

    async def play() -> None:
        try:
            await host.start()
        finally:
            await host.close()

    try:
        if isinstance(used, str):
            with pytest.raises(InputError, match=used):
                asyncio.run(play())
        else:
            asyncio.run(play())
            assert [gpu.uuid for gpu in host.gpus] == used
    finally:
        keeper.close()


@pytest.mark.parametrize(
    ("host_memory", "budget"), [(None, 120 << 30), (200 << 30, 200 << 30), (40 << 30, 120 << 30), (300 << 30, None)]
)
def test_an_own_agent_may_reserve_the_host_memory_of_the_file(
    host_memory: int | None, budget: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is restarted, while the models' programs already have much of the machine's memory."""
    available, started = [240 << 30], list[int]()
    monkeypatch.setattr(hosts, "available_bytes", lambda: available[0])
    monkeypatch.setattr(hosts, "total_bytes", lambda: 256 << 30)
    monkeypatch.setattr(hosts, "agent_folder", lambda: tmp_path)

    def answer(host: AgentHost, _: str) -> dict[str, Any]:
        if not started:
            raise WorkError("no agent runs here")
        gpus = [{"index": 0, "uuid": "GPU-a", "name": "X", "memory_bytes": 1 << 30}]
        return {"gpus": gpus, "swap_memory": {"budget_bytes": started[0]}}

    async def spawn(command: list[str], log: Path, environment: dict[str, str]) -> asyncio.subprocess.Process:
        started.append(int(command[command.index("--swap-memory") + 1].removesuffix("B")))
        return await asyncio.create_subprocess_exec("/bin/true", start_new_session=True)

    async def play() -> None:
        try:
            await host.start()
            available[0] = 10 << 30
            assert host._watch is not None
            host._watch.cancel()
            await host._run_own()
        finally:
            await host.close()

    monkeypatch.setattr(AgentHost, "_call_once", answer)
    monkeypatch.setattr(hosts, "spawn", spawn)
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=1), (), None, keeper, host_memory)
    try:
        if budget is None:
            with pytest.raises(InputError, match=r"host_memory: 300\.0 GiB is more than the 256\.0 GiB of this"):
                asyncio.run(play())
        else:
            asyncio.run(play())
            assert set(started) == {budget}
            assert len(started) >= 2
    finally:
        keeper.close()


@pytest.mark.parametrize("present", [1, 2])
def test_an_own_agent_makes_as_many_software_gpus_as_the_file_has(
    present: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The software GPU's state file may have another number already."""
    wanted: list[str] = []

    def answer(host: AgentHost, _: str) -> dict[str, Any]:
        if not wanted:
            raise WorkError("no agent runs here")
        rows = [{"index": i, "uuid": f"GPU-{i}", "name": "X", "memory_bytes": 1 << 30} for i in range(present)]
        return {"gpus": rows, "swap_memory": {"budget_bytes": 1 << 30}}

    async def spawn(command: list[str], log: Path, environment: dict[str, str]) -> asyncio.subprocess.Process:
        wanted.append(environment["COTENANT_SOFTGPU_COUNT"])
        return await asyncio.create_subprocess_exec("/bin/sleep", "600", start_new_session=True)

    async def play() -> None:
        try:
            await host.start()
        finally:
            await host.close()

    monkeypatch.setattr(AgentHost, "_call_once", answer)
    monkeypatch.setattr(hosts, "spawn", spawn)
    monkeypatch.setattr(hosts, "agent_folder", lambda: tmp_path)
    monkeypatch.delenv("COTENANT_SOFTGPU_COUNT", raising=False)
    keeper = Keeper()
    host = AgentHost(ModelGpusEntry(count=2, model="soft"), (), None, keeper)
    try:
        if present < 2:
            with pytest.raises(InputError, match="1 GPU, not 2; COTENANT_SOFTGPU_STATE=FILE with a new file"):
                asyncio.run(play())
        else:
            asyncio.run(play())
            assert len(host.gpus) == 2
    finally:
        keeper.close()
    assert wanted == ["2"]
