"""Parking, swapping and oversubscription on a real GPU; writes JSON (docs/benchmarks/swap.md).

    PYTHONPATH=src python bench/gpu/swap.py OUT.json [STEP,STEP...]

The GPU is the one that CUDA_VISIBLE_DEVICES names by its UUID; COTENANT_SECOND_GPU names another for `park_elsewhere`.
COTENANT_SWAP_ON=soft rehearses the steps on the software GPU, a thousandth in size.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

import swap_copies
from swap_rig import GIB, GPU, SOFT, Job, agent_log, losses, query, say, soft_environment, used_mib

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.bench import overhead, swap
from cotenant.bench.harness import Bench, Program

SHARED_CARD = 40 * GIB  # memory that tenants share when host memory must hold two jobs of 70 % of it


def bench_swap() -> dict[str, Any]:
    """Park and resume 24 GiB; park_resume_torch measures parking by checkpoint."""
    return swap.measure(24 * GIB, 20, gpus=GPU, park=False, progress=say)


def many_moves() -> dict[str, Any]:
    """Move 256 MiB 2,000 times: 500 moves out and 500 in, then 500 exchanges of one tenant for another. Contents are
    checked after each pair of moves and each exchange."""
    return swap.measure(max(2 << 20, GIB // 4), 500, gpus=GPU, park=False, progress=say)


def both_ways() -> dict[str, Any]:
    """Find out what slows moves in both directions at once: copies of two processes to which the other parts of a move
    are added one by one, then variants."""
    if SOFT:
        return swap_copies.experiment(64 * GIB, 8 * GIB, 15, soft_environment())
    return swap_copies.experiment(6 * GIB, GIB // 4, 50, {})


def hand_over() -> dict[str, Any]:
    """Measure moves in both directions at once by the shim, alternately with and without passing memory from one tenant
    to the other."""
    ways: dict[str, dict[str, Any]] = {str(hand): {"gbps": [], "parts": []} for hand in (True, False)}
    size, cap = (256 * GIB, 288 * GIB) if SOFT else (16 * GIB, 18 * GIB)  # so large that a move consists of many pieces
    settings = {"swap_memory": f"{3 * cap}B"} | ({"swap_piece": 16 << 20} if SOFT else {})
    with Bench(GPU, settings) as bench:
        one, two = (swap.Mover(bench, name, size, cap, number) for number, name in enumerate(("one", "two")))
        pin_s = swap.wait_until_pinned(bench, cap)
        intact = []
        with ControlClient(bench.folder, timeout_s=120) as client:
            swap.exchange(client, [two], [])
            for index in range(24):
                row = ways[str(index // 2 % 2 == 0)]  # the two ways are measured in turn, each in both directions
                hand = index // 2 % 2 == 0
                row["gbps"].append(swap.exchange(client, [one], [two], row["parts"], hand=hand) / 1e9)
                intact.append(two.intact())
                one, two = two, one
            swap.exchange(client, [], [two])
            intact.append(two.intact())
        log = agent_log(bench)
    rows = {
        f"hand {name}": {
            "gbps": statistics.median(row["gbps"]),
            "all": [round(gbps, 2) for gbps in row["gbps"]],
            "parts_ms": swap.parts_ms(row["parts"]),
            "handed": {
                way: statistics.median(p["handed_bytes"] / p["bytes"] for p in row["parts"] if p["way"] == way)
                for way in ("out", "in")
            },
        }
        for name, row in ways.items()
    }
    return rows | {"pin_s": pin_s, "corrupted": intact.count(False), "log": log}


def rate_between(marks: list[list[float]], begin: float, end: float) -> float:
    def at(moment: float) -> float:
        before = [mark for mark in marks if mark[0] <= moment]
        return before[-1][1] if before else 0.0

    return (at(end) - at(begin)) / (end - begin)


def two_jobs_70() -> dict[str, Any]:
    """Measure two jobs, each of which uses 70 % of the memory that tenants share, in turns that the policy chooses,
    relative to one of them alone without the shim."""
    size = int(0.70 * SHARED_CARD) - GIB // 2  # half a GiB is left for the context
    alone = Job(["products", str(size), "8"])
    alone.wait_lines(1, 60)
    alone.go()
    marks = alone.end(60)[1]["marks"]
    solo = rate_between(marks, marks[0][0] + 1, marks[-1][0])
    found: dict[str, Any] = {"shared_card_bytes": SHARED_CARD, "bytes_each": size, "solo_per_s": solo}
    seconds = 60.0
    # contexts on the software GPU have their full size, although the memory is scaled down
    contexts = 512 << 20 if SOFT else 0
    settings = {"swap_memory": f"{2 * (size + 3 * GIB)}B", "gpu_memory": f"{SHARED_CARD + contexts}B"}
    with Bench(GPU, settings) as bench:
        jobs = []
        try:
            for name in ("one", "two"):
                spec = TenantSpec(name, 0.5, 1.0, memory_bytes=size + 2 * GIB, oversubscribe="swap")
                jobs.append(Job(["products", str(size), str(seconds)], bench, spec))
            for job in jobs:
                job.wait_lines(1, 90)
            say("both jobs hold their memory")
            found["pin_s"] = swap.wait_until_pinned(bench, size + 2 * GIB)
            before = {row["name"]: row["gpus"][0]["residency"] for row in bench.tenants()}
            for job in jobs:
                job.go()
            results = [job.end(seconds + 40)[1] for job in jobs]
            begin = max(result["marks"][0][0] for result in results)
            end = min(result["marks"][-1][0] for result in results)
            rates = [rate_between(result["marks"], begin, end) for result in results]
            found |= {
                "per_s": rates,
                "total_over_alone": sum(rates) / solo,
                "window_s": end - begin,
                "corrupted": [result["corrupted"] for result in results],
                "gaps_s": [gaps(result["marks"]) for result in results],
                "before": before,
            }
        finally:
            found["log"] = agent_log(bench)
            for job in jobs:
                job.kill()
    return found


def gaps(marks: list[list[float]]) -> list[float]:
    """Pauses of a job that exceed half a second, in seconds: turns of the other job and the moves."""
    return [round(b[0] - a[0], 2) for a, b in itertools.pairwise(marks) if b[0] - a[0] > 0.5]


def no_cost_when_fits() -> dict[str, Any]:
    """Measure the work per second of a tenant that may be swapped, of one that may not, and of the program without the
    shim. Blocks of all three run alternately on one core, so the cost of swapping can be separated from that of the
    shim. One program works at a time, so each counts as alone at once, as in `cotenant bench overhead`."""
    found: dict[str, Any] = {}
    with overhead.core_of_its_own() as core, Bench(GPU, overhead.ALONE | {"swap_memory": f"{24 * GIB}B"}) as bench:
        for kind in ("training", "graph", "busy"):
            programs = {
                "native": bench.native(kind, core=core),
                "plain": bench.tenant(kind, TenantSpec(f"plain-{kind}", memory_bytes=4 * GIB), core=core),
                "swap": bench.tenant(
                    kind, TenantSpec(f"swap-{kind}", memory_bytes=4 * GIB, oversubscribe="swap"), core=core
                ),
            }
            for program in programs.values():
                program.wait_ready()
            swap.wait_until_pinned(bench, 4 * GIB)
            for program in programs.values():
                program.block(overhead.LEAD_IN_S)
            found[kind] = in_turns(programs, 24, 0.25)
            shares = [row["gpus"][0] for row in bench.tenants() if row["oversubscribe"] == "swap"]
            found[kind]["moves"] = sum(share["residency"]["moves_out"] for share in shares)
            for program in programs.values():
                program.close()
    return found


def in_turns(programs: dict[str, Program], rounds: int, seconds: float) -> dict[str, Any]:
    """Medians and quartiles of the ratios of neighbouring blocks, and each program's median rate."""
    rates: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for index in range(rounds):
        turn = names[index % 3 :] + names[: index % 3]
        for name in turn if index % 2 else reversed(turn):
            rates[name].append(programs[name].block(seconds))
    row: dict[str, Any] = {f"{name}_per_s": statistics.median(values) for name, values in rates.items()}
    for over, under in (("plain", "native"), ("swap", "native"), ("swap", "plain")):
        ratios = [a / b for a, b in zip(rates[over], rates[under], strict=True)]
        row[f"{over}_over_{under}"] = statistics.median(ratios)
        row[f"{over}_over_{under}_quartiles"] = statistics.quantiles(ratios, n=4)
    return row


