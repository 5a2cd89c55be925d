"""The figures of docs/benchmarks/shares.md, on a real GPU with the real agent; writes JSON.

PYTHONPATH=src python bench/gpu/figures.py OUT.json [STEP,STEP...]
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "src"))

from cotenant.agent.config.files import TenantSpec, check_spec  # noqa: E402
from cotenant.agent.ipc.client import ControlClient  # noqa: E402
from cotenant.agent.tenants.launcher import Launch, program_environment, register  # noqa: E402
from cotenant.bench import overhead, shares  # noqa: E402
from cotenant.bench.harness import Bench  # noqa: E402
from cotenant.native.libraries import SOFT_DRIVER, library_path  # noqa: E402

# a UUID selects one of several GPUs; `soft` only tests the script
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES") or "all"
if GPUS == "soft":
    del os.environ["CUDA_VISIBLE_DEVICES"]
PROGRAMS = str(HERE / "programs.py")
TURNS = {"quota": "100ms", "min_quota": "20ms", "max_quota": "100ms"}
SCENARIOS = {
    "limit 50 %": ([0.0], [0.5]),
    "limit 25 %": ([0.0], [0.25]),
    "request 30/70": ([0.3, 0.7], [1.0, 1.0]),
    "three 20/30/50": ([0.2, 0.3, 0.5], [1.0, 1.0, 1.0]),
}


def all_shares(seconds: float) -> dict[str, Any]:
    return {
        name: shares.measure(requests, limits, seconds, gpus=GPUS, quota_ms=100.0)
        for name, (requests, limits) in SCENARIOS.items()
    }


def work_between(block: dict[str, Any], start_ns: float, end_ns: float) -> float:
    """Units of work of a block between two times, interpolated linearly between marks."""
    points = [(block["begin_ns"], 0), *((m[0], m[1]) for m in block["marks"]), (block["end_ns"], block["count"])]

    def until(at_ns: float) -> float:
        for (left_ns, left), (right_ns, right) in itertools.pairwise(points):
            if left_ns <= at_ns <= right_ns:
                return left + (right - left) * (at_ns - left_ns) / max(1, right_ns - left_ns)
        return 0.0 if at_ns < points[0][0] else float(points[-1][1])

    return until(end_ns) - until(start_ns)


def come_and_go() -> dict[str, Any]:
    """Check shares while tenants come and go: A (request 20 %) runs for 34 s, B (30 %) from 5 to 30 s, C (50 %) from 12
    to 26 s. In any 10 s in which a tenant was there all the time, it must get at least its request; while all three are
    there, exactly that."""
    plan = {"A": (0.2, 0.0, 34.0), "B": (0.3, 5.0, 25.0), "C": (0.5, 12.0, 14.0)}
    with Bench(GPUS, TURNS) as bench:
        native = bench.native("busy")
        native.wait_ready()
        solo = statistics.median(native.block(0.7) for _ in range(4))
        specs = {name: check_spec(TenantSpec(name, row[0], 1.0)) for name, row in plan.items()}
        tenants = {name: bench.tenant("busy", spec) for name, spec in specs.items()}
        for tenant in tenants.values():
            tenant.wait_ready()
        began = time.monotonic()
        for name, (_, start, length) in plan.items():
            time.sleep(max(0.0, began + start - time.monotonic()))
            tenants[name].begin(length)
        blocks = {name: tenant.result() for name, tenant in tenants.items()}
        for tenant in tenants.values():
            tenant.close()
        after = statistics.median(native.block(0.7) for _ in range(4))
    solo = (solo + after) / 2
    found: dict[str, Any] = {"solo_rate": solo}
    window = 10e9
    for name, (request, _, _) in plan.items():
        block = blocks[name]
        got = []
        at = block["begin_ns"]
        while at + window <= block["end_ns"]:
            got.append(work_between(block, at, at + window) / 10 / solo)
            at += 100e6
        found[name] = {"request": request, "least_of_any_10_s": min(got), "most_of_any_10_s": max(got)}
    start, end = blocks["C"]["begin_ns"], blocks["C"]["end_ns"]
    total = sum(work_between(b, start, end) for b in blocks.values()) / ((end - start) / 1e9) / solo
    found["total_over_solo_while_three"] = total
    return found


def limits_by_time() -> dict[str, Any]:
    """Measure a tenant's GPU time by its own events, relative to wall time. A GPU that is idle half of the time has a
    higher clock, so the amount of work would show more than the share of time."""
    found: dict[str, Any] = {}
    environment = dict(os.environ)
    alone = subprocess.Popen(timed(8), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found["native"] = result(alone)
    with Bench(GPUS, TURNS) as bench:
        for limit in (1.0, 0.5, 0.25):
            name = f"limit-{limit}"
            found[name] = result(start_program(bench, TenantSpec(name, 0.0, limit), timed(12)))
    return found


def timed(seconds: int) -> list[str]:
    return [sys.executable, PROGRAMS, "products_timed", str(seconds)]


def start_program(bench: Bench, spec: TenantSpec, arguments: list[str], **extra: str) -> subprocess.Popen[str]:
    client = ControlClient(bench.folder)
    bench.clients.append(client)
    environment = program_environment(register(client, Launch(bench.folder, spec, arguments)))
    process = subprocess.Popen(
        arguments, env=environment | extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    client.call("started", name=spec.name, pid=process.pid)
    return process


def result(process: subprocess.Popen[str], timeout: float = 90) -> dict[str, Any]:
    out, err = process.communicate(timeout=timeout)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"ok": False}
    if process.returncode != 0 or err:
        found["stderr"] = err[-600:]
    return found | {"rc": process.returncode}


def memory() -> dict[str, Any]:
    """Test a memory limit of 4 GiB with each of PyTorch's allocators, what NVML reports inside and outside of the
    tenant, and the agent's ledger after kill -9."""
    found: dict[str, Any] = {}
    kinds = {"default": "", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
    with Bench(GPUS, {}) as bench:
        runs = {
            name: start_program(bench, capped(name), program("torch_memory"), PYTORCH_CUDA_ALLOC_CONF=setting)
            for name, setting in kinds.items()
        }
        found |= {name: result(run) for name, run in runs.items()}
        found["nvml"] = result(start_program(bench, capped("nvml"), program("nvml")))
        found["hold"] = hold_and_kill(bench)
    return found


def capped(name: str) -> TenantSpec:
    return TenantSpec(name, memory_bytes=4 << 30)


def program(name: str) -> list[str]:
    return [sys.executable, PROGRAMS, name]


def hold_and_kill(bench: Bench) -> dict[str, Any]:
    script = "import torch, time; x = torch.empty(2 << 30, dtype=torch.uint8, device='cuda'); x.zero_();"
    script += "torch.cuda.synchronize(); print('up', flush=True); time.sleep(60)"
    process = start_program(bench, capped("hold"), [sys.executable, "-c", script])
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.5)
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    outside = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    ledger = next(row for row in bench.tenants() if row["name"] == "hold")["gpus"]
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    gone_s = None
    while time.monotonic() - killed < 5:
        rows = [row for row in bench.tenants() if row["name"] == "hold"]
        if not rows or all(not gpu.get("memory_used_bytes", 0) for gpu in rows[0]["gpus"]):
            gone_s = time.monotonic() - killed
            break
        time.sleep(0.01)
    return {"ledger": ledger, "nvidia_smi_mib": outside, "pid": process.pid, "ledger_empty_after_s": gone_s}


