"""Translates a pod's annotations and resources into one share per container, and validates them."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.strength import Strength, strength_named
from cotenant.kube import names
from cotenant.kube.quantity import parse_count, parse_memory, parse_quantity, parse_share

Pod = Mapping[str, Any]
YES, NO = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
MOST_GPUS = 16
PLAIN_BYTES = 1 << 20  # a number of memory units of at least this was probably meant in bytes, such as 8Gi


@dataclass(frozen=True)
class ContainerShare:
    """One container's share of a GPU. The scheduler counts `units` and `memory_units`. The agent enforces `request`,
    `limit` and `memory_bytes`; `enforce_memory` is the weakest enforcement of memory that the pod accepts. `gpus` above
    0: the container gets this many whole GPUs, and no units."""

    container: str
    list_name: str  # the list in the pod's spec: containers or initContainers
    index: int
    request: float = 0.0
    limit: float = 1.0
    memory_bytes: int | None = None
    units: int = 0
    memory_units: int = 0
    gpus: int = 0
    ends: bool = False  # an init container, which ends before the pod's regular containers start
    claimed: bool = False  # the container is placed by a claim, so it takes no units
    enforce_memory: Strength = Strength.NOTHING

    @property
    def whole(self) -> bool:
        """Whether the container takes whole GPUs."""
        return self.gpus > 0

    def resources(self) -> dict[str, int]:
        """Extended resources of the container, by name."""
        if self.claimed:
            return {}
        counts = {
            names.SHARE_RESOURCE: self.units,
            names.MEMORY_RESOURCE: self.memory_units,
            names.GPU_RESOURCE: self.gpus,
        }
        return {name: count for name, count in counts.items() if count}


def key_field(key: str) -> str:
    """Describe where an annotation is, for messages."""
    return f"metadata.annotations[{key}]"


def annotations_of(pod: Pod) -> dict[str, Any]:
    """Return the pod's annotations in Cotenant's domain. Raises InputError for unknown ones."""
    found = {}
    for key, value in _mapping(pod.get("metadata"), "metadata", "annotations").items():
        if not names.in_domain(key):
            continue
        if key not in names.ANNOTATIONS:
            near = difflib.get_close_matches(key, names.ANNOTATIONS, 1, 0.7)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names.ANNOTATIONS)}"
            raise InputError(f"unknown annotation {key[:120]}; {hint}", field="metadata.annotations")
        if not isinstance(value, str):
            raise InputError(f"{value!r:.60} is not a string; put it in quotes", field=key_field(key))
        found[key] = value
    return found


def containers_of(pod: Pod) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(list name, index, container) of init containers, then regular ones."""
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        raise InputError("the pod has no spec", field="spec")
    for list_name in ("initContainers", "containers"):
        entries = spec.get(list_name) or []
        if not isinstance(entries, list) or not all(
            isinstance(c, dict) and isinstance(c.get("name"), str) for c in entries
        ):
            raise InputError("not a list of containers with names", field=f"spec.{list_name}")
        for index, container in enumerate(entries):
            yield list_name, index, container


