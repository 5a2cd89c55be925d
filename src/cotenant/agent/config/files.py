"""Settings of an agent and its tenants, and their validation. They come from a YAML file, which schema.py reads, or
from a resource-config file of Gemini (another program for sharing GPUs), which this module reads.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.agent.config import kernel_table
from cotenant.agent.config.colocation import check_work
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.core.errors import InputError
from cotenant.core.strength import Strength
from cotenant.core.units import parse_bytes, parse_fraction
from cotenant.policy.colocation import ColocationSettings
from cotenant.policy.copies import CopySettings
from cotenant.policy.shares import QuotaSettings

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
FAIL_MODES = ("open", "closed")
OVERSUBSCRIBE = ("none", "swap", "managed", "park")
MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True)
class Choices:
    """The ranges from which a launcher may choose values for a declared tenant, as (lower, upper); None: the launcher
    cannot choose this value.
    """

    request: tuple[float, float] | None = None
    limit: tuple[float, float] | None = None
    memory_bytes: tuple[int, int] | None = None


@dataclass(frozen=True)
class TenantSpec:
    """A tenant's share, memory and GPUs, as declared or requested. `memory_bytes` None: no limit. `gpus` empty: the
    agent chooses a GPU. `uid`: the user who may run the tenant; None: the agent's own user.
    """

    name: str
    request: float = 0.0
    limit: float = 1.0
    memory_bytes: int | None = None
    priority: int = 0
    weight: float = 0.0
    gpus: tuple[str, ...] = ()
    gpu_count: int = 1
    mechanism: str = mechanisms.AUTO
    uid: int | None = None
    best_effort: bool = False
    work_class: str = "unknown"  # the resource that limits its kernels: unknown, memory, compute; used by scheme orion
    work_sms: int = 0  # number of SMs that the tenant's kernels use; 0: unknown
    kernels: str = ""  # the work class of each kernel, as a table that kernel_table.py encodes
    # largest GPU time of a best-effort tenant's launched but unfinished work; 0: that of the co-location settings
    in_flight_us: int = 0
    # how the tenant's memory is moved to the host to make space for other tenants. none: not at all; swap: its
    # processes copy their allocations; managed: the allocations are managed memory, which the driver moves; park: the
    # driver checkpoints its processes
    oversubscribe: str = "none"
    # weight of the tenant's copies on the PCIe link; None: not given, which counts as 1 if copies are scheduled
    copy_weight: float | None = None
    # whether best-effort tenants wait while this tenant has GPU work, and its copies go first
    latency_sensitive: bool = False
    # ranges in a declared tenant's request, limit or memory, from which its launcher may choose; None: no ranges
    choices: Choices | None = None
    # least strength with which the tenant's memory limit must be enforced; otherwise the tenant is refused
    enforce_memory: Strength = Strength.NOTHING


@dataclass(frozen=True)
class AgentConfig:
    """Settings of one agent. The end of a field's name is its unit."""

    gpus: tuple[str, ...] = ("all",)
    quota: QuotaSettings = field(default_factory=QuotaSettings)
    fail: str = "closed"
    tenants: tuple[TenantSpec, ...] = ()
    idle_release_ns: int = 2_000_000
    inflight_ns: int = 4_000_000
    # memory charged for each CUDA context; None: 640 MiB on a real GPU, 0 on the software GPU
    context_reserve_bytes: int | None = None
    reconnect_ms: int = 100
    colocation: ColocationSettings = field(default_factory=ColocationSettings)
    copies: CopySettings = field(default_factory=CopySettings)
    swap_memory_bytes: int | None = None  # host memory for swapped contents; None: half of what is available
    gpu_memory_bytes: int | None = None  # memory of each GPU that is available to tenants; None: all of it
    most_moving: float = 0.05  # largest fraction of the time that a GPU may spend on swapping memory
    swap_piece_bytes: int = 256 << 20  # memory is swapped in pieces of at most this size
    # whether an evicted tenant's device memory may be passed by handle to the tenant restored next, so that the driver
    # need not clear it
    swap_hand: bool = True


@dataclass
class InForce:
    """The configuration from which all parts of the agent read their settings. A new version of the file replaces
    `config`.
    """

    config: AgentConfig
    fault: str = ""  # why the newest version of the configuration file, or part of it, is not in effect
    left_out: dict[str, str] = field(default_factory=dict)  # declared tenant that does not fit on the GPUs -> reason


