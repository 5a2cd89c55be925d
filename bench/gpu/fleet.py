"""The training fleet on real GPUs: correctness and cost of its operations; writes JSON. Needs only torch and src.

    CUDA_VISIBLE_DEVICES=<UUID> PYTHONPATH=src python bench/gpu/fleet.py OUT.json [STEP,STEP...]

COTENANT_SECOND_GPU: UUID of another GPU of this host, for the steps that move work between two.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "src"), str(HERE)]

from cases import failure, keeper, within  # noqa: E402

from cotenant.agent.config.files import TenantSpec, check_spec  # noqa: E402
from cotenant.agent.ipc.client import ControlClient  # noqa: E402
from cotenant.agent.tenants.launcher import Launch, program_environment, register  # noqa: E402
from cotenant.bench.harness import Bench  # noqa: E402
from cotenant.training.contract import Lease, write_lease  # noqa: E402

PROGRAM = str(HERE / "train_job.py")
FIRST = os.environ.get("CUDA_VISIBLE_DEVICES", "")
SECOND = os.environ.get("COTENANT_SECOND_GPU", "")
GPUS = FIRST or "soft"
SMALL = not Path("/dev/nvidiactl").exists()  # there is no GPU, so the script only tests itself, with small jobs


class Job:
    """A job of cotenant.loop in its own folder. It can be started repeatedly, as a tenant or without the agent."""

    def __init__(self, folder: Path, kind: str, steps: int, ranks: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.kind, self.steps, self.ranks = folder, "small" if SMALL else kind, steps, ranks
        self.curve, self.attempt = folder / "curve", -1
        self.processes: list[subprocess.Popen[bytes]] = []
        self.started_s = 0.0
        self.log = folder / "log"

    def start(self, gpus: str = FIRST, bench: Bench | None = None, spec: TenantSpec | None = None, **more: str) -> None:
        """Start the job on GPUs (UUIDs, one per rank), or as a tenant."""
        self.attempt += 1
        for rank in range(self.ranks):
            write_lease(self.folder, rank, Lease(attempt=self.attempt))
        mine = {"COTENANT_JOB_DIR": str(self.folder), "COTENANT_ATTEMPT": str(self.attempt), "PYTHONUNBUFFERED": "1"}
        mine |= {"PYTHONPATH": str(HERE.parent.parent / "src"), "CUDA_VISIBLE_DEVICES": gpus} | more
        base: Mapping[str, str] = os.environ
        client = None
        if bench is not None and spec is not None:
            client = ControlClient(bench.folder)
            bench.clients.append(client)
            base = program_environment(register(client, Launch(bench.folder, check_spec(spec), [PROGRAM])))
            if "CUDA_VISIBLE_DEVICES" in base:
                del mine["CUDA_VISIBLE_DEVICES"]
        self.started_s = time.monotonic()
        port = free_port()
        self.processes = []
        for rank in range(self.ranks):
            own = mine | gang_environment(rank, self.ranks, port) if self.ranks > 1 else mine
            command = [sys.executable, PROGRAM, self.kind, str(self.steps), str(self.curve)]
            with self.log.open("ab") as log:
                self.processes.append(subprocess.Popen(command, env={**base, **own}, stdout=log, stderr=log))
        if client is not None and spec is not None:
            client.call("started", name=spec.name, pid=self.processes[0].pid)

    def lines(self, rank: int = 0) -> list[Any]:
        """The loss curve so far."""
        path = Path(f"{self.curve}-{rank}") if self.ranks > 1 else self.curve
        whole = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in whole if line.endswith("]")]

    def until(self, steps: int, seconds: float = 90.0) -> None:
        """Wait until the curve has that many steps."""
        end = time.monotonic() + seconds
        while len(self.lines()) < steps:
            if any(p.poll() not in (None, 0) for p in self.processes) or time.monotonic() > end:
                raise RuntimeError(f"{self.folder.name}: {len(self.lines())} of {steps} steps; {self.tail()}")
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM, expect: int = 75) -> float:
        """Send a signal to every rank and wait for their end. Returns the seconds."""
        began = time.monotonic()
        for process in self.processes:
            process.send_signal(number)
        codes = [process.wait(60) for process in self.processes]
        if any(code != expect for code in codes):
            raise RuntimeError(f"{self.folder.name}: exit codes {codes}, not {expect}; {self.tail()}")
        return time.monotonic() - began

    def end(self, seconds: float = 120.0) -> None:
        """Wait for the end of training."""
        codes = [process.wait(seconds) for process in self.processes]
        if any(codes):
            raise RuntimeError(f"{self.folder.name}: exit codes {codes}; {self.tail()}")

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def first_step_s(self) -> float:
        """Seconds from the last start to the end of its first step."""
        return float(next(line[2] for line in self.lines() if line[2] > self.started_s)) - self.started_s

    def pace_s(self, since_s: float, until_s: float = float("inf")) -> float:
        """Median seconds per step between two moments."""
        taken = [line[3] for line in self.lines() if since_s < line[2] - line[3] and line[2] < until_s]
        return statistics.median(taken) if len(taken) > 3 else float("nan")

    def tail(self) -> str:
        """The last lines of the job's output."""
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""


