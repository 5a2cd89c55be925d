"""Reads the native format of token traces: CSV or Parquet with time_s, prompt_tokens, output_tokens, and optionally
model and cached_tokens.
"""

from __future__ import annotations

import numpy as np

from cotenant.workloads.llm.trace import MAX_TOKENS, TokenOptions, TokenTrace, coded, make_trace
from cotenant.workloads.table_files import read_csv, read_parquet

COLUMNS = ("time_s", "model", "prompt_tokens", "output_tokens", "cached_tokens")


def read(path: str, options: TokenOptions) -> TokenTrace:
    """Read the requests of one file."""
    table = read_parquet(path, COLUMNS) if path.lower().endswith(".parquet") else read_csv(path, COLUMNS)
    table.require("time_s", "prompt_tokens", "output_tokens")
    models, model = coded(table.texts("model")) if "model" in table.header else (("",), None)
    cached = None
    if "cached_tokens" in table.header:
        cached = np.nan_to_num(table.numbers("cached_tokens", least=0, most=MAX_TOKENS, optional=True))
    prompt, output = (table.numbers(name, least=0, most=MAX_TOKENS) for name in ("prompt_tokens", "output_tokens"))
    return make_trace(
        f"native:{path}", table.numbers("time_s", least=0), model, prompt, output, models, cached, table.left_out,
        table.remarks, options,
    )  # fmt: skip
