"""Workers on the floor: LS ones raise it around batches, BE ones wait, and nobody waits for the dead."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from heard import heard
from serve_setup import deployment, drill, infer, plan
from server_thread import running
from waiting import stays, wait_for

from cotenant.abi.floor import WorkClass
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.gate.client import Floor, join_floor
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import Launch, register
from cotenant.bench.harness import Bench, Program
from cotenant.core.errors import InputError, WorkError
from cotenant.serving.worker import ModelSpec, WorkerSpec
from cotenant.serving.workers.colocation import SIGN_S, Claim, Colocation, Turnstile

HEARTBEAT_MS = 60_000  # longer than a busy machine delays a heartbeat


@pytest.fixture
def bench() -> Iterator[Bench]:
    """An agent with a software GPU."""
    with Bench("soft", {"colocation": {"heartbeat_timeout_ms": HEARTBEAT_MS}}) as started:
        yield started


def believe_longer(bench: Bench) -> None:
    """A scheme that was set has brought its own heartbeat timeout."""
    with ControlClient(bench.folder) as client:
        client.call("colocation", heartbeat_timeout_ms=HEARTBEAT_MS)


def uuid_of(bench: Bench) -> str:
    with ControlClient(bench.folder) as client:
        return str(client.call("status")["gpus"][0]["uuid"])


def raises(bench: Bench) -> int:
    with ControlClient(bench.folder) as client:
        return sum(h["raises"] for gpu in client.call("colocation")["gpus"].values() for h in gpu["holders"])


def test_a_latency_sensitive_service_raises_the_floor_for_each_batch(bench: Bench, tmp_path: Path) -> None:
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path)
    with running(services, plan=plan({"a": 1}), colocation="tidal", agent=bench.folder) as server:
        for _ in range(5):
            before = raises(bench)
            assert infer(server.http_url, "a")[0] == 200
            assert raises(bench) > before  # raised at the start of the batch, and again while the batch takes long
        with ControlClient(bench.folder) as client:
            assert client.call("colocation")["scheme"] == "tidal"
        wait_for(lambda: not any(_up(bench)))


def test_the_floor_shows_the_class_of_the_service_whose_batch_runs(bench: Bench, tmp_path: Path) -> None:
    """`work_class` of the file, whether a service has its worker alone or shares it with one of another class."""
    # long enough for the test to look, if this process runs meanwhile
    long = {"slo_ms": 60_000, "model": drill(tmp_path, "long", latency_ms={"1": 400.0, "8": 400.0})}
    entries = [
        {"name": "a", "work_class": "memory", **long},
        {"name": "b", "work_class": "compute", **long},
        {"name": "c", **long},
    ]
    watch = join_floor(bench.folder, uuid_of(bench))

    def shown(url: str, service: str) -> set[int]:
        seen: set[int] = set()
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                seen.update(bytes(watch.mapping.raised))

        def seen_in_a_batch() -> set[int]:
            assert infer(url, service)[0] == 200
            return seen - {0}

        watching = threading.Thread(target=look)
        watching.start()
        try:
            wait_for(seen_in_a_batch, what=f"a batch of {service} is seen on the page")
            # the worker lowers its flag after its answer
            wait_for(lambda: not any(bytes(watch.mapping.raised)))
        finally:
            over.set()
            watching.join()
        return seen - {0}

    services = deployment(entries, tmp_path)
    for gpulets in ([{"a": 1}, {"b": 1, "c": 1}], [{"a": 1, "b": 1}, {"c": 1}]):
        with running(services, plan=plan(*gpulets), colocation="orion", agent=bench.folder) as server:
            assert shown(server.http_url, "a") == {WorkClass.MEMORY}
            assert shown(server.http_url, "b") == {WorkClass.COMPUTE}
            assert shown(server.http_url, "c") == {WorkClass.UNKNOWN}
    watch.close()


def test_the_floor_is_up_when_a_batch_is_sent_and_down_when_it_is_answered(bench: Bench, tmp_path: Path) -> None:
    """Not for best-effort services, and nobody stays on the floor for workers that have gone."""
    entries = [
        {"name": "a", "slo_ms": 60_000, "work_class": "compute"},
        {"name": "b", "slo_ms": 60_000, "class": "best-effort"},
    ]
    services = deployment(entries, tmp_path)
    watch = join_floor(bench.folder, uuid_of(bench))
    sent: list[tuple[str, set[int]]] = []
    before = Colocation.coming

    def coming(made: Colocation, spec: WorkerSpec, service: str) -> None:
        before(made, spec, service)
        sent.append((service, set(bytes(watch.mapping.raised))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Colocation, "coming", coming)
        with running(services, plan=plan({"a": 1}, {"b": 1}), colocation="tidal", agent=bench.folder) as server:
            for service in ("a", "a", "b", "a"):
                assert infer(server.http_url, service)[0] == 200
                # the flag itself, since one whose heartbeat has expired counts as down before the worker clears it
                wait_for(lambda: not any(bytes(watch.mapping.raised)))
    # a worker joins the gate page while its first batch is being sent
    assert sent[1:] == [("a", {0, WorkClass.COMPUTE}), ("b", {0}), ("a", {0, WorkClass.COMPUTE})]
    wait_for(lambda: sum(pid > 0 for pid in watch.mapping.layout.pid) == 1)
    watch.close()


def test_workers_that_only_take_time_are_tenants_too(bench: Bench, tmp_path: Path) -> None:
    """Class, memory and weight of a service hold at the agent, and the start says where."""
    entries = [
        {"name": "a", "slo_ms": 60_000, "memory": "2GiB", "copy_weight": 3},
        {"name": "b", "slo_ms": 60_000, "class": "best-effort"},
    ]
    services = deployment(entries, tmp_path)
    with heard() as said, running(services, plan=plan({"a": 1}, {"b": 1}), colocation="tidal", agent=bench.folder):
        tenants = {row["name"].split("-")[2]: row for row in bench.tenants()}
        assert tenants["a"]["class"] == "latency-sensitive"
        assert tenants["b"]["class"] == "best-effort"
        assert tenants["a"]["gpus"][0]["memory_limit_bytes"] == 2 << 30
        assert tenants["a"]["gpus"][0]["copies"]["weight"] == 3
        assert tenants["a"]["root_pid"]
        # as `cotenant run --best-effort --mechanism mps` does on the same machine
        with ControlClient(bench.folder) as client:
            train = TenantSpec("train", mechanism="mps", best_effort=True)
            assert register(client, Launch(bench.folder, train, ["train"]))
    assert any(line.startswith("co-location: tidal on GPU 0 (Cotenant Software GPU) of the agent in") for line in said)
    wait_for(lambda: not bench.tenants())


def test_who_holds_best_effort_work_off_is_told_of_a_worker_without_a_device_too(bench: Bench) -> None:
    floor = join_floor(bench.folder, uuid_of(bench))  # this process acts as the worker, which never calls the GPU
    with ControlClient(bench.folder) as client:
        mine = TenantSpec("mine", mechanism="mps", latency_sensitive=True)
        register(client, Launch(bench.folder, mine, ["mine"]))
        client.call("started", name="mine", pid=os.getpid())
        assert bench.tenants()[0]["gpus"][0]["floor"] == ""
        with floor.held():
            assert bench.tenants()[0]["gpus"][0]["floor"] == "holds"
        assert bench.tenants()[0]["gpus"][0]["floor"] == ""
    floor.close()


def test_a_worker_on_a_gpu_is_under_the_shim_and_held_off(bench: Bench, tmp_path: Path) -> None:
    """What a best-effort worker gets as environment makes any program a tenant that the floor holds off."""
    model = ModelSpec("night batch", "m", "onnx", None, "1", 8, latency_sensitive=False)
    spec = WorkerSpec("0/50%/0#1", 0, "X", "50%", 0.5, "mps", (model,))
    made = Colocation("tidal", bench.folder, {"night batch": Claim(1 << 30, 2.0)})
    environment = bench.environment | made.environment(spec)
    environment |= {key: value for key, value in bench.environment.items() if "SOFTGPU" in key}
    be = Program("be", ["cotenant.bench.be_loads", "driver"], environment)
    try:
        be.wait_ready()
        made.started(spec, be.process.pid)
        be.ask("load mm2048", 60)
        (row,) = bench.tenants()
        assert row["name"].startswith(f"serve-{os.getpid()}-night-batch-")
        assert (row["class"], row["limit"], row["gpus"][0]["memory_limit_bytes"]) == ("best-effort", 0.5, 1 << 30)
        believe_longer(bench)
        floor = join_floor(bench.folder, uuid_of(bench))
        floor.raise_()
        be.tell("run 0.4")
        time.sleep(0.2)
        down = time.monotonic_ns()
        floor.lower()
        block = be.answer()
        floor.close()
        # no launch has completed, whether or not it was submitted
        assert all(done == 0 for at, done, _ in block["marks"] if at < down)
        assert block["count"] > 0
        made.released(spec)
    finally:
        be.close()
        made.close()


def test_the_scheme_of_a_server_goes_with_it(bench: Bench, tmp_path: Path) -> None:
    """The agent's own setting is in force again afterwards, unless somebody has set another one meanwhile."""

    def scheme() -> str:
        with ControlClient(bench.folder) as client:
            return str(client.call("status")["colocation"])

    assert scheme() == "tidal"
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path)
    with running(services, plan=plan({"a": 1}), colocation="static", agent=bench.folder):
        assert scheme() == "static"
    wait_for(lambda: scheme() == "tidal")
    served = running(services, plan=plan({"a": 1}), colocation="static", agent=bench.folder)
    with served, ControlClient(bench.folder) as client:
        client.call("colocation", scheme="orion")
    stays(lambda: scheme() == "orion")


