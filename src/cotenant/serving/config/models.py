"""Reading of models.yaml: language models behind one endpoint, each a program with OpenAI's API, and their shared
GPUs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cotenant.agent.config.files import check_name
from cotenant.core.checked import Fraction, Memory, Seconds, Strict, check
from cotenant.core.errors import InputError
from cotenant.core.gpus import CATALOG, find_gpu
from cotenant.core.yamlfile import YamlFile, read_yaml
from cotenant.observability.http import parse_address
from cotenant.policy.residency import ModelFacts
from cotenant.serving.config.server import ListenEntry
from cotenant.serving.config.services import MOST_PRIORITY

# value of gpus.model for the software GPU
SOFT = "soft"
# value of gpus.model for programs that use no GPU; such programs cannot be evicted to host memory, so they are stopped
CPU = "cpu"
MOST_MODELS = 10_000
PORT = "{port}"


class ModelGpusEntry(Strict):
    """The setting `gpus`: the number of GPUs for the models, and the memory that models may use on each GPU. `model:
    soft` is the software GPU, which imitates a GPU on a machine without one. `model: cpu` means that the programs use
    no GPU."""

    count: int = Field(default=1, ge=1, le=64)
    """Number of GPUs that the models may use."""
    model: str | None = None
    """`soft`: the software GPU, which imitates a GPU on a machine without one; `cpu`: no GPU. By default the machine's
    GPUs. A GPU model, such as A100-40GB, states the memory of a GPU for plans and simulations."""
    memory: Memory | None = None
    """Memory that models may use on each GPU; by default all."""
    mechanism: Literal["auto", "time", "slices", "mps"] = "auto"
    """How models share a GPU. `time`: by turns; `slices`: by time slices of the hardware; `auto`: by slices if all
    models fit the GPU and it offers slices, otherwise by turns. `mps`: the programs work at the same time under one MPS
    server, which yields more tokens if a step does not fill the GPU, but a fault in one program can end the others.
    Models are evicted to host memory only if they take turns; under `slices` and `mps` they are stopped instead."""


class ModelEntry(Strict):
    """An entry of the setting `models`: one language model with its program."""

    name: str = Field(min_length=1, max_length=63)
    """The model's name in requests. On GPUs, the model's program is a tenant of the agent under the same name."""
    command: str = ""
    """The program; `{port}` becomes a free port of 127.0.0.1. It is run without a shell. Only `cotenant serve` needs
    it; plans and simulations start no program."""
    memory: Memory
    """GPU memory that the program may use in total: weights, KV cache, workspaces."""
    class_: Literal["latency-sensitive", "best-effort"] = Field(default="latency-sensitive", alias="class")
    """Best-effort models wait while a latency-sensitive model on the same GPU is working, and are evicted first."""
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    """Among models of one class, those with a larger priority are served first and evicted last."""
    ttft_ms: float = Field(default=1000.0, allow_inf_nan=False, gt=0)
    """Target for the time to the first token. Of several models that wait for a GPU, the one that would miss its target
    first is served first."""
    tpot_ms: float = Field(default=100.0, allow_inf_nan=False, gt=0)
    """Target for the mean time between output tokens, which metrics and simulations compare with the measured time.
    """
    request: Fraction = Field(default=0.0, ge=0, le=1)
    """Share of its GPU's time that the model gets at least, as long as it has work, while other models work there too.
    The requests of all models are 100% at most, so they can be kept whichever models are on one GPU."""
    keep: int = Field(default=0, ge=0)
    """1: start the model with the server, and never evict it."""
    served_as: str | None = Field(default=None, min_length=1)
    """The program's name for the model; by default the argument of `transformers serve`, else `name` if it is in the
    program's `/v1/models`, else the first there."""
    max_queue: int = Field(default=1000, ge=1, le=1_000_000)
    """Largest number of requests that may wait; further requests are refused."""
    max_concurrency: int = Field(default=256, ge=1, le=1_000_000)
    """Largest number of requests that the program processes at once."""

    @property
    def known_name(self) -> str | None:
        """The program's name for the model, if the file states it. `transformers serve MODEL` refuses every name except
        MODEL, and its `/v1/models` lists the models of its cache instead.
        """
        words = shlex.split(self.command) if self.served_as is None else []
        for program, verb, argument in zip(words, words[1:], words[2:], strict=False):
            if (Path(program).name, verb) == ("transformers", "serve") and not argument.startswith("-"):
                return argument
        return self.served_as


class ModelsListenEntry(ListenEntry):
    """`listen` of models.yaml."""

    origins: list[str] = Field(default=[], max_length=1000)
    """Origins whose web pages may call OpenAI's API from a browser (CORS), such as https://chat.example; `*`: all."""


