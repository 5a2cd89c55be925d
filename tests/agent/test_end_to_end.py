"""Real processes on the software GPU: launcher, shim, agent. Shares in work done, and faults that hurt nobody else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import alive, saved, state_cannot_be_written
from waiting import stays, wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.bench.harness import Bench, Program
from cotenant.core.errors import WorkError

CLIENT = Path(__file__).resolve().parent.parent / "shim" / "client.c"

# long kernels and much work in flight, so that scheduling delays of a test machine do not look like lost shares
SETTINGS = {"quota": "50ms", "min_quota": "20ms", "max_quota": "50ms", "stuck_after": "1s", "work_in_flight": "10ms"}

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")


@pytest.fixture(scope="module")
def client_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver-API test program, compiled."""
    target = tmp_path_factory.mktemp("client") / "client"
    subprocess.run(["cc", "-O1", "-w", str(CLIENT), "-o", str(target), "-ldl", "-lpthread"], check=True)
    return target


class Node(Bench):
    """A benchmark's agent, with what the fault tests need besides."""

    def launch(self, name: str, command: list[str], *options: str, **more: Any) -> subprocess.Popen[str]:
        """`cotenant run` as a process."""
        line = [sys.executable, "-m", "cotenant.cli.main", "run", "--dir", str(self.folder), "--name", name]
        return subprocess.Popen(
            [*line, *options, "--", *command],
            env=self.environment | more.pop("env", {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        with ControlClient(self.folder) as client:
            return client.call(op, **order)

    def row(self, name: str) -> dict[str, Any] | None:
        return next((row for row in self.tenants() if row["name"] == name), None)

    def kill_agent(self) -> None:
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()

    def restart_agent(self) -> None:
        command = [sys.executable, "-m", "cotenant.agent", "--dir", str(self.folder), "--gpus", "soft"]
        self.agent = subprocess.Popen(
            [*command, "--config", str(self.folder / "agent.json")], stderr=self.log, env=self.environment
        )
        self.wait_for_agent()

    def said(self) -> str:
        return (self.folder / "agent.log").read_text()

    def saved(self, name: str) -> dict[str, Any]:
        """A tenant as the state file has it; {} if it has none."""
        return saved(self.folder, name)


@pytest.fixture
def start_node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        node = Node("soft", SETTINGS | settings, kernel_ns=2_000_000)
        node.__enter__()
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        node.__exit__(None, None, None)


@pytest.fixture
def node(start_node: Callable[..., Node]) -> Node:
    return start_node()


def ready(node: Node, name: str, **share: float) -> Program:
    workload = node.tenant("busy", TenantSpec(name, **share))
    workload.wait_ready()
    return workload


def test_run_returns_the_exit_code_and_keeps_the_timeout(node: Node) -> None:
    process = node.launch("seven", ["sh", "-c", "exit 7"])
    assert process.wait(60) == 7
    process = node.launch("killed", ["sh", "-c", "kill -9 $$"])
    assert process.wait(60) == 137
    process = node.launch("slow", ["sleep", "60"], "--timeout", "300ms")
    assert process.wait(60) == 124
    assert "timeout of 0.3 s" in process.communicate()[1]
    process = node.launch("missing", ["/no/such/program"])
    assert process.wait(60) == 2
    assert "/no/such/program: cannot be started: No such file or directory" in process.communicate()[1]
    wait_for(lambda: not node.tenants(), what="ended tenants are removed")


def test_stop_ends_the_program_and_its_children(node: Node) -> None:
    process = node.launch("family", ["sh", "-c", "sleep 60 & echo $!; wait"])
    assert process.stdout is not None
    child = int(process.stdout.readline())
    wait_for(lambda: (node.row("family") or {}).get("root_pid"))
    answer = node.call("stop", name="family", grace_s=60.0)
    assert answer["left"] == []
    assert process.wait(60) == 143
    wait_for(lambda: not alive(child), what="the child of the program has ended too")


def test_kill_9_of_the_holder_frees_the_gpu(node: Node) -> None:
    victim, other = ready(node, "victim"), ready(node, "other")
    victim.begin(30.0)
    wait_for(lambda: node.row("victim")["gpus"][0]["holding"])
    os.kill(victim.process.pid, signal.SIGKILL)
    assert other.block(0.3) > 0
    wait_for(lambda: node.row("victim") is None, what="a dead tenant is forgotten")


def answers_until_it_waits(program: Program) -> int:
    """How many blocks a program ends before it has ended none for two seconds."""
    answers = 0
    while True:
        try:
            program.answer(2.0)
        except WorkError as error:
            assert "did not answer within 2 s" in str(error)  # noqa: PT017 - the loop ends by it
            return answers
        answers += 1


@pytest.mark.parametrize(("fail", "limit"), [("open", 0.9), ("closed", 0.9), ("closed", 1.0)])
def test_kill_9_of_the_agent(start_node: Callable[..., Node], fail: str, limit: float) -> None:
    """Tenants go on (open) or wait (closed, also one that is alone and has a turn without an end), and are the same
    tenants for the next agent."""
    node = start_node(fail=fail, alone_after="0s")
    tenant = ready(node, "survivor", limit=limit, request=0.4)
    wait_for(lambda: node.saved("survivor").get("processes"), what="the agent has written down what it must know again")
    blocks = 300  # of 0.2 s: more than a minute, so that the program works until the end of the test
    for _ in range(blocks):
        tenant.begin(0.2)
    wait_for(lambda: node.row("survivor")["gpus"][0]["holding"])
    node.kill_agent()
    killed_ns = time.monotonic_ns()
    if fail == "open":
        while (done := tenant.answer())["begin_ns"] < killed_ns + 300e6:
            pass
        assert done["count"] > 0
    else:
        assert answers_until_it_waits(tenant) < blocks
    assert (node.folder / "agent.sock").exists()  # the socket is stale, and the next agent replaces it
    node.restart_agent()
    back_ns = time.monotonic_ns()
    row = wait_for(lambda: (r := node.row("survivor")) and r["pids"] and r, what="the tenant reconnects")
    assert (row["request"], row["limit"]) == (0.4, limit)
    while (done := tenant.answer())["begin_ns"] < back_ns:
        pass
    assert done["count"] > 0, "work goes on under the new agent"
    tenant.process.kill()


def test_a_process_left_behind_is_the_same_tenant_for_the_next_agent(node: Node, client_program: Path) -> None:
    process = node.launch("daemon", ["sh", "-c", f"{client_program} v2 rate 600 1 >/dev/null 2>&1 &"], "--limit", "70%")
    assert process.wait(60) == 0
    wait_for(lambda: node.saved("daemon").get("processes"), what="the agent has written down what it must know again")
    node.kill_agent()
    node.restart_agent()
    row = wait_for(lambda: (r := node.row("daemon")) and r["pids"] and r, what="it comes back under its name")
    assert (row["limit"], row["root_pid"]) == (0.7, None)
    for pid in row["pids"]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: node.row("daemon") is None, what="and is forgotten when it ends")


def test_kill_9_of_the_launcher_leaves_the_program_and_the_others(node: Node) -> None:
    other = ready(node, "other")
    process = node.launch("orphan", ["sleep", "600"])
    root = wait_for(lambda: (node.row("orphan") or {}).get("root_pid"))
    process.kill()
    process.wait()
    stays(lambda: alive(root) and node.row("orphan") is not None)
    assert other.block(0.3) > 0
    os.kill(root, signal.SIGKILL)
    wait_for(lambda: node.row("orphan") is None, what="the tenant goes when its program ends")


@pytest.mark.timed
def test_a_tenant_that_never_synchronises_shares_all_the_same(node: Node, client_program: Path) -> None:
    flood = node.launch("flood", [str(client_program), "v2", "flood", "2000", "20"], "--request", "50%")
    fair = ready(node, "fair", request=0.5)
    wait_for(lambda: (node.row("flood") or {}).get("launches", 0) > 10)
    rate = fair.block(3.0)
    assert 0.3 * 500 < rate < 0.62 * 500  # with kernels of 2 ms, a tenant alone launches 500 a second
    flood.terminate()
    flood.wait(60)


def test_a_hung_kernel_stops_nobody_else(node: Node, client_program: Path) -> None:
    """A kernel of 10 s, where the limit is 1 s; its tenant is there until it is stopped."""
    other = ready(node, "other")
    one_kernel = f"CLIENT_KERNEL_NS=10000000000 {client_program} v2 launches 1; sleep 600"
    hung = node.launch("hung", ["sh", "-c", one_kernel])
    wait_for(lambda: (row := node.row("hung")) and row["launches"])
    turns = node.row("other")["gpus"][0]["turns"]
    other.begin(0.5)
    wait_for(lambda: (row := node.row("hung")) and row["warnings"], what="it is reported")
    assert any("hang" in text or "did not end" in text for text in node.row("hung")["warnings"])
    wait_for(lambda: node.row("other")["gpus"][0]["turns"] > turns, what="the GPU goes on to the next tenant")
    node.call("stop", name="hung", grace_s=0.2)
    hung.wait(60)
    assert other.result()["count"] > 0


def test_children_by_fork_and_by_exec_belong_to_the_tenant(node: Node, client_program: Path) -> None:
    forked = node.launch("forks", [str(client_program), "v2", "fork"])
    out, err = forked.communicate(timeout=60)
    assert "child 7" in out, err
    shell = node.launch("execs", ["sh", "-c", f"{client_program} v2 rate 600 1; true"], "--memory", "1GiB")
    row = wait_for(lambda: (r := node.row("execs")) and r["pids"] and r)
    assert row["programs"] == ["client"]
    assert row["pids"] != [row["root_pid"]]
    node.call("stop", name="execs")
    shell.wait(60)


def test_a_process_that_lost_its_token_is_found_by_its_parents(node: Node, client_program: Path) -> None:
    """As after su or a remote shell: the environment is gone, the ancestry is not."""
    command = ["sh", "-c", f"unset COTENANT_TOKEN; {client_program} v2 rate 1.5 1; read line"]
    shell = node.launch("bare", command, "--limit", "50%", stdin=subprocess.PIPE)
    wait_for(lambda: (row := node.row("bare")) and row["launches"] > 0)
    out, _ = shell.communicate("\n", timeout=60)
    count = int(out.split()[1])
    assert count < 0.75 * 1.5e9 / 100_000  # kernels of 0.1 ms, at half of the GPU


MEMORY = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, device = ctypes.c_void_p(), ctypes.c_int()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
assert cuda.cuCtxSetCurrent(context) == 0
free, total, held = ctypes.c_size_t(), ctypes.c_size_t(), []
for _ in range(5):
    pointer = ctypes.c_void_p()
    code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(256 << 20))
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    print(code, free.value >> 20, total.value >> 20, flush=True)
    held.append(pointer)
sys.stdin.read()
"""


def test_memory_is_capped_and_comes_back(node: Node) -> None:
    command = [sys.executable, "-c", MEMORY]
    process = node.launch("greedy", command, "--memory", "1GiB", stdin=subprocess.PIPE)
    assert process.stdout is not None
    rows = [tuple(int(word) for word in process.stdout.readline().split()) for _ in range(5)]
    codes = [code for code, _, _ in rows]
    assert codes[:3] == [0, 0, 0]
    assert codes[4] == 2  # CUDA_ERROR_OUT_OF_MEMORY
    assert all(total <= 1024 for _, _, total in rows)
    assert [free for _, free, _ in rows[:3]] == sorted((free for _, free, _ in rows[:3]), reverse=True)
    row = node.row("greedy")
    assert row is not None
    used = row["gpus"][0]["memory_used_bytes"]
    assert 3 * (256 << 20) <= used <= 1 << 30
    assert row["gpus"][0]["memory"]["plain"] == codes.count(0) * (256 << 20)
    for pid in row["pids"]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: node.call("status")["gpus"][0]["memory_charged_bytes"] == 0, what="the account is right")
    assert process.wait(60) == 137
    # the launcher prints what the agent has noticed
    assert "greedy: out of memory: 256 MiB requested" in process.communicate()[1]


def test_whole_gives_the_gpu_to_one_tenant(node: Node, client_program: Path) -> None:
    alone = node.launch("alone", [str(client_program), "v2", "rate", "600", "1"], "--mechanism", "whole")
    wait_for(lambda: (row := node.row("alone")) and row["launches"] > 100)
    second = node.launch("second", ["true"])
    assert second.wait(60) == 2
    assert "already has alone: whole cannot share it" in second.communicate()[1]
    node.call("stop", name="alone", grace_s=0.2)
    alone.wait(60)


def test_a_program_that_goes_around_the_shim_is_reported(node: Node, client_program: Path) -> None:
    from cotenant.native.libraries import SOFT_DRIVER, library_path

    process = node.launch("sly", [str(client_program), "v2", "bypass", str(library_path(SOFT_DRIVER)), "600"])
    wait_for(lambda: (row := node.row("sly")) and row["warnings"], what="it is shown, not ignored")
    assert any("no launch has passed the shim" in text for text in node.row("sly")["warnings"])
    node.call("stop", name="sly", grace_s=0.2)
    process.wait(60)


def test_two_hundred_tenants_at_once(node: Node, client_program: Path) -> None:
    running = []
    clients = []
    from cotenant.agent.tenants.launcher import Launch, program_environment, register

    os.environ["COTENANT_SOFTGPU_STATE"] = node.environment["COTENANT_SOFTGPU_STATE"]
    try:
        for index in range(200):
            clients.append(ControlClient(node.folder))
            answer = register(clients[-1], Launch(node.folder, TenantSpec(f"t{index}", request=0.005), []))
            environment = program_environment(answer)
            command = [str(client_program), "v2", "launches", "5"]
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
            clients[-1].call("started", name=f"t{index}", pid=running[-1].pid)
    finally:
        del os.environ["COTENANT_SOFTGPU_STATE"]
    assert [process.wait(60) for process in running] == [0] * 200
    for client in clients:
        client.close()
    wait_for(lambda: not node.tenants(), what="nothing is left of them")
    wait_for(lambda: node.call("status")["connections"] == 0)
    folder = f"/proc/{node.call('status')['pid']}/fd"
    wait_for(lambda: len(os.listdir(folder)) < 30, what="every socket, pidfd and page is given back")


def test_a_second_agent_is_refused_and_a_full_disk_is_survived(node: Node) -> None:
    command = [sys.executable, "-m", "cotenant.agent", "--dir", str(node.folder), "--gpus", "soft"]
    second = subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"an agent (pid {node.call('status')['pid']}) already runs" in second.stderr
    state_cannot_be_written(node.folder)  # as if the disk were full: the state file cannot be written
    tenant = ready(node, "a")
    assert tenant.block(0.3) > 0
    wait_for(lambda: "state.json cannot be written" in node.said())


def test_the_config_file_is_taken_live_and_a_wrong_one_is_not(start_node: Callable[..., Node]) -> None:
    node = start_node(tenants=[{"name": "team", "request": "30%", "limit": "60%", "memory": "1GiB"}])
    config = node.folder / "agent.json"
    row = node.row("team")
    assert row is not None
    assert (row["declared"], row["limit"]) == (True, 0.6)
    data = json.loads(config.read_text())
    data["tenants"][0]["limit"] = "80%"
    data["tenants"].append({"name": "late", "request": "10%"})

    def replace(text: str) -> None:
        (node.folder / "new").write_text(text)
        os.replace(node.folder / "new", config)

    replace(json.dumps(data))
    wait_for(lambda: node.row("team")["limit"] == 0.8, what="a file replaced by rename is taken")
    assert node.row("late")["request"] == 0.1
    replace(json.dumps(data | {"quota": [1]}))
    wait_for(lambda: "[1] is not a quantity" in node.call("status")["config_fault"])
    data["tenants"][0]["request"] = "95%"
    replace(json.dumps(data))
    wait_for(lambda: "its own limit" in node.call("status")["config_fault"], what="a wrong file does not end the watch")
    assert node.row("team")["request"] == 0.3
    data["tenants"] = data["tenants"][1:]
    data["tenants"][0]["request"] = "20%"
    replace(json.dumps(data))
    wait_for(lambda: node.row("team") is None, what="a tenant that is no longer listed goes")
    assert node.row("late")["request"] == 0.2
    refused = node.launch("late", ["true"], "--limit", "90%")
    assert refused.wait(60) == 2
    assert "declared in the agent's configuration" in refused.communicate()[1]


def test_without_an_agent_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="start one with cotenant agent"):
        ControlClient(tmp_path)
