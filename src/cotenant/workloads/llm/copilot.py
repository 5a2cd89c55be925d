"""Reads the trace of GitHub Copilot's coding agents of June 2026: one session a line (JSONL, gzip; folders
date=.../shard-....jsonl.gz).

A session has turns, a turn has llm_calls: timestamp, model ("Model A" ...), result, tokens {prompt, completion,
cached}. A session makes its next call when a tool has ended. How long that takes is not simulated: calls arrive at the
recorded times. A cancelled call has the tokens that it had produced.
"""

from __future__ import annotations

from array import array
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.workloads.llm.json_lines import files_of, objects
from cotenant.workloads.llm.trace import MAX_TOKENS, TokenOptions, TokenTrace, make_trace

UNSUCCESSFUL = "calls did not end with Success; their tokens are kept"


def read(path: str, options: TokenOptions) -> TokenTrace:
    """Read the calls of all sessions of a file or folder."""
    times, model = array("d"), array("i")
    prompt, output, cached = array("q"), array("q"), array("q")
    models: dict[str, int] = {}
    left: Counter[str] = Counter()
    unsuccessful = 0
    for file in files_of(path):
        for line, session in objects(file):
            for call in _calls(session, file, line):
                tokens = call.get("tokens") or {}
                counts = [tokens.get(name) or 0 for name in ("prompt", "completion", "cached")]
                if not all(isinstance(c, int | float) and 0 <= c <= MAX_TOKENS for c in counts):
                    left["with invalid token counts"] += 1
                    continue
                at = _seconds(call.get("timestamp"))
                if at is None:
                    left["without a time"] += 1
                    continue
                unsuccessful += call.get("result") not in (None, "Success")
                times.append(at)
                model.append(models.setdefault(str(call.get("model") or "unnamed"), len(models)))
                for column, count in zip((prompt, output, cached), counts, strict=True):
                    column.append(int(count))
    remarks = [f"{unsuccessful:,} {UNSUCCESSFUL}"] if unsuccessful else []
    return make_trace(f"copilot:{path}", times, model, prompt, output, tuple(models), cached, left, remarks, options)


def _calls(session: dict[str, Any], path: Path, line: int) -> list[dict[str, Any]]:
    turns = session.get("turns")
    if not isinstance(turns, list):
        raise InputError("is not a session with turns", file=path, line=line, field="turns")
    return [call for turn in turns for call in (turn.get("llm_calls") or [])]


def _seconds(text: Any) -> float | None:
    """Return a time as seconds since 1970, or None if the text is not a time. A time without a zone is UTC."""
    try:
        at = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return (at if at.tzinfo else datetime.fromisoformat(f"{text}+00:00")).timestamp()