class ModelsFile(BaseModel):
    """The whole of models.yaml. It may also contain the keys of a services file, which are passed to that file's
    reader.
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    gpus: ModelGpusEntry = ModelGpusEntry()
    """The GPUs that the models share."""
    models: list[ModelEntry] = Field(min_length=1, max_length=MOST_MODELS)
    """The models, each a program that speaks OpenAI's API."""
    listen: ModelsListenEntry = ModelsListenEntry()
    """Address and limits of the endpoint."""
    host_memory: Memory | None = None
    """Host memory for all evicted models together; by default only the limit of the agent applies, which is its setting
    `swap_memory`. The agent reserves the memory of each running program, evicted or not. An agent that the server
    starts may reserve this much, or half of the available memory if that is more."""
    load_timeout: Seconds = Field(default=600.0, gt=0)
    """How long a program may take to start."""
    answer_timeout: Seconds = Field(default=600.0, gt=0)
    """How long a program may send nothing of an answer. Then the request fails, so that a program that hangs does not
    keep its GPU for ever."""
    idle: Seconds = Field(default=10.0, ge=0)
    """How long a model must be idle before a model of a lower class or priority can replace it on its GPU."""


@dataclass(frozen=True)
class ModelsConfig:
    """models.yaml, validated. `services`: the part of the file about services, if it has one."""

    file: str
    raw: ModelsFile
    models: tuple[ModelEntry, ...]
    services: Mapping[str, Any] | None
    source: YamlFile | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the models run without GPU and agent."""
        return self.raw.gpus.model == CPU

    def facts(self) -> list[ModelFacts]:
        """Each model as the policy sees it."""
        return [
            ModelFacts(m.name, m.memory, m.class_ == "best-effort", m.priority, kept=m.keep > 0, late_s=m.ttft_ms / 1e3)
            for m in self.models
        ]


def is_models_file(content: Any) -> bool:
    """Whether a file describes language models: there `models` is a list, in a services file it is the name of a
    folder. A file whose list has a misspelt key, or which has a mapping of models, counts, too, so that the error is
    about that key.
    """
    if not isinstance(content, Mapping):
        return False
    return isinstance(content.get("models"), list | dict) or _misspelt(content) is not None


def _misspelt(content: Mapping[str, Any]) -> str | None:
    """Return the key that stands in place of `models`: its value is a list of entries with commands. None: no key."""
    for key, value in content.items():
        if isinstance(value, list) and any(isinstance(entry, Mapping) and "command" in entry for entry in value):
            return None if key in ("models", "services", "applications") else str(key)
    return None


def read_models(path: str | Path, *, starts: bool = True) -> ModelsConfig:
    """Read models.yaml; InputError names line and field. `starts`: models need the commands of their programs."""
    read = read_yaml(path)
    with read.located():
        return parse_models(read.content, path, read, starts=starts)


def parse_models(
    content: Any, path: str | Path = "models", source: YamlFile | None = None, *, starts: bool = True
) -> ModelsConfig:
    """Validate the content of models.yaml, as `read_models` does."""
    if not is_models_file(content):
        raise InputError("needs a list of models", field="models")
    if isinstance(content.get("models"), dict):
        raise InputError("must be a list: each model an entry with name, command and memory", field="models")
    if not isinstance(content.get("models"), list) and (key := _misspelt(content)) is not None:
        raise InputError("unknown setting for a list of models; did you mean models?", field=key)
    services = _services(content) if "services" in content else None
    raw = check(ModelsFile, content)
    if services is None and raw.model_extra:
        known = ", ".join(ModelsFile.model_fields)
        raise InputError(f"unknown setting; known: {known}", field=next(iter(raw.model_extra)))
    if services is None:
        _check_gpu_model(raw.gpus.model, starts)
    address = raw.listen.http
    if address in (None, "", "none"):
        raise InputError("language models are served over HTTP only", field="listen.http")
    parse_address(str(address), "listen.http")
    seen: set[str] = set()
    for i, model in enumerate(raw.models):
        _check_model(model, f"models[{i}]", starts)
        if model.name in seen:
            raise InputError(f"{model.name} is declared twice", field=f"models[{i}].name")
        seen.add(model.name)
    _check_origins(raw.listen.origins)
    _check_requests(raw)
    _check_memory(raw)
    return ModelsConfig(str(path), raw, tuple(raw.models), services, source)


def _services(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of models.yaml about services, in the form that the reader of services.yaml expects."""
    own = ModelsFile.model_fields.keys() - {"gpus", "listen"}
    found = {key: value for key, value in content.items() if key not in own}
    if isinstance(found.get("gpus"), Mapping):
        found["gpus"] = {key: value for key, value in found["gpus"].items() if key in ("count", "model")}
    if isinstance(found.get("listen"), Mapping):
        found["listen"] = {key: value for key, value in found["listen"].items() if key != "origins"}
    return found