def check_name(name: object, **where: Any) -> str:
    """Check a tenant name: at most 63 ASCII letters, digits and . _ / -, so that it fits every message and path."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:77] + "..."
        raise InputError(
            f"{shown} is not a tenant name: 1 to 63 letters, digits, '.', '_', '/' or '-', the first a letter or digit",
            **where,
        )
    return name


def check_spec(spec: TenantSpec, **where: Any) -> TenantSpec:
    """Check that a tenant's values are allowed and fit together. Raises InputError."""
    check_name(spec.name, **where)
    if not 0.0 < spec.limit <= 1.0:
        raise InputError(f"{spec.name} has a limit of {spec.limit:.0%}; it must be over 0 % and at most 100 %", **where)
    if not 0.0 <= spec.request <= 1.0:
        raise InputError(f"{spec.name} asks for {spec.request:.0%}; write 0 % to 100 %", **where)
    if spec.request > spec.limit:
        raise InputError(f"{spec.name} asks for {spec.request:.0%}, over its own limit of {spec.limit:.0%}", **where)
    if spec.memory_bytes is not None and not 0 < spec.memory_bytes < 1 << 62:
        raise InputError(f"the memory of {spec.name} must be over 0 bytes and under 4 EiB", **where)
    if spec.memory_bytes is None and spec.enforce_memory is not Strength.NOTHING:
        raise InputError(f"{spec.name} demands enforcement of a memory limit but has none: add one", **where)
    if spec.oversubscribe not in OVERSUBSCRIBE:
        known = ", ".join(OVERSUBSCRIBE)
        raise InputError(f"{spec.oversubscribe!r} is not a way to oversubscribe; known: {known}", **where)
    if spec.oversubscribe != "none" and max(spec.gpu_count, len(spec.gpus)) > 1:
        raise InputError(f"{spec.name} has several GPUs; only tenants with one GPU can oversubscribe it", **where)
    if not 0.0 <= spec.weight < math.inf:
        raise InputError(f"the weight of {spec.name} is {spec.weight}; it must be 0 or more", **where)
    check_work(spec.work_class, spec.work_sms, spec.in_flight_us, **where)
    if spec.kernels and not (spec.best_effort or spec.latency_sensitive):
        raise InputError(
            f"{spec.name} has a kernel profile, which applies only to best-effort and latency-sensitive tenants",
            **where,
        )
    kernel_table.entries_of(spec.kernels)
    if spec.in_flight_us and not spec.best_effort:
        raise InputError(f"{spec.name} has an in-flight limit, which applies only to best-effort tenants", **where)
    if spec.copy_weight is not None and not 0.001 <= spec.copy_weight <= 1000.0:
        raise InputError(f"the copy weight of {spec.name} is {spec.copy_weight:g}; write 0.001 to 1000", **where)
    if spec.latency_sensitive and spec.best_effort:
        raise InputError(f"{spec.name} cannot be both latency-sensitive and best-effort", **where)
    if not 1 <= spec.gpu_count <= 16:
        raise InputError(f"{spec.name} asks for {spec.gpu_count} GPUs; a tenant has 1 to 16", **where)
    return spec


def config_path(source: str) -> Path:
    """Path of the file that a --config value names."""
    return Path(source.removeprefix("gemini:"))


def read_text(path: Path) -> str:
    """Contents of a small text file. Raises InputError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"the file is larger than {MAX_CONFIG_BYTES >> 20} MiB", file=path)
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start})", file=path) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None


def quota_settings(discipline: str, times: Mapping[str, int], path: Path | None = None) -> QuotaSettings:
    """Return QuotaSettings with the given times. If only some of quota, minimum, maximum and window are given, the
    settings that are not given are adapted so that minimum <= quota <= maximum and quota <= window. Raises
    InputError.
    """
    values = dict(times)
    most_ns = values.get("max_quota_ns", QuotaSettings.quota_ns)
    base = values.setdefault("quota_ns", max(min(QuotaSettings.quota_ns, most_ns), values.get("min_quota_ns", 0)))
    values.setdefault("min_quota_ns", min(QuotaSettings.min_quota_ns, base))
    values.setdefault("max_quota_ns", max(QuotaSettings.max_quota_ns, base))
    values.setdefault("window_ns", max(QuotaSettings.window_ns, base))
    try:
        return QuotaSettings(discipline=discipline, **values)
    except ValueError as error:
        raise InputError(str(error), file=path, field="quota") from None


def parse_gemini(text: str, path: Path | None = None) -> tuple[TenantSpec, ...]:
    """Parse Gemini's resource-config: a count, then as many lines `ID REQUEST LIMIT MEM_BYTES`. # starts a comment."""
    rows = [(n, line.split("#")[0].split()) for n, line in enumerate(text.splitlines(), 1)]
    rows = [(n, words) for n, words in rows if words]
    if not rows:
        raise InputError("the file is empty; its first line is the number of tenants", file=path)
    first, words = rows[0]
    if len(words) != 1 or not words[0].isdigit():
        raise InputError(f"{' '.join(words)!r} is not the number of tenants", file=path, line=first)
    if int(words[0]) != len(rows) - 1:
        raise InputError(
            f"the first line announces {words[0]} tenants, but {len(rows) - 1} follow", file=path, line=first
        )
    specs: dict[str, TenantSpec] = {}
    for line, words in rows[1:]:
        if len(words) != 4:
            raise InputError(f"{len(words)} fields; a tenant is `ID REQUEST LIMIT MEM_BYTES`", file=path, line=line)
        try:
            spec = check_spec(
                TenantSpec(
                    name=check_name(words[0]),
                    request=parse_fraction(words[1], "REQUEST"),
                    limit=parse_fraction(words[2], "LIMIT"),
                    memory_bytes=parse_bytes(words[3], "MEM_BYTES") or None,
                    mechanism=mechanisms.DEFAULT,
                )
            )
        except InputError as error:
            raise InputError(error.message, file=path, line=line, field=error.field) from None
        if spec.name in specs:
            raise InputError(f"the tenant {spec.name} is declared twice", file=path, line=line)
        specs[spec.name] = spec
    total = sum(spec.request for spec in specs.values())
    if total > 1.0 + 1e-9:
        raise InputError(f"the requests add up to {total:.0%} of the GPU", file=path)
    return tuple(specs.values())


def with_options(config: AgentConfig, **given: Any) -> AgentConfig:
    """The config overridden by the command line's values (None: not given)."""
    return dataclasses.replace(config, **{key: value for key, value in given.items() if value is not None})
