"""Draw an experiment: the output of `cotenant sweep FILE.yaml --out DIR --json` as an SVG and a Markdown table.

    python docs/experiments/figure.py out.json --by rate --svg load.svg          lines over a number
    python docs/experiments/figure.py out.json --by ordering --svg zoo.svg       rows of dots for other options

A value is the mean JCT in hours, averaged over the seeds. Vertical bars show the smallest and the largest value of the
seeds. Only Python's standard library is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections import defaultdict
from pathlib import Path

COLORS = {"fifo": "#0072b2", "srtf": "#d55e00", "las": "#009e73", "drf": "#0072b2", "tetris": "#d55e00"}
DASHES = {"proportional": "5 4", "greedy": "1 4", "tune": ""}
DOTS = {"proportional": "#8a8a8a", "greedy": "#e69f00", "tune": "#0072b2"}
TEXT, GRID, FONT = "#333", "#ddd", "font-family='system-ui, sans-serif' font-size='12'"
Key = tuple[str, ...]
Values = dict[Key, dict[str, list[float]]]  # row -> series -> mean JCT of each seed, hours


def read(path: Path, by: list[str], series: list[str]) -> Values:
    """Read the mean JCT of each run. A run's row is its values of the options in `by`, and its series those of the
    options in `series`.
    """
    values: Values = defaultdict(lambda: defaultdict(list))
    for run in json.loads(path.read_text())["runs"]:
        options = run["options"]
        row = tuple(str(options.get(name, "")) for name in by)
        values[row][" + ".join(str(options[name]) for name in series)].append(run["jct_s"]["mean"] / 3600)
    return values


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def hours(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(values: Values, by: list[str]) -> str:
    """Make a Markdown table. For orderings with both allotments it shows the ratio proportional / tune."""
    names = list(dict.fromkeys(name for row in values.values() for name in row))
    pairs = [(n, n.replace("tune", "proportional")) for n in names if n.endswith("tune")]
    pairs = [(tune, other) for tune, other in pairs if other in names]
    heads = [*by, *names, *(f"{tune.removesuffix('tune').removesuffix(' + ')} gain".strip() for tune, _ in pairs)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(by) + "|--:" * (len(heads) - len(by)) + "|"]
    for row, cells in values.items():
        gains = [f"{mean(cells[other]) / mean(cells[tune]):.2f}×" for tune, other in pairs]
        lines.append("| " + " | ".join([*row, *(hours(mean(cells[name])) for name in names), *gains]) + " |")
    return "\n".join(lines)


def log_ticks(low: float, high: float) -> list[float]:
    marks = [m * 10.0**k for k in range(-1, 5) for m in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high]


def line_chart(values: Values, axis: str) -> str:
    """Draw a line for each series of `values`: its mean JCT, on a logarithmic axis, over the number in the name of each
    row. The name of a series is at the end of its line.
    """
    width, height, left, right, top, bottom = 760, 400, 56, 170, 24, 48
    xs = {row: float(re.sub(r"[^0-9.]", "", row[0])) for row in values}
    every = [x for row in values.values() for seeds in row.values() for x in seeds]
    low, high = min(every) * 0.92, max(every) * 1.08
    first, last = min(xs.values()), max(xs.values())

    def x_of(x: float) -> float:
        return left + (x - first) / (last - first) * (width - left - right)

    def y_of(y: float) -> float:
        return height - bottom - math.log(y / low) / math.log(high / low) * (height - top - bottom)

    out = [
        f"<line x1='{left}' x2='{width - right}' y1='{y_of(t):.1f}' y2='{y_of(t):.1f}' stroke='{GRID}'/>"
        f"<text x='{left - 8}' y='{y_of(t) + 4:.1f}' text-anchor='end'>{t:g} h</text>"
        for t in log_ticks(low, high)
    ]
    out += [
        f"<text x='{x_of(x):.1f}' y='{height - bottom + 20}' text-anchor='middle'>{x:g}</text>" for x in xs.values()
    ]
    out.append(f"<text x='{(left + width - right) / 2}' y='{height - 10}' text-anchor='middle'>{axis}</text>")
    out.append(f"<text x='{left}' y='{top - 8}'>mean JCT</text>")
    ends = []
    for name in next(iter(values.values())):
        ordering, _, allotment = name.partition(" + ")
        color, dash = COLORS.get(ordering, "#555"), DASHES.get(allotment, "")
        points = [(x_of(xs[row]), y_of(mean(cells[name]))) for row, cells in values.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f"fill='none' stroke='{color}' stroke-width='2' stroke-dasharray='{dash}'"
        out.append(f"<polyline points='{path}' {style}/>")
        for row, cells in values.items():
            x, (y1, y2) = x_of(xs[row]), (y_of(min(cells[name])), y_of(max(cells[name])))
            out.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{y1:.1f}' y2='{y2:.1f}' stroke='{color}' opacity='.45'/>")
        ends.append([points[-1][1] + 4, name, color])
    ends.sort()
    for before, after in itertools.pairwise(ends):
        after[0] = max(after[0], before[0] + 14)
    out += [f"<text x='{width - right + 10}' y='{y:.1f}' fill='{color}'>{name}</text>" for y, name, color in ends]
    return svg(width, height, out)


def dot_chart(values: Values) -> str:
    """Draw a line of dots for each row of `values`. A dot is the mean JCT of one series (an allotment) in that row; the
    axis of the JCT is logarithmic.
    """
    labels = {row: " · ".join(row) for row in values}
    left = 24 + 7 * max(len(text) for text in labels.values())
    width, right, top, step = 760, 30, 44, 24
    height = top + step * len(values) + 34
    every = [mean(seeds) for row in values.values() for seeds in row.values()]
    low, high = min(every) * 0.85, max(every) * 1.15

    def x_of(x: float) -> float:
        return left + math.log(x / low) / math.log(high / low) * (width - left - right)

    out = [
        f"<line x1='{x_of(t):.1f}' x2='{x_of(t):.1f}' y1='{top - 8}' y2='{height - 30}' stroke='{GRID}'/>"
        f"<text x='{x_of(t):.1f}' y='{height - 12}' text-anchor='middle'>{t:g} h</text>"
        for t in log_ticks(low, high)
    ]
    for i, name in enumerate(next(iter(values.values()))):
        out.append(f"<circle cx='{left + 120 * i + 6}' cy='16' r='5' fill='{DOTS.get(name, '#555')}'/>")
        out.append(f"<text x='{left + 120 * i + 16}' y='20'>{name}</text>")
    for i, (row, cells) in enumerate(values.items()):
        y = top + step * i + 8
        at = {name: x_of(mean(seeds)) for name, seeds in cells.items()}
        out.append(f"<text x='{left - 14}' y='{y + 4}' text-anchor='end'>{labels[row]}</text>")
        ends = f"x1='{min(at.values()):.1f}' x2='{max(at.values()):.1f}' y1='{y}' y2='{y}'"
        out.append(f"<line {ends} stroke='#bbb' stroke-width='2'/>")
        out += [f"<circle cx='{x:.1f}' cy='{y}' r='5' fill='{DOTS.get(name, '#555')}'/>" for name, x in at.items()]
    return svg(width, height, out)


def svg(width: int, height: int, parts: list[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {FONT} fill='{TEXT}'>"
    return "\n".join([head, f"<rect width='{width}' height='{height}' fill='#fff'/>", *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="output of cotenant sweep --json")
    parser.add_argument("--by", required=True, help="swept option on the axis, or several, such as split,ordering")
    parser.add_argument("--axis", default="", help="title of a numeric axis; without it rows of dots are drawn")
    parser.add_argument("--svg", type=Path, help="where to write the picture")
    given = parser.parse_args()
    by = given.by.split(",")
    series = [name for name in ("ordering", "allotment") if name not in by]
    values = read(given.results, by, series)
    if given.svg:
        given.svg.write_text(line_chart(values, given.axis) if given.axis else dot_chart(values))
    print(table(values, by))


if __name__ == "__main__":
    main()
