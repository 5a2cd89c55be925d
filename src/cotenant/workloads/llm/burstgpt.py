"""Reads BurstGPT, a trace of requests to language models: Timestamp [s], Model, Request tokens, Response tokens, Total
tokens, Log Type; later files also Session ID and Elapsed time. A request with 0 response tokens failed. Times are whole
seconds, so many are equal.
"""

from __future__ import annotations

from cotenant.workloads.llm.trace import MAX_TOKENS, TokenOptions, TokenTrace, coded, make_trace
from cotenant.workloads.table_files import read_csv

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


def read(path: str, options: TokenOptions) -> TokenTrace:
    """Read the requests of one file. Failed requests are left out."""
    table = read_csv(path, COLUMNS)
    table.require(*COLUMNS)
    table.leave_out(table.numbers("Response tokens", least=0, most=MAX_TOKENS) == 0, "that failed")
    models, model = coded(table.texts("Model"))
    return make_trace(
        f"burstgpt:{path}", table.numbers("Timestamp", least=0), model,
        table.numbers("Request tokens", least=0, most=MAX_TOKENS),
        table.numbers("Response tokens", least=0, most=MAX_TOKENS), models, left_out=table.left_out,
        remarks=table.remarks, options=options,
    )  # fmt: skip
