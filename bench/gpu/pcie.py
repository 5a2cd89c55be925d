"""The figures of docs/benchmarks/pcie.md on a real GPU, with the real agent; writes JSON.

    PYTHONPATH=src CUDA_VISIBLE_DEVICES=UUID python bench/gpu/pcie.py OUT.json [STEP,STEP...]

Each step runs in its own process with a time limit. If it fails or hangs, its results until then, its error and its log
are kept, and the other steps run. OUT.json is rewritten after each new result of a step.
"""

from __future__ import annotations

import contextlib
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
sys.path[:0] = [str(HERE), str(SOURCE)]

from cases import Keep, each, failure, keeper  # noqa: E402

GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0]


def chunk_curve(_keep: Keep) -> dict[str, Any]:
    """Measure successive chunks with and without the shim's stream memory operations around them: native, without an
    agent."""
    from pcie_curve import measure

    return measure()


def measured(weights: list[float], seconds: float, **case: Any) -> Callable[[Keep], dict[str, Any]]:
    """A case of `cotenant bench pcie` on this GPU."""
    from cotenant.bench.pcie import measure

    return lambda _keep: measure(weights, gpus=GPU, seconds=seconds, **case)


def tenant_curve(keep: Keep) -> dict[str, Any]:
    """Measure two tenants at 1:1, and an LS copy against a BE one, by chunk size. This shows how much bandwidth a
    shorter wait costs."""
    sizes = (512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20)
    cases = {f"{chunk >> 10} KiB": measured([1, 1], 1.2, chunk_bytes=chunk, ls=True) for chunk in sizes}
    return each(cases, keep, 40.0)


WEIGHTS: dict[str, dict[str, Any]] = {
    "1:3 h2d pinned": {"weights": [1, 3]},
    "1:3 d2h pinned": {"weights": [1, 3], "direction": "d2h"},
    "1:3 h2d pageable": {"weights": [1, 3], "memory": "pageable", "mode": "sync"},
    "1:3 d2h pageable": {"weights": [1, 3], "direction": "d2h", "memory": "pageable", "mode": "sync"},
    "1:3 h2d pinned sync": {"weights": [1, 3], "mode": "sync"},
    "1:1 h2d pinned": {"weights": [1, 1]},
    "1:2:4 h2d pinned": {"weights": [1, 2, 4]},
}


def weights(keep: Keep) -> dict[str, Any]:
    """Measure shares of the link and their sum, by weights, direction, kind of memory and kind of copy."""
    return each({name: measured(seconds=2.0, ls=False, **case) for name, case in WEIGHTS.items()}, keep, 40.0)


def ls_wait(keep: Keep) -> dict[str, Any]:
    """Waiting time of a latency-sensitive copy, as reported by `cotenant bench pcie`."""
    cases = {direction: measured([1, 3], 3.0, ls=True, direction=direction) for direction in ("h2d", "d2h")}
    return each(cases, keep, 45.0)


# -- one program, native and as a tenant -----------------------------------------------------------------------------


def run_tenant(
    arguments: list[str], settings: dict[str, Any], native: bool = False, beside: str = "", **spec: Any
) -> dict[str, Any]:
    """Run this script's own program `arguments` as a tenant (or natively) and return its JSON line. `beside`: with an
    idle second tenant."""
    from cotenant.agent.config.files import TenantSpec
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.agent.tenants.launcher import Launch, program_environment, register
    from cotenant.bench.harness import Bench

    command = [sys.executable, str(HERE / "pcie.py"), "--program", *arguments]
    with Bench(GPU, settings) as bench:
        environment = dict(bench.environment)
        if native:
            environment["COTENANT_BENCH_LIBRARY"] = str(bench.device.driver())
        client = ControlClient(bench.folder)
        bench.clients.append(client)
        if beside:
            idle = TenantSpec("idle", mechanism="mps", copy_weight=1.0, latency_sensitive=beside == "latency-sensitive")
            other = ControlClient(bench.folder)
            bench.clients.append(other)
            register(other, Launch(bench.folder, idle, ["idle"]))
        if not native:
            tenant = TenantSpec("one", mechanism="mps", **spec)
            environment |= program_environment(register(client, Launch(bench.folder, tenant, command)))
            environment |= {key: value for key, value in bench.environment.items() if "SOFTGPU" in key}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            if not native:
                client.call("started", name="one", pid=process.pid)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        queues = [] if native else [row["gpus"][0]["copies"] for row in bench.tenants() if row["name"] == "one"]
        lines = [line for line in out.splitlines() if line.startswith("{")]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {"said": out[-400:]}
        return found | {"rc": process.returncode, "stderr": err[-600:], "queues": queues}


def tenant_case(arguments: list[str], settings: dict[str, Any], **more: Any) -> Callable[[Keep], dict[str, Any]]:
    """A case of `each` that runs such a tenant (see `run_tenant`)."""
    return lambda _keep: run_tenant(arguments, settings, **more)


