"""Reads mig-parted's configuration files: named lists of rules that give GPUs a MIG mode and instances.

    version: v1
    mig-configs:
      balanced:
        - device-filter: ["0x233010DE"]     # optional: PCI device and vendor
          devices: all                      # or indices: [0, 1]
          mig-enabled: true
          mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}

If several rules apply to a GPU the last one wins, as in mig-parted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.mig import Geometry, Layout, Placement, geometry, kind_of, place
from cotenant.core.mig_tables import PCI_MODELS, TABLES
from cotenant.core.yamlfile import read_yaml

NVIDIA = 0x10DE
KEYS = ("device-filter", "devices", "mig-enabled", "mig-devices")


@dataclass(frozen=True)
class Rule:
    """One rule of a named list of a mig-parted file. `devices`: indices of GPUs, None: all; `pci_ids`: 0xDDDDVVVV
    (device and vendor), None: any; `profiles`: number of instances by profile.
    """

    devices: tuple[int, ...] | None
    pci_ids: tuple[int, ...] | None
    enabled: bool
    profiles: dict[str, int]

    def addresses(self, index: int, pci_id: int) -> bool:
        """Whether the rule applies to the GPU of this index and PCI id."""
        return (self.devices is None or index in self.devices) and (self.pci_ids is None or pci_id in self.pci_ids)

    def layout(self, geo: Geometry, keep: Iterable[Placement] = ()) -> Layout:
        """Return placements of the rule's instances that keep existing instances in place. Raises InputError if the
        instances do not fit on this GPU.
        """
        kinds = [kind_of(geo, name) for name, count in self.profiles.items() for _ in range(count)]
        order = {kind: i for i, kind in enumerate(geo.every)}
        found = place(geo, sorted(kinds, key=order.__getitem__), keep) if len(kinds) <= geo.memory_slots else None
        if found is None:
            raise InputError(f"{self} do not fit on {geo.gpu} together", field="mig-devices")
        return found

    def models(self) -> tuple[list[str], str]:
        """Return the models of the catalog that support the rule, and a reason, which may be empty. If the rule names
        models by `pci_ids`, the reason says why one of them does not support the rule; otherwise, that no model of the
        catalog does.
        """
        named = None if self.pci_ids is None else [PCI_MODELS.get(i >> 16, "") for i in self.pci_ids]
        fit, why = [], ""
        for model in dict.fromkeys(named or TABLES):
            if not model:
                continue
            try:
                self.layout(geometry(model, double_memory=True))
                fit.append(model)
            except InputError as error:
                why = why or (error.message if named else "no GPU model of the catalog supports it")
        unknown = next((name for name in self.profiles if not fit and not _is_known(name)), None)
        if unknown is not None and not named:
            divided = "it names a compute instance; only whole GPU instances are applied"
            why = f"no GPU model of the catalog has the profile {unknown!r}{f': {divided}' * ('c.' in unknown)}"
        return fit, why if named or not fit else ""

    def __str__(self) -> str:
        return ", ".join(f"{count} of {name}" for name, count in self.profiles.items()) or "no instances"


def read_mig_config(path: str | Path) -> dict[str, tuple[Rule, ...]]:
    """Return the named lists of rules of a mig-parted file. Raises InputError with file, line and field."""
    source = read_yaml(path)
    with source.located():
        content = source.content
        if not isinstance(content, dict) or set(content) - {"version", "mig-configs"}:
            raise InputError("may only contain version and mig-configs")
        if content.get("version") != "v1":
            raise InputError(f"is {content.get('version')!r}; only v1 is supported", field="version")
        lists = content.get("mig-configs")
        if not isinstance(lists, dict) or not lists:
            raise InputError("needs at least one list of rules", field="mig-configs")
        found = {}
        for name, rows in lists.items():
            where = f"mig-configs.{name}"
            if not isinstance(rows, list) or not rows:
                raise InputError("needs at least one rule", field=where)
            found[str(name)] = tuple(_rule(row, f"{where}[{i}]") for i, row in enumerate(rows))
    return found


def named_rules(lists: dict[str, tuple[Rule, ...]], name: str, path: str | Path) -> tuple[Rule, ...]:
    """Return the rules of the list of that name; InputError lists the known names."""
    if name not in lists:
        raise InputError(f"has no list {name!r}; its lists are {', '.join(lists)}", file=path)
    return lists[name]


def _rule(row: Any, where: str) -> Rule:
    if not isinstance(row, dict):
        raise InputError("a rule needs devices and mig-enabled", field=where)
    if unknown := set(row) - set(KEYS):
        raise InputError(f"unknown field {min(map(str, unknown))!r}; known: {', '.join(KEYS)}", field=where)
    devices, enabled, counts = row.get("devices"), row.get("mig-enabled"), row.get("mig-devices") or {}
    if devices != "all" and not (isinstance(devices, list) and _all_whole(devices)):
        raise InputError(f"is {devices!r}; must be all, or a list of GPU indices", field=f"{where}.devices")
    if not isinstance(enabled, bool):
        raise InputError(f"is {enabled!r}, not true or false", field=f"{where}.mig-enabled")
    if not isinstance(counts, dict) or not _all_whole(counts.values()):
        raise InputError("must map profiles to numbers of instances", field=f"{where}.mig-devices")
    if counts and not enabled:
        raise InputError("lists instances although mig-enabled is false", field=f"{where}.mig-devices")
    return Rule(
        None if devices == "all" else tuple(devices), _filter(row.get("device-filter"), f"{where}.device-filter"),
        enabled, {str(name): count for name, count in counts.items()},
    )  # fmt: skip


def _is_known(profile: str) -> bool:
    """Return whether any model of the catalog has a profile."""
    for model in TABLES:
        with contextlib.suppress(InputError):
            kind_of(geometry(model, double_memory=True), profile)
            return True
    return False


def _all_whole(values: Iterable[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)


def _filter(value: Any, where: str) -> tuple[int, ...] | None:
    """Return a filter's PCI ids as numbers. The file has them as text ("0x233010DE") or, unquoted, as numbers."""
    words = value if isinstance(value, list) else [value] if value not in (None, "") else []
    found = []
    for word in words:
        try:
            found.append(word if isinstance(word, int) and not isinstance(word, bool) else int(str(word), 16))
        except ValueError:
            raise InputError(f"{word!r} is not a PCI device and vendor such as 0x233010DE", field=where) from None
    return tuple(found) or None
