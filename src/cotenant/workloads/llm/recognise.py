"""Recognises the format of a token trace by its first line, for the error message after a wrong format was given."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from cotenant.workloads import job_headers

FIRST_LINE_BYTES = 1 << 16
# columns, or keys of a JSON object, by which a format is recognised; the first entry that matches is used
SIGNS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset(("time_s", "prompt_tokens", "output_tokens")), "native"),
    (frozenset(("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens")), "azure-lmm"),
    (frozenset(("TIMESTAMP", "ContextTokens", "GeneratedTokens")), "azure-llm"),
    (frozenset(("Timestamp", "Request tokens", "Response tokens")), "burstgpt"),
    (frozenset(("timestamp", "input_length", "output_length")), "mooncake"),
    (frozenset(("turns",)), "copilot"),
)


def looks_like(path: str) -> str | None:
    """Return how a token trace at `path` is named, such as `burstgpt:PATH`, or what the file is instead; None if it is
    not recognised."""
    where = Path(path)
    if where.is_dir():
        return f"servegen:{path}" if next(where.rglob("chunk-*-trace.csv"), None) else None
    if ".tar" in where.name or where.suffix in (".tgz", ".txz"):
        return f"servegen:{path}"
    names = _first_names(where)
    for signs, form in SIGNS:
        if signs <= set(names):
            return f"{form}:{path}"
    jobs = job_headers.looks_like(names)
    return f"a trace of training jobs, {jobs}{path}" if jobs and not jobs.startswith("--") else None


def _first_names(path: Path) -> list[str]:
    """The columns of a CSV file, or the keys of the JSON object in its first line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            line = file.readline(FIRST_LINE_BYTES).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError):
        return []
    if line.lstrip().startswith("{"):
        try:
            return list(json.loads(line))
        except ValueError:  # the object goes on after the part that was read, or it is none
            return [sign for signs, _ in SIGNS for sign in signs if f'"{sign}"' in line]
    return [cell.strip().strip('"') for cell in line.split(",")]