def gang_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def same_curve(whole: list[Any], parts: list[Any]) -> dict[str, Any]:
    """Whether every step of the parts has exactly the same loss as in the whole run."""
    losses = {line[0]: line[1] for line in whole}
    unlike = [line[0] for line in parts if losses.get(line[0]) != line[1]]
    seen = {line[0] for line in parts}
    return {
        "steps": len(losses), "missing": sorted(set(losses) - seen)[:5], "unlike": unlike[:5],
        "bit_identical": not unlike and seen == set(losses), "done_twice": len(parts) - len(seen),
    }  # fmt: skip


def loop_bit_identical(folder: Path) -> dict[str, Any]:
    """Stop a job twice and kill it once; in between it runs under the shim with half of the GPU. Its loss curve must
    equal that of an undisturbed run bit by bit."""
    steps = 60
    whole = Job(folder / "whole", "conv", steps)
    again = Job(folder / "again", "conv", steps)
    job = Job(folder / "parts", "conv", steps)
    found: dict[str, Any] = {}
    try:
        whole.start()
        again.start()
        whole.end()
        again.end()
        found["undisturbed_twice"] = same_curve(whole.lines(), again.lines())
        job.start()
        job.until(12)
        found["stop_s"] = [job.stop()]
        found["start_to_first_step_s"] = [job.first_step_s()]
        with Bench(GPUS, {}) as bench:
            job.start(bench=bench, spec=TenantSpec("half", 0.0, 0.5))
            job.until(30)
            found["stop_s"].append(job.stop())
            found["start_to_first_step_s"].append(job.first_step_s())
        job.start()
        job.until(40)
        job.stop(signal.SIGKILL, expect=-9)
        job.start()
        job.end()
        found["start_to_first_step_s"].append(job.first_step_s())
    finally:
        for one in (whole, again, job):
            one.kill()
    return found | same_curve(whole.lines(), job.lines())


def move_cost(folder: Path) -> dict[str, Any]:
    """Measure the cost of stopping and resuming a job with about 1 GB of state; if there are two GPUs, it resumes on
    the other one."""
    job = Job(folder / "wide", "wide", 100_000)
    found: dict[str, Any] = {}
    try:
        job.start()
        job.until(10)
        found["first_start_s"] = job.first_step_s()
        found["stop_s"] = job.stop()
        checkpoint = job.folder / "checkpoint"
        found["checkpoint_bytes"] = sum(path.stat().st_size for path in checkpoint.rglob("*.pt"))
        reached = len(job.lines())
        job.start(SECOND or FIRST)
        job.until(reached + 10)
        found["resume_s"] = job.first_step_s()
        found["moved_to_another_gpu"] = bool(SECOND)
        job.stop()
    finally:
        job.kill()
    return found


def gang_move(folder: Path) -> dict[str, Any]:
    """Run two ranks over NCCL on two GPUs: stop them, exchange their GPUs, resume them; then request only one rank to
    leave."""
    if not SECOND and not SMALL:
        return {"skipped": "COTENANT_SECOND_GPU is not set"}
    steps = 60
    whole, job = Job(folder / "gang-whole", "conv", steps, 2), Job(folder / "gang-parts", "conv", steps, 2)
    found: dict[str, Any] = {}
    try:
        whole.start(f"{FIRST},{SECOND}")
        whole.end()
        job.start(f"{FIRST},{SECOND}")
        job.until(25)
        began = time.monotonic()
        job.processes[1].send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in job.processes]
        found["stop_s"], found["codes"] = time.monotonic() - began, codes
        found["steps_of_ranks_at_stop"] = [len(job.lines(rank)) for rank in range(2)]
        job.start(f"{SECOND},{FIRST}")
        job.end()
        found["resume_s"] = job.first_step_s()
    finally:
        whole.kill()
        job.kill()
    found["ranks"] = [same_curve(whole.lines(rank), job.lines(rank)) for rank in range(2)]
    return found


