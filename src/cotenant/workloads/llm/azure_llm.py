"""Reads Azure's traces of language-model requests of 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens.

Times of 2023 have seven fractional digits and no zone; those of 2024 a zone (+00:00), and no fraction if it is zero.
There is no column of models: each file is from one service (code or conversation).
"""

from __future__ import annotations

import polars as pl

from cotenant.core.errors import InputError
from cotenant.workloads.llm.trace import MAX_TOKENS, TokenOptions, TokenTrace, make_trace
from cotenant.workloads.table import Table
from cotenant.workloads.table_files import read_csv

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES = "NumImages"  # the further column of the trace of 2025


def read(path: str, options: TokenOptions) -> TokenTrace:
    """Read the requests of one file."""
    table = read_csv(path, COLUMNS)
    table.require(*COLUMNS)
    if IMAGES in table.header:
        raise InputError(f"the trace has a column {IMAGES}", file=path, line=1)
    return requests(f"azure-llm:{path}", table, options)


def requests(source: str, table: Table, options: TokenOptions) -> TokenTrace:
    """Make the trace of the rows of a table with `COLUMNS`, those with token counts."""
    empty = table.empty("ContextTokens") | table.empty("GeneratedTokens")
    table.leave_out(empty, "without token counts")
    written = pl.Series(table.texts("TIMESTAMP").tolist(), dtype=pl.String)
    plain = written.str.replace(r"(?:Z|\+00:00)$", "").str.replace("T", " ", literal=True)
    times = plain.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
    table.refuse(times.is_null().to_numpy(), "TIMESTAMP", "{} is not a time like 2024-05-10 00:00:00.009930+00:00")
    prompt, output = (table.numbers(name, least=0, most=MAX_TOKENS) for name in COLUMNS[1:])
    seconds = times.dt.epoch("ns").to_numpy().astype("int64")
    return make_trace(
        source, (seconds - seconds.min()) / 1e9, None, prompt, output, left_out=table.left_out,
        remarks=table.remarks, options=options,
    )  # fmt: skip