def correctness(keep: Keep) -> dict[str, Any]:
    """Check contents, order in a stream, graphs and captures: natively, and as a tenant with both kinds of pacing."""
    ahead = {"copy_weight": 1.0, "beside": "latency-sensitive"}
    cases = {
        "native": tenant_case(["checks"], {}, native=True),
        "by itself": tenant_case(["checks"], {"copies": True}, copy_weight=1.0),
        "stream": tenant_case(["checks"], {"copies": True}, **ahead),
        "small chunks": tenant_case(["checks"], {"copies": {"chunk_bytes": 256 << 10}}, **ahead),
    }
    return each(cases, keep, 40.0)


def cost_alone(keep: Keep) -> dict[str, Any]:
    """Measure interleaved copies of several sizes by one tenant: native, without turns, and with turns, alone and with
    an idle tenant."""
    turns = {"copies": True}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "native": ({}, {"native": True}),
        "tenant": ({}, {}),
        "turns": (turns, {"copy_weight": 1.0}),
        "turns, another idle": (turns, {"copy_weight": 1.0, "beside": "another"}),
        "turns, one ahead idle": (turns, {"copy_weight": 1.0, "beside": "latency-sensitive"}),
        "ahead, another idle": (turns, {"latency_sensitive": True, "beside": "another"}),
    }
    found: dict[str, Any] = {kind: [] for kind in kinds}
    for _ in range(2):
        for kind, (settings, spec) in kinds.items():
            try:
                found[kind].append(run_tenant(["cost"], settings, **spec))
            except Exception as error:  # a case that fails must not prevent the others
                found[kind].append(failure(error))
            keep(found)
    return found


def faults(_keep: Keep) -> dict[str, Any]:
    """Kill a tenant during its copies; kill and restart an agent. Records the other tenant's rate every 50 ms."""
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


def side_by_side(name: str) -> Callable[[Keep], dict[str, Any]]:
    """A step of pcie_designs.py."""

    def measure(keep: Keep) -> dict[str, Any]:
        import pcie_designs

        found: dict[str, Any] = getattr(pcie_designs, name)(keep)
        return found

    return measure


STEPS: dict[str, tuple[Callable[[Keep], dict[str, Any]], int]] = {
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
}


# -- programs ----------------------------------------------------------------------------------------------------------


def program(arguments: list[str]) -> None:
    import pcie_programs

    print(json.dumps(getattr(pcie_programs, arguments[0])()), flush=True)


# -- running the steps -------------------------------------------------------------------------------------------------


def quit_mps(folder: str) -> None:
    """End the control daemons that a killed step left."""
    for pipe in glob.glob(f"{folder}/**/mps-*/pipe", recursive=True):
        environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": pipe}
        try:
            command = ["nvidia-cuda-mps-control"]
            subprocess.run(command, input="quit -t 2\n", env=environment, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue


def read(path: Path) -> Any:
    """Results that a step has stored so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def run_step(name: str, limit_s: int, keep: Keep) -> dict[str, Any]:
    """Results of the step. If it failed or ran out of time: the results stored until then, and the reason."""
    with tempfile.TemporaryDirectory(prefix="ct", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {"TMPDIR": folder, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
        kept, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [sys.executable, str(HERE / "pcie.py"), "--step", name, str(kept)]
        with log.open("wb") as said:
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
        until = time.monotonic() + limit_s
        agents: dict[str, str] = {}
        try:
            while process.poll() is None and time.monotonic() < until:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
                keep(read(kept))
            late = process.poll() is None
            if late:
                agents = {p: Path(p).read_text(errors="replace")[-1500:] for p in glob.glob(f"{folder}/*/agent.log")}
        finally:
            end(process)
            quit_mps(folder)
        found: dict[str, Any] = read(kept)
        if late or process.returncode != 0:
            why = f"time limit of {limit_s} s" if late else f"exit {process.returncode}"
            found |= {"error": why, "said": log.read_text(errors="replace")[-3000:], "agents": agents}
        return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End a step that still runs: first with a signal that lets it end its programs, then with SIGKILL."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    if sys.argv[1] == "--program":
        program(sys.argv[2:])
        return
    if sys.argv[1] == "--step":
        keep = keeper(Path(sys.argv[3]))
        keep(STEPS[sys.argv[2]][0](keep))
        return
    # SIGTERM must also end the step that runs, so it raises an exception
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    write = keeper(Path(sys.argv[1]))
    found: dict[str, Any] = {"card": card()}
    for name in chosen:
        began = time.monotonic()

        def keep_step(part: Any, name: str = name) -> None:
            found[name] = part
            write(found)

        found[name] = run_step(name, STEPS[name][1], keep_step)
        print(name, round(time.monotonic() - began, 1), json.dumps(found[name])[:3500], flush=True)
        write(found)


def card() -> str:
    """Name and driver of the GPU that is measured."""
    if GPU == "soft":
        return "software GPU"
    which = [] if GPU == "all" else ["-i", GPU]
    query = ["nvidia-smi", "--query-gpu=uuid,name,driver_version,memory.total", "--format=csv,noheader", *which]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except OSError as error:
        return repr(error)


if __name__ == "__main__":
    main()
