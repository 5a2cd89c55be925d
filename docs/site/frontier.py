"""Draws docs/benchmarks/colocation-frontier.svg from the table "Schemes" of docs/benchmarks/colocation.md:

    python docs/site/frontier.py
"""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "benchmarks" / "colocation.md"
COLOURS = {"temporal": "#7a7a7a", "orion": "#b8860b", "mps-plus": "#c0392b", "static": "#8e44ad", "tidal": "#1f77b4"}
CELL = re.compile(r"([\d.]+) / ([\d.]+), (\d+) %")
LEFT, LATENCY, WORK, TOP, ROW, STEP = 150, (170, 500), (560, 800), 70, 62, 10  # px; a row has a line for each scheme
FACTORS = (0.7, 300.0)  # of the axis of latencies
PERCENT = (40.0, 120.0)  # of the axis of best-effort work


def rows() -> dict[str, dict[str, tuple[float, float, float]]]:
    """Best-effort program -> scheme -> p50 and p99 relative to the service alone, and best-effort work in percent."""
    section = PAGE.read_text().partition("\n## Schemes ")[2]
    head, _, *lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][:8]
    schemes = [title.split()[0] for title in head[1:]]
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, *cells in lines:
        figures = [tuple(map(float, match.groups())) for cell in cells if (match := CELL.search(cell))]
        found[name.strip()] = dict(zip(schemes, figures, strict=True))  # type: ignore[arg-type]
    return found


def at_factor(value: float) -> float:
    least, most = map(math.log, FACTORS)
    return LATENCY[0] + (LATENCY[1] - LATENCY[0]) * (math.log(value) - least) / (most - least)


def at_percent(value: float) -> float:
    return WORK[0] + (WORK[1] - WORK[0]) * (value - PERCENT[0]) / (PERCENT[1] - PERCENT[0])


def drawn() -> str:
    found = rows()
    bottom = TOP + ROW * len(found)
    made = [f'<rect width="820" height="{bottom + 64}" fill="white"/>']

    def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> None:
        made.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(words)}</text>')

    def line(x: float, colour: str = "#ddd", more: str = "") -> None:
        made.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{colour}"{more}/>')

    text(LATENCY[0], 26, "Latency of the service, relative to alone", more=' font-weight="bold"')
    text(LATENCY[0], 44, "filled: p50, open: p99; further left is better")
    text(WORK[0], 26, "Best-effort work", more=' font-weight="bold"')
    text(WORK[0], 44, "% of what fits; further right is better")
    for factor in (1, 2, 5, 10, 30, 100, 300):
        line(at_factor(factor))
        text(at_factor(factor), bottom + 16, f"{factor}x", "middle")
    for percent in (40, 60, 80, 100, 120):
        line(at_percent(percent))
        text(at_percent(percent), bottom + 16, f"{percent} %", "middle")
    for number, (name, schemes) in enumerate(found.items()):
        middle = TOP + ROW * (number + 0.5)
        text(LEFT, middle + 4, name.partition(" (")[0], "end")
        if number:
            y = TOP + ROW * number
            made.append(f'<line x1="{LATENCY[0]}" x2="{WORK[1]}" y1="{y}" y2="{y}" stroke="#eee"/>')
        for place, (scheme, (p50, p99, work)) in enumerate(schemes.items()):
            y, colour = middle + STEP * (place - (len(schemes) - 1) / 2), COLOURS[scheme]
            first, last = at_factor(p50), at_factor(p99)
            made.append(f'<line x1="{first:.1f}" x2="{last:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>')
            made.append(f'<circle cx="{last:.1f}" cy="{y:.1f}" r="4" fill="white" stroke="{colour}"/>')
            made.append(f'<circle cx="{first:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
            made.append(f'<circle cx="{at_percent(work):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
    for place, (scheme, colour) in enumerate(COLOURS.items()):
        x = LATENCY[0] + 110 * place
        made.append(f'<circle cx="{x}" cy="{bottom + 44}" r="5" fill="{colour}"/>')
        text(x + 11, bottom + 48, scheme)
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#222"'
    box = f'viewBox="0 0 820 {bottom + 64}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>\n' + "\n".join(made) + "\n</svg>\n"


if __name__ == "__main__":
    (PAGE.parent / "colocation-frontier.svg").write_text(drawn())