def launch_cost() -> dict[str, Any]:
    """Measure the host time per launch, native and as a tenant alternately, 15 times each."""
    with tempfile.TemporaryDirectory() as folder, Bench(GPUS, {}) as bench:
        program = str(Path(folder) / "launch_cost")
        subprocess.run(["nvcc", "-O2", "-o", program, str(HERE / "launch_cost.cu")], check=True)
        taken: dict[str, list[float]] = {"native": [], "tenant": []}
        for number in range(15):
            for side in ("native", "tenant") if number % 2 else ("tenant", "native"):
                if side == "native":
                    run = subprocess.Popen([program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                else:
                    run = start_program(bench, TenantSpec(f"t{number}"), [program])
                taken[side].append(result(run)["launch_ns"])
        ratios = [n / t for n, t in zip(taken["native"], taken["tenant"], strict=True)]
    return {side: {"median_ns": statistics.median(v), "min_ns": min(v), "all": v} for side, v in taken.items()} | {
        "ratio": statistics.median(ratios)
    }


def launch_pair() -> dict[str, Any]:
    """Time launches and graph launches with and without the shim, alternately, inside one process. Five processes are
    measured, since the memory layout of one can change the result by half a percent."""
    with tempfile.TemporaryDirectory() as folder, Bench(GPUS, {}) as bench:
        program = str(Path(folder) / "launch_pair")
        source = str(HERE / "launch_pair.c")
        subprocess.run(["cc", "-O2", "-w", "-o", program, source, "-ldl", "-lm"], check=True)
        runs = [result(start_program(bench, TenantSpec(f"p{n}"), [program])) for n in range(5)]
    found: dict[str, Any] = {str(n): run for n, run in enumerate(runs)}
    for kind in ("launch", "graph"):
        ratios = [run[kind]["ratio"] for run in runs if kind in run]
        found[f"{kind}_median"] = statistics.median(ratios) if ratios else None
    return found


def overheads(kind: str, processes: int, pairs: int) -> dict[str, Any]:
    """Compare many pairs of processes with short pairs of blocks, because processes differ by their memory layout."""
    return overhead.measure(gpus=GPUS, workloads=[kind], pairs=pairs, block_s=0.05, processes=processes)


def endless_or_not(kind: str, processes: int, rounds: int) -> dict[str, Any]:
    """Measure the gain of unbounded turns. Tenants of two agents, one of which always sets deadlines, and two native
    programs run alternately. The two native programs show the error of such a comparison."""
    agents = {"endless": {"alone_after": "0s"}, "finite": {"alone_after": "1000s"}}
    with contextlib.ExitStack() as stack:
        core = stack.enter_context(overhead.core_of_its_own())
        benches = {name: stack.enter_context(Bench(GPUS, settings)) for name, settings in agents.items()}
        sets = [
            [
                *(benches["endless"].native(kind, core=core) for _ in range(2)),
                *(bench.tenant(kind, TenantSpec(f"{kind}{n}"), core=core) for bench in benches.values()),
            ]
            for n in range(processes)
        ]
        for workload in itertools.chain(*sets):
            workload.wait_ready()
        found = []
        for sides in sets:
            for workload in sides[2:]:
                workload.block(overhead.LEAD_IN_S)
            found.append(overhead.interleaved(sides, rounds, block_s=0.05))
    pairs = {
        "native_over_native": (0, 1),
        "endless_over_native": (0, 2),
        "finite_over_native": (0, 3),
        "endless_over_finite": (3, 2),
    }
    rows = {name: overhead.summary_of_processes([[f[a], f[b]] for f in found]) for name, (a, b) in pairs.items()}
    return {
        name: {key: row[key] for key in ("ratio", "ratio_ci95", "ratio_trimmed", "ratio_trimmed_ci95", "by_process")}
        for name, row in rows.items()
    }


def wake() -> dict[str, Any]:
    """Time the first launch after 0.1 s of idleness, until it returns and until the GPU has executed it, 130 times:
    native, as a tenant that is alone, and as a tenant with 90 %, which must request a turn each time."""
    backend = "driver" if GPUS == "soft" else "torch"
    command = [sys.executable, str(HERE / "waking.py"), backend, "130"]
    with Bench(GPUS, {"alone_after": "0s"}) as one, Bench(GPUS, {}) as other:
        native = dict(one.environment)
        if GPUS == "soft":
            native["COTENANT_BENCH_LIBRARY"] = str(library_path(SOFT_DRIVER))
        runs = {  # run at the same time, because each program sleeps most of the time
            "native": subprocess.Popen(command, env=native, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True),
            "alone": start_program(one, TenantSpec("alone"), command),
            "limit 90 %": start_program(other, TenantSpec("limited", 0.0, 0.9), command),
        }
        found = {name: result(run) for name, run in runs.items()}
    for row in found.values():
        for kind in ("launch_us", "done_us"):
            values = sorted(row.pop(kind, []))
            if values:
                row[kind] = {"median": statistics.median(values), "p99": values[int(len(values) * 0.99)]}
    return found


def mps() -> dict[str, Any]:
    """Measure two concurrent tenants under MPS with 50 % of the threads each, relative to a native run."""
    with Bench(GPUS, {}) as bench:
        native = bench.native("busy")
        native.wait_ready()
        solo = statistics.median(native.block(0.7) for _ in range(3))
        native.close()
        specs = [TenantSpec(name, 0.5, 0.5, mechanism="mps") for name in ("m1", "m2")]
        tenants = [bench.tenant("busy", spec) for spec in specs]
        for tenant in tenants:
            tenant.wait_ready()
        for tenant in tenants:
            tenant.begin(4.0)
        blocks = [tenant.result() for tenant in tenants]
        start, end = max(b["begin_ns"] for b in blocks), min(b["end_ns"] for b in blocks)
        rates = [work_between(b, start, end) / ((end - start) / 1e9) for b in blocks]
    return {"solo_rate": solo, "got": [rate / solo for rate in rates]}


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "shares": lambda: all_shares(10.0),
    "limits_by_time": limits_by_time,
    "come_and_go": come_and_go,
    "launch_cost": launch_cost,
    "launch_pair": launch_pair,
    "memory": memory,
    "mps": mps,
    "overhead_training": lambda: overheads("training", 9, 50),
    "overhead_launch": lambda: overheads("launch", 9, 55),
    "overhead_graph": lambda: overheads("graph", 7, 30),
    "endless_graph": lambda: endless_or_not("graph", 6, 20),
    "endless_training": lambda: endless_or_not("training", 6, 30),
    "endless_launch": lambda: endless_or_not("launch", 6, 30),
    "wake": wake,
}


def main() -> None:
    out = Path(sys.argv[1])
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    card = "software GPU" if GPUS == "soft" else subprocess.run(query, capture_output=True, text=True).stdout.strip()
    found: dict[str, Any] = {"card": card}
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    for name, step in itertools.chain((n, STEPS[n]) for n in chosen):
        began = time.monotonic()
        try:
            found[name] = step()
        except Exception as error:  # a step that fails must not prevent the others
            found[name] = {"error": repr(error)}
        print(name, round(time.monotonic() - began, 1), json.dumps(found[name])[:3500], flush=True)
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
