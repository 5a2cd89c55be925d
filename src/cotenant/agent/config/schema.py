"""The agent's configuration file as pydantic models.

Only code that reads or describes the file imports this module, so that other commands, such as `cotenant run`, start
without loading pydantic.
"""

from __future__ import annotations

import dataclasses
import pwd
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, WithJsonSchema

from cotenant.agent.config.choices import one_or_range, split_ranges
from cotenant.agent.config.colocation import known_kernels, parse_colocation, whole
from cotenant.agent.config.copies import parse_copies
from cotenant.agent.config.files import (
    OVERSUBSCRIBE,
    AgentConfig,
    TenantSpec,
    check_name,
    check_spec,
    config_path,
    parse_gemini,
    quota_settings,
    read_text,
)
from cotenant.agent.config.swap import parse_moving, parse_piece
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.core.checked import PART, SIZE, TIME_WITH_UNIT, Memory, MemoryOrZero, Nanoseconds, Strict, check, parsed
from cotenant.core.errors import InputError
from cotenant.core.strength import Strength, strength_named
from cotenant.core.units import parse_fraction, parse_memory, parse_time
from cotenant.core.yamlfile import parse_yaml
from cotenant.policy.colocation import RUN_AHEAD, SCHEMES, ColocationSettings
from cotenant.policy.copies import CopySettings
from cotenant.policy.shares import DISCIPLINES, QuotaSettings
from cotenant.profiles.kernels.profile import CLASS_NAMES

# the JSON schemas of values that may be written as a range, such as 10%..50%, from which a launcher chooses
A_SHARE = WithJsonSchema({"type": ["number", "string"], "title": "share", "examples": ["30%", "10%..50%"]})
A_SIZE = WithJsonSchema({"type": ["integer", "string"], "title": "size", "examples": ["8GiB", "2GiB..16GiB"]})
STRENGTHS = {"enum": [strength.value for strength in Strength if strength is not Strength.NOTHING]}
A_LIMIT = WithJsonSchema(
    {
        "anyOf": [
            A_SIZE.json_schema,
            {
                "type": "object",
                "properties": {"bytes": A_SIZE.json_schema, "enforce": STRENGTHS},
                "required": ["bytes", "enforce"],
            },
        ]
    }
)
SOME_GPUS = WithJsonSchema({"type": ["string", "integer", "array"], "items": {"type": ["string", "integer"]}})
A_USER = WithJsonSchema({"type": ["string", "integer"]})
A_SCHEME = {"enum": [scheme.name for scheme in SCHEMES]}
SCHEME_OR_SETTINGS = WithJsonSchema(
    {
        "anyOf": [
            A_SCHEME,
            {
                "type": "object",
                "description": ColocationSettings.__doc__,
                "additionalProperties": False,
                "properties": {
                    each.name: {"scheme": A_SCHEME, "run_ahead": {"enum": [*RUN_AHEAD]}}.get(each.name)
                    or (PART.json_schema if each.type == "float" else {"type": "integer"})
                    for each in dataclasses.fields(ColocationSettings)
                },
            },
        ]
    }
)
ON_OR_SIZES = WithJsonSchema(
    {
        "anyOf": [
            {"type": "boolean"},
            {"type": "object", "properties": dict.fromkeys(("period_bytes", "chunk_bytes"), SIZE.json_schema)},
        ]
    }
)


def one_of(names: Collection[str]) -> WithJsonSchema:
    """The JSON schema of a setting that has one of these names."""
    return WithJsonSchema({"type": "string", "enum": [*names]})


Share = Annotated[float | tuple[float, float], parsed(one_or_range(parse_fraction)), A_SHARE]
Size = Annotated[int | tuple[int, int], parsed(one_or_range(parse_memory)), A_SIZE]
MECHANISMS = (mechanisms.AUTO, *mechanisms.names(Use.TENANT))
UNSET: Any = None  # stands for a setting that was not given; its default is in TenantSpec, AgentConfig or QuotaSettings


