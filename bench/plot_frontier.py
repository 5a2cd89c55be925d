"""The frontier of docs/benchmarks/colocation.md as an SVG: `python bench/plot_frontier.py RESULT.json OUT.svg`.

RESULT is what bench/gpu/colocation.py wrote (its step `schemes`), or what `cotenant bench colocation --json` printed.
"""

from __future__ import annotations

import html
import json
import math
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 780, 440, 70, 46, 150, 50
COLOURS = {"temporal": "#7a7a7a", "orion": "#b8860b", "mps-plus": "#c0392b", "static": "#8e44ad", "tidal": "#1f77b4"}
MOST_WORK = 1.4
FIGURE = "ls_p99_over_alone"
FONT = 'font-family="sans-serif" font-size="12"'


def place(work: float, ratio: float, top_ratio: float) -> tuple[float, float]:
    """Coordinates of a point: BE work to the right, LS p99 over alone (logarithm) upwards."""
    x = LEFT + (WIDTH - LEFT - RIGHT) * min(work, MOST_WORK) / MOST_WORK
    y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(max(ratio, 0.9) / 0.9) / math.log(top_ratio / 0.9)
    return x, y


def draw(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The whole picture as SVG."""
    top = 1.3 * max(row[FIGURE] for loads in rows.values() for row in loads.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="14">LS p99 over alone against BE work: right and down is better</text>',
    ]
    for ratio in (1, 2, 5, 10, 50, 100, 300):
        if ratio < top:
            _, y = place(0, ratio, top)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{ratio}x</text>')
    for percent in range(0, round(100 * MOST_WORK) + 1, 20):
        x, _ = place(percent / 100, 1, top)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{percent}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    axis = "BE work, % of the time that LS leaves"
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{axis}</text>')
    x, _ = place(0.95, 1, top)
    parts.append(
        f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#999" stroke-dasharray="4"/>'
    )
    letters = dict(zip(dict.fromkeys(load for loads in rows.values() for load in loads), "abcdefghijkl", strict=False))
    for index, (load, letter) in enumerate(letters.items()):
        at = TOP + 30 + 18 * (len(rows) + index)
        parts.append(f'<text x="{WIDTH - RIGHT + 16}" y="{at}">{letter} {html.escape(load)}</text>')
    for index, (scheme, loads) in enumerate(rows.items()):
        colour = COLOURS.get(scheme, "black")
        at = TOP + 10 + 18 * index
        parts.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{at - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 32}" y="{at}">{html.escape(scheme)}</text>')
        for load, row in loads.items():
            x, y = place(row["be_over_left"], row[FIGURE], top)
            title = f"{scheme} beside {load}: {row[FIGURE]:.2f}x, {row['be_over_left']:.0%}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" fill-opacity="0.8">'
                f"<title>{html.escape(title)}</title></circle>"
                f'<text x="{x + 7:.1f}" y="{y + 4:.1f}" font-size="10">{letters[load]}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Read, draw, write."""
    found = json.loads(Path(sys.argv[1]).read_text())
    rows = found["schemes"]["schemes"] if "card" in found else found
    Path(sys.argv[2]).write_text(draw(rows))


if __name__ == "__main__":
    main()