def park_resume_torch(kinds: tuple[str, ...] = ("tenant", "plain", "swap")) -> dict[str, Any]:
    """Park a training job during its run, and resume it: as a tenant, as a plain process, and as a tenant that
    swaps."""
    steps = 80
    undisturbed = Job(["train", str(steps)])
    wanted = losses(undisturbed.end(120))
    again = losses(Job(["train", str(steps)]).end(120))
    found: dict[str, Any] = {"deterministic": wanted == again, "steps": len(wanted)}
    with Bench(GPU, {"swap_memory": f"{16 * GIB}B"}) as bench:
        for kind in kinds:
            try:
                found[kind] = park_one(bench, kind, wanted)
            except Exception as error:
                found[kind] = {"error": repr(error), "log": agent_log(bench)}
    return found


def park_one(bench: Bench, kind: str, wanted: list[str]) -> dict[str, Any]:
    spec = TenantSpec(f"train-{kind}", memory_bytes=6 * GIB, oversubscribe="swap" if kind == "swap" else "none")
    job = Job(["train", str(len(wanted)), "0.05"], *(() if kind == "plain" else (bench, spec)))
    try:
        job.wait_lines(20, 120)
        name = f"pid:{job.process.pid}" if kind == "plain" else spec.name
        with ControlClient(bench.folder, timeout_s=120) as client:
            before = used_mib()
            out = client.call("park", name=name)
            held = used_mib()
            steps = len(job.lines)
            time.sleep(1.0)
            still = len(job.lines) - steps
            back = client.call("resume", name=name)
        lines = job.end(120)
        return {
            "identical": losses(lines) == wanted,
            "ballast": lines[-1].get("ballast"),
            "park": out,
            "resume": back,
            "used_mib": [before, held, used_mib()],
            "steps_while_parked": still,
        }
    finally:
        job.kill()


