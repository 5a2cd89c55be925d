"""Three measurements of co-location: an unmodified service, whose LS-activity flag the shim sets; workers with the
environment of `cotenant serve --colocation`; and how the agent detects a dead MPS server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from colocation_faults import GPU, TOGETHER, failure, mps_server

from cotenant.agent.config.files import TenantSpec
from cotenant.bench.colocation import Plan, Series, ls_block, native_block, pair_block, parse_ls, parse_schemes, summary
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program
from cotenant.serving.worker import ModelSpec, WorkerSpec
from cotenant.serving.workers.colocation import Claim, Colocation

Found = dict[str, Any]
MECHANISM = "mps" if TOGETHER else "time"
FEW = ("ls_p50_over_alone", "ls_p99_over_alone", "ls_p99_over_alone_ci95", "ls_added_p99_ms", "be_over_left")


def beside(ls: Program, be: Program, native: Program, raises: bool, rounds: int) -> dict[str, Any]:
    """Alternate blocks of LS alone and LS with BE; both have the same arrivals."""
    mine = Plan(parse_ls("resnet50:4:100"), [], parse_schemes("tidal"), block_s=0.8)
    series = Series()
    for seed in range(rounds):
        alone = ls_block(ls, mine, seed, raises=raises)
        native_rate = native_block(native, 0.3)
        seen, rate = pair_block(ls, be, mine, seed)
        series.add(alone, native_rate, seen, rate, mine.block_s)
    row = summary(series)
    return {key: row[key] for key in FEW}


def shim_held(found: Found) -> None:
    """Measure an unmodified service under `cotenant run --latency-sensitive`: the overhead of the shim, and the effect
    of BE."""
    with Rig(GPU, together=TOGETHER) as rig:
        be, native, plain = rig.be(below=True), rig.be_native(), rig.ls("ls-plain")
        spec = TenantSpec("ls-held", mechanism=MECHANISM, latency_sensitive=True)
        held = rig.tenant(spec, ["cotenant.bench.ls_client", rig.bench.backend, "4"])
        for program in (be, native, plain, held):
            program.wait_ready()
        rig.join(plain)
        mine = Plan(parse_ls("resnet50:4:100"), [], parse_schemes("tidal"), block_s=0.8)
        pairs = [(ls_block(plain, mine, i, raises=True), ls_block(held, mine, i, raises=False)) for i in range(3)]
        found["shim_alone_over_plain"] = [
            sum(b["service_ms"]) / sum(a["service_ms"]) for a, b in pairs
        ]  # the client does not report activity itself; the shim does
        for kind in ("mm2048", "add256"):
            rig.scheme("mps-plus")
            native.ask(f"load {kind}", 60)
            be.ask(f"load {kind}", 60)
            rig.scheme("tidal")
            found[kind] = {
                "shim holds": beside(held, be, native, False, 3),
                "worker holds": beside(plain, be, native, True, 3),
            }
            found[kind]["raises"] = rig.scheme("tidal")["gpus"][rig.uuid]["holders"]


def serve_workers(found: Found) -> None:
    """Measure two workers with the environment that `cotenant serve --colocation tidal` gives them: work classes,
    memory, weight of copies."""
    with Rig(GPU, together=TOGETHER) as rig:
        claims = {"a": Claim(8 << 30, 3.0), "b": Claim(8 << 30, 1.0)}
        made = Colocation("tidal", rig.bench.folder, claims)
        programs = {}
        for number, (service, module) in enumerate((("a", "ls_client"), ("b", "be_loads"))):
            model = ModelSpec(service, service, "torch", None, "1", 4, latency_sensitive=service == "a")
            spec = WorkerSpec(f"0/50%/{number}#1", 0, "X", "100%", 1.0, MECHANISM, (model,))
            environment = rig.bench.environment | made.environment(spec)
            environment |= {key: value for key, value in rig.bench.environment.items() if "SOFTGPU" in key}
            arguments = [f"cotenant.bench.{module}", rig.bench.backend, *(["4"] if service == "a" else [])]
            programs[service] = Program(service, arguments, environment)
            made.started(spec, programs[service].process.pid)
        try:
            native = rig.be_native().wait_ready()
            for program in programs.values():
                program.wait_ready()
            rig.scheme("mps-plus")
            native.ask("load mm2048", 60)
            programs["b"].ask("load mm2048", 60)
            rig.scheme("tidal")
            found["mm2048"] = beside(programs["a"], programs["b"], native, False, 4)
            found["tenants"] = [
                {
                    "name": row["name"],
                    "class": row["class"],
                    "memory_limit_bytes": row["gpus"][0]["memory_limit_bytes"],
                    "warnings": row["warnings"],
                }
                for row in rig.bench.tenants()
            ]
        finally:
            for program in programs.values():
                program.close()
            made.close()


def mps_watch(found: Found) -> None:
    """Kill the MPS server. Measures when the agent reports it, and whether new programs get a new server."""
    if not TOGETHER:
        found["skipped"] = "no MPS here"
        return
    with Rig(GPU, together=True) as rig:
        be = rig.be(below=True).wait_ready()
        be.ask("load mm2048", 60)
        be.tell("run 4")
        time.sleep(1.5)  # the agent looks for a new MPS server about once a second
        server = mps_server(rig)
        log = rig.bench.folder / "agent.log"
        killed = time.monotonic()
        os.kill(server, signal.SIGKILL)
        while "has died" not in log.read_text() and time.monotonic() - killed < 10:
            time.sleep(0.005)
        found["agent_said_after_s"] = time.monotonic() - killed
        found["said"] = [line for line in log.read_text().splitlines() if "has died" in line]
        found["warnings"] = rig.tenants().get("be", {}).get("warnings")
        try:
            be.process.wait(10)
        except subprocess.TimeoutExpired as error:
            found["be"] = failure(error)
            be.process.kill()
        again = rig.be("again", below=True).wait_ready()
        again.ask("load mm2048", 60)
        found["runs_again"] = again.ask("run 0.2", 60)["count"]
        found["again_after_s"] = time.monotonic() - killed


HELD_STEPS: dict[str, tuple[Callable[[Found], None], int]] = {
    "shim_held": (shim_held, 75),
    "serve_workers": (serve_workers, 50),
    "mps_watch": (mps_watch, 45),
}
