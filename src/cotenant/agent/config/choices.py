"""Ranges in declared tenants: with `request: 10%..50%` a launcher may choose any value from 10 % to 50 %.

Without a choice, and while the tenant does not run, each range counts as its lower bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cotenant.agent.config.files import Choices, TenantSpec
from cotenant.core.errors import InputError
from cotenant.core.units import format_bytes

N = TypeVar("N", int, float)
SEPARATOR = ".."


def _percent(value: float) -> str:
    return f"{value * 100:.6g} %"


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Words for messages about a field of a tenant that may be a range: the field's name, and the format of its values.
    """

    word: str
    option: str
    shown: Callable[[Any], str]


FIELDS = {
    "request": _Choice("a request", "--request", _percent),
    "limit": _Choice("a limit", "--limit", _percent),
    "memory_bytes": _Choice("memory", "--memory", format_bytes),
}


def one_or_range(parse: Callable[[Any], N]) -> Callable[[Any], N | tuple[N, N]]:
    """Return a parser for the text of one value, or of a range `LOW..HIGH` of values."""

    def read(given: Any) -> N | tuple[N, N]:
        if not isinstance(given, str) or SEPARATOR not in given:
            return parse(given)
        first, _, second = given.partition(SEPARATOR)
        if second.startswith("."):  # 0%...50% has three dots, so its upper bound would be read as .50%
            raise InputError(f"{given!r} has more than two dots between its bounds; write it like 10%..50%")
        least, most = parse(first), parse(second)
        if least > most:
            raise InputError(
                f"{given!r} has its bounds in the wrong order; write the lower first, like 10%..50% or 8GiB..32GiB"
            )
        return least, most

    return read


def split_ranges(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields of a config entry to fields of a TenantSpec: a range becomes its lower bound, and `choices` holds
    all ranges.
    """
    ranges = {name: value for name, value in values.items() if name in FIELDS and isinstance(value, tuple)}
    if not ranges:
        return dict(values)
    return {**values, **{name: least for name, (least, _) in ranges.items()}, "choices": Choices(**ranges)}


def least(spec: TenantSpec) -> TenantSpec:
    """The tenant with the lower bound of every range."""
    return dataclasses.replace(spec, **{name: low for name, (low, _) in _ranges(spec).items()})


def keep_choice(spec: TenantSpec, now: TenantSpec) -> TenantSpec:
    """Return the new declaration `spec` of a running tenant, with the current values (`now`) where the new ranges allow
    these values, since the tenant's launcher chose them.
    """
    kept = {name: getattr(now, name) for name in _ranges(spec)}
    return dataclasses.replace(spec, **{n: v for n, v in kept.items() if v is not None and _permits(spec, n, v)})


def choose(spec: TenantSpec, given: Mapping[str, Any]) -> TenantSpec:
    """Return a declared tenant with the values that its launcher chose. Raises InputError if a chosen value is outside
    the declared range, or if the declaration has no range for it but another value.
    """
    chosen = {}
    for name, field in FIELDS.items():
        value = given.get(name)
        if value is None or (name == "request" and not value):
            continue
        if name not in _ranges(spec):
            # a value that equals the declared one is accepted, since a launcher may send the same options for all
            # tenants
            if value == getattr(spec, name):
                continue
            raise InputError(
                f"{spec.name} is declared in the agent's configuration, which sets {field.word}: leave out "
                f"{field.option}",
                field="--name",
            )
        if not _permits(spec, name, value):
            low, high = (field.shown(bound) for bound in _ranges(spec)[name])
            raise InputError(
                f"{spec.name} may have {field.word} of {low} to {high}, not {field.shown(value)}", field=field.option
            )
        chosen[name] = value
    return dataclasses.replace(least(spec), **chosen)


def differs(now: TenantSpec, given: Mapping[str, Any]) -> str:
    """The running tenant's first value that differs from a launcher's choice, as text such as "a request of 30 %".
    Empty if none differs.
    """
    for name, field in FIELDS.items():
        if given.get(name) and given[name] != (has := getattr(now, name)):
            return f"{field.word} of {field.shown(has)}"
    return ""


def _ranges(spec: TenantSpec) -> dict[str, tuple[Any, Any]]:
    found = {name: getattr(spec.choices, name) for name in FIELDS} if spec.choices is not None else {}
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def _permits(spec: TenantSpec, name: str, value: float) -> bool:
    low, high = _ranges(spec)[name]
    return bool(low <= value <= high)
