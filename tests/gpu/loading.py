"""Does the shim load under every kind of program, and does it see the launches?  Needs a GPU; writes JSON.

    python tests/gpu/loading.py OUT.json [STEP,STEP...]

Uses the tests' small agent (equal turns for all), so that it says something about the shim alone.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "src"))
sys.path.insert(0, str(HERE.parent / "shim"))

from fake_agent import COMMIT, UNFENCED, WARNING, FakeAgent  # noqa: E402

from cotenant.bench.overhead import median_interval  # noqa: E402
from cotenant.shim.build import build, find_driver, tenant_environment  # noqa: E402
from cotenant.shim.elf import defined_symbols  # noqa: E402

PROGRAMS = HERE / "programs.py"
PUBLISHED = {"launches": 144, "copies": 152, "graphs": 160, "fences": 168, "turns": 200}  # offsets in a slot
DRIVER = find_driver()


class Run:
    """One program under an agent (or natively, without one)."""

    def __init__(self, command: list[str], socket: Path | None, **extra: str) -> None:
        environment = dict(os.environ, **extra)
        if socket is not None:
            assert DRIVER is not None
            environment |= tenant_environment(socket, "token", DRIVER)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, timeout: float) -> dict[str, Any]:
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            err = "TIMEOUT " + err
        lines = [line for line in out.splitlines() if line.startswith("{")]
        result: dict[str, Any] = json.loads(lines[-1]) if lines else {"ok": False}
        result |= {"rc": self.process.returncode, "seconds": round(time.monotonic() - self.began, 1)}
        if self.process.returncode != 0 or "cotenant" in err:
            result["stderr"] = err[-1200:]
        return result


def python(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(PROGRAMS), name, *arguments]


def compile_cudart(folder: Path) -> dict[str, list[str]]:
    made = {}
    for kind in ("static", "shared"):
        target = folder / f"cudart-{kind}"
        subprocess.run(["nvcc", "-cudart", kind, "-o", str(target), str(HERE / "cudart.cu")], check=True)
        made[f"cudart_{kind}"] = [str(target)]
    return made


def coverage(folder: Path) -> dict[str, Any]:
    """Every kind of program at once, each under an agent of its own with short turns."""
    commands = {name: python(name) for name in ("torch_eager", "torch_graph", "jax", "cupy", "triton", "numba", "nvml")}
    if shutil.which("nvcc"):
        commands |= compile_cudart(folder)
    if os.environ.get("CUDART12"):
        commands["cudart12"] = python("cudart12")
    results: dict[str, Any] = {}
    agents = {name: FakeAgent(folder / f"{name}.sock", turn_ns=50_000_000) for name in commands}
    runs = {
        name: Run(command, agents[name].path, XLA_PYTHON_CLIENT_PREALLOCATE="false", TRITON_CACHE_DIR=str(folder / "t"))
        for name, command in commands.items()
    }
    for name, run in runs.items():
        results[name] = run.finish(150)
        seen = [
            {field: client.slot(0, offset).value for field, offset in PUBLISHED.items()}
            | {"warnings": [m.body[8:200].split(b"\0")[0].decode() for m in client.of(WARNING)]}
            for client in agents[name].clients
        ]
        results[name]["seen"] = seen
        agents[name].close()
    return results


def memory(folder: Path, limit_gib: int = 4) -> dict[str, Any]:
    kinds = {"default": "", "expandable": "expandable_segments:True", "cudaMallocAsync": "backend:cudaMallocAsync"}
    results: dict[str, Any] = {}
    for name, setting in kinds.items():
        with FakeAgent(folder / f"m-{name}.sock", memory_limit=limit_gib << 30, context_bytes=600 << 20) as agent:
            extra = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
            results[name] = Run(python("torch_memory"), agent.path, **extra).finish(90)
            commits = [m for client in agent.clients for m in client.of(COMMIT)]
            results[name]["families"] = sorted({m.u32(0) for m in commits})
            results[name]["left_in_ledger"] = agent.total_used
    with FakeAgent(folder / "m-nvml.sock", memory_limit=limit_gib << 30, context_bytes=600 << 20) as agent:
        results["nvml"] = Run(python("nvml"), agent.path).finish(90)
    return results


def start_together(gate: Path, count: int) -> None:
    until = time.monotonic() + 90
    while len(list(gate.parent.glob(gate.name + ".ready.*"))) < count and time.monotonic() < until:
        time.sleep(0.02)
    gate.touch()


def products_rate(folder: Path, tenants: int, turn_ms: int | None, seconds: float) -> dict[str, Any]:
    gate = folder / f"start-{tenants}-{turn_ms}"
    agent = None if turn_ms is None else FakeAgent(folder / "p.sock", turn_ns=turn_ms * 1_000_000 if turn_ms else None)
    socket = agent.path if agent else None
    runs = [Run(python("products", str(seconds)), socket, START_FILE=str(gate)) for _ in range(tenants)]
    start_together(gate, tenants)
    results = [run.finish(60 + seconds) for run in runs]
    rates = [r["count"] / (r["ended"] - r["began"]) if r.get("count") else 0.0 for r in results]
    found: dict[str, Any] = {"rates": rates, "rc": [r["rc"] for r in results]}
    found["stderr"] = [r.get("stderr", "") for r in results]
    if agent:
        releases = agent.releases()
        overuse = sorted(m.u64(16) / 1e6 for m in releases)
        used = [m.u64(8) / 1e6 for m in releases]
        if overuse:
            found |= {
                "turns": len(releases),
                "overuse_ms_median": statistics.median(overuse),
                "overuse_ms_max": overuse[-1],
                "used_ms_median": statistics.median(used),
            }
        agent.close()
    return found


def parts_of_overhead(folder: Path, kind: str, processes: int, pairs: int) -> dict[str, Any]:
    """What the fences cost and what the rest: native, tenant with fences and tenant without them, blocks in turn.

    Ratios of work: without fences over native, with fences over without them (the same process).
    """
    rest, fences = [], []
    core = str(max(os.sched_getaffinity(0)))
    for number in range(processes):
        with FakeAgent(folder / f"{kind}{number}.sock") as agent:
            command = [sys.executable, "-m", "cotenant.bench.workload", kind, "torch"]
            extra = {"COTENANT_BENCH_CORE": core, "PYTHONPATH": str(HERE.parent.parent / "src")}
            programs = [Run(command, None, **extra), Run(command, agent.path, **extra)]
            for run in programs:
                assert run.process.stdout is not None
                assert run.process.stdout.readline().startswith("ready")
            rates: dict[str, list[float]] = {"native": [], "fenced": [], "unfenced": []}
            order = list(rates)
            for index in range(pairs):
                for side in order if index % 2 else order[::-1]:
                    agent.clients[0].flags(UNFENCED if side == "unfenced" else 0)
                    rates[side].append(block(programs[0 if side == "native" else 1], 0.1))
            for run in programs:
                run.finish(20)
        rest.append(statistics.median(u / n for u, n in zip(rates["unfenced"], rates["native"], strict=True)))
        fences.append(statistics.median(f / u for f, u in zip(rates["fenced"], rates["unfenced"], strict=True)))
    return {"unfenced_over_native": summary(rest), "fenced_over_unfenced": summary(fences)}


def block(run: Run, seconds: float) -> float:
    """Units of work per second of one block."""
    assert run.process.stdin is not None
    assert run.process.stdout is not None
    run.process.stdin.write(f"run {seconds}\n")
    run.process.stdin.flush()
    done = json.loads(run.process.stdout.readline())
    return float(done["count"] / (done["end_ns"] - done["begin_ns"]) * 1e9)


def summary(ratios: list[float]) -> dict[str, Any]:
    low, high = median_interval(len(ratios))
    ordered = sorted(ratios)
    return {"median": statistics.median(ordered), "ci95": [ordered[low], ordered[high]], "all": ratios}


def main() -> None:
    out = Path(sys.argv[1])
    assert DRIVER is not None, "no CUDA driver here"
    steps: dict[str, Any] = {"driver": str(DRIVER)}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    steps["card"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    print(steps, flush=True)
    build(DRIVER)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, step in (  # each: what it is called in the result, and how to get it
            ("coverage", lambda: coverage(folder)),
            ("memory", lambda: memory(folder)),
            ("solo_native", lambda: products_rate(folder, 1, None, 4)),
            ("solo_tenant", lambda: products_rate(folder, 1, 0, 4)),
            ("two_native", lambda: products_rate(folder, 2, None, 4)),
            ("two_turns_100", lambda: products_rate(folder, 2, 100, 6)),
            ("two_turns_50", lambda: products_rate(folder, 2, 50, 6)),
            ("parts_training", lambda: parts_of_overhead(folder, "training", 10, 15)),
            ("parts_launch", lambda: parts_of_overhead(folder, "launch", 6, 15)),
            ("parts_graph", lambda: parts_of_overhead(folder, "graph", 6, 15)),
        ):
            if len(sys.argv) > 2 and name not in sys.argv[2].split(","):
                continue
            began = time.monotonic()
            try:
                steps[name] = step()
            except Exception as error:  # one failed step must not cost the others
                steps[name] = {"error": repr(error)}
            print(name, round(time.monotonic() - began, 1), json.dumps(steps[name])[:3000], flush=True)
            out.write_text(json.dumps(steps, indent=1))
    names = defined_symbols(DRIVER, dynamic=True)
    (out.parent / "driver_exports.txt").write_text("\n".join(sorted(names)))
    nvml = find_driver("libnvidia-ml.so.1")
    if nvml:
        (out.parent / "nvml_exports.txt").write_text("\n".join(sorted(defined_symbols(nvml, dynamic=True))))


if __name__ == "__main__":
    main()
