"""Self-contained pages: a common template, with styles, scripts, data and the chart library inside."""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

ASSETS = resources.files("cotenant.report").joinpath("assets")


def asset(name: str) -> str:
    """Return the content of a file of this package."""
    return ASSETS.joinpath(name).read_text(encoding="utf-8")


def plotly() -> str:
    """Return Plotly's basic bundle (scatter and bar), the only third-party file in this package; its licence is in the
    same folder.
    """
    return gzip.decompress(ASSETS.joinpath("plotly-basic.min.js.gz").read_bytes()).decode()


def shell(
    title: str, head: str, main: str, parts: Mapping[str, str], data: Any, scripts: Sequence[str], body: str = ""
) -> str:
    """Return a whole page as HTML.

    `head`: HTML below the title. `main`: name of the asset with the page's sections. `parts`: HTML that replaces each
    {{NAME}} in that asset, by name. `data`: input of the scripts. `scripts`: names of assets. `body`: attributes of the
    body element.

    All names are replaced in one pass, so that a replacement that contains braces is not replaced again.
    """
    whole = {
        "title": html.escape(title),
        "head": head,
        "main": _fill(asset(main), parts),
        "body": body,
        "css": asset("report.css"),
        "js": "\n".join(asset(name) for name in scripts),
        "data": script_json(data),
        "plotly": plotly(),
    }
    return _fill(asset("shell.html"), whole)


def lead(text: str) -> str:
    """Return the HTML of the paragraph below the title, which states the result."""
    return f'<p class="headline">{html.escape(text)}</p>'


def _fill(template: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], template)


def script_json(data: Any) -> str:
    """Return the data as JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
