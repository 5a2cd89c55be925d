"""Injects faults during co-location, one at a time, and measures how long it takes until the other side continues."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from cotenant.bench.colocation import Plan, ls_block, parse_ls, parse_schemes, quantile
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import with_source

GPU = os.environ.get("COTENANT_TEST_GPU") or os.environ.get("CUDA_VISIBLE_DEVICES") or "all"
TOGETHER = GPU != "soft"


def failure(error: Exception) -> dict[str, Any]:
    return {"error": repr(error), "notes": getattr(error, "__notes__", [])}


def faults(found: dict[str, Any]) -> None:
    """Inject one fault after the other; measure how long until the other side continues."""
    for name, step in FAULTS.items():
        try:
            found[name] = step()
        except Exception as error:
            found[name] = failure(error)


def ls_killed(**settings: Any) -> dict[str, Any]:
    """Kill an LS process while its LS-activity flag is set. `settings`: of the scheme, where they differ."""
    with Rig(GPU, together=TOGETHER) as rig:
        be = rig.be(below=True).wait_ready()
        be.ask("load mm2048", 60)
        rig.scheme("tidal", **settings)
        script = (
            "import sys, time; sys.path.insert(0, sys.argv[1]);"
            "from pathlib import Path; from cotenant.agent.gate.client import join_floor;"
            "floor = join_floor(Path(sys.argv[2]), sys.argv[3]);\n"
            "while True: floor.raise_(); print('up', flush=True); time.sleep(0.01)"
        )
        source = str(Path(__file__).resolve().parent.parent.parent / "src")
        holder = subprocess.Popen(
            [sys.executable, "-c", script, source, str(rig.bench.folder), rig.uuid], stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        be.tell("times 3")
        time.sleep(1.0)
        killed = time.monotonic_ns()
        holder.kill()
        holder.wait()
        times = be.answer(60)["times_ns"]
        after = [at for at in times if at > killed]
        return {
            "launches_while_held": len([at for at in times if killed - 5e8 < at < killed]),
            "be_goes_on_after_ms": (after[0] - killed) / 1e6 if after else None,
        }


def be_killed() -> dict[str, Any]:
    """Kill a BE process inside a kernel, then stop another one (SIGSTOP). LS must continue."""
    result = {}
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        with Rig(GPU, together=TOGETHER) as rig:
            ls, be = rig.ls(), rig.be(below=True)
            ls.wait_ready()
            be.wait_ready()
            rig.join(ls)
            be.ask("load mm8192", 60)
            rig.scheme("tidal")
            be.tell("run 5")
            ls.tell("run 2.5 100 5 1 0")
            time.sleep(1.0)
            be.process.send_signal(number)
            seen = ls.answer(60)
            if number == signal.SIGSTOP:
                be.process.send_signal(signal.SIGCONT)
            result[name] = {
                "ls_requests": len(seen["latency_ms"]),
                "ls_p99_ms": quantile(seen["latency_ms"], 0.99),
                "ls_max_ms": max(seen["latency_ms"]),
            }
            be.process.kill()
    return result


def agent_restarted() -> dict[str, Any]:
    """Kill and restart the agent while LS and BE run."""
    with Rig(GPU, together=TOGETHER, settings={"fail": "open"}) as rig:
        ls, be = rig.ls(), rig.be(below=True)
        ls.wait_ready()
        be.wait_ready()
        rig.join(ls)
        be.ask("load mm2048", 60)
        rig.scheme("tidal")
        be.tell("times 6")
        ls.tell("run 5 100 5 1 0")
        time.sleep(1.0)
        agent = rig.bench.agent
        assert agent is not None
        arguments = agent.args
        killed = time.monotonic_ns()
        agent.kill()
        agent.wait()
        time.sleep(0.5)
        rig.bench.agent = subprocess.Popen(
            arguments, stderr=rig.bench.log, stdout=rig.bench.log, env=with_source(rig.bench.environment)
        )
        seen = ls.answer(60)
        times = be.answer(60)["times_ns"]
        gaps = [(b - a, a) for a, b in itertools.pairwise(times)]
        late = [gap for gap, at in gaps if at > killed + 3e9]
        worst = max(gaps)
        with_floor = rig.scheme("tidal")
        return {
            "ls_p99_ms": quantile(seen["latency_ms"], 0.99),
            "ls_max_ms": max(seen["latency_ms"]),
            "be_longest_gap_ms": worst[0] / 1e6,
            "be_longest_gap_from_kill_ms": (worst[1] - killed) / 1e6,
            "be_gap_at_end_ms": max(late) / 1e6 if late else None,
            "floor": with_floor["gpus"],
        }


def mps_server(rig: Rig) -> int:
    """Process id of the MPS server of the rig's programs."""
    pipe = next(rig.bench.folder.glob("mps-*/pipe"))
    asked = subprocess.run(
        ["nvidia-cuda-mps-control"],
        input="get_server_list\n",
        env=os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return int(asked.stdout.split()[0])


def mps_server_dead() -> dict[str, Any]:
    """Kill the MPS server, which ends its clients. Measures when LS notices, and when a new worker serves again."""
    if not TOGETHER:
        return {"skipped": "no MPS here"}
    with Rig(GPU, together=True) as rig:
        ls = rig.ls().wait_ready()
        rig.join(ls)
        server = mps_server(rig)
        ls.tell("run 6 100 5 1 0")
        time.sleep(1.0)
        killed = time.monotonic()
        os.kill(server, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            ls.process.wait(10)
        noticed_s = time.monotonic() - killed
        again = rig.ls("ls-again")
        again.wait_ready()
        rig.join(again)
        seen = ls_block(
            again, Plan(parse_ls("resnet50:4:100"), [], parse_schemes("tidal"), block_s=0.5), 1, raises=True
        )
        return {
            "noticed_s": noticed_s,
            "ended": ls.process.poll(),
            "serves_again_after_s": time.monotonic() - killed - 0.5,
            "p50_ms": quantile(seen["latency_ms"], 0.5),
            "agent_log": (rig.bench.folder / "agent.log").read_text()[-600:],
        }


FAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ls_killed": ls_killed,
    "be_killed": be_killed,
    "agent_restarted": agent_restarted,
    "mps_server_dead": mps_server_dead,
}
