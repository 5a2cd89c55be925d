"""Code that the commands for language models share: requests from options, a simulator setup from models.yaml and
profiles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.cli.added_options import Command, Options, with_options
from cotenant.core.errors import InputError
from cotenant.core.units import number_or_nan, parse_fraction, parse_seconds

if TYPE_CHECKING:
    from cotenant.profiles.llm.profile import LlmProfile
    from cotenant.serving.config.models import ModelsConfig
    from cotenant.sim.llm.engine import LlmSetup, SimModel
    from cotenant.workloads.llm.trace import TokenTrace

REQUESTS = "Requests"
Text = str | None
DEFAULT_GPU_BYTES = 80 << 30  # that of an H100-80GB, for which the times of a model size are estimated
DEFAULT_S = 60.0  # duration of generated requests, if no option states one

REQUEST_OPTIONS: Options = {
    "trace": (Text, None, "FORMAT:PATH; see Token traces in docs/traces.md."),
    "rate": (list[str] | None, None, "Requests/s of all models together, or NAME=R. Repeatable."),
    "prompt": (str, "512", "Prompt lengths in tokens: 512, 100-900, 512~1.2 (mean~CV)."),
    "output": (str, "128", "Answer lengths in tokens, in the same notation."),
    "arrivals": (str, "poisson", "poisson, constant, bursts, gamma:CV, mmpp:..."),
    "duration": (Text, None, "Duration (default: the whole trace, else 60s)."),
    "start": (str, "0s", "Time in the trace at which to start."),
    "speed": (float, 1.0, "Factor by which the trace's gaps are shortened."),
    "keep": (str, "100%", "Random fraction of the trace's requests to keep: 10%."),
    "seed": (int, 0, "Seed of the random draws.", {"min": 0}),
}
Profiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        help="Profile of all models, or NAME=PROFILE: a file written by `profile llm`, or a model size "
        "(8b). Repeatable.",
    ),
]


@dataclass(frozen=True)
class GpuMemory:
    """The memory that models may use on each GPU, in bytes. `source`: `gpus.memory` or `gpus.model` of the models file,
    `--divide`, or `default`."""

    each_bytes: int
    source: str
    model: str | None = None  # name of the GPU model in the catalog, if one was given

    def content(self) -> dict[str, int | str]:
        """As keys of a JSON object."""
        return {"gpu_memory_bytes": self.each_bytes, "gpu_memory_from": self.source}

    def sentence(self) -> str:
        """Return a sentence that states the memory and its source."""
        why = {
            "gpus.model": f"the memory of {self.model}, as gpus.model states",
            "--divide": f"assumed for {self.model}; to change it, set gpus.memory in the file",
            "default": "assumed; to change it, set gpus.model or gpus.memory in the file",
        }.get(self.source, f"as {self.source} states")
        return f"models may use {self.each_bytes / 2**30:g} GiB of each GPU ({why})"


def gpu_memory(config: ModelsConfig, divide: str | None = None) -> GpuMemory:
    """Return the memory of each GPU for a plan or a simulation. `divide`: GPU model whose parts are planned, if any.
    InputError names file and field if the GPU model is unknown or has less memory than gpus.memory, or if a model needs
    more than one GPU has.
    """
    from cotenant.core.gpus import find_gpu
    from cotenant.serving.config.models import CPU, SOFT, check_sizes

    given, name = config.raw.gpus.memory, config.raw.gpus.model
    card = find_gpu(divide, "divide") if divide is not None else None
    with contextlib.nullcontext() if config.source is None else config.source.located():
        if card is None and name not in (None, SOFT, CPU):
            try:
                card = find_gpu(str(name))
            except InputError as error:
                # beside services the name may be that of a profile of theirs, of which only the memory need be known
                if given is None:
                    raise InputError(f"{error.message}; or give gpus.memory", field="gpus.model") from None
        if given is not None and card is not None and given > card.memory_bytes:
            has = f"{card.name} has only {card.memory_bytes / 2**30:g} GiB"
            raise InputError(f"{given / 2**30:g} GiB are too much: {has}", field="gpus.memory")
        if given is not None:
            found = GpuMemory(given, "gpus.memory", None if card is None else card.name)
        elif divide is not None and card is not None:
            from cotenant.profiles.llm.partitions import USABLE

            found = GpuMemory(round(USABLE * card.memory_bytes), "--divide", card.name)
        elif card is not None:
            found = GpuMemory(card.memory_bytes, "gpus.model", card.name)
        else:
            found = GpuMemory(DEFAULT_GPU_BYTES, "default")
        check_sizes(config.models, found.each_bytes)
    return found


def times_content(setup: LlmSetup) -> dict[str, dict[str, str]]:
    """As a key of a JSON object: the GPU on which each model's step times hold, as its profile names it."""
    return {"step_times_of": {m.facts.name: m.profile.gpu for m in setup.models}}


