"""Plain simulators of language models, written independently of the engine. Each step computes everything anew."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.profiles.llm.profile import LlmProfile


@dataclass(eq=False)  # two requests may have the same times and lengths
class Plain:
    """A request and its progress."""

    due_s: float
    prompt: int
    output: int
    tokens_s: list[float] = field(default_factory=list)
    cached: int = 0  # number of tokens that have been computed
    placed: int = -1  # number of its admission


def cost_s(profile: LlmProfile, chunks: list[tuple[Plain, int]]) -> float:
    """Duration of a step by the formula of docs/metrics.md, term by term."""
    t = profile.times
    prefill, decode, total = False, False, 0.0
    for request, new in chunks:
        size = request.prompt + len(request.tokens_s)
        if request.cached > 0 and size - request.cached == 1:
            decode = True
            total += t.per_sequence + t.per_context * size
        else:
            prefill = True
            total += t.per_token * new
            total += t.per_pair * sum(request.cached + k for k in range(1, new + 1))
    return total + max(t.prefill_base * prefill, t.decode_base * decode)


def one_model(profile: LlmProfile, requests: list[tuple[float, int, int]]) -> list[Plain]:
    """Simulate one model that is alone on a GPU."""
    everything = [Plain(*r) for r in requests]
    now, admissions = 0.0, 0
    while any(len(r.tokens_s) < r.output for r in everything):
        here = [r for r in everything if r.due_s <= now and len(r.tokens_s) < r.output]
        running = sorted((r for r in here if r.placed >= 0), key=lambda r: r.placed)
        while len(running) > 1 and sum(r.prompt + len(r.tokens_s) for r in running) > profile.kv_tokens:
            out = running.pop()
            out.placed, out.cached = -1, 0
        # Preempted requests are older than those that were never admitted, so order of arrival is right for both.
        waiting = sorted((r for r in here if r.placed < 0), key=lambda r: (r.due_s, everything.index(r)))
        chunks = [(r, 1) for r in running if r.cached > 0 and r.prompt + len(r.tokens_s) - r.cached == 1]
        budget = profile.step_tokens - len(chunks)
        decoding = [r for r, _ in chunks]
        for r in [r for r in running if r not in decoding]:
            new = min(budget, r.prompt + len(r.tokens_s) - r.cached)
            if new > 0:
                chunks.append((r, new))
                budget -= new
        for r in waiting:
            used = sum(x.prompt + len(x.tokens_s) for x in everything if x.placed >= 0 and len(x.tokens_s) < x.output)
            if (
                budget <= 0
                or len(running) >= profile.max_sequences
                or used + r.prompt + len(r.tokens_s) > profile.kv_tokens
            ):
                break
            r.placed, admissions = admissions, admissions + 1
            running.append(r)
            new = min(budget, r.prompt + len(r.tokens_s))
            chunks.append((r, new))
            budget -= new
        if not chunks:
            now = min(r.due_s for r in everything if r.due_s > now)
            continue
        now += cost_s(profile, chunks)
        for r, new in chunks:
            r.cached += new
            if r.cached == r.prompt + len(r.tokens_s):
                r.tokens_s.append(now)
    return everything


def shared_gpu(work: list[tuple[float, float, float]], quantum_s: float) -> list[float]:
    """End times of jobs (arrival s, seconds of work, weight) on one GPU that serves them in turns of `quantum_s` times
    the weight."""
    left = [seconds for _, seconds, _ in work]
    ends = [0.0] * len(work)
    now = 0.0
    while any(x > 0 for x in left):
        here = [i for i, (at, _, _) in enumerate(work) if at <= now and left[i] > 0]
        if not here:
            now = min(at for i, (at, _, _) in enumerate(work) if left[i] > 0)
            continue
        for i in here:
            taken = min(left[i], quantum_s * work[i][2])
            left[i] -= taken
            now += taken
            if left[i] <= 0:
                ends[i] = now
    return ends
