"""The commands of oversubscription as people type them, on the software GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_harness import AgentProcess, declare

from cotenant.cli.tenant_table import tenant_table

PROGRAM = Path(__file__).with_name("swap_program.py")


def test_run_park_resume_as_commands(start_agent: Callable[..., AgentProcess], call: Any) -> None:
    agent = start_agent()
    folder = str(agent.folder)
    code, _, err = call("park", "nobody", "--dir", folder)
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no tenant 'nobody'" in err
    code, _, err = call("resume", "nobody", "--dir", folder)
    assert (code, "is not parked" in err) == (2, True)
    code, _, err = call("park", "nobody", "--timeout", "0", "--dir", folder)
    assert (code, "--timeout: '0.0' is not a time" in err) == (2, True)
    code, out, _ = call("preempt", "--gpu", "0", "--dir", folder, "--json")
    assert (code, json.loads(out)["parked"]) == (0, [])
    code, _, err = call("preempt", "--dir", folder)
    assert (code, "give tenants to preempt" in err) == (2, True)
    code, _, err = call("preempt", "--gpu", "7", "--dir", folder)
    assert (code, "no GPU '7'" in err) == (2, True)
    code, _, err = call("preempt", "--gpu", "0", "--free", "1GiB", "--dir", folder)
    assert (code, "not enough memory could be freed" in err) == (1, True)


def test_a_tenant_is_parked_before_it_comes_to_its_gpu(agent: AgentProcess, call: Any) -> None:
    with agent.client() as client:
        client.call("register", tenant={"name": "early", "memory_bytes": 1 << 20, "oversubscribe": "swap"})
        code, out, _ = call("park", "early", "--dir", str(agent.folder), "--json")
        assert (code, json.loads(out)["freed_bytes"]) == (0, 0)
        assert agent.tenant("early")["state"] == "parked"
        code, _, err = call("run", "--name", "early", "--join", "--dir", str(agent.folder), "--", "true")
        assert (code, "early is parked: its GPU work waits for `cotenant resume early`" in err) == (0, True)
        assert call("resume", "early", "--dir", str(agent.folder))[0] == 0


def test_a_tenant_is_resumed_instead_of_others(agent: AgentProcess, call: Any) -> None:
    with agent.client() as one, agent.client() as two:
        for client, name in ((one, "one"), (two, "two")):
            client.call("register", tenant={"name": name, "memory_bytes": 1 << 20, "oversubscribe": "swap"})
        where = ("--dir", str(agent.folder))
        assert call("park", "one", *where)[0] == 0
        code, out, _ = call("resume", "one", "--instead-of", "two", "--instead-of", "gone", *where)
        lines = out.splitlines()
        assert (code, len(lines)) == (0, 3)
        assert lines[0].startswith("one: back on ")
        assert lines[1].startswith("two: parked, 0 B freed in 0.")
        assert lines[2].startswith("gone: not parked: there is no tenant 'gone'")
        assert [agent.tenant(name)["state"] == "parked" for name in ("one", "two")] == [False, True]
        code, out, _ = call("resume", "two", "--instead-of", "one", "--json", *where)
        assert (code, [row["name"] for row in json.loads(out)["parked"]], json.loads(out)["failed"]) == (0, ["one"], {})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--name", "a", "--oversubscribe", "magic"], "cotenant: 'magic' is not a way to oversubscribe"),
        (["--name", "a", "--memory", "0"], "--memory: memory must be over 0"),
        (["--name", "a", "--memory", "2000"], "--memory: '2000' has no unit; write 2000MiB"),
        (["--name", "a", "--memory", "8"], "--memory: '8' has no unit; write 8GiB"),
        (["--name", "a", "--memory", "8KB"], "--memory: '8KB' is less than 1 MiB"),
        (["--name", "a b"], "--name: 'a b' is not a tenant name"),
        (["--oversubscribe", "swap", "--gpus", "2"], "several GPUs"),
        (["--oversubscribe", "swap", "--mechanism", "whole"], "only between turns"),
        (["--oversubscribe", "swap", "--memory", "900GiB"], "to promise"),
        (["--oversubscribe", "swap", "--empty-cache", "often"], "not turn, iteration or off"),
        (["--empty-cache", "turn"], "--empty-cache: the memory of this tenant is never evicted"),
    ],
)
def test_wrong_wishes_are_one_sentence(agent: AgentProcess, call: Any, options: list[str], why: str) -> None:
    code, _, err = call("run", *options, "--dir", str(agent.folder), "--", "true")
    assert (code, err.count("\n")) == (2, 1)
    assert why in err


def test_host_memory_is_an_agent_s_setting(start_agent: Callable[..., AgentProcess], tmp_path: Path, call: Any) -> None:
    config = declare(tmp_path, "swap_memory: 1GiB\nmost_moving: 10%\n")
    agent = start_agent(config=config)
    run = ["run", "--oversubscribe", "swap", "--memory", "2GiB", "--dir", str(agent.folder), "--", "true"]
    code, _, err = call(*run)
    assert (code, "needs 2.0 GiB of host memory" in err) == (2, True)
    code, _, err = call("agent", "--most-moving", "99%", "--gpus", "soft", "--dir", str(tmp_path / "x"))
    assert (code, "0.1 % to 90 %" in err) == (2, True)


def test_bench_swap_on_the_software_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cotenant.cli.main", "bench", "swap", "--size", "16MiB", "--moves", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["corrupted"] == 0
    assert set(found["copy_gbps"]) == set(found["swap_gbps"]) == {"out", "in", "both"}
    assert min(found["swap_gbps"].values()) > 0
    two = found["copy_two_processes_gbps"]
    assert two["both"] == min(two["out"], two["in"]) > 0
    assert set(found["parts_ms"]["both"]) == {"out", "in"}
    for row in (found["parts_ms"]["out"]["out"], found["parts_ms"]["in"]["in"]):
        assert row["order"] >= row["process"] >= row["mapping"] + row["copying"] > 0
    assert set(found["park_s"]) == {"out", "in"}


def row(name: str, **residency: Any) -> dict[str, Any]:
    share: dict[str, Any] = {
        "index": 0, "got": 0.5, "holding": False, "waiting": True, "memory_used_bytes": 1 << 30, "turns": 3,
        "memory_limit_bytes": None, "waited_s": 1.0,
    }  # fmt: skip
    if residency:
        share["residency"] = residency
    return {
        "name": name, "request": 0.5, "limit": 1.0, "state": "running", "gpus": [share], "pids": [1], "warnings": [],
        "launches": 1, "graph_launches": 0, "gate_wait_s": 0.0,
    }  # fmt: skip


def rendered(*rows: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(tenant_table({"tenants": list(rows)})[0])
    return capture.get()


def test_top_shows_who_is_on_the_gpu() -> None:
    moved = {"movable_bytes": 100, "resident_bytes": 40, "moving": False}
    moved |= {"moves_out": 2, "moves_in": 1, "moving_s": 1.5}
    text = rendered(row("plain"), row("part", **moved), row("now", **(moved | {"moving": True})))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "ON GPU" in lines["TENANT"]
    assert "40%" in lines["part"]
    assert "3, 1.5" in lines["part"]
    assert "moves" in lines["now"]
    assert " all " in lines["plain"]
    assert "ON GPU" not in rendered(row("plain"))
