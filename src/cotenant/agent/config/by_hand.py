"""Values that `cotenant set` gave declared tenants. Each holds until the configuration file has another value of that
setting for that tenant.

A mapping `by_hand` has for each setting that was set by hand the value that the file had at that time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cotenant.agent.config.choices import FIELDS
from cotenant.agent.config.files import Choices, TenantSpec, check_spec
from cotenant.core.errors import InputError

SETTABLE = ("request", "limit", "memory_bytes", "priority", "weight", "copy_weight")


def changed_by_hand(
    now: TenantSpec, declared: TenantSpec | None, by_hand: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[TenantSpec, dict[str, Any]]:
    """Return a tenant after `changes` by hand, and its new `by_hand`. `declared`: the tenant as the file has it; None:
    the file does not declare it. A value that equals the file's value, or the lower end of the file's range, counts as
    the file's own.
    """
    if declared is None:
        return dataclasses.replace(now, **changes), {}
    kept = {name: was for name, was in by_hand.items() if name not in changes}
    kept |= {name: _of_file(declared, name) for name, new in changes.items() if new != getattr(declared, name)}
    return _fixed(dataclasses.replace(now, choices=declared.choices), kept, changes), kept


def kept_by_hand(
    declared: TenantSpec, now: TenantSpec, by_hand: Mapping[str, Any]
) -> tuple[TenantSpec, dict[str, Any], list[str]]:
    """Return the tenant of a new file with those values of `now` that were set by hand and still hold, its new
    `by_hand`, and a sentence for each value that the file replaces. If the values by hand contradict the tenant's new
    settings in the file, the file replaces all of them.
    """
    kept = {name: was for name, was in by_hand.items() if _of_file(declared, name) == was}
    try:
        spec = check_spec(_fixed(declared, kept, {name: getattr(now, name) for name in kept}))
    except InputError:
        spec, kept = declared, {}
    replaced = [
        f"{declared.name}: {value_text(name, getattr(now, name))}, set by hand, is replaced by "
        f"{value_text(name, _of_file(declared, name), named=False)}, since the tenant's settings in the configuration "
        "file have changed"
        for name in by_hand
        if name not in kept
    ]
    return spec, kept, replaced


def by_hand_rows(now: TenantSpec, by_hand: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each setting that was set by hand, its value and the file's, in JSON types."""
    return {name: {"value": getattr(now, name), "file": was} for name, was in by_hand.items()}


def value_text(name: str, value: Any, *, named: bool = True) -> str:
    """A setting's value in words, such as "limit 45 %". A range is a list of its two bounds."""
    bounds = value if isinstance(value, list) else [value]
    shown = FIELDS[name].shown if name in FIELDS else "{:g}".format
    text = " to ".join("none" if bound is None else shown(bound) for bound in bounds)
    return f"{name.removesuffix('_bytes').replace('_', ' ')} {text}" if named else text


def _of_file(declared: TenantSpec, name: str) -> Any:
    """A setting's value in the file; a range as a list of its two bounds, as JSON has it."""
    bounds = getattr(declared.choices, name, None)
    return getattr(declared, name) if bounds is None else list(bounds)


def _fixed(spec: TenantSpec, by_hand: Mapping[str, Any], values: Mapping[str, Any]) -> TenantSpec:
    """The spec with other values, and without the ranges of the settings that were set by hand."""
    ranges = {} if spec.choices is None else {n: r for n, r in vars(spec.choices).items() if n not in by_hand and r}
    return dataclasses.replace(spec, **values, choices=Choices(**ranges) if ranges else None)
