"""Checks that the shim is loaded in every kind of program and counts its launches. Needs a GPU; writes JSON.

    python bench/gpu/loading.py OUT.json [STEP,STEP...]

The parts_ steps also run on the software GPU (CUDA_VISIBLE_DEVICES=soft), to try them out.

The tests' small agent (equal turns for all) is used, so that the results depend on the shim alone.
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

from fake_agent import COMMIT, WARNING, FakeAgent  # noqa: E402
from fencing import parts  # noqa: E402
from runs import DRIVER, SOFT, Run  # noqa: E402

from cotenant.native.libraries import DRIVER_SHIM, library_path  # noqa: E402

PROGRAMS = HERE / "programs.py"
# offsets of the counters in a slot of the shared page
PUBLISHED = {"launches": 144, "copies": 152, "graphs": 160, "fences": 168, "turns": 200}


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
    """Run every kind of program at once, each under its own agent with short turns."""
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


def main() -> None:
    out = Path(sys.argv[1])
    steps: dict[str, Any] = {"driver": str(DRIVER)}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    steps["card"] = "software GPU" if SOFT else subprocess.run(query, capture_output=True, text=True).stdout.strip()
    print(steps, flush=True)
    library_path(DRIVER_SHIM)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, step in (  # name of the step in the result, and the function that measures it
            ("coverage", lambda: coverage(folder)),
            ("memory", lambda: memory(folder)),
            ("solo_native", lambda: products_rate(folder, 1, None, 4)),
            ("solo_tenant", lambda: products_rate(folder, 1, 0, 4)),
            ("two_native", lambda: products_rate(folder, 2, None, 4)),
            ("two_turns_100", lambda: products_rate(folder, 2, 100, 6)),
            ("two_turns_50", lambda: products_rate(folder, 2, 50, 6)),
            ("parts_training", lambda: parts("training", 8, 21)),
            ("parts_launch", lambda: parts("launch", 6, 21)),
            ("parts_graph", lambda: parts("graph", 4, 11)),
        ):
            if len(sys.argv) > 2 and name not in sys.argv[2].split(","):
                continue
            began = time.monotonic()
            try:
                steps[name] = step()
            except Exception as error:  # a step that fails must not prevent the others
                steps[name] = {"error": repr(error)}
            print(name, round(time.monotonic() - began, 1), json.dumps(steps[name])[:3000], flush=True)
            out.write_text(json.dumps(steps, indent=1))


if __name__ == "__main__":
    main()