def test_an_agent_that_comes_back_is_told_the_scheme_again(tmp_path: Path) -> None:
    with Bench("soft", {}) as bench:
        made = Colocation("static", bench.folder, {})
        agent = bench.agent
        assert agent is not None
        agent.kill()
        agent.wait()
        bench.agent = subprocess.Popen(agent.args, stderr=bench.log, stdout=bench.log, env=bench.environment)

        def scheme() -> str:
            try:
                with ControlClient(bench.folder) as client:
                    return str(client.call("status")["colocation"])
            except WorkError:
                return ""

        wait_for(lambda: scheme() == "static")
        made.close()
        wait_for(lambda: scheme() == "tidal")


def test_what_a_shared_process_cannot_keep_is_said(bench: Bench, tmp_path: Path) -> None:
    """Two classes in one worker: BE batches wait between LS ones only, and a reservation needs both to state theirs."""
    entries = [
        {"name": "a", "slo_ms": 60_000, "memory": "2GiB"},
        {"name": "b", "slo_ms": 60_000, "class": "best-effort"},
    ]
    services = deployment(entries, tmp_path)
    with heard() as said, running(services, plan=plan({"a": 1, "b": 1}), colocation="tidal", agent=bench.folder):
        pass
    assert any("best-effort work of b shares a process with a latency-sensitive service" in line for line in said)
    assert any("no memory is reserved for a: the same process runs b, for which" in line for line in said)