def times_sentence(setup: LlmSetup, memory: GpuMemory) -> str:
    """Return a sentence that states on which GPUs the step times of the profiles hold, and whether they are those of
    the GPUs of the plan or simulation."""
    known = dict.fromkeys(m.profile.gpu or "a GPU that the profile does not name" for m in setup.models)
    text = f"step times: those of {' and '.join(known)}"
    if memory.model is not None and (unknown := [m.facts.name for m in setup.models if m.profile.card is None]):
        text += f" (not scaled to {memory.model}: the profile of {', '.join(unknown)} names no GPU of the catalog)"
    return text


@dataclass(frozen=True)
class Requests:
    """The options that describe requests to language models, as they were given."""

    trace: str | None
    rate: list[str] | None
    prompt: str
    output: str
    arrivals: str
    duration: str | None
    start: str
    speed: float
    keep: str
    seed: int


def takes_requests(command: Command) -> Command:
    """Decorator that adds the options about requests to a command, which receives them as `requests: Requests`."""
    return with_options(command, {REQUESTS: REQUEST_OPTIONS}, "requests", Requests)


def build_trace(models: Sequence[str], given: Requests, factor: float = 1.0) -> TokenTrace:
    """Generate the requests that the options describe, for these models, at `factor` times the rates."""
    from cotenant.workloads.llm.drawn import draw_trace
    from cotenant.workloads.llm.registry import read_tokens
    from cotenant.workloads.llm.trace import TokenOptions

    length_s = None if given.duration is None else parse_seconds(given.duration, field="duration")
    if given.trace is None:
        if not given.rate:
            raise InputError("give the requests: --trace FORMAT:PATH, or --rate R")
        rates = [r * factor for r in rates_of(models, given.rate)]
        length_s = length_s or DEFAULT_S
        return draw_trace(models, rates, given.prompt, given.output, length_s, given.arrivals, given.seed)
    if given.rate:
        raise InputError("a trace has its own rate; change it with --speed or --keep", field="rate")
    options = TokenOptions(parse_seconds(given.start, field="start"), length_s or math.inf, given.seed)
    found = read_tokens(given.trace, options).thinned(parse_fraction(given.keep, field="keep"), given.seed)
    return found.faster(given.speed * factor).onto(models, given.seed)


def fitting(trace: TokenTrace, models: Sequence[SimModel], each: bool = False) -> TokenTrace:
    """Return the requests that fit the context of their model. InputError if none does; with `each`, if a model has
    requests of which none does.
    """
    from cotenant.sim.llm.engine import longest

    most = longest(models)
    found = trace.fitting(most)
    for index, model in enumerate(models):
        if each and (trace.model == index).any() and not (found.model == index).any():
            text = f"no request of {model.facts.name} fits into the {most[index]:,} tokens of its context"
            raise InputError(f"{text}; shorten prompts or answers")
    if not len(found):
        limits = " or ".join(f"{n:,}" for n in sorted(set(most)))
        text = f"no request fits into the {limits} tokens of the models' contexts"
        raise InputError(f"{text}; shorten prompts or answers")
    return found


