"""Parsing of the agent's co-location settings, and of what the agent's configuration says about a tenant's kernels:
their work classes (the resource that limits a kernel: memory, compute or unknown) and SMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cotenant.agent.config import kernel_table
from cotenant.core.errors import InputError, nearest
from cotenant.core.units import parse_fraction
from cotenant.policy.colocation import ColocationSettings, settings_for
from cotenant.profiles.kernels.profile import CLASS_NAMES, read_kernel_rows

# setting -> its type: float for a fraction, int for a count, str for one of a list of names
_KEYS = {each.name: str(each.type) for each in fields(ColocationSettings)}
_KEPT = ("overlap", "heartbeat_timeout_ms", "sm_threshold")  # these settings keep their values when the scheme changes
_CLASSES = CLASS_NAMES[1:]


def parse_colocation(data: Any) -> ColocationSettings:
    """Parse the setting `colocation`: the name of a scheme, such as `tidal`, or a mapping of fields of
    ColocationSettings. A field that is left out has the scheme's default. Raises InputError that names the setting.
    """
    if isinstance(data, str):
        return settings_for(data)
    if not isinstance(data, Mapping):
        raise InputError("must be the name of a scheme or a mapping of settings", field="colocation")
    changes: dict[str, Any] = {}
    for key, value in data.items():
        _check_key(str(key))
        if key == "scheme":
            continue
        if _KEYS[key] == "float":
            changes[key] = parse_fraction(value, f"colocation.{key}")
        else:
            changes[key] = whole(value, f"colocation.{key}") if _KEYS[key] == "int" else str(value)
    return settings_for(str(data.get("scheme", "tidal")), **changes)


def _check_key(key: str) -> None:
    if key in _KEYS:
        return
    hint = f"; {nearest(key, _KEYS) or 'known: ' + ', '.join(_KEYS)}"
    raise InputError(f"unknown setting {key[:40]!r}{hint}", field="colocation")


def whole(value: Any, field: str) -> int:
    """Convert the value of a setting to an integer; JSON may have written it as 200000.0. Raises InputError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{str(value)[:40]!r} is not a whole number", field=field)
    return value


def changed(settings: ColocationSettings, order: Mapping[str, Any]) -> ColocationSettings:
    """Return the settings after an order from the control socket, which maps fields of ColocationSettings to new
    values. If the order has a scheme, fields that it does not have get that scheme's defaults, except those in `_KEPT`.
    Raises InputError.
    """
    changes: dict[str, Any] = {}
    for key, value in order.items():
        _check_key(key)
        if value is None or key == "scheme":
            continue
        if _KEYS[key] == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{str(value)[:40]!r} is not a number", field=key)
        changes[key] = whole(value, key) if _KEYS[key] == "int" else value
    if order.get("scheme") is None:
        return replace(settings, **changes)
    kept = {key: getattr(settings, key) for key in _KEPT}
    return settings_for(str(order["scheme"]), **(kept | changes))


def known_kernels(
    profile: Any, work_class: Any, *, latency_sensitive: bool, folder: Path, field: str = "kernel_profile"
) -> dict[str, str]:
    """Return what is known about a tenant's kernels, as the fields `kernels` and `work_class` of its TenantSpec.

    `profile` is the path of a kernel profile relative to `folder`; without one, `work_class` applies to all of the
    tenant's work. With a profile, `work_class` applies only to work other than single kernels, such as copies and
    CUDA graphs. Then its default for a latency-sensitive tenant is the class whose kernels take most of the time in the
    profile. In all other cases the default is `unknown`. Raises InputError that names `field`.
    """
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


def check_work(work_class: str, work_sms: int, in_flight_us: int, **where: Any) -> None:
    """Check what a best-effort tenant declares about its kernels. Raises InputError."""
    if work_class not in _CLASSES:
        raise InputError(f"unknown class of work {work_class!r}; known: {', '.join(_CLASSES)}", **where)
    if not 0 <= work_sms <= 1 << 20:
        raise InputError(f"the number of SMs must be 0 to {1 << 20}, not {work_sms}", **where)
    if not 0 <= in_flight_us <= 1_000_000:
        raise InputError("the in-flight limit of a best-effort tenant must be between 1 and 1000000 us", **where)