def shares_on_one_gpu(folder: Path) -> dict[str, Any]:
    """Measure two jobs of cotenant.loop with 30 and 70 % of one GPU in turns, then with half of the SMs each under MPS:
    their pace relative to each alone."""
    kinds = {"a": "text", "b": "conv"}
    found: dict[str, Any] = {"alone_s": {}}
    for name, kind in kinds.items():
        job = Job(folder / f"alone-{name}", kind, 100_000)
        try:
            job.start()
            job.until(30)
            time.sleep(2.0)
            found["alone_s"][name] = job.pace_s(job.started_s + job.first_step_s() + 0.5)
            job.stop()
        finally:
            job.kill()
    schemes = {"time": {"a": (0.3, 1.0), "b": (0.7, 1.0)}, "mps": {"a": (0.5, 0.5), "b": (0.5, 0.5)}}
    for scheme, shares in schemes.items():
        if scheme == "mps" and SMALL:
            continue
        jobs = {name: Job(folder / f"{scheme}-{name}", kind, 100_000) for name, kind in kinds.items()}
        with Bench(GPUS, {"quota": "100ms", "min_quota": "20ms", "max_quota": "100ms"}) as bench:
            try:
                for name, job in jobs.items():
                    request, limit = shares[name]
                    job.start(bench=bench, spec=TenantSpec(name, request, limit, mechanism=scheme))
                for job in jobs.values():
                    job.until(5)
                begin = time.monotonic() + 1.0
                time.sleep(8.0)
                paces = {name: job.pace_s(begin) for name, job in jobs.items()}
                steps = {name: sum(line[2] > begin for line in job.lines()) for name, job in jobs.items()}
                for job in jobs.values():
                    job.stop()
            finally:
                for job in jobs.values():
                    job.kill()
        span = 7.0
        found[scheme] = {
            name: {"speed": steps[name] * found["alone_s"][name] / span, "median_step_s": paces[name]} for name in jobs
        }
    return found


def miso_live(folder: Path) -> dict[str, Any]:
    """Run each kind of job alone, for its curve and pace; then run three jobs under MISO."""
    import fleet_miso

    references = {}
    for name, kind in fleet_miso.KINDS.items():
        job = Job(folder / f"alone-{name}", kind, 400)
        try:
            job.start()
            job.end()
        finally:
            job.kill()
        references[name] = job.lines()
    found = fleet_miso.miso_live(folder, GPUS, SMALL, references, PROGRAM)
    return found | {"alone_step_s": {name: fleet_miso.pace(curve) for name, curve in references.items()}}


def park_resume(folder: Path) -> dict[str, Any]:
    """Park and resume an unmodified job by the agent. Its loss curve must continue."""
    whole, job = Job(folder / "whole", "conv", 900), Job(folder / "parked", "conv", 900)
    found: dict[str, Any] = {}
    try:
        whole.start()
        whole.end()
        with Bench(GPUS, {}) as bench:
            job.start(bench=bench, spec=TenantSpec("parked", 0.0, 1.0))
            job.until(20)
            with ControlClient(bench.folder, timeout_s=120) as client:
                began = time.monotonic()
                found["park"] = client.call("park", name="parked")
                found["park_s"] = time.monotonic() - began
                steps = len(job.lines())
                time.sleep(2.0)
                found["steps_while_parked"] = len(job.lines()) - steps
                began = time.monotonic()
                found["resume"] = client.call("resume", name="parked")
                job.until(steps + 2)
                found["resume_to_step_s"] = time.monotonic() - began
            job.end()
    finally:
        whole.kill()
        job.kill()
    return found | same_curve(whole.lines(), job.lines())


# step -> function and time limit in seconds
STEPS: dict[str, tuple[Callable[[Path], dict[str, Any]], float]] = {
    "loop_bit_identical": (loop_bit_identical, 300),
    "move_cost": (move_cost, 180),
    "shares_on_one_gpu": (shares_on_one_gpu, 240),
    "gang_move": (gang_move, 240),
    "miso_live": (miso_live, 300),
    "park_resume": (park_resume, 150),
}


def main() -> None:
    out = Path(sys.argv[1])
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    which = ["-i", FIRST] if FIRST else []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", *which]
    try:
        card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        card = "none"
    found: dict[str, Any] = {"card": card}
    write = keeper(out)
    for name in chosen:
        step, limit_s = STEPS[name]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="cotenant-fleet-") as folder:
            try:
                with within(limit_s):
                    found[name] = step(Path(folder))
            except Exception as error:  # a step that fails must not prevent the others
                logs = {str(path.relative_to(folder)): path.read_text(errors="replace")[-800:]
                        for path in Path(folder).rglob("log")}  # fmt: skip
                found[name] = failure(error) | {"trace": traceback.format_exc()[-1500:], "logs": logs}
        found[name]["took_s"] = round(time.monotonic() - began, 1)
        print(name, found[name]["took_s"], json.dumps(found[name])[:3500], flush=True)
        write(found)


if __name__ == "__main__":
    main()