def rates_of(models: Sequence[str], given: Sequence[str]) -> list[float]:
    """Return the requests/s of each model. `given` has texts NAME=R, the rate of one model, and at most one R without a
    name: the total rate of all models without a NAME=R, divided equally among them.
    """
    named: dict[str, float] = {}
    whole: float | None = None
    for text in given:
        name, equals, number = text.rpartition("=")
        value = number_or_nan(number)
        if 1e6 <= value < math.inf:
            raise InputError(f"{text!r} is over the limit of 1,000,000 requests/s", field="rate")
        if not 0 <= value < 1e6 or (not equals and whole is not None):
            raise InputError(f"{text!r} is not a rate in requests per second", field="rate")
        if equals and name not in models:
            raise InputError(f"there is no model {name!r}; the models are {', '.join(models)}", field="rate")
        if equals:
            named[name] = value
        else:
            whole = value
    others = max(1, len(models) - len(named))
    return [named.get(name, (whole or 0.0) / others) for name in models]


def profiles_of(config: ModelsConfig, given: Sequence[str], gpu: str | None = None) -> list[LlmProfile]:
    """Return a profile for each model of the file, in the file's order. `gpu`: model of the GPUs for which step times
    are estimated, if a profile is of others; None: not known, and the profiles' step times are used."""
    from cotenant.core.gpus import find_gpu
    from cotenant.profiles.llm.files import find_profile

    card = None if gpu is None else find_gpu(gpu)
    names = [m.name for m in config.models]
    specs: dict[str, str] = {}
    for text in given:
        name, equals, spec = text.partition("=")
        if equals and name not in names:
            raise InputError(f"there is no model {name!r}; the models are {', '.join(names)}", field="profile")
        specs |= {name: spec} if equals else {n: specs.get(n, text) for n in names}
    found = []
    for model in config.models:
        if model.name not in specs:
            raise InputError(f"{model.name} has no profile; give --profile {model.name}=FILE or =8b", field="profile")
        profile = replace(find_profile(specs[model.name], model.name, model.memory), name=model.name)
        found.append(profile if card is None else profile.on(card))
    return found


def build_setup(
    config: ModelsConfig, profiles: Sequence[LlmProfile], memory: GpuMemory, gpus: int | None, sharing: str,
    shares: Sequence[str], warm: bool = True, prefix_cache: bool = False, start_s: float | None = None,
) -> LlmSetup:  # fmt: skip
    """Return the simulator's setup for models.yaml and the profiles."""
    from cotenant.core.metrics.tokens import Target
    from cotenant.policy.residency import ModelSettings
    from cotenant.policy.shares.timetable import divide_by_request
    from cotenant.sim.llm.engine import LlmSetup, SimModel

    weights = dict.fromkeys((m.name for m in config.models), 1.0 / len(config.models) if sharing == "fixed" else 1.0)
    if any(m.request for m in config.models):
        weights = divide_by_request({m.name: m.request for m in config.models}, dict.fromkeys(weights, 1.0))
    for text in shares:
        name, equals, part = text.partition("=")
        if not equals or name not in weights:
            raise InputError(f"{text!r} is not NAME=FRACTION with a name of {', '.join(weights)}", field="share")
        weights[name] = parse_fraction(part, field="share")
    models = []
    for entry, facts, profile in zip(config.models, config.facts(), profiles, strict=True):
        target = Target(entry.name, entry.ttft_ms, entry.tpot_ms)
        known = facts if start_s is None else replace(facts, start_s=start_s)
        models.append(
            SimModel(known, profile, target, weights[entry.name], entry.max_concurrency, entry.max_queue)
        )  # fmt: skip
    settings = ModelSettings(idle_s=config.raw.idle)
    return LlmSetup(
        tuple(models), (memory.each_bytes,) * (gpus or config.raw.gpus.count), sharing, warm, prefix_cache, settings,
        0 if config.on_cpu else config.raw.host_memory,
    )  # fmt: skip