@pytest.mark.parametrize(("mechanism", "between_batches"), [("green", True), ("mps", False)])
def test_what_green_contexts_cannot_keep_is_said(bench: Bench, mechanism: str, between_batches: bool) -> None:
    """A best-effort worker there changes its SMs itself, and the shim does not hold it up."""
    made = Colocation("tidal", bench.folder, {}, timed=True)
    model = ModelSpec("b", "b", "timed", None, "1", 4, latency_sensitive=False)
    with heard() as said:
        made.environment(WorkerSpec("0/50%/0#1", 0, "X", "50%", 0.5, mechanism, (model,)))
    made.close()
    assert any("b runs on green contexts, so it waits for" in line for line in said) == between_batches


def test_a_best_effort_service_waits_while_somebody_holds_the_floor(bench: Bench, tmp_path: Path) -> None:
    entry = {"name": "b", "slo_ms": 60_000, "class": "best-effort"}
    services = deployment([entry], tmp_path)
    with running(services, plan=plan({"b": 1}), colocation="tidal", agent=bench.folder) as server:
        assert infer(server.http_url, "b")[0] == 200
        believe_longer(bench)
        floor = join_floor(bench.folder, uuid_of(bench))
        answered: list[int] = []
        floor.raise_()
        asking = threading.Thread(target=lambda: answered.append(infer(server.http_url, "b")[0]))
        asking.start()
        stays(lambda: not answered)
        floor.lower()
        asking.join()
        floor.close()
        assert answered == [200]
        wait_for(lambda: raises(bench) == 0, what="a best-effort worker never raises, and the other leaves")


def test_one_scheme_of_the_list_and_an_agent_are_needed(bench: Bench, tmp_path: Path) -> None:
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path)
    wrong_name = running(services, plan=plan({"a": 1}), colocation="sideways", agent=bench.folder)
    with pytest.raises(InputError, match="unknown co-location scheme"), wrong_name:
        pass
    no_agent = running(services, plan=plan({"a": 1}), colocation="tidal", agent=tmp_path / "nowhere")
    with pytest.raises(WorkError, match="no agent answers"), no_agent:
        pass


