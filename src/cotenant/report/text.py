"""Formats of numbers for readers, the same in tables, sentences and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

DASH = "–"


def time_text(seconds: float | None, trim: bool = True) -> str:
    """Return a duration as text with three figures: 0 s, 350 ms, 42 s, 5.2 min, 13.4 h, 2.41 d; `trim` drops trailing
    zeros.
    """
    if seconds is None or math.isnan(seconds):
        return DASH
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 0.9995:
        return f"{figures(seconds * 1e3, trim=trim)} ms"
    for limit, scale, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if size < limit:
            return f"{figures(seconds / scale, trim=trim)} {unit}"
    return f"{figures(seconds / 86400, trim=trim)} d"


_UNITS = (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0))


def column_texts(values: Sequence[float | None], unit: str) -> list[str]:
    """Return the texts of a column of values by its unit (s, share, ratio, J or count): three figures, trailing zeros
    kept.

    Times of one column share one unit, so that they can be compared at a glance: the unit that suits the median. If the
    largest time would have four digits in it, a larger unit is used; if the smallest would be below 0.1, a smaller
    one, as far as that leaves the largest below four digits.
    """
    known = sorted(value for value in values if value is not None and not math.isnan(value))
    if unit != "s" or not known:
        return [metric_text(value, unit) for value in values]
    names = [name for name, _ in _UNITS]
    at = names.index(time_text(known[len(known) // 2]).rsplit(" ", 1)[1])
    while at and 0 < known[0] / _UNITS[at][1] < 0.1 and known[-1] / _UNITS[at - 1][1] < 1000:
        at -= 1
    while at + 1 < len(_UNITS) and known[-1] / _UNITS[at][1] >= 1000:
        at += 1
    name, scale = _UNITS[at]
    return [DASH if v is None or math.isnan(v) else f"{figures(v / scale, trim=False)} {name}" for v in values]


def figures(value: float, n: int = 3, trim: bool = True) -> str:
    """Return a number as text with n significant figures and no exponent: 0.0123, 1.5, 134, 1,340. `trim` drops
    trailing zeros.
    """
    if value == 0:
        return "0"
    # the value is rounded to n digits first, so that 0.9996 gets as many decimals as 1.00
    value = float(f"{value:.{n - 1}e}")
    decimals = n - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(decimals, 0)}f}"
    return text.rstrip("0").rstrip(".") if trim and "." in text else text


def share_text(share: float | None) -> str:
    """Return a fraction as text in percent: 65.6 %."""
    return DASH if share is None or math.isnan(share) else f"{share * 100:.1f} %"


def ratio_text(ratio: float | None, trim: bool = True) -> str:
    """Return a ratio as text in three figures: 1.62."""
    return DASH if ratio is None or math.isnan(ratio) else figures(ratio, trim=trim)


def count_text(count: float | None) -> str:
    """Return a count as text with thousands separators: 12,345."""
    return DASH if count is None or math.isnan(count) else f"{count:,.0f}"


def metric_text(value: float | None, unit: str) -> str:
    """Return a value as text by its unit (s, share, ratio, J or count), for columns: three figures, trailing zeros
    kept. Energies are shown in kWh.
    """
    if unit == "s":
        return time_text(value, trim=False)
    if unit == "ratio":
        return ratio_text(value, trim=False)
    if unit == "J":
        return DASH if value is None or math.isnan(value) else f"{figures(value / 3.6e6, trim=False)} kWh"
    return share_text(value) if unit == "share" else count_text(value)


def clock_text(seconds: float) -> str:
    """Return as text a point of time since the start of the trace, whole seconds: 0:05:00, 13:20:00, 2 d 01:30:00."""
    days, rest = divmod(int(seconds), 86400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} d {text.zfill(8)}" if days else text


def join_words(words: list[str], last: str = "and") -> str:
    """Join words as in a sentence: "a", "a and b", "a, b and c"."""
    if len(words) <= 1:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def plural(count: float, noun: str, many: str | None = None) -> str:
    """Return a number with its noun: 1 GPU, 2 GPUs, 0.5 GPUs, 12,345 jobs."""
    text = f"{count:,.0f}" if float(count).is_integer() else figures(count)
    return f"{text} {noun if count == 1 else many or noun + 's'}"
