"""Plots engine time against rounds x active jobs as an SVG: python bench/plot_growth.py POINTS.csv OUT.svg"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 420, 70, 20, 40, 55


def ticks(low: float, high: float) -> list[int]:
    """Powers of ten that enclose the values."""
    return list(range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1))


def label(power: int) -> str:
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"


def draw(points: list[tuple[float, float]]) -> str:
    xs, ys = (ticks(min(axis), max(axis)) for axis in zip(*points, strict=True))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - xs[0]) / (xs[-1] - xs[0])
        up = (math.log10(y) - ys[0]) / (ys[-1] - ys[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">Engine time against work, fifo + tune (dashed: linear)</text>',
    ]
    for power in xs:
        x, _ = at(10.0**power, 10.0 ** ys[0])
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label(power)}</text>')
    for power in ys:
        _, y = at(10.0 ** xs[0], 10.0**power)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label(power)} s</text>')
    pace = math.exp(sum(math.log(y / x) for x, y in points) / len(points))
    ends = [at(x, x * pace) for x in (min(p[0] for p in points), max(p[0] for p in points))]
    (x1, y1), (x2, y2) = ends
    out.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#888" stroke-dasharray="5 4"/>')
    for x, y in sorted(points):
        cx, cy = at(x, y)
        out.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="#1f6fb2"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">rounds x unfinished jobs</text></svg>')
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    rows = list(csv.DictReader(Path(sys.argv[1]).read_text().splitlines()))
    Path(sys.argv[2]).write_text(draw([(float(r["rounds_x_jobs"]), float(r["engine_s"])) for r in rows]))
