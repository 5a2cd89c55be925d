"""What a self-contained page carries in itself: styles, scripts, data and the chart library."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from typing import Any

ASSETS = resources.files("cotenant.report").joinpath("assets")


def asset(name: str) -> str:
    """A file of the page's own."""
    return ASSETS.joinpath(name).read_text(encoding="utf-8")


def plotly() -> str:
    """Plotly's basic bundle (scatter and bar), the one file here that others wrote; its licence lies beside it."""
    return gzip.decompress(ASSETS.joinpath("plotly-basic.min.js.gz").read_bytes()).decode()


def script_json(data: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
