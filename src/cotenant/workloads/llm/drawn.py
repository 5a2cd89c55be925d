"""Generates random requests to language models, drawn with a given rate and distributions of lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cotenant.core.errors import InputError
from cotenant.workloads.llm.trace import TokenTrace, make_trace
from cotenant.workloads.requests.arrivals import draw, parse_arrivals

POOL = 4096  # requests that are drawn for each model; closed-loop clients send them in rotation
Lengths = Callable[[np.random.Generator, int], np.ndarray]


def parse_lengths(text: str, field: str) -> Lengths:
    """Parse `512` (constant), `100-900` (uniform) or `512~1.2` (lognormal with this mean and coefficient of
    variation)."""
    try:
        if "~" in text:
            mean, cv = (float(x) for x in text.split("~"))
            if not (1 <= mean <= 1e7 and 0 < cv <= 100):
                raise ValueError
            sigma2 = math.log(1 + cv * cv)
            return lambda rng, n: np.maximum(
                1, rng.lognormal(math.log(mean) - sigma2 / 2, math.sqrt(sigma2), n)
            ).round()
        low, high = (int(x) for x in text.split("-")) if "-" in text else (int(text), int(text))
        if not 1 <= low <= high <= 1e7:
            raise ValueError
    except ValueError:
        raise InputError(f"{text!r} is not a length; write 512, 100-900 or 512~1.2 (mean~CV)", field=field) from None
    return lambda rng, n: rng.integers(low, high, n, endpoint=True)


def draw_trace(
    models: Sequence[str], rates_rps: Sequence[float], prompt: str, output: str, duration_s: float,
    arrivals: str = "poisson", seed: int = 0,
) -> TokenTrace:  # fmt: skip
    """Draw requests to each model. Each model has its own random stream, so that adding a model does not change the
    others.
    """
    prompts, outputs = parse_lengths(prompt, "prompt"), parse_lengths(output, "output")
    process = parse_arrivals(arrivals)
    parts = []
    for number, rate in enumerate(rates_rps):
        rng = np.random.default_rng([seed, number])
        times = draw(process, rate, duration_s, rng) if rate > 0 else np.zeros(0)
        parts.append((times, np.full(len(times), number), prompts(rng, len(times)), outputs(rng, len(times))))
    times, model, ins, outs = (np.concatenate([part[k] for part in parts]) for k in range(4))
    if not len(times):
        raise InputError("no requests were drawn: the rates or the duration are too small", field="rate")
    order = np.argsort(times, kind="stable")  # the models' requests are drawn one model after the other
    times, model, ins, outs = (values[order] for values in (times, model, ins, outs))
    source = f"{arrivals} {sum(rates_rps):g}/s, prompts of {prompt} and outputs of {output} tokens, seed {seed}"
    return make_trace(source, times, model, ins, outs, tuple(models), zero_s=0.0)


def draw_pool(models: Sequence[str], prompt: str, output: str, seed: int = 0) -> TokenTrace:
    """Draw requests for closed-loop clients: prompt and answer lengths of POOL requests to each model. Their times are
    all 0, because a closed-loop client sends a request when its previous one is answered.
    """
    prompts, outputs = parse_lengths(prompt, "prompt"), parse_lengths(output, "output")
    ins, outs = [], []
    for number in range(len(models)):
        rng = np.random.default_rng([seed, number])
        ins.append(prompts(rng, POOL))
        outs.append(outputs(rng, POOL))
    model = np.repeat(np.arange(len(models)), POOL)
    source = f"closed loop, prompts of {prompt} and outputs of {output} tokens, seed {seed}"
    return make_trace(source, np.zeros(len(model)), model, np.concatenate(ins), np.concatenate(outs), tuple(models))
