"""The verbs that talk to an agent, as a user types them: output, JSON, exit codes, one-sentence errors."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import command
import pytest
from agent_harness import AgentProcess, declare, gpu_uuid
from fake_shim import FakeShim, register
from waiting import wait_for

SOURCE = Path(__file__).resolve().parents[2] / "src"


def cotenant(*arguments: str, code: int = 0) -> str:
    """What it wrote; `cotenant agent` as a process of its own, for it becomes the agent."""
    done = (command.cotenant_process if arguments[0] == "agent" else command.cotenant)(*arguments)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    return done.out if code == 0 else done.err


@pytest.fixture(scope="module")
def busy_agent() -> Iterator[AgentProcess]:
    with tempfile.TemporaryDirectory(prefix="cot-") as folder:
        text = "tenants: [{name: team/a, request: 30%, limit: 60%, memory: 2GiB}]\n"
        agent = AgentProcess(Path(folder), config=declare(Path(folder), text))
        yield agent
        agent.close()


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_top_in_a_terminal_ends_without_a_complaint(busy_agent: AgentProcess, key: bytes) -> None:
    terminal, end = pty.openpty()
    run = subprocess.Popen(
        command.command("top", "--dir", busy_agent.folder), stdin=end, stdout=end, stderr=end, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(end)
    shown = b""
    while b"q quit" not in shown:
        shown += os.read(terminal, 65536)
    os.write(terminal, key)
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(terminal, 65536):
            shown += part
    os.close(terminal)
    assert run.wait(60) == 0
    assert b"interrupted" not in shown


def test_ps_top_set_stop(busy_agent: AgentProcess) -> None:
    where = ("--dir", str(busy_agent.folder))
    with busy_agent.client() as launcher:
        shim = FakeShim(busy_agent.folder, register(launcher, "team/a", limit=None)["token"])
        shim.attach(gpu_uuid(0))
        shim.take()
        shim.commit(shim.reserve(1 << 30)["reservation"], 1 << 30)
        answer = json.loads(cotenant("ps", "--json", *where))
        (row,) = answer["tenants"]
        assert row["name"] == "team/a"
        assert (row["request"], row["limit"]) == (0.3, 0.6)
        (share,) = row["gpus"]
        assert share["holding"]
        assert share["memory"] == {"plain": 1 << 30}
        assert answer["agent"]["gpus"][0]["holder"] == "team/a"
        table = cotenant("ps", *where)
        assert "team/a" in table
        assert "1.0 GiB / 2.0 GiB" in table
        look = cotenant("top", "--once", *where)
        assert "promised 30%" in look
        assert "turn of team/a" in look
        assert "LAUNCHES" in look  # the output is a pipe, which has no width, so no column is left out
        assert json.loads(cotenant("top", "--json", *where))["tenants"][0]["name"] == "team/a"
        changed = json.loads(cotenant("set", "team/a", "--limit", "80%", "--json", *where))
        assert (changed["limit"], changed["holds"]) == (0.8, "at once")
        assert "limit 70%" in cotenant("set", "team/a", "--limit", "70%", *where)
        assert "2.0 GiB, priority 2, copy weight 2.5; holds at once" in cotenant(
            "set", "team/a", "--copy-weight", "2.5", "--priority", "2", "--memory", "2GiB", *where
        )


def test_a_run_is_not_told_what_was_wrong_with_the_one_before(busy_agent: AgentProcess) -> None:
    with busy_agent.client() as launcher:
        shim = FakeShim(busy_agent.folder, register(launcher, "team/a", limit=None)["token"])
        shim.attach(gpu_uuid(0))
        shim.reserve(3 << 30)
        assert "out of memory" in launcher.call("warnings", name="team/a")["warnings"][0]
        register(launcher, "team/a", limit=None)
        assert launcher.call("warnings", name="team/a")["warnings"], "that run goes on"
        shim.close()
        wait_for(lambda: not busy_agent.tenant("team/a")["pids"])
        register(launcher, "team/a", limit=None)
        assert launcher.call("warnings", name="team/a")["warnings"] == []


def test_mechanisms_are_listed(busy_agent: AgentProcess) -> None:
    told = json.loads(cotenant("ps", "--mechanisms", "--json", "--dir", str(busy_agent.folder)))
    assert list(told["mechanisms"]) == ["time", "slices", "whole", "mps"]
    (gpu,) = told["gpus"]
    by = {row["promise"]: (row["by"], row["mechanism"]) for row in gpu["promises"]}
    assert by["time"] == ("shim", "time")  # the same as for its tenants
    assert by["memory"] == ("shim", "time")
    assert by["sms"] == ("nothing", "time")
    assert by["bandwidth"][0] in ("nothing", "shim")  # "shim" if a tenant of another test has a link weight
    assert by["faults"] == ("driver", "time")
    shown = cotenant("ps", "--mechanisms", "--dir", str(busy_agent.folder))
    assert "time is enforced by shim, SMs by nothing, memory by shim" in shown
    assert "fixed when" in shown
    assert f"GPU {gpu['index']}: {gpu['name']}, {gpu['uuid']}\n" in shown
    assert "  faults    driver    --mechanism time: a CUDA context for each tenant\n" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("set", "nobody", "--limit", "50%"), "there is no tenant 'nobody'; there are: team/a"),
        (("set", "team/a"), "nothing to change: give one of --request, --limit, --memory, "),
        (("set", "team/a", "--limit", "20%"), "asks for 30%, over its own limit of 20%"),
        (("set", "team/a", "--limit", "150%"), "is over 100%"),
        (("stop", "nobody"), "there is no tenant"),
        (("run", "--name", "../x", "--", "true"), "is not a tenant name"),
        (("run", "--name", "b", "--request", "80%", "--", "true"), "70% left to promise; b asks for 80%"),
        (("run", "--name", "b", "--memory", "9GiB", "--", "true"), "6.00 GiB of memory left"),
        (("run", "--name", "b", "--gpus", "3", "--", "true"), "3 GPUs asked for, this agent has 1"),
        (("run", "--name", "b", "--mechanism", "mps", "--", "true"), "shared by time (team/a)"),
        (("run", "--name", "b", "--timeout", "soon", "--", "true"), "is not a quantity"),
        (
            ("run", "--name", "b", "--mechanism", "foo", "--", "true"),
            "unknown mechanism 'foo'; known: time, slices, whole, mps",
        ),
        (("run", "--name", "nobody", "--join", "--", "true"), "there is no tenant 'nobody'; there are: team/a"),
        (("run", "--join", "--", "true"), "needs --name with the name of the tenant"),
        (("run", "--timeout", "0", "--", "true"), "must be above 0"),
        (("run", "--name", "team/a", "--join", "--limit", "50%", "--", "true"), "uses the tenant's budget"),
    ],
)
def test_mistakes_are_one_sentence(busy_agent: AgentProcess, arguments: tuple[str, ...], words: str) -> None:
    verb, *rest = arguments
    said = cotenant(verb, "--dir", str(busy_agent.folder), *rest, code=2)
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_without_an_agent_each_verb_says_how_to_start_one(tmp_path: Path) -> None:
    for arguments in (("ps",), ("top",), ("set", "a", "--limit", "5%"), ("stop", "a")):
        assert "start one with cotenant agent" in cotenant(*arguments, "--dir", str(tmp_path), code=1)


def test_wrong_agent_settings(tmp_path: Path) -> None:
    where = ("--dir", str(tmp_path / "run"), "--gpus", "soft")
    assert "'fair'" in cotenant("agent", *where, "--discipline", "fair", code=2)
    assert "quota" in cotenant("agent", *where, "--quota", "20s", "--window", "10s", code=2)
    assert "is not an octal mode" in cotenant("agent", *where, "--socket-mode", "rw", code=2)
    assert "soft must be the only" in cotenant("agent", "--dir", str(tmp_path / "run"), "--gpus", "soft,0", code=2)
    assert "cannot be written" in cotenant("agent", *where, "--trace", str(tmp_path), code=2)


def test_bench_mistakes() -> None:
    assert "2 requests but 1 limits" in cotenant("bench", "shares", "--requests", "30,70", "--limits", "50", code=2)
    assert "unknown workload 'x'" in cotenant("bench", "overhead", "--workloads", "x", code=2)
    assert "block must be between 1 ms" in cotenant("bench", "overhead", "--block", "0", code=2)
    assert "kernel must be between 1 us" in cotenant("bench", "shares", "--kernel", "0", code=2)


def test_the_node_runs_on_the_standard_library_alone() -> None:
    """As on a machine where nothing else is installed: no third-party module is imported until it is needed."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules)\n"
        "import cotenant.agent.__main__, cotenant.agent.tenants.launcher\n"
        "import cotenant.bench.shares, cotenant.bench.overhead, cotenant.bench.workload, cotenant.bench.driver\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before} - {'cotenant'}\n"
        "print(sorted(names - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(SOURCE)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
