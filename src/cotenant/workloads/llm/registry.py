"""Registry of the formats of token traces, and the parser of `FORMAT:PATH`."""

from __future__ import annotations

import importlib

from cotenant.core.errors import InputError, nearest
from cotenant.core.extras import needs
from cotenant.workloads.llm.recognise import looks_like
from cotenant.workloads.llm.trace import TokenOptions, TokenTrace
from cotenant.workloads.token_formats import FORMATS


def read_tokens(spec: str, options: TokenOptions | None = None) -> TokenTrace:
    """Read the trace FORMAT:PATH. A path without a format is native."""
    name, colon, path = spec.partition(":")
    if not colon and spec.lower().endswith((".csv", ".parquet")):
        name, path = "native", spec
    if name not in FORMATS or not path:
        near = nearest(name, FORMATS)
        known = f"write FORMAT:PATH, FORMAT being one of {', '.join(FORMATS)}"
        hint = near.replace("?", f":{path or 'PATH'}?") or known
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
