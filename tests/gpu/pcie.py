"""The figures of docs/benchmarks/pcie.md on a real GPU, with the real agent; writes JSON.

    PYTHONPATH=src CUDA_VISIBLE_DEVICES=UUID python tests/gpu/pcie.py OUT.json [STEP,STEP...]

Each step runs in a process of its own under a time limit; one that fails or hangs leaves its log and does not cost the
others.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
sys.path.insert(0, str(SOURCE))

GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0]


def chunk_curve() -> dict[str, Any]:
    """Chunks one after the other, with and without the shim's words around them: native, no agent."""
    from cotenant.bench.pcie_curve import measure

    return measure()


def tenant_curve() -> dict[str, Any]:
    """Two tenants at 1:1 and an LS copy beside a BE one, by chunk: what bandwidth pays for a shorter wait."""
    from cotenant.bench.pcie import measure

    return {
        f"{chunk >> 10} KiB": measure([1, 1], gpus=GPU, seconds=1.2, chunk_bytes=chunk, ls=True)
        for chunk in (512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20)
    }


WEIGHTS: dict[str, dict[str, Any]] = {
    "1:3 h2d pinned": {"weights": [1, 3]},
    "1:3 d2h pinned": {"weights": [1, 3], "direction": "d2h"},
    "1:3 h2d pageable": {"weights": [1, 3], "memory": "pageable", "mode": "sync"},
    "1:3 d2h pageable": {"weights": [1, 3], "direction": "d2h", "memory": "pageable", "mode": "sync"},
    "1:3 h2d pinned sync": {"weights": [1, 3], "mode": "sync"},
    "1:3 h2d pinned, thread paced": {"weights": [1, 3], "paced": "thread"},
    "1:1 h2d pinned": {"weights": [1, 1]},
    "1:2:4 h2d pinned": {"weights": [1, 2, 4]},
}


def weights() -> dict[str, Any]:
    from cotenant.bench.pcie import measure

    found: dict[str, Any] = {}
    for name, case in WEIGHTS.items():
        try:
            found[name] = measure(gpus=GPU, seconds=2.0, ls=False, **case)
        except Exception as error:  # the others are wanted all the same
            found[name] = {"error": repr(error)}
    return found


def ls_wait() -> dict[str, Any]:
    from cotenant.bench.pcie import measure

    return {
        direction: measure([1, 3], gpus=GPU, seconds=3.0, ls=True, direction=direction) for direction in ("h2d", "d2h")
    }


# -- one program, native and as a tenant -----------------------------------------------------------------------------


def run_tenant(
    arguments: list[str], settings: dict[str, Any], native: bool = False, beside: str = "", **spec: Any
) -> dict[str, Any]:
    """This script's own program `arguments`, as a tenant (or native); its JSON line. `beside`: another who is idle."""
    from cotenant.bench.harness import Bench
    from cotenant.node.client import ControlClient
    from cotenant.node.config import TenantSpec
    from cotenant.node.launcher import Launch, program_environment, register

    command = [sys.executable, str(HERE / "pcie.py"), "--program", *arguments]
    with Bench(GPU, settings) as bench:
        environment = dict(bench.environment)
        if native and bench.soft:
            from cotenant.softgpu.build import build

            environment["COTENANT_BENCH_LIBRARY"] = str(build())
        client = ControlClient(bench.folder)
        bench._clients.append(client)
        if beside:
            idle = TenantSpec("idle", mechanism="mps", copy_weight=1.0, latency_sensitive=beside == "latency-sensitive")
            other = ControlClient(bench.folder)
            bench._clients.append(other)
            register(other, Launch(bench.folder, idle, ["idle"]))
        if not native:
            tenant = TenantSpec("one", mechanism="mps", **spec)
            environment |= program_environment(register(client, Launch(bench.folder, tenant, command)))
            environment |= {key: value for key, value in bench.environment.items() if "SOFTGPU" in key}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if not native:
            client.call("started", name="one", pid=process.pid)
        out, err = process.communicate(timeout=60)
        queues = [] if native else [row["gpus"][0]["copies"] for row in bench.tenants() if row["name"] == "one"]
        lines = [line for line in out.splitlines() if line.startswith("{")]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {"said": out[-400:]}
        return found | {"rc": process.returncode, "stderr": err[-600:], "queues": queues}


def correctness() -> dict[str, Any]:
    """Contents, order in a stream, graphs and captures: native and as a tenant in both ways of pacing."""
    return {
        "native": run_tenant(["checks"], {}, native=True),
        "by itself": run_tenant(["checks"], {"copies": True}, copy_weight=1.0),
        "stream": run_tenant(["checks"], {"copies": True}, copy_weight=1.0, beside="latency-sensitive"),
        "thread": run_tenant(["checks"], {"copies": {"paced": "thread"}}, copy_weight=1.0, beside="latency-sensitive"),
        "small chunks": run_tenant(
            ["checks"], {"copies": {"chunk": 256 << 10}}, copy_weight=1.0, beside="latency-sensitive"
        ),
    }


