"""Draws language-model requests from ServeGen's clients: a folder or tar with chunk-N-trace.csv and
chunk-N-dataset.json for each.

trace.csv has a row per window: start [s], rate, CV, then parameters of fits, which are not used. Gaps are drawn from a
gamma distribution with the window's rate and CV. dataset.json has windows of its own: each start maps to `input_tokens`
(or text_, image_, audio_ and video_tokens, which are added up) and `output_tokens`, each a text like
{12: 0.25, 40: 0.75}. The clients of a folder call one model, which has the folder's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import numpy as np

from cotenant.core.errors import InputError
from cotenant.workloads.llm.trace import MAX_REQUESTS, TokenOptions, TokenTrace, coded, make_trace
from cotenant.workloads.servegen import arrivals, step_of, texts_of, windows_of

PAIR = re.compile(r"([0-9.]+)\s*:\s*([0-9.eE+-]+)")
INPUTS = ("text_tokens", "image_tokens", "audio_tokens", "video_tokens")
Dist = tuple[np.ndarray, np.ndarray]  # a distribution of token counts: its values, and the probability of each


def read(path: str, options: TokenOptions) -> TokenTrace:
    """Draw requests of all clients, for the windows within the time span of `options`."""
    end = options.start_s + options.duration_s
    parts: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
    drawn = idle = 0
    for number, (name, windows, lengths) in enumerate(_clients(path)):
        rng = np.random.default_rng([options.seed, number])
        step = step_of(windows)
        for start, rate, cv in windows:
            if start >= end or start + step <= options.start_s:
                continue
            idle += rate <= 0
            times = arrivals(rng, start, step, rate, cv)
            drawn += len(times)
            if drawn > MAX_REQUESTS:
                raise InputError(f"more than {MAX_REQUESTS:,} requests; give a shorter duration", file=path)
            prompts, outputs = (_draw(rng, dists, len(times)) for dists in _at(lengths, start))
            parts.append((name, times, prompts, outputs))
    if not parts:
        raise InputError("has no windows in the given time span", file=path)
    times, prompt, output = (np.concatenate([part[k] for part in parts]) for k in (1, 2, 3))
    models, code = coded(part[0] for part in parts)
    model = np.repeat(code, [len(part[1]) for part in parts])
    remarks = [f"{idle:,} windows had no rate"] if idle else []
    return make_trace(
        f"servegen:{path}", times, model, prompt, output, models, remarks=remarks, options=options, zero_s=0.0
    )


def _draw(rng: np.random.Generator, dists: list[Dist], count: int) -> np.ndarray:
    total = np.zeros(count)
    for values, chances in dists:
        total += rng.choice(values, size=count, p=chances)
    return total


def _at(lengths: list[tuple[float, list[Dist], list[Dist]]], start: float) -> tuple[list[Dist], list[Dist]]:
    found = next((row for row in reversed(lengths) if row[0] <= start), lengths[0])
    return found[1], found[2]


def _clients(path: str) -> Iterator[tuple[str, np.ndarray, list[tuple[float, list[Dist], list[Dist]]]]]:
    """Produce (model, windows (n, 3), lengths by window) for each client, sorted by name."""
    texts = texts_of(path, ("-trace.csv", "-dataset.json"))
    for name in sorted(texts):
        if not name.endswith("-trace.csv"):
            continue
        other = name.removesuffix("-trace.csv") + "-dataset.json"
        if other not in texts:
            raise InputError(f"{name} lacks its file of lengths ({PurePosixPath(other).name})", file=path)
        model = PurePosixPath(name).parent.name or "servegen"
        yield model, windows_of(path, name, texts[name]), _lengths(path, other, texts[other])


def _lengths(path: str, name: str, text: str) -> list[tuple[float, list[Dist], list[Dist]]]:
    try:
        content = json.loads(text)
        rows = sorted((float(start), row) for start, row in content.items())
        found = []
        for start, row in rows:
            inputs = ("input_tokens",) if "input_tokens" in row else [x for x in INPUTS if x in row]
            found.append((start, [_dist(row[x]) for x in inputs], [_dist(row["output_tokens"])]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{name}: not distributions of tokens: {error}", file=path) from None
    if not found or not found[0][1]:
        raise InputError(f"{name}: has no distributions of tokens", file=path)
    return found


def _dist(text: str) -> Dist:
    pairs = np.array([(float(v), float(p)) for v, p in PAIR.findall(text)]).reshape(-1, 2)
    if not len(pairs) or pairs[:, 1].sum() <= 0:
        raise ValueError(f"{text[:40]!r} is not a distribution; write it like {{12: 0.25, 40: 0.75}}")
    return pairs[:, 0], pairs[:, 1] / pairs[:, 1].sum()