def park_elsewhere() -> dict[str, Any]:
    """Park a job on one GPU, and resume it on another of the same model."""
    second = os.environ.get("COTENANT_SECOND_GPU")
    if not second:
        return {"skipped": "COTENANT_SECOND_GPU is not set"}
    wanted = losses(Job(["train", "60"]).end(120))
    found: dict[str, Any] = {}
    for visible in (GPU, f"{GPU},{second}"):  # whether the target GPU must be visible to the program
        with Bench(f"{GPU},{second}", {"swap_memory": f"{16 * GIB}B"}) as bench:
            spec = TenantSpec("walker", memory_bytes=6 * GIB, gpus=(GPU,))
            job = Job(["train", "60", "0.05"], bench, spec, CUDA_VISIBLE_DEVICES=visible)
            try:
                job.wait_lines(15, 120)
                with ControlClient(bench.folder, timeout_s=120) as client:
                    out = client.call("park", name="walker")
                    back = client.call("resume", name="walker", gpu=second)
                lines = job.end(120)
                row = {"identical": losses(lines) == wanted, "park": out, "resume": back}
            except Exception as error:
                row = {"error": repr(error), "stderr": job.errors[-800:]}
            finally:
                job.kill()
            found[f"{visible.count(',') + 1} visible"] = row | {"log": agent_log(bench)}
    return found


def managed_small() -> dict[str, Any]:
    """Prefetch 4 GiB of managed memory out and in, far less than the free memory."""
    with Bench(GPU, {"swap_memory": f"{16 * GIB}B"}) as bench:
        mover = swap.Mover(bench, "managed", 4 * GIB, 6 * GIB, 5, "managed")
        out, back, intact = [], [], []
        with ControlClient(bench.folder, timeout_s=120) as client:
            for index in range(5):
                mover.refill(index)
                out.append(swap.exchange(client, [mover], []) / 1e9)
                back.append(swap.exchange(client, [], [mover]) / 1e9)
                intact.append(mover.intact())
        return {"out_gbps": out, "in_gbps": back, "intact": intact, "log": agent_log(bench)}


def faults() -> dict[str, Any]:
    """Kill a process during a move, and move a stopped process. Records the effect on other tenants and on the GPU."""
    found: dict[str, Any] = {}
    with Bench(GPU, {"swap_memory": f"{64 * GIB}B"}) as bench:
        before = used_mib()
        victim, other = (swap.Mover(bench, name, 8 * GIB, 10 * GIB, 1) for name in ("victim", "other"))
        swap.wait_until_pinned(bench, 10 * GIB)
        with ControlClient(bench.folder, timeout_s=120) as client:
            killer = threading.Timer(0.05, os.kill, (victim.workload.process.pid, signal.SIGKILL))
            killer.start()
            try:
                swap.exchange(client, [victim], [])
                found["move"] = "ended"
            except Exception as error:
                found["move"] = str(error)
            killer.join()
            victim.workload.process.wait(10)
            time.sleep(1.0)
            found["used_mib_before_and_after"] = [before, used_mib()]
            found["other_intact"] = other.intact()
            found["other_moves"] = [swap.exchange(client, [other], []) / 1e9]
            found["other_moves"].append(swap.exchange(client, [], [other]) / 1e9)
            found["other_intact_after_moves"] = other.intact()
        found["tenants"] = [row["name"] for row in bench.tenants()]
        found["log"] = agent_log(bench)
    return found


# step -> (function, time limit in s), the most important step first
STEPS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "both_ways": (both_ways, 110),
    "hand_over": (hand_over, 90),
    "two_jobs_70": (two_jobs_70, 170),
    "no_cost_when_fits": (no_cost_when_fits, 120),
    "park_swap_torch": (lambda: park_resume_torch(("swap",)), 90),
    "bench_swap": (bench_swap, 150),
    "park_elsewhere": (park_elsewhere, 120),
    "faults": (faults, 60),
    "many_moves": (many_moves, 90),
    "managed_small": (managed_small, 60),
    "park_resume_torch": (park_resume_torch, 180),
}


def give_up(number: int, frame: object) -> None:
    raise TimeoutError("the step took too long")


def main() -> None:
    out = Path(sys.argv[1])
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    found: dict[str, Any] = {"card": query("name,driver_version,memory.total")}
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    signal.signal(signal.SIGALRM, give_up)
    for name in chosen:
        began = time.monotonic()
        print(name, file=sys.stderr, flush=True)
        try:
            step, limit_s = STEPS[name]
            signal.alarm(limit_s)
            found[name] = step()
        except Exception as error:  # a step that fails must not prevent the others
            found[name] = {"error": repr(error), "trace": traceback.format_exc()[-2000:]}
        finally:
            signal.alarm(0)
        found[name]["step_s"] = round(time.monotonic() - began, 1)
        print(name, found[name]["step_s"], json.dumps(found[name])[:3000], flush=True)
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
