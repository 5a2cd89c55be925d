"""Registry of the formats of token traces, and the parser of `FORMAT:PATH`."""

from __future__ import annotations

import difflib
import importlib

from cotenant.core.errors import InputError
from cotenant.core.extras import needs
from cotenant.workloads.llm.recognise import looks_like
from cotenant.workloads.llm.trace import TokenOptions, TokenTrace

# format -> (module with the function `read(path, options) -> TokenTrace`, line of help)
FORMATS: dict[str, tuple[str, str]] = {
    "native": ("cotenant.workloads.llm.native", "CSV or Parquet: time_s, prompt_tokens, output_tokens, model, ..."),
    "azure-llm": ("cotenant.workloads.llm.azure_llm", "Azure LLM inference 2023 and 2024 (CSV)"),
    "azure-lmm": ("cotenant.workloads.llm.azure_lmm", "Azure LMM inference 2025, with images (CSV)"),
    "burstgpt": ("cotenant.workloads.llm.burstgpt", "BurstGPT: ChatGPT and GPT-4 of a campus (CSV)"),
    "copilot": ("cotenant.workloads.llm.copilot", "Copilot coding agents 2026, 37 models (JSONL, gzip, folders)"),
    "mooncake": ("cotenant.workloads.llm.mooncake", "Mooncake: lengths and blocks of prompts (JSONL)"),
    "servegen": ("cotenant.workloads.llm.servegen", "requests drawn from ServeGen's clients (folder or tar)"),
}


def read_tokens(spec: str, options: TokenOptions | None = None) -> TokenTrace:
    """Read the trace FORMAT:PATH. A path without a format is native."""
    name, colon, path = spec.partition(":")
    if not colon and spec.lower().endswith((".csv", ".parquet")):
        name, path = "native", spec
    if name not in FORMATS or not path:
        near = difflib.get_close_matches(name, list(FORMATS), n=1)
        known = f"write FORMAT:PATH, FORMAT being one of {', '.join(FORMATS)}"
        hint = f"did you mean {near[0]}:{path or 'PATH'}?" if near else known
        raise InputError(f"unknown token trace {spec!r}; {hint}", field="trace")
    with needs("sim"):  # most formats are read by polars, which requests drawn at random do not need
        reader = importlib.import_module(FORMATS[name][0])
    try:
        found: TokenTrace = reader.read(path, options or TokenOptions())
    except InputError as error:
        fitting = looks_like(path)
        if fitting is None or fitting == f"{name}:{path}":
            raise
        what = f"the file is not in the {name} format; it looks like {fitting}"
        raise InputError(what, file=path, line=error.line) from None
    return found