def cost_alone() -> dict[str, Any]:
    """Copies of several sizes by one tenant, interleaved: native, without turns, with turns, by itself or not."""
    kinds: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
        "native": ({}, True, {}),
        "tenant": ({}, False, {}),
        "turns": ({"copies": True}, False, {"copy_weight": 1.0}),
        "turns, another idle": ({"copies": True}, False, {"copy_weight": 1.0, "beside": "another"}),
        "turns, one ahead idle": ({"copies": True}, False, {"copy_weight": 1.0, "beside": "latency-sensitive"}),
        "ahead, another idle": ({"copies": True}, False, {"latency_sensitive": True, "beside": "another"}),
    }
    found: dict[str, Any] = {kind: [] for kind in kinds}
    for _ in range(2):
        for kind, (settings, native, spec) in kinds.items():
            found[kind].append(run_tenant(["cost"], settings, native=native, **spec))
    return found


def faults() -> dict[str, Any]:
    """A tenant killed in the middle of its copies; an agent killed and started again: the other's rate, by 50 ms."""
    from cotenant.bench.harness import Bench
    from cotenant.bench.pcie import specs_for

    program = ["cotenant.bench.copying", "h2d", "pinned", "async", str(64 << 20)]
    with Bench(GPU, {"copies": True}) as bench:
        one, other = (bench.tenant("copy", spec, program=program) for spec in specs_for([1, 1], "mps"))
        one.wait_ready()
        other.wait_ready()
        one.begin(3.0)
        other.begin(3.0)
        time.sleep(1.5)
        other.process.send_signal(signal.SIGKILL)
        killed_ns = time.monotonic_ns()
        block = one.result()
    marks = [[block["begin_ns"], 0, 0], *block["marks"], [block["end_ns"], block["count"], 0]]
    steps = [((b[0] - killed_ns) / 1e6, (b[1] - a[1]) / max(1, b[0] - a[0])) for a, b in itertools.pairwise(marks)]
    after = [(at, rate) for at, rate in steps if at > 0]
    late = sorted(rate for at, rate in steps if at > 500)
    full = late[len(late) // 2] if late else 0.0
    again = next((at for at, rate in after if rate > 0.8 * full), None)
    return {
        "gb_per_s_alone_after": full,
        "full_rate_again_ms": again,
        "around": [s for s in steps if -200 < s[0] < 400],
    }


def probe_channels() -> dict[str, Any]:
    from cotenant.bench.channels import probe

    return probe(seconds=40.0)


def colouring() -> dict[str, Any]:
    from cotenant.bench.colouring import measure

    return measure(seconds=60.0)


def side_by_side(name: str) -> Callable[[], dict[str, Any]]:
    """A step of pcie_designs.py."""

    def measure() -> dict[str, Any]:
        sys.path.insert(0, str(HERE))
        import pcie_designs

        found: dict[str, Any] = getattr(pcie_designs, name)()
        return found

    return measure


STEPS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "designs": (side_by_side("designs"), 140),
    "designs_beside": (side_by_side("designs_beside"), 100),
    "designs_one_by_one": (side_by_side("designs_one_by_one"), 100),
    "designs_mixed": (side_by_side("designs_mixed"), 45),
    "chunk_curve": (chunk_curve, 45),
    "weights": (weights, 150),
    "ls_wait": (ls_wait, 60),
    "correctness": (correctness, 90),
    "cost_alone": (cost_alone, 100),
    "faults": (faults, 40),
    "tenant_curve": (tenant_curve, 120),
    "probe_channels": (probe_channels, 90),
    "colouring": (colouring, 120),
}


# -- programs ----------------------------------------------------------------------------------------------------------


def program(arguments: list[str]) -> None:
    sys.path.insert(0, str(HERE))
    import pcie_programs

    print(json.dumps(getattr(pcie_programs, arguments[0])()), flush=True)


# -- running the steps -------------------------------------------------------------------------------------------------


def quit_mps(folder: str) -> None:
    """A step that was killed leaves its control daemons: ask them to go."""
    for pipe in glob.glob(f"{folder}/**/mps-*/pipe", recursive=True):
        environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": pipe}
        try:
            command = ["nvidia-cuda-mps-control"]
            subprocess.run(command, input="quit -t 2\n", env=environment, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue


def run_step(name: str, limit_s: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ct", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {"TMPDIR": folder, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(HERE / "pcie.py"), "--step", name]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=limit_s)
            late = False
        except subprocess.TimeoutExpired:
            late = True
            logs = {p: Path(p).read_text(errors="replace")[-1500:] for p in glob.glob(f"{folder}/*/agent.log")}
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += json.dumps(logs)
        quit_mps(folder)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"error": f"time limit of {limit_s} s" if late else f"exit {process.returncode}", "stderr": err[-3000:]}


def main() -> None:
    if sys.argv[1] == "--program":
        program(sys.argv[2:])
        return
    if sys.argv[1] == "--step":
        print(json.dumps(STEPS[sys.argv[2]][0]()))
        return
    out = Path(sys.argv[1])
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    query = ["nvidia-smi", "--query-gpu=uuid,name,driver_version,memory.total", "--format=csv,noheader"]
    found: dict[str, Any] = {"card": "software GPU"}
    if GPU != "soft":
        found["card"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    for name in chosen:
        began = time.monotonic()
        found[name] = run_step(name, STEPS[name][1])
        print(name, round(time.monotonic() - began, 1), json.dumps(found[name])[:3500], flush=True)
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
