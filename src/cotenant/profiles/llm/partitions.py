"""Language models on parts of a GPU, as services that the packing planners can place.

An engine repeats steps. With b requests in its cache each step decodes a token of every request. Since a request stays
for D decodes, each step also prefills b / D prompts in the mean:

    step_ms(b) = decodes of b requests + b / D prefills

For the planners, such an engine is a service whose batch of b gives b answers: a step is a batch, and a token is an
answer. The service's rate is in decoded tokens per second. Its longest cycle is the longest step that keeps TPOT and
TTFT; a prompt waits for the end of one step, and then takes one step or more.

Times on a part of a GPU are measured there (row `MODEL@PARTITION` of a profile), or estimated from those of the whole
GPU. The time of work that is limited by arithmetic is divided by the part's fraction of the SMs. The time of work that
is limited by memory is divided by the part's fraction of the bandwidth. A part that is no MIG instance of its own is
assumed to have only its fraction of the bandwidth, although more may be free, so that the estimate holds whatever its
neighbours do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.mig import geometry
from cotenant.core.serving import MAX_BATCH, Service
from cotenant.profiles.llm.profile import LlmProfile, StepTimes, pairs_of
from cotenant.profiles.serving.latency import ModelProfile, Partition, ServingProfile

USABLE = 0.9  # plans use this fraction of the memory of a GPU or an instance
# fractions of the SMs that a partition may have on a GPU without MIG; an instance can only be halved
PARTS = (0.4, 0.5, 0.6)
# largest number of gpulets (parts on which one model runs) on a GPU: two halves of each of seven instances
MOST_PARTS = 14


@dataclass(frozen=True)
class Traffic:
    """The requests to one language model. Means over requests: `prompt` tokens, `pairs` of prompt tokens for attention,
    `decodes` (tokens after the first). `context`: mean tokens in the cache over all decodes. `longest`: tokens that one
    prompt in a hundred exceeds.
    """

    rate_rps: float
    prompt: float
    pairs: float
    decodes: float
    context: float
    longest: int


def request_for(times: StepTimes, traffic: Traffic, tpot_s: float) -> float:
    """Estimate the part of a GPU's time with which a model's tokens are `tpot_s` apart in the mean: a step every
    `tpot_s`, for the requests that decode at this pace, but at least one, and its prompts. Above 1: no GPU suffices.
    """
    decoding = max(1.0, traffic.rate_rps * traffic.decodes * tpot_s)
    step_s = times.decode_base + decoding * (times.per_sequence + times.per_context * traffic.context)
    prompts = traffic.rate_rps * (times.per_token * traffic.prompt + times.per_pair * traffic.pairs)
    return step_s / tpot_s + prompts


@dataclass(frozen=True)
class Engine:
    """A language model to place: its profile on the whole GPU and `measured` step times by partition, the GPU memory
    that its program takes, its SLOs and its requests."""

    name: str
    profile: LlmProfile
    memory_bytes: int
    ttft_ms: float
    tpot_ms: float
    traffic: Traffic
    priority: int = 0
    latency_sensitive: bool = True
    measured: Mapping[str, StepTimes] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Return how many requests the engine's KV cache holds at once."""
        each = math.ceil(self.traffic.prompt + self.traffic.decodes + 1)
        return min(self.profile.max_sequences, self.profile.kv_tokens // each, MAX_BATCH)

    def times_on(self, part: Partition, slots: int) -> StepTimes:
        """Return the step times on a partition of a GPU. `slots`: number of memory slots of the whole GPU."""
        if part.label in self.measured:
            return self.measured[part.label]
        bandwidth = part.share * part.slots / slots if part.slots else part.fraction
        return self.profile.times.on(part.fraction, bandwidth)

    def step_ms(self, times: StepTimes, requests: int) -> float:
        """Return the mean length of a step while this many requests decode, and new requests enter as fast as others
        end.
        """
        t, prefills = self.traffic, requests / self.traffic.decodes
        some = min(1.0, prefills)  # the fraction of the steps that have prompts
        base = times.decode_base + some * max(0.0, times.prefill_base - times.decode_base)
        decode = requests * (times.per_sequence + times.per_context * t.context)
        prompt = times.per_token * t.prompt + times.per_pair * t.pairs
        on_gpu = max(times.prefill_base, times.decode_base) + decode + max(1.0, prefills) * prompt
        return 1e3 * (base + decode + prefills * prompt + some * max(0.0, times.prefill_least - on_gpu))

    def longest_cycle_ms(self, times: StepTimes) -> float:
        """Return the longest cycle that keeps TPOT and TTFT: a prompt waits for the end of one cycle (of two, if the
        engine schedules ahead), and takes one cycle for each chunk in addition to its own work. Not above 0 if TTFT
        cannot be kept.
        """
        prompt = self.traffic.longest
        chunks = math.ceil(prompt / self.profile.step_tokens)
        on_gpu = chunks * times.prefill_base + times.per_token * prompt + times.per_pair * pairs_of(prompt)
        alone = max(on_gpu, chunks * times.prefill_least)
        cycles = 1 + self.profile.schedules_ahead + chunks
        return min(self.tpot_ms, (self.ttft_ms - 1e3 * (self.profile.request_s + alone)) / cycles)


def divided(gpu: str, memory_bytes: int | None = None) -> ServingProfile:
    """Return a profile with the possible partitions of a GPU model: MIG instances and their halves if it has MIG,
    fractions of the SMs of the undivided GPU, and the whole GPU. `memory_bytes`: memory that models may use on each
    GPU.
    """
    card = find_gpu(gpu, "divide")
    parts = [Partition(1.0, "100%"), *(Partition(x, f"{x:.0%}") for x in PARTS)]
    slots = 0
    if card.mig is not None:
        geo = geometry(gpu, double_memory=True)
        slots = geo.memory_slots
        for kind, row in geo.profiles.items():
            fraction = row.compute / geo.compute_slices if row.sms is None else row.sms / card.sms
            if row.compute < geo.compute_slices:  # the largest instance is left out, because it equals the whole GPU
                whole = Partition(fraction, kind, row.memory_slots)
                parts += [whole, whole.cut(f"{kind}/50%", 0.5)]
    usable = USABLE if memory_bytes is None else min(1.0, memory_bytes / card.memory_bytes)
    return ServingProfile(
        card.name, "", card.memory_bytes, tuple(sorted(parts)), {}, usable=usable, max_gpulets=MOST_PARTS, slots=slots
    )


def as_services(base: ServingProfile, engines: Sequence[Engine]) -> tuple[ServingProfile, list[Service]]:
    """Return the engines as models of a profile and as services whose rates are decoded tokens/s. InputError for an
    engine that keeps its SLOs on no partition.
    """
    models, services = dict(base.models), []
    for engine in engines:
        cycle_ms, latency = _table(base, engine)
        models[engine.name] = ModelProfile(engine.name, engine.memory_bytes, latency)
        services.append(
            Service(
                engine.name, engine.name, engine.traffic.rate_rps * engine.traffic.decodes, 2.0 * cycle_ms,
                engine.priority, engine.latency_sensitive,
            )
        )  # fmt: skip
    return replace(base, models=models), services


def _table(base: ServingProfile, engine: Engine) -> tuple[float, dict[str, tuple[tuple[int, float], ...]]]:
    """Return the longest cycle of an engine, and the length of its steps by partition and number of requests.

    A larger partition permits a longer cycle within TTFT, but a service has only one cycle. The cycle chosen is the one
    with which a token costs the smallest fraction of a GPU. Partitions that would need a shorter cycle are not used.
    """
    if engine.most < 1:
        raise InputError(f"the KV cache of {engine.name} is too small for one request of mean length", field="profile")
    steps, longest = {}, {}
    for part in base.partitions:
        times = engine.times_on(part, base.slots)
        steps[part] = [engine.step_ms(times, b) for b in range(1, engine.most + 1)]
        longest[part] = engine.longest_cycle_ms(times)
    best: tuple[float, float] | None = None
    for cycle_ms in sorted({x for x in longest.values() if x > 0}, reverse=True):
        for part, ms in steps.items():
            rates = [(b + 1) / x for b, x in enumerate(ms) if x <= cycle_ms] if longest[part] >= cycle_ms else []
            if rates and (best is None or part.fraction / max(rates) < best[0] * (1 - 1e-9)):
                best = (part.fraction / max(rates), cycle_ms)
    if best is None:
        raise InputError(
            f"{engine.name} cannot keep its SLOs ({engine.ttft_ms:g} ms to the first token, {engine.tpot_ms:g} ms per "
            f"token) even alone on a whole {base.gpu}",
            field="models",
        )
    cycle_ms = best[1]
    table = {
        part.label: tuple((b + 1, x) for b, x in enumerate(ms) if x <= cycle_ms)
        for part, ms in steps.items() if longest[part] >= cycle_ms
    }  # fmt: skip
    return cycle_ms, {label: points for label, points in table.items() if points}
