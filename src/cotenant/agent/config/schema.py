"""The agent's configuration file as pydantic models. Imported only where a file is read: tenants start without it."""

from __future__ import annotations

import dataclasses
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from cotenant.agent.config.choices import one_or_range, split_ranges
from cotenant.agent.config.colocation import known_kernels, parse_colocation, whole
from cotenant.agent.config.copies import parse_copies
from cotenant.agent.config.files import (
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
from cotenant.core.checked import Bytes, Memory, Nanoseconds, Strict, check, parsed
from cotenant.core.errors import InputError
from cotenant.core.strength import Strength, strength_named
from cotenant.core.units import parse_fraction, parse_memory, parse_seconds
from cotenant.core.yamlfile import parse_yaml
from cotenant.policy.colocation import ColocationSettings
from cotenant.policy.copies import CopySettings
from cotenant.policy.shares import DISCIPLINES, QuotaSettings

Share = Annotated[float | tuple[float, float], parsed(one_or_range(parse_fraction))]  # 10%..50%: a launcher chooses
Size = Annotated[int | tuple[int, int], parsed(one_or_range(parse_memory))]
UNSET: Any = None  # of settings whose defaults are those of the classes they go to


def _gpus(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        given = given.split(",")
    if not isinstance(given, list | tuple) or not all(isinstance(x, str | int) for x in given):
        raise InputError(f"{given!r} is no list of GPUs (indices or UUIDs)")
    return tuple(str(x).strip() for x in given)


def _some_gpus(given: Any) -> tuple[str, ...]:
    found = _gpus(given)
    if not found:
        raise InputError("write soft, all, or a list of GPU UUIDs")
    return found


def _user(given: Any) -> int:
    """A user's number, from its name or number."""
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


class MemoryLimit(Strict):
    """`memory: {bytes: 8GiB, enforce: driver}`."""

    size: Size = Field(alias="bytes")
    enforce: Annotated[Strength, parsed(strength_named)]


_size = one_or_range(parse_memory)


def _memory(given: Any) -> Any:
    return check(MemoryLimit, given) if isinstance(given, Mapping) else _size(given)


class TenantEntry(Strict):
    """One of `tenants`. What is left out is as TenantSpec has it."""

    name: Annotated[str, parsed(check_name)]
    request: Share = 0.0
    limit: Share = 1.0
    memory_bytes: Annotated[int | tuple[int, int] | MemoryLimit, parsed(_memory)] = Field(default=UNSET, alias="memory")
    priority: int = 0
    weight: float = 0.0
    gpus: Annotated[tuple[str, ...], parsed(_gpus)] = ()
    mechanism: str = mechanisms.AUTO
    uid: Annotated[int, parsed(_user)] = Field(default=UNSET, alias="user")
    best_effort: StrictBool = False
    work_class: str | None = None
    work_sms: int = 0
    kernel_profile: Any = None
    in_flight_us: Annotated[int, parsed(lambda value: whole(value, ""))] = 0
    copy_weight: float = Field(default=UNSET)
    latency_sensitive: StrictBool = False
    oversubscribe: str = "none"


class AgentFile(Strict):
    """The whole file. What is left out is as AgentConfig and QuotaSettings have it."""

    gpus: Annotated[tuple[str, ...], parsed(_some_gpus)] = ("all",)
    fail: Literal["open", "closed"] = "closed"
    discipline: Annotated[str, parsed(_discipline)] = "request-limit"
    quota_ns: Nanoseconds = Field(default=UNSET, alias="quota")
    min_quota_ns: Nanoseconds = Field(default=UNSET, alias="min_quota")
    max_quota_ns: Nanoseconds = Field(default=UNSET, alias="max_quota")
    window_ns: Nanoseconds = Field(default=UNSET, alias="window")
    idle_credit_ns: Nanoseconds = Field(default=UNSET, alias="idle_credit")
    alone_ns: Nanoseconds = Field(default=UNSET, alias="alone_after")
    exclusive_ns: Nanoseconds = Field(default=UNSET, alias="exclusive_turn")
    grace_ns: Nanoseconds = Field(default=UNSET, alias="revoke_grace")
    stuck_ns: Nanoseconds = Field(default=UNSET, alias="stuck_after")
    idle_release_ns: Nanoseconds = Field(default=UNSET, alias="idle_release")
    inflight_ns: Nanoseconds = Field(default=UNSET, alias="work_in_flight")
    reconnect_ms: Annotated[int, parsed(lambda value: round(parse_seconds(value) * 1e3))] = Field(
        default=UNSET, alias="reconnect"
    )
    context_reserve_bytes: Bytes = Field(default=UNSET, alias="context_reserve")
    gpu_memory_bytes: Memory = Field(default=UNSET, alias="gpu_memory")
    swap_memory_bytes: Bytes = Field(default=UNSET, alias="swap_memory")
    most_moving: Annotated[float, parsed(parse_moving)] = Field(default=UNSET)
    swap_piece_bytes: Annotated[int, parsed(parse_piece)] = Field(default=UNSET, alias="swap_piece")
    swap_hand: StrictBool = True
    colocation: Annotated[ColocationSettings, parsed(parse_colocation)] = Field(default=UNSET)
    copies: Annotated[CopySettings, parsed(parse_copies)] = Field(default=UNSET)
    tenants: list[TenantEntry] = Field(default_factory=list)


def load(source: str) -> AgentConfig:
    """Read `FILE.yaml` or `gemini:FILE`."""
    path = config_path(source)
    if source.startswith("gemini:"):
        return AgentConfig(tenants=parse_gemini(read_text(path), path))
    read = parse_yaml(read_text(path), path)
    if read.content is not None and not isinstance(read.content, dict):
        raise InputError("the file must hold settings, one `name: value` a line", file=path)
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
            raise InputError(f"the tenant {spec.name} is there twice", file=path, field=f"tenants[{index}]")
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