def _check_model(model: ModelEntry, where: str, starts: bool) -> None:
    check_name(model.name, field=f"{where}.name")
    if model.keep > 1:
        raise InputError(f"a model has one program, so keep is 0 or 1, not {model.keep}", field=f"{where}.keep")
    if not model.command and starts:
        raise InputError("is missing: the program that serves the model", field=f"{where}.command")
    if not model.command:
        return
    try:
        words = shlex.split(model.command)
    except ValueError as error:
        raise InputError(f"is not a valid command line: {str(error).lower()}", field=f"{where}.command") from None
    if not any(PORT in word for word in words):
        raise InputError(f"must contain {PORT}, for the port on which the program listens", field=f"{where}.command")
    if PORT in words[0]:
        raise InputError(f"must begin with the program's name, and {PORT} must come after it", field=f"{where}.command")


def _check_gpu_model(name: str | None, starts: bool) -> None:
    """Refuse a name that nothing knows: a server would run the models on the machine's GPUs instead, and a plan would
    not know the memory of a GPU. (The profiles of services may have names of their own.)"""
    if name in (None, SOFT, CPU):
        return
    try:
        find_gpu(str(name))
    except InputError:
        instead = "leave it out to use the GPUs of this machine" if starts else "leave it out and give gpus.memory"
        known = ", ".join(CATALOG)
        text = f"{name!r} is neither {SOFT}, nor {CPU}, nor a known GPU model: give one of {known}, or {instead}"
        raise InputError(text, field="gpus.model") from None


def _check_origins(origins: Sequence[str]) -> None:
    """Raise InputError for an entry that is no origin, since no browser would ever send it."""
    for origin in origins:
        scheme, mark, host = origin.partition("://")
        if origin != "*" and not (scheme and mark and host and host.isascii() and not set(host) & set("/ ?#*\r\n")):
            text = f"{origin!r} is not an origin such as https://chat.example or http://localhost:3000, nor '*' for all"
            raise InputError(text, field="listen.origins")
        sent = origin.lower().removesuffix({"http": ":80", "https": ":443"}.get(scheme.lower(), ""))
        if origin != sent:
            raise InputError(f"write {sent!r}, as browsers send it, not {origin!r}", field="listen.origins")


def _check_requests(raw: ModelsFile) -> None:
    """Raise InputError for a request that could not be kept."""
    total = 0.0
    for i, model in enumerate(raw.models):
        if not model.request:
            continue
        total += model.request
        why = ""
        if raw.gpus.model == CPU:
            why = "leave it out with model: cpu, because no GPU is shared then"
        elif raw.gpus.mechanism == "mps":
            why = "leave it out with mechanism: mps, under which models use the GPU at the same time"
        elif model.class_ == "best-effort":
            why = "leave it out for a best-effort model, which waits for the others"
        elif total > 1.0 + 1e-9:
            why = f"with it the requests of all models are {total:.0%}; they must be 100% at most"
        if why:
            raise InputError(why, field=f"models[{i}].request")


def _check_memory(raw: ModelsFile) -> None:
    """Check the declared memory as far as that is possible before the GPUs are known."""
    if raw.gpus.model == CPU and raw.gpus.mechanism != "auto":
        raise InputError("leave it out with model: cpu, because no GPU is shared then", field="gpus.mechanism")
    each = raw.gpus.memory
    if each is None:
        if raw.gpus.model == CPU:
            raise InputError(
                "needs memory: the host memory that all programs together may use, such as memory: 32GiB",
                field="gpus",
            )
        return
    check_sizes(raw.models, each)


def check_sizes(models: Sequence[ModelEntry], each_bytes: int) -> None:
    """Raise InputError if a model needs more than the memory that models may use on each GPU."""
    for i, model in enumerate(models):
        if model.memory > each_bytes:
            raise InputError(
                f"{model.name} needs {model.memory / 2**30:.2f} GiB, but the models may use only "
                f"{each_bytes / 2**30:.2f} GiB of each GPU",
                field=f"models[{i}].memory",
            )


def check_kept(models: tuple[ModelEntry, ...], gpu_bytes: list[int]) -> None:
    """Raise InputError if the models to keep do not fit together, or if a model fits on no GPU (first fit, largest
    first).
    """
    free = sorted(gpu_bytes, reverse=True)
    for i, model in enumerate(models):
        if model.memory > free[0]:
            raise InputError(
                f"{model.name} needs {model.memory / 2**30:.2f} GiB and no GPU has more than {free[0] / 2**30:.2f} GiB",
                field=f"models[{i}].memory",
            )
    for model in sorted((m for m in models if m.keep), key=lambda m: -m.memory):
        place = next((g for g, left in enumerate(free) if left >= model.memory), None)
        if place is None:
            raise InputError(
                f"the models to keep do not fit together: there is no room for {model.name}", field="models"
            )
        free[place] -= model.memory
