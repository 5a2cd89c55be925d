"""Measures the accuracy of the LLM simulator: percentiles of TTFT and TPOT of the same requests, simulated and sent in
real time to an engine: a given one, or a timed engine, a server whose steps take the times of a profile and which runs
no model."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.core.metrics.tokens import PERCENTILES, Target
from cotenant.loadgen.llm_profiling import Profiling, limits, measure
from cotenant.loadgen.openai import OpenAiTest, run_openai
from cotenant.loadgen.target import parse_target
from cotenant.policy.residency import ModelFacts
from cotenant.profiles.llm.files import add_row, find_profile, residual_of
from cotenant.profiles.llm.profile import LlmProfile, parse_size
from cotenant.sim.llm.engine import LlmSetup, SimModel, longest, simulate
from cotenant.workloads.llm.trace import TokenTrace

KEYS = ("ttft_ms", "tpot_ms")


@dataclass(frozen=True)
class Engine:
    """A running engine. `profile`: its measured profile, with the model's name at the engine; `residual`: the largest
    relative error of the profile's fit, None if unknown; `timed`: whether it is a timed engine, whose answers can be
    checked.
    """

    url: str
    profile: LlmProfile
    residual: float | None
    endpoint: str = "completions"
    timed: bool = False


@contextlib.contextmanager
def timed_engine(profile: LlmProfile) -> Iterator[str]:
    """Run a timed engine (one that computes nothing) in a child process; yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        add_row(path, profile)
        command = [sys.executable, "-m", "cotenant.cli.main", "timed-llm", "--model", profile.name, "--port", "0"]
        with subprocess.Popen([*command, "--profile", str(path)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "http://" not in line:
                raise WorkError(f"the timed engine did not start (code {process.wait()})")
            try:
                yield line.split()[-1]
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()


@contextlib.contextmanager
def own_engine(
    profile: LlmProfile, rounds: int, endpoint: str, seed: int, say: Callable[[str], None]
) -> Iterator[Engine]:
    """Start a timed engine with the times of `profile`, and measure these times through its API."""
    with timed_engine(profile) as url:
        say(f"measuring the engine at {url}")
        target = parse_target(url)
        work = Profiling(
            target, profile.name, profile.max_context, profile.kv_tokens, rounds, endpoint, seed, profile.max_sequences
        )
        fit = measure(work)
        yield Engine(url, replace(profile, times=fit.times, request_s=fit.request_s), fit.worst, endpoint, timed=True)


def given_engine(url: str, model: str, spec: str, endpoint: str) -> Engine:
    """Return an engine that someone else runs. `spec`: the file that `cotenant profile llm` wrote for it. InputError if
    it is not a file with such a profile or the engine has no such model, WorkError if the engine does not answer.
    """
    if parse_size(spec) is not None and not Path(spec).exists():
        raise InputError(f"{spec} is a size; run `cotenant profile llm` on the engine first, and give its file",
                         field="profile")  # fmt: skip
    profile = find_profile(spec, model)
    if profile.name != model:
        raise InputError(f"has the profile of {profile.name}, not of {model}", file=spec, field="profile")
    limits(parse_target(url), model)
    return Engine(url, profile, residual_of(spec, model), endpoint)


def simulated(profile: LlmProfile, trace: TokenTrace) -> dict[str, Any]:
    """Return simulated figures of the trace, with the model alone on a GPU."""
    model = SimModel(ModelFacts(profile.name, 1 << 30), profile, Target(profile.name))
    found: dict[str, Any] = simulate(trace, LlmSetup((model,), (2 << 30,))).summary()["total"]
    return found


def live(engine: Engine, trace: TokenTrace, seed: int) -> dict[str, Any]:
    """Send the trace to the engine; returns the figures. WorkError if a response is missing, or a timed engine's is
    wrong."""
    test = OpenAiTest(
        parse_target(engine.url), trace, (Target(engine.profile.name),), engine.endpoint, {"ignore_eos": True},
        check=engine.timed, seed=seed,
    )  # fmt: skip
    found = run_openai(test).summary()
    if found["failures"]:
        raise WorkError(f"requests failed: {found['failures']}")
    total: dict[str, Any] = found["total"]
    return total | {"lateness_ms": found["lateness_ms"]}


def fitting_loads(profile: LlmProfile, loads: Sequence[tuple[str, TokenTrace]]) -> list[tuple[str, TokenTrace]]:
    """Return the loads without the requests that are longer than the model's context. InputError if nothing is left of
    one."""
    most = longest([SimModel(ModelFacts(profile.name, 1), profile, Target(profile.name))])
    found = [(name, trace.fitting(most)) for name, trace in loads]
    for name, trace in found:
        if not len(trace):
            raise InputError(f"no request of {name} fits into the {most[0]:,} tokens of the model's context",
                             field="prompt")  # fmt: skip
    return found


def compare(
    engine: Engine, traces: Sequence[tuple[str, TokenTrace]], seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Send each trace to the engine, and simulate the trace with the engine's profile. Requests longer than the model's
    context are left out. Returns a row per trace: live and simulated percentiles, and their ratio live / simulated.
    InputError if a trace has no request that fits.
    """
    rows: list[dict[str, Any]] = []
    profile = engine.profile
    for (name, trace), (_, fitting) in zip(traces, fitting_loads(profile, traces), strict=True):
        left_out = len(trace) - len(fitting)
        also = f", {left_out:,} longer than the model's context" if left_out else ""
        say(f"{name}: {len(fitting):,} requests, {fitting.span_s:.0f} s{also}")
        virtual, real = simulated(profile, fitting), live(engine, fitting, seed)
        ratios = {
            key: {f"p{p}": real[key][f"p{p}"] / virtual[key][f"p{p}"] for p in PERCENTILES}
            for key in KEYS if virtual[key] and real[key]
        }  # fmt: skip
        rows.append({
            "load": name, "requests": len(fitting), "left_out": left_out, "simulated": {k: virtual[k] for k in KEYS},
            "live": {k: real[k] for k in (*KEYS, "lateness_ms")}, "live_over_simulated": ratios,
        })  # fmt: skip
    worst = max(abs(r - 1) for row in rows for ratio in row["live_over_simulated"].values() for r in ratio.values())
    measured = {k: v * 1e3 for k, v in vars(profile.times).items()} | {"request": profile.request_s * 1e3}
    return {"gpu": profile.gpu, "url": None if engine.timed else engine.url, "seed": seed, "profile_ms": measured,
            "worst_residual": engine.residual, "rows": rows, "worst_deviation": worst}  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Return the compared percentiles as text: simulated and live ms, and their ratio."""
    lines = ["each cell: simulated ms, live ms, live / simulated"]
    lines += [f"{'load':24} {'':4} " + "".join(f"{f'p{p}':>24}" for p in PERCENTILES)]
    for row in result["rows"]:
        for key in KEYS:
            if key not in row["live_over_simulated"]:
                continue
            cells = []
            for p in PERCENTILES:
                a, b = row["simulated"][key][f"p{p}"], row["live"][key][f"p{p}"]
                cells.append(f"{a:8.1f} {b:8.1f} {row['live_over_simulated'][key][f'p{p}']:5.3f}")
            lines.append(f"{row['load']:24} {key[:4]} " + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join([*lines, f"largest deviation {result['worst_deviation']:.1%}"])


def dump(result: dict[str, Any]) -> str:
    """Return the result of the comparison as JSON."""
    return json.dumps(result)