def test_what_a_scheme_does_to_mechanism_and_sms_is_said(bench: Bench, tmp_path: Path) -> None:
    """`temporal` has workers take turns whatever the file's mechanism is, `static` cuts what was planned."""
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path)
    with ControlClient(bench.folder) as client:
        train = TenantSpec("train", mechanism="mps", best_effort=True)
        register(client, Launch(bench.folder, train, ["train"]))
        refused = running(services, plan=plan({"a": 1}), colocation="temporal", agent=bench.folder)
        with pytest.raises(InputError, match=r"temporal runs its workers under .* time: .*\(train\)"), refused:
            pass
    with heard() as said, running(services, plan=plan({"a": 1}), colocation="static", agent=bench.folder):
        # a quarter of the half that the plan gives the service
        assert [row["limit"] for row in bench.tenants()] == [0.25 * 0.5]
    assert any("that it has in the plan, a best-effort one 75%" in line for line in said)


def test_a_turnstile_tells_the_classes_of_a_mixed_worker_apart(bench: Bench) -> None:
    ours = join_floor(bench.folder, uuid_of(bench))
    other = join_floor(bench.folder, uuid_of(bench))
    gate = Turnstile(ours, frozenset({"be"}), gated=False)
    gate.enter("ls")
    assert other.others_up()
    assert not ours.others_up()
    gate.enter("be")  # the service's own batch does not hold the gate closed for it
    gate.leave("ls")
    assert not other.others_up()
    ours.close()
    other.close()


def test_a_long_batch_is_protected_to_its_end(bench: Bench) -> None:
    """It is raised again and again: who raises once is not believed for long."""
    ours, other = (join_floor(bench.folder, uuid_of(bench)) for _ in range(2))
    gate = Turnstile(ours, frozenset(), gated=False)
    gate.enter("ls")
    for _ in range(3):
        last_ns = ours.mapping.raised_ns[ours.mapping.holder]
        wait_for(lambda: ours.mapping.raised_ns[ours.mapping.holder] > last_ns)  # noqa: B023 - called in this round
        assert other.others_up()
    gate.leave("ls")
    wait_for(lambda: not other.others_up())
    stays(lambda: not other.others_up(), 2 * SIGN_S)


def test_a_worker_on_green_contexts_shrinks_while_ls_works_and_grows_again(bench: Bench) -> None:
    ours, other = join_floor(bench.folder, uuid_of(bench)), join_floor(bench.folder, uuid_of(bench))
    steps: list[float] = []
    gate = Turnstile(ours, frozenset({"be"}), gated=False, beside=0.125, whole=0.75, resize=steps.append)
    gate.enter("be")
    other.raise_()
    gate.enter("be")
    gate.enter("be")
    other.lower()
    gate.enter("be")
    assert steps == [0.125, 0.75]
    ours.close()
    other.close()


def test_a_killed_holder_is_lowered_at_once_and_a_silent_one_after_the_limit(bench: Bench) -> None:
    watcher = join_floor(bench.folder, uuid_of(bench))
    doomed = join_floor(bench.folder, uuid_of(bench))
    doomed.raise_()
    assert watcher.others_up()
    doomed._closed = True  # as the kernel does for a killed process: the connection ends, and the gate is not lowered
    doomed.mapping.connection.shutdown(2)
    doomed.mapping.connection.close()
    wait_for(lambda: not watcher.others_up())
    silent = join_floor(bench.folder, uuid_of(bench))
    silent.raise_()
    assert watcher.others_up()
    with ControlClient(bench.folder) as client:
        client.call("colocation", heartbeat_timeout_ms=50)
    wait_for(lambda: not watcher.others_up())
    silent.close()
    watcher.close()


def test_a_holder_finds_the_agents_successor(tmp_path: Path) -> None:
    with Bench("soft", {"colocation": {"heartbeat_timeout_ms": HEARTBEAT_MS}}) as bench:
        floor: Floor = join_floor(bench.folder, uuid_of(bench))
        agent = bench.agent
        assert agent is not None
        agent.kill()
        agent.wait()
        floor.raise_()  # the gate page works without an agent
        bench.agent = subprocess.Popen(agent.args, stderr=bench.log, stdout=bench.log, env=bench.environment)
        wait_for(lambda: (bench.folder / "floor.sock").exists() and bool(_up(bench)))
        wait_for(lambda: _up(bench) == [True])  # the worker joins first and then raises the gate
        floor.close()


def _up(bench: Bench) -> list[bool]:
    try:
        with ControlClient(bench.folder) as client:
            return [h["up"] for h in client.call("colocation")["gpus"][uuid_of(bench)]["holders"]]
    except WorkError:
        return []