def own_resources(container: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A container's resources in Cotenant's domain. Raises InputError if one is unknown, or if its request and limit
    differ."""
    limits = _mapping(container.get("resources"), f"{where}.resources", "limits")
    requests = _mapping(container.get("resources"), f"{where}.resources", "requests")
    found: dict[str, Any] = {}
    for key, value in [*limits.items(), *requests.items()]:
        if not names.in_domain(key):
            continue
        if key not in names.RESOURCES and not names.MIG_RESOURCE.match(key):
            near = difflib.get_close_matches(key, names.RESOURCES, 1, 0.7)
            hint = (
                f"did you mean {near[0]}?" if near else f"known are {', '.join(names.RESOURCES)}, {names.MIG_PREFIX}*"
            )
            raise InputError(f"unknown resource {key[:120]}; {hint}", field=f"{where}.resources")
        if key in found and parse_quantity(found[key], where) != parse_quantity(value, where):
            raise InputError(
                f"{key} is limited to {found[key]} and requested as {value}; they must be equal", field=where
            )
        found[key] = value
    return found


def opted_out(annotations: Mapping[str, Any]) -> bool:
    """Return whether the webhook must leave the pod as it is."""
    value = annotations.get(names.INJECT, "true")
    if not isinstance(value, str) or value.lower() not in (*YES, *NO):
        raise InputError(f"{value!r:.60} is not true or false", field=key_field(names.INJECT))
    return value.lower() in NO


def shares_of(pod: Pod) -> list[ContainerShare]:
    """Return the share of every container that requests one, init containers first. Raises InputError if a request is
    invalid.

    A container requests a share by a resource of its own, or if cotenant.dev/containers lists its name. If the pod's
    annotations state a share, but no container requests one in these ways, then the main container gets the share:
    kubectl's default container, or else the first.
    """
    annotations = annotations_of(pod)
    entries = list(containers_of(pod))
    resources = {c["name"]: own_resources(c, f"spec.{kind}[{i}]") for kind, i, c in entries}
    given = any(key in annotations for key in (names.REQUEST, names.LIMIT, names.MEMORY, names.ENFORCE_MEMORY))
    asking = _asking(pod, annotations, resources, given)
    if opted_out(annotations):
        if any(resources.values()):
            name = next(name for name, mine in resources.items() if mine)
            why = f"container {name} takes a share of a GPU and cannot opt out: its share would not be enforced"
            raise InputError(why, field=key_field(names.INJECT))
        return []
    if not asking:
        return []
    terms = _terms(annotations)
    placed_by = annotations.get(names.PLACED_BY, "units")
    if placed_by not in ("units", "claims"):
        raise InputError(f"{placed_by!r:.60} is not units or claims", field=key_field(names.PLACED_BY))
    claimed = placed_by == "claims"
    found = []
    for kind, index, container in entries:
        name = container["name"]
        if name in asking:
            where = f"spec.{kind}[{index}].resources"
            share = _share(kind, index, name, resources[name], terms, where)
            ends = kind == "initContainers" and container.get("restartPolicy") != "Always"
            if claimed and resources[name]:
                why = f"container {name} takes units, and the pod is placed by claims; keep one of them"
                raise InputError(why, field=key_field(names.PLACED_BY))
            # The annotations state no request, so it is set to the limit here. The binder then reduces it to the part
            # of a GPU that the container's claim has.
            if claimed and terms[0] is None:
                share = dataclasses.replace(share, request=share.limit)
            found.append(dataclasses.replace(share, ends=ends, claimed=claimed))
    return found


def present(shares: list[ContainerShare], finished: Container[str]) -> list[ContainerShare]:
    """Shares of containers that run now: the first unfinished init container with the sidecars before it, otherwise all
    containers except init containers that end.

    The kubelet passes an init container's devices on to later ones, so not all shares are held at once.
    """
    waiting = next((share for share in shares if share.ends and share.container not in finished), None)
    if waiting is None:
        return [share for share in shares if not share.ends]
    before = shares[: shares.index(waiting)]
    return [*(share for share in before if not share.ends), waiting]


def _asking(pod: Pod, annotations: Mapping[str, Any], resources: Mapping[str, Any], given: bool) -> set[str]:
    asking = {
        name for name, mine in resources.items() if any(not names.MIG_RESOURCE.match(resource) for resource in mine)
    }
    listed = annotations.get(names.CONTAINERS)
    if listed is not None:
        if not given and not asking and annotations.get(names.PLACED_BY) != "claims":
            raise InputError(
                f"it selects containers, but no share is given: add {names.REQUEST}", field=key_field(names.CONTAINERS)
            )
        wanted = [part.strip() for part in listed.split(",")] if isinstance(listed, str) else [""]
        if wanted == ["*"]:
            return set(resources)
        for name in wanted:
            if name not in resources:
                there = ", ".join(resources)
                raise InputError(
                    f"there is no container {name[:80]!r}; the containers are {there}",
                    field=key_field(names.CONTAINERS),
                )
        return asking | set(wanted)
    if given and not asking:
        regular = [c["name"] for kind, _, c in containers_of(pod) if kind == "containers"]
        preferred = _mapping(pod.get("metadata"), "metadata", "annotations").get(names.DEFAULT_CONTAINER)
        if regular:
            return {str(preferred) if preferred in regular else regular[0]}
    return asking


# request, limit, memory in bytes, required strength of the memory limit
_Terms = tuple[float | None, float, int | None, Strength]


def _terms(annotations: Mapping[str, Any]) -> _Terms:
    request = limit = memory = None
    enforce = Strength.NOTHING
    if names.REQUEST in annotations:
        request = parse_share(annotations[names.REQUEST], key_field(names.REQUEST))
    if names.LIMIT in annotations:
        limit = parse_share(annotations[names.LIMIT], key_field(names.LIMIT))
        if limit == 0.0:
            raise InputError("a limit of 0% would let nothing run", field=key_field(names.LIMIT))
    if names.MEMORY in annotations:
        memory = parse_memory(annotations[names.MEMORY], key_field(names.MEMORY))
    if names.ENFORCE_MEMORY in annotations:
        enforce = strength_named(annotations[names.ENFORCE_MEMORY], field=key_field(names.ENFORCE_MEMORY))
    return request, 1.0 if limit is None else limit, memory, enforce


def _share(
    kind: str,
    index: int,
    name: str,
    mine: Mapping[str, Any],
    terms: _Terms,
    where: str,
) -> ContainerShare:
    request, limit, memory, enforce = terms
    gpus = parse_count(mine[names.GPU_RESOURCE], where, MOST_GPUS) if names.GPU_RESOURCE in mine else 0
    if gpus:
        if len(mine) > 1 or request is not None or memory is not None or limit < 1.0 or enforce is not Strength.NOTHING:
            raise InputError(
                f"container {name} takes whole GPUs, which cannot be combined with share, limit or memory", field=where
            )
        return ContainerShare(name, kind, index, 1.0, 1.0, gpus=gpus)
    units = units_of(request or 0.0)
    if names.SHARE_RESOURCE in mine:
        given = parse_quantity(mine[names.SHARE_RESOURCE], where)
        if given.denominator != 1 or not 0 < given <= names.SHARE_UNITS:
            raise InputError(
                f"{mine[names.SHARE_RESOURCE]} units of {names.SHARE_RESOURCE} in container {name}; write 1 "
                "to 100, in percent of one GPU",
                field=where,
            )
        if request is not None and given != units:
            raise InputError(
                f"container {name} takes {given} units of {names.SHARE_RESOURCE}, but the pod's {names.REQUEST} of"
                f" {percent(request)} makes {units} units; remove one of the two",
                field=where,
            )
        units = int(given)
    if request is None:
        request = units / names.SHARE_UNITS if units > 1 else min(1 / names.SHARE_UNITS, limit)
    if request > limit:
        raise InputError(
            f"container {name} requests {percent(request)} of a GPU, over its limit of {percent(limit)}",
            field=key_field(names.LIMIT),
        )
    memory_units = 0 if memory is None else memory_units_of(memory)
    if names.MEMORY_RESOURCE in mine:
        given_units = _memory_resource(mine[names.MEMORY_RESOURCE], name, where)
        if memory is not None and given_units != memory_units:
            raise InputError(
                f"container {name} takes {given_units} GiB by {names.MEMORY_RESOURCE} and the pod's annotation says"
                f" {memory_units}; keep one of them",
                field=where,
            )
        memory_units = given_units
        memory = memory_units * names.MEMORY_UNIT_BYTES if memory is None else memory
    if memory is None and enforce is not Strength.NOTHING:
        raise InputError(
            f"container {name} has no limit on its memory that could be enforced: give {names.MEMORY}",
            field=key_field(names.ENFORCE_MEMORY),
        )
    return ContainerShare(name, kind, index, request, limit, memory, units, memory_units, enforce_memory=enforce)


def _memory_resource(value: Any, name: str, where: str) -> int:
    number = parse_quantity(value, where)
    if number >= PLAIN_BYTES:
        number = Fraction(memory_units_of(int(number)))
    if number.denominator != 1 or not 0 < number < PLAIN_BYTES:
        raise InputError(
            f"{value!r:.40} of {names.MEMORY_RESOURCE} in container {name}; write whole GiB, as 8 or 8Gi", field=where
        )
    return int(number)


def percent(fraction: float) -> str:
    """Format a share as text: 30%, 12.5%."""
    return f"{fraction * 100:.6g}%"


def units_of(request: float) -> int:
    """Share units of a request, rounded up to percent and at least one, since only a container with units gets a
    GPU.
    """
    return max(1, math.ceil(request * names.SHARE_UNITS - 1e-9))


def memory_units_of(memory_bytes: int) -> int:
    """Memory units, rounded up to GiB."""
    return -(-memory_bytes // names.MEMORY_UNIT_BYTES)


def _mapping(parent: Any, where: str, key: str) -> Mapping[str, Any]:
    """Return the map under a key of another map. Either map may be missing or null. Raises InputError for another type.
    """
    if parent is None:
        return {}
    value = parent.get(key) if isinstance(parent, dict) else parent
    if value is None:
        return {}
    if not isinstance(parent, dict) or not isinstance(value, dict):
        raise InputError("not a map of names and values", field=f"{where}.{key}")
    return value
