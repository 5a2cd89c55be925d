"""Registry of the formats of job traces, and the parser of `FORMAT:PATH`."""

from __future__ import annotations

import importlib
from pathlib import Path

from cotenant.core.errors import InputError, nearest
from cotenant.core.work import Trace
from cotenant.workloads.job_headers import looks_like
from cotenant.workloads.table import MissingColumnError, OtherFormatError
from cotenant.workloads.token_formats import FORMATS as TOKEN_FORMATS
from cotenant.workloads.trace_options import TraceOptions

FIRST_LINE_BYTES = 1 << 16  # of a file whose format is unknown, at most this much of the first line is read
# format -> (module with the function `read(path, options) -> Trace`, line of help)
FORMATS: dict[str, tuple[str, str]] = {
    "native": ("cotenant.workloads.jobs.native", "CSV or Parquet: id, arrival_s, gpus, duration_s or iterations, ..."),
    "synergy": ("cotenant.workloads.jobs.synergy", "headerless CSV: id, model, arrival_s, iterations, gpus"),
    "philly": ("cotenant.workloads.jobs.philly", "Microsoft Philly 2017 as a job list (CSV)"),
    "philly-json": ("cotenant.workloads.jobs.philly_json", "Microsoft Philly 2017, the original job log (JSON)"),
    "chronus": ("cotenant.workloads.jobs.chronus", "Philly-derived jobs with deadlines (Chronus, CSV)"),
    "openb": ("cotenant.workloads.jobs.openb", "Alibaba 2023 GPU-sharing cluster, pod list (CSV)"),
    "tiresias": ("cotenant.workloads.jobs.tiresias", "testbed trace (Tiresias, CSV)"),
    "miso": ("cotenant.workloads.jobs.miso", "jobs with their latency on every MIG slice (MISO, CSV)"),
    "gavel": ("cotenant.workloads.jobs.gavel", "workloads of Gavel's simulator (headerless, tabs)"),
    "sia": ("cotenant.workloads.jobs.sia", "workloads of Sia's and Pollux's simulators (CSV)"),
    "blox": ("cotenant.workloads.jobs.blox", "jobs that Blox submits (CSV)"),
    "helios": ("cotenant.workloads.jobs.helios", "Helios 2020, Slurm clusters of SenseTime (CSV)"),
    "acme": ("cotenant.workloads.jobs.acme", "Acme 2023, LLM development on Seren and Kalos (CSV)"),
    "alibaba-spot": ("cotenant.workloads.jobs.alibaba_spot", "Alibaba 2026, guaranteed and spot jobs (CSV)"),
    "alibaba-genai": ("cotenant.workloads.jobs.alibaba_genai", "Alibaba 2026, image generation with LoRA (CSV)"),
}


def split_spec(spec: str) -> tuple[str, str]:
    """Split a trace's name into format and path: "philly:jobs.csv" is ("philly", "jobs.csv"). A path
    without a format has the native format if it ends in .csv or .parquet, or if the file exists."""
    name, colon, path = spec.partition(":")
    if colon and name in FORMATS:
        if not path:
            raise InputError(f"{spec!r} names no file; write {name}:PATH", field="trace")
        return name, path
    if Path(spec).suffix.lower() in (".csv", ".parquet") and (not colon or Path(spec).exists()):
        return "native", spec
    if Path(spec).is_file():
        return "native", spec
    if colon and name in TOKEN_FORMATS:
        raise InputError(
            f"{spec!r} is a token trace (requests to language models), not a trace of jobs; it is read by "
            f"cotenant simulate --serving MODELS.yaml --trace {name}:{path or 'PATH'}, and by cotenant load --openai",
            field="trace",
        )
    near = nearest(name, (*FORMATS, *TOKEN_FORMATS))
    hint = near.replace("?", f":{path or 'PATH'}?") or f"write FORMAT:PATH, FORMAT being {_listed()}"
    raise InputError(f"unknown trace format in {spec!r}; {hint}", field="trace")


def read_trace(spec: str, options: TraceOptions | None = None) -> Trace:
    """Read `FORMAT:PATH` without applying filters and replacements of `options`, which `select.load_trace` does.

    Readers use only `time_unit`, `attempts`, and whether arrivals and durations will be replaced.
    """
    name, path = split_spec(spec)
    options = options or TraceOptions()
    if options.time_unit and name != "chronus":
        raise InputError(f"the {name} format states its time unit; --time-unit is for chronus", field="time-unit")
    if options.attempts != TraceOptions.attempts and name != "philly-json":
        raise InputError(f"the {name} format has no attempts; --attempts is for philly-json", field="attempts")
    try:
        trace: Trace = importlib.import_module(FORMATS[name][0]).read(path, options)
    except OtherFormatError as other:
        fitting = looks_like(other.header)
        if fitting is None or fitting == f"{name}:":
            raise
        why = f" (it has no column {other.field!r})" if isinstance(other, MissingColumnError) else ""
        raise InputError(
            f"the file is not in the {name} format{why}; it looks like {fitting}{path}",
            file=other.file,
            line=other.line,
            field=other.field,
        ) from None
    return trace


def trace_of(name: str) -> str | None:
    """Return how `--trace` names the job trace `name`, a path with or without a format. None if it is no job trace. A
    text file is recognized by its first line; Parquet files always count as traces.
    """
    form, colon, path = name.partition(":")
    if colon and path and form in FORMATS:
        return name
    suffix = Path(name).suffix.lower()
    if suffix in (".yaml", ".yml") or not Path(name).is_file():
        return None
    if suffix == ".parquet":
        return name
    with Path(name).open("rb") as file:
        line = file.readline(FIRST_LINE_BYTES).decode("utf-8", errors="replace")
    form = looks_like([cell.strip().strip('"') for cell in line.split(",")]) or "--"
    return None if form.startswith("--") else f"{form}{name}".removeprefix("native:")


def _listed() -> str:
    names = list(FORMATS)
    return f"{', '.join(names[:-1])} or {names[-1]}"
