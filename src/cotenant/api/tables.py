"""A table for notebooks: plain HTML that follows the notebook's style."""

from __future__ import annotations

import html
from collections.abc import Sequence


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return an HTML table with one row of column names and the given rows, whose first cells are row headings. Texts
    are escaped.
    """
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        f'<tr><th scope="row" style="text-align:left">{html.escape(row[0])}</th>'
        + "".join(f"<td>{html.escape(text)}</td>" for text in row[1:])
        + "</tr>"
        for row in rows
    )
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text with aligned columns, for a terminal."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    return "\n".join(line.rstrip() for line in lines)