def _gpus(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        given = given.split(",")
    if not isinstance(given, list | tuple) or not all(isinstance(x, str | int) for x in given):
        raise InputError(f"{given!r} is not a list of GPUs (indices or UUIDs)")
    return tuple(str(x).strip() for x in given)


def _some_gpus(given: Any) -> tuple[str, ...]:
    found = _gpus(given)
    if not found:
        raise InputError("must be soft, all, or a list of GPU UUIDs")
    return found


def _user(given: Any) -> int:
    """A user's number, from name or number."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    try:
        return pwd.getpwnam(str(given)).pw_uid
    except KeyError:
        raise InputError(f"there is no user {given!r} on this machine") from None


def _discipline(name: Any) -> Any:
    if name not in [d.name for d in DISCIPLINES]:
        raise InputError(f"unknown discipline {name!r}; known: {', '.join(d.name for d in DISCIPLINES)}")
    return name


def _mechanism(name: Any) -> Any:
    if name not in MECHANISMS:
        raise InputError(f"unknown mechanism {str(name)[:40]!r}; known: {', '.join(MECHANISMS)}")
    return name


class MemoryLimit(Strict):
    """A memory limit with a demanded enforcement: `memory: {bytes: 8GiB, enforce: driver}`."""

    size: Size = Field(alias="bytes")
    """The memory limit."""
    enforce: Annotated[Strength, parsed(strength_named)]
    """Weakest enforcement with which the tenant may run; from strong to weak: kernel (the operating system's), driver,
    hardware, server, shim."""


_size = one_or_range(parse_memory)


def _memory(given: Any) -> Any:
    return check(MemoryLimit, given) if isinstance(given, Mapping) else _size(given)


class TenantEntry(Strict):
    """An entry of the setting `tenants`. Missing fields have the defaults of TenantSpec."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "class": "write latency_sensitive: true or best_effort: true",
    }

    name: Annotated[str, parsed(check_name)]
    """The tenant's name: 1 to 63 letters, digits and . _ / -"""
    request: Share = 0.0
    """Share of the GPU that the tenant gets while others compete. A range (10%..50%) lets the launcher choose."""
    limit: Share = 1.0
    """Share that the tenant never exceeds, even if it is alone on the GPU. May be a range, too."""
    memory_bytes: Annotated[int | tuple[int, int] | MemoryLimit, parsed(_memory), A_LIMIT] = Field(
        default=UNSET, alias="memory"
    )
    """GPU memory of all processes of the tenant: a size, a range, or a mapping that demands an enforcement."""
    priority: int = 0
    """For the discipline `priority`: tenants with a larger number go first."""
    weight: float = 0.0
    """Weight in the discipline `weighted-round-robin` and under MPS; by default the request."""
    gpus: Annotated[tuple[str, ...], parsed(_gpus), SOME_GPUS] = ()
    """Indices or UUIDs of the tenant's GPUs; by default the agent chooses one."""
    mechanism: Annotated[str, parsed(_mechanism), one_of(MECHANISMS)] = mechanisms.AUTO
    """How the share is enforced. auto: by hardware time slices (`slices`) if the GPU offers them and the tenant does
    not oversubscribe, otherwise by turns that the agent grants (`time`)."""
    uid: Annotated[int, parsed(_user), A_USER] = Field(default=UNSET, alias="user")
    """User who may run the tenant; by default the agent's user."""
    best_effort: StrictBool = False
    """Hold the tenant's work back while latency-sensitive tenants of its GPU have work."""
    work_class: Annotated[str | None, one_of(CLASS_NAMES[1:])] = None
    """Resource that limits the tenant's kernels, for the scheme orion: memory, compute, unknown."""
    work_sms: int = 0
    """Number of SMs that the tenant's kernels fill; 0: not known."""
    kernel_profile: Annotated[Any, WithJsonSchema({"type": "string"})] = None
    """File written by `cotenant profile kernels`. A relative path starts at the folder of the configuration file."""
    in_flight_us: Annotated[int, parsed(lambda value: whole(value, ""))] = 0
    """Largest GPU time of a best-effort tenant's launched but unfinished work; 0: that of the setting `colocation`."""
    copy_weight: float = Field(default=UNSET)
    """Weight of the tenant's copies over the PCIe link."""
    latency_sensitive: StrictBool = False
    """Best-effort tenants are held back while this tenant has work on their GPU, and this tenant's copies go first."""
    oversubscribe: Annotated[str, one_of(OVERSUBSCRIBE)] = "none"
    """How the tenant's memory is moved to the host to make space for others. none: not at all; swap: its processes copy
    their allocations; managed: the allocations are managed memory, which the driver moves; park: the driver checkpoints
    its processes."""


class AgentFile(Strict):
    """The whole file. Missing settings have the defaults of AgentConfig and QuotaSettings."""

    gpus: Annotated[tuple[str, ...], parsed(_some_gpus), SOME_GPUS] = ("all",)
    """GPUs of the agent: `soft` (the software GPU), `all`, or indices or UUIDs."""
    fail: Literal["open", "closed"] = "closed"
    """What tenants do without the agent: wait (closed), or continue without limits (open)."""
    discipline: Annotated[str, parsed(_discipline), one_of([each.name for each in DISCIPLINES])] = "request-limit"
    """Rule by which tenants get turns (time slices that the agent grants) under the mechanism `time`."""
    quota_ns: Nanoseconds = Field(default=UNSET, alias="quota")
    """Length of a tenant's turn until the length of the tenant's bursts of work is known."""
    min_quota_ns: Nanoseconds = Field(default=UNSET, alias="min_quota")
    """Length of the shortest turn."""
    max_quota_ns: Nanoseconds = Field(default=UNSET, alias="max_quota")
    """Length of the longest turn."""
    window_ns: Nanoseconds = Field(default=UNSET, alias="window")
    """Time window in which each tenant gets its request and does not exceed its limit."""
    idle_credit_ns: Nanoseconds = Field(default=UNSET, alias="idle_credit")
    """A tenant that was idle may make up later for at most this much idle time."""
    alone_ns: Nanoseconds = Field(default=UNSET, alias="alone_after")
    """A tenant that has been alone on its GPU for this time gets an unbounded turn."""
    exclusive_ns: Nanoseconds = Field(default=UNSET, alias="exclusive_turn")
    """Length of a turn in the discipline `exclusive-turns`."""
    grace_ns: Nanoseconds = Field(default=UNSET, alias="revoke_grace")
    """Time from the deadline of a turn until the turn is revoked, if the tenant has not returned it by then."""
    stuck_ns: Nanoseconds = Field(default=UNSET, alias="stuck_after")
    """Time from the revocation of a turn until other tenants get the GPU although the tenant's kernels still run."""
    idle_release_ns: Nanoseconds = Field(default=UNSET, alias="idle_release")
    """Time without a launch after which a tenant returns its turn."""
    inflight_ns: Nanoseconds = Field(default=UNSET, alias="work_in_flight")
    """Largest amount of launched but unfinished work of a tenant, in GPU time."""
    reconnect_ms: Annotated[int, parsed(lambda value: round(parse_time(value) * 1e3)), TIME_WITH_UNIT] = Field(
        default=UNSET, alias="reconnect"
    )
    """Interval at which a tenant tries to reconnect to the agent."""
    context_reserve_bytes: MemoryOrZero = Field(default=UNSET, alias="context_reserve")
    """Memory charged for the CUDA context of a process; by default 640 MiB, 0 on the software GPU."""
    gpu_memory_bytes: Memory = Field(default=UNSET, alias="gpu_memory")
    """Memory of each GPU that tenants share; by default all."""
    swap_memory_bytes: MemoryOrZero = Field(default=UNSET, alias="swap_memory")
    """Host memory for swapped contents; by default half of the available memory."""
    most_moving: Annotated[float, parsed(parse_moving), PART] = Field(default=UNSET)
    """Largest fraction of time that a GPU spends on swapping memory."""
    swap_piece_bytes: Annotated[int, parsed(parse_piece), SIZE] = Field(default=UNSET, alias="swap_piece")
    """Memory is swapped in pieces of at most this size."""
    swap_hand: StrictBool = True
    """Whether memory of an evicted tenant may be passed to another tenant of its user without being cleared."""
    colocation: Annotated[ColocationSettings, parsed(parse_colocation), SCHEME_OR_SETTINGS] = Field(default=UNSET)
    """Name of a co-location scheme, or a mapping of its settings."""
    copies: Annotated[CopySettings, parsed(parse_copies), ON_OR_SIZES] = Field(default=UNSET)
    """Whether copies over the PCIe link are scheduled on every GPU: true, false, or a mapping, which means true and
    sets `chunk_bytes` (size of the chunks into which copies are split) or `period_bytes` (what all waiting tenants copy
    together in one round)."""
    tenants: list[TenantEntry] = Field(default_factory=list)
    """Tenants that are declared here rather than by the command that starts them."""


def load(source: str) -> AgentConfig:
    """Read `FILE.yaml` or `gemini:FILE`."""
    path = config_path(source)
    if source.startswith("gemini:"):
        return AgentConfig(tenants=parse_gemini(read_text(path), path))
    read = parse_yaml(read_text(path), path)
    if read.content is not None and not isinstance(read.content, dict):
        raise InputError("the file must contain settings, one `name: value` per line", file=path)
    with read.located():
        return parse_config(read.content or {}, path)


def parse_config(data: Mapping[str, Any], path: Path) -> AgentConfig:
    """AgentConfig from a parsed YAML mapping."""
    file = check(AgentFile, {key: value for key, value in data.items() if (key, value) != ("tenants", None)}, path)
    given = {name: getattr(file, name) for name in file.model_fields_set}
    times = {field.name for field in dataclasses.fields(QuotaSettings)} - {"discipline"}
    quota = quota_settings(file.discipline, {key: value for key, value in given.items() if key in times}, path)
    tenants: dict[str, TenantSpec] = {}
    for index, entry in enumerate(file.tenants):
        try:
            spec = _tenant(entry, path.parent)
        except InputError as error:
            field = f"tenants[{index}]" + (f".{error.field}" if error.field else "")
            raise InputError(error.message, file=path, field=field) from None
        if spec.name in tenants:
            raise InputError(f"the tenant {spec.name} is declared twice", file=path, field=f"tenants[{index}]")
        tenants[spec.name] = spec
    own = {key: value for key, value in given.items() if key not in times | {"discipline", "tenants"}}
    return AgentConfig(**own | {"quota": quota, "tenants": tuple(tenants.values())})


def _tenant(entry: TenantEntry, folder: Path) -> TenantSpec:
    kernels = known_kernels(
        entry.kernel_profile, entry.work_class, latency_sensitive=entry.latency_sensitive, folder=folder
    )
    given = {name: getattr(entry, name) for name in entry.model_fields_set - {"kernel_profile", "work_class"}}
    if isinstance(limit := given.get("memory_bytes"), MemoryLimit):
        given |= {"memory_bytes": limit.size, "enforce_memory": limit.enforce}
    return check_spec(TenantSpec(**split_ranges(given) | kernels | {"gpu_count": max(1, len(entry.gpus))}))
