"""Settings of the floor and of best-effort tenants, as they are written in the agent's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cotenant.agent.config import kernel_table
from cotenant.core.errors import InputError
from cotenant.core.units import parse_fraction, parse_seconds
from cotenant.policy.colocation import ColocationSettings, settings_for
from cotenant.profiles.kernels.profile import CLASS_NAMES, read_kernel_rows

_TIMES = ("interval", "lead", "ahead", "hold_limit", "check")
_PARTS = ("ahead_below", "beside", "duty", "clock")
_KEYS = ("scheme", *_TIMES, *_PARTS, "sm_threshold", "stretch")
_KEPT = ("beside", "hold_limit_ns", "sm_threshold")  # by a new scheme
_CLASSES = CLASS_NAMES[1:]


def parse_colocation(data: Any) -> ColocationSettings:
    """ColocationSettings from `scheme: tidal` or a mapping of settings. InputError names the setting."""
    if isinstance(data, str):
        return settings_for(data)
    if not isinstance(data, Mapping):
        raise InputError("write the name of a scheme, or a mapping of settings", field="colocation")
    for key in data:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_KEYS)}"
            raise InputError(f"unknown setting {key!r}{hint}", field="colocation")
    changes: dict[str, Any] = {}
    for key in _TIMES:
        if key in data:
            changes[f"{key}_ns"] = round(parse_seconds(data[key], f"colocation.{key}") * 1e9)
    for key in _PARTS:
        if key in data:
            changes[key] = parse_fraction(data[key], f"colocation.{key}")
    if "sm_threshold" in data:
        threshold = data["sm_threshold"]
        if isinstance(threshold, bool) or not isinstance(threshold, int):
            raise InputError(f"{threshold!r} is not a number of SMs", field="colocation.sm_threshold")
        changes["sm_threshold"] = threshold
    if "stretch" in data:
        stretch = data["stretch"]
        if isinstance(stretch, bool) or not isinstance(stretch, int | float) or stretch > 1e9:
            raise InputError(f"{str(stretch)[:40]} is not a number of times", field="colocation.stretch")
        changes["stretch"] = float(stretch)
    return settings_for(str(data.get("scheme", "tidal")), **changes)


def changed(settings: ColocationSettings, order: Mapping[str, Any]) -> ColocationSettings:
    """Settings after an order of the control socket: fields of ColocationSettings. A new scheme brings its own times.
    InputError."""
    known = tuple(field.name for field in fields(ColocationSettings) if field.name != "scheme")
    for key in order:
        if key not in known and key != "scheme":
            raise InputError(f"unknown setting {key[:40]!r}; known: scheme, {', '.join(known)}", field="colocation")
    changes = {key: order[key] for key in known if order.get(key) is not None}
    for key, value in changes.items():
        whole = key not in (*_PARTS, "stretch")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or (whole and not isinstance(value, int) and not value.is_integer()):
            raise InputError(f"{key} is {str(value)[:40]!r}, which is not a number of its kind", field=key)
        if whole:
            changes[key] = int(value)  # JSON may have written it 200000.0; the page takes whole numbers
    if order.get("scheme") is None:
        return replace(settings, **changes)
    kept = {key: getattr(settings, key) for key in _KEPT}
    return settings_for(str(order["scheme"]), **(kept | changes))


def known_kernels(
    profile: Any, work_class: Any, *, latency_sensitive: bool, folder: Path, field: str = "kernel_profile"
) -> dict[str, str]:
    """Fields of a tenant from `profile`, a file whose name counts from `folder`, and `work_class`, which goes for what
    is no single kernel. Where that is not said, LS work shows the class that most of the profile's time has; copies and
    graphs of BE are not known, so that they pass. InputError names `field`."""
    if profile is None:
        return {"work_class": "unknown" if work_class is None else str(work_class)}
    if not isinstance(profile, str) or not profile:
        raise InputError(f"{profile!r} is not the name of a file", field=field)
    try:
        rows = read_kernel_rows(folder / profile)
    except InputError as error:
        raise InputError(f"{profile}: {error.message}", field=field) from None
    if work_class is None:
        work_class = kernel_table.most_class(rows) if latency_sensitive else "unknown"
    return {"work_class": str(work_class), "kernels": kernel_table.compiled(rows)}


def check_work(work_class: str, work_sms: int, in_flight_ns: int, **where: Any) -> None:
    """What a best-effort tenant says of its kernels."""
    if work_class not in _CLASSES:
        raise InputError(f"unknown class of work {work_class!r}; known: {', '.join(_CLASSES)}", **where)
    if not 0 <= work_sms <= 1 << 20:
        raise InputError(f"kernels cannot fill {work_sms} SMs", **where)
    if in_flight_ns and not 1_000 <= in_flight_ns <= 1_000_000_000:
        raise InputError("a best-effort tenant's work in flight is 1 us to 1 s", **where)
