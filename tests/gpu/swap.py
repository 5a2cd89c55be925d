"""Parking, swapping and oversubscription on a real GPU; writes JSON (docs/benchmarks/swap.md).

    PYTHONPATH=src python tests/gpu/swap.py OUT.json [STEP,STEP...]

The GPU is the one that CUDA_VISIBLE_DEVICES names by its UUID; COTENANT_SECOND_GPU names another for `park_elsewhere`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "src"))

from cotenant.bench import swap  # noqa: E402
from cotenant.bench.harness import Bench  # noqa: E402
from cotenant.node.client import ControlClient  # noqa: E402
from cotenant.node.config import TenantSpec, check_spec  # noqa: E402
from cotenant.node.launcher import Launch, program_environment, register  # noqa: E402

JOBS = str(HERE / "swap_jobs.py")
GPU = os.environ.get("CUDA_VISIBLE_DEVICES") or "all"
GIB = 1 << 30


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


class Job:
    """A program of swap_jobs.py, native or as a tenant; its lines are kept as they come."""

    def __init__(
        self, arguments: list[str], bench: Bench | None = None, spec: TenantSpec | None = None, **extra: str
    ) -> None:
        command = [sys.executable, JOBS, *arguments]
        environment = dict(os.environ)
        if bench is not None and spec is not None:
            client = ControlClient(bench.folder)
            bench._clients.append(client)
            environment = program_environment(register(client, Launch(bench.folder, check_spec(spec), command)))
        self.process = subprocess.Popen(
            command,
            env=environment | extra,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if bench is not None and spec is not None:
            client.call("started", name=spec.name, pid=self.process.pid)
        self.lines: list[dict[str, Any]] = []
        self.errors = ""
        self.threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self.threads:
            thread.daemon = True
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = (self.errors + line)[-3000:]

    def wait_lines(self, count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.lines) < count:
            if self.process.poll() is not None and not self.threads[0].is_alive():
                raise RuntimeError(f"a job ended early ({self.process.returncode}): {self.errors[-1500:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(self.lines)} of {count} lines after {seconds} s; {self.errors[-1500:]}")
            time.sleep(0.01)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self, seconds: float) -> list[dict[str, Any]]:
        self.process.wait(seconds)
        for thread in self.threads:
            thread.join(5)
        if self.process.returncode != 0:
            raise RuntimeError(f"a job failed ({self.process.returncode}): {self.errors[-1500:]}")
        return self.lines

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def agent_log(bench: Bench) -> list[str]:
    return (bench.folder / "agent.log").read_text(errors="replace").splitlines()[-30:]


def bench_swap() -> dict[str, Any]:
    return swap.measure(24 * GIB, 20, gpus=GPU, progress=say)


def many_moves() -> dict[str, Any]:
    """Thousands of moves of 256 MiB, the contents checked after each: 1000 out, 1000 in, 500 both ways."""
    return swap.measure(GIB // 4, 500, gpus=GPU, park=False, progress=say)


def rate_between(marks: list[list[float]], begin: float, end: float) -> float:
    def at(moment: float) -> float:
        before = [mark for mark in marks if mark[0] <= moment]
        return before[-1][1] if before else 0.0

    return (at(end) - at(begin)) / (end - begin)


def two_jobs_70() -> dict[str, Any]:
    """Two jobs that each go round 70 % of the card, in turns that the policy chooses, against one alone."""
    card = min(int(query("memory.total").split()[0]) << 20, 80 * GIB)  # of a larger card, tenants share 80 GiB
    size = int(0.70 * card) - GIB
    alone = Job(["products", str(size), "12"])
    alone.wait_lines(1, 120)
    alone.go()
    marks = alone.end(120)[1]["marks"]
    solo = rate_between(marks, marks[0][0] + 2, marks[-1][0])
    found: dict[str, Any] = {"card_bytes": card, "bytes_each": size, "solo_per_s": solo}
    seconds = 80.0
    with Bench(GPU, {"swap_memory": 2 * (size + 3 * GIB), "gpu_memory": card}) as bench:
        jobs = []
        try:
            for name in ("one", "two"):
                spec = TenantSpec(name, 0.5, 1.0, memory_bytes=size + 2 * GIB, oversubscribe="swap")
                jobs.append(Job(["products", str(size), str(seconds)], bench, spec))
            for job in jobs:
                job.wait_lines(1, 150)
            say("both jobs hold their memory")
            found["pin_s"] = swap.wait_until_pinned(bench, size + 2 * GIB)
            for job in jobs:
                job.go()
            results = [job.end(seconds + 90)[1] for job in jobs]
            begin = max(result["marks"][0][0] for result in results)
            end = min(result["marks"][-1][0] for result in results)
            rates = [rate_between(result["marks"], begin, end) for result in results]
            found |= {
                "per_s": rates,
                "total_over_alone": sum(rates) / solo,
                "window_s": end - begin,
                "corrupted": [result["corrupted"] for result in results],
                "tenants": bench.tenants(),
            }
        finally:
            found["log"] = agent_log(bench)
            for job in jobs:
                job.kill()
    return found


def no_cost_when_fits() -> dict[str, Any]:
    """A tenant that may be swapped, beside another one that fits too: work per second against native, in pairs."""
    found: dict[str, Any] = {}
    with Bench(GPU, {"swap_memory": 24 * GIB}) as bench:
        beside = swap.Mover(bench, "beside", 2 * GIB, 4 * GIB, 1)
        for kind in ("training", "graph"):
            native = bench.native(kind)
            tenant = bench.tenant(kind, TenantSpec(f"fits-{kind}", memory_bytes=4 * GIB, oversubscribe="swap"))
            native.wait_ready()
            tenant.wait_ready()
            swap.wait_until_pinned(bench, 4 * GIB)
            ratios = []
            for index in range(24):
                order = [native, tenant] if index % 2 == 0 else [tenant, native]
                rates = {id(each): each.block(0.2) for each in order}
                ratios.append(rates[id(tenant)] / rates[id(native)])
            native.close()
            tenant.close()
            found[kind] = {"tenant_over_native": statistics.median(ratios), "worst": min(ratios)}
        found["beside_intact"] = beside.intact()
    return found


def losses(lines: list[dict[str, Any]]) -> list[str]:
    return [line["loss"] for line in lines if "loss" in line]


def park_resume_torch(kinds: tuple[str, ...] = ("tenant", "plain", "swap")) -> dict[str, Any]:
    """A training job parked in the middle and resumed: as a tenant, as a plain process, as a tenant that swaps."""
    steps = 80
    undisturbed = Job(["train", str(steps)])
    wanted = losses(undisturbed.end(120))
    again = losses(Job(["train", str(steps)]).end(120))
    found: dict[str, Any] = {"deterministic": wanted == again, "steps": len(wanted)}
    with Bench(GPU, {"swap_memory": 16 * GIB}) as bench:
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
    """Parked on one GPU, resumed on another of its kind."""
    second = os.environ.get("COTENANT_SECOND_GPU")
    if not second:
        return {"skipped": "COTENANT_SECOND_GPU is not set"}
    wanted = losses(Job(["train", "60"]).end(120))
    found: dict[str, Any] = {}
    for visible in (GPU, f"{GPU},{second}"):  # does the program have to see where it goes?
        with Bench(f"{GPU},{second}", {"swap_memory": 16 * GIB}) as bench:
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
    """4 GiB of managed memory prefetched out and in: far below what is free."""
    with Bench(GPU, {"swap_memory": 16 * GIB}) as bench:
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
    """Killed in the middle of a move; a move of a stopped process; what others and the card see of it."""
    found: dict[str, Any] = {}
    with Bench(GPU, {"swap_memory": 64 * GIB}) as bench:
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


def query(what: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    if GPU != "all":
        command.append(f"--id={GPU.split(',')[0]}")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def used_mib() -> int:
    return int(query("memory.used").splitlines()[0])


# the most important first; each with the seconds after which it is given up
STEPS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "bench_swap": (bench_swap, 240),
    "two_jobs_70": (two_jobs_70, 300),
    "many_moves": (many_moves, 120),
    "park_swap_torch": (lambda: park_resume_torch(("swap",)), 120),
    "no_cost_when_fits": (no_cost_when_fits, 150),
    "faults": (faults, 90),
    "managed_small": (managed_small, 60),
    "park_elsewhere": (park_elsewhere, 150),
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
        except Exception as error:  # one failed step must not cost the others
            found[name] = {"error": repr(error), "trace": traceback.format_exc()[-2000:]}
        finally:
            signal.alarm(0)
        found[name]["step_s"] = round(time.monotonic() - began, 1)
        print(name, found[name]["step_s"], json.dumps(found[name])[:3000], flush=True)
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
