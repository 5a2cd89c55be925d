"""Model of the duration of an engine's iteration: prefill by tokens, decode by batch and context.

An engine with iteration-level batching runs steps. A step computes T new prompt tokens of some requests, whose
attention goes over A pairs of a new and an earlier token. In the same step, B other requests decode one token each, and
read C tokens of context:

    step_s = base + per_token T + per_pair A + per_sequence B + per_context C

`base` is that of the prefill or of the decode, the larger one if a step has both: the weights are read once. The form
is that of a roofline: products with the weights grow with T, attention with A, and a decode reads weights and cache.
A step with prompt tokens takes `prefill_least` at least, the time in which the host launches its kernels one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.errors import InputError
from cotenant.core.gpus import Gpu, find_gpu
from cotenant.core.units import format_bytes

H100_FLOPS = 989e12  # peak rate of an H100's dense bf16 arithmetic, in FLOP/s
H100_BYTES_PER_S = 3.35e12
H100_MEMORY = 80 << 30
ESTIMATED = ", estimated"  # follows the name of the GPU in a profile that was not measured there
USED_MEMORY = 0.9  # fraction of a program's memory that weights and cache may fill
# fractions of the GPU's peak arithmetic rate and bandwidth that a good engine reaches
REACHED_FLOPS, REACHED_BYTES = 0.6, 0.8


@dataclass(frozen=True)
class Step:
    """The work of one iteration: the amounts T, A, B and C of the formula at the top of the module."""

    tokens: int = 0
    pairs: int = 0
    sequences: int = 0
    context: int = 0


@dataclass(frozen=True)
class StepTimes:
    """Coefficients of the module's formula of step times, in seconds."""

    prefill_base: float
    per_token: float
    per_pair: float
    decode_base: float
    per_sequence: float
    per_context: float
    prefill_least: float = 0.0

    def seconds(self, step: Step) -> float:
        """Return the length of a step on the whole GPU in seconds."""
        base = max(self.prefill_base if step.tokens else 0.0, self.decode_base if step.sequences else 0.0)
        on_gpu = (
            base + self.per_token * step.tokens + self.per_pair * step.pairs
            + self.per_sequence * step.sequences + self.per_context * step.context
        )  # fmt: skip
        return max(on_gpu, self.prefill_least) if step.tokens else on_gpu

    def scaled(self, factor: float) -> StepTimes:
        """Return these step times, all multiplied by a factor."""
        return StepTimes(*(x * factor for x in vars(self).values()))

    def on(self, compute: float, bandwidth: float) -> StepTimes:
        """Estimate the step times on a part of the GPU, or on another GPU. `compute` and `bandwidth`: its arithmetic
        rate and memory bandwidth, as fractions of those of the whole GPU of these times.
        """
        return StepTimes(
            self.prefill_base / bandwidth, self.per_token / compute, self.per_pair / compute,
            self.decode_base / bandwidth, self.per_sequence, self.per_context / bandwidth, self.prefill_least,
        )  # fmt: skip


@dataclass(frozen=True)
class LlmProfile:
    """The profile of a language model on one GPU. `kv_tokens`: capacity of the cache, in tokens of all running
    requests; `step_tokens`: maximum tokens of a step; `max_sequences`: maximum requests in a step; `max_context`:
    maximum tokens of one request, prompt and answer together; `request_s`: seconds that a request spends outside of
    steps before its first token, as for HTTP and tokenizing, while steps of other requests run; `schedules_ahead`:
    whether the engine decides what a step computes when the step before begins, so that a request that arrives during a
    step also waits for the next one.
    """

    name: str
    times: StepTimes
    kv_tokens: int = 200_000
    step_tokens: int = 8192
    max_sequences: int = 256
    max_context: int = 32_768
    weights_bytes: int = 0
    gpu: str = ""
    request_s: float = 0.0
    schedules_ahead: bool = False

    def __post_init__(self) -> None:
        for field in ("kv_tokens", "step_tokens", "max_sequences", "max_context"):
            if getattr(self, field) < 1:
                raise InputError(f"{getattr(self, field)} is not 1 or more", field=field)
        for field, value in vars(self.times).items():
            if not 0 <= value < 1e6:
                raise InputError(f"{value} s is not a time of at least 0", field=field)
        if not 0 <= self.request_s < 1e6:
            raise InputError(f"{self.request_s} s is not a time of at least 0", field="request_s")

    def scaled(self, factor: float) -> LlmProfile:
        """Return the model's profile for a GPU whose steps take `factor` times as long."""
        return replace(self, times=self.times.scaled(factor))

    @property
    def card(self) -> Gpu | None:
        """The GPU model on which the step times hold; None if the profile names none of the catalog."""
        try:
            return find_gpu(self.gpu.partition(ESTIMATED)[0])
        except InputError:
            return None

    def on(self, card: Gpu) -> LlmProfile:
        """Return the profile with step times estimated for a GPU model: those of work that is limited by arithmetic by
        the ratio of the GPUs' FLOP/s, and those of work that is limited by memory by the ratio of their bandwidths.
        Unchanged if the profile is that of this GPU, or of none in the catalog.
        """
        own = self.card
        if own is None or own == card:
            return self
        times = self.times.on(card.fp16_tflops / own.fp16_tflops, card.bandwidth_gbps / own.bandwidth_gbps)
        source = "" if ESTIMATED in self.gpu else f" from times on {self.gpu}"
        return replace(self, times=times, gpu=f"{card.name}{ESTIMATED}{source}")


def pairs_of(tokens: int, before: int = 0) -> int:
    """Return the number of pairs of tokens over which the attention of `tokens` new prompt tokens is computed, with
    `before` tokens in the cache.
    """
    return tokens * before + tokens * (tokens + 1) // 2


def roofline(name: str, parameters: float, memory_bytes: float = H100_MEMORY) -> LlmProfile:
    """Return the profile of a dense model in bf16 on an H100, estimated from its size alone: for planning before a
    profile is measured.

    Layers and width follow the shapes of published models (12 L d^2 parameters, L = d / 128, keys and values
    of d / 4).
    """
    width = (parameters * 128 / 12) ** (1 / 3)
    layers = width / 128
    kv_bytes = 2 * layers * (width / 4) * 2
    weights = 2 * parameters
    flops, bps = H100_FLOPS * REACHED_FLOPS, H100_BYTES_PER_S * REACHED_BYTES
    base = weights / bps
    times = StepTimes(base, 2 * parameters / flops, 4 * layers * width / flops, base, 20e-6, kv_bytes / bps)
    tokens = int((USED_MEMORY * memory_bytes - weights) / kv_bytes)
    if tokens < 1:
        raise InputError(
            f"{name} of {parameters / 1e9:g}B needs more than {format_bytes(memory_bytes)}", field="profile"
        )
    return LlmProfile(name, times, tokens, weights_bytes=int(weights), gpu=f"H100{ESTIMATED}")


def parse_size(text: str) -> float | None:
    """Return the number of parameters that a size such as 8b or 0.5B states; None if the text is not a size."""
    try:
        value = float(text[:-1]) * 1e9 if text[-1:] in ("b", "B") else 0.0
    except ValueError:
        return None
    return value if 1e6 <= value <= 1e12 else None
