"""Describes a node's GPUs and MIG instances as devices of ResourceSlices. Pure functions.

With consumable capacity (KEP-5075, alpha in Kubernetes 1.34, on by default from 1.36) several claims are allocated on
one device and each consumes part of its `share` and `memory`, so the scheduler itself keeps a share on one GPU. With
shared counters (KEP-4815, on by default from 1.36) the devices of one GPU exclude each other: its shares, the whole GPU
and its MIG instances consume the same compute slices. A device with several allocations consumes its slices only once.
Fields are those of the public API group resource.k8s.io.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cotenant.core.errors import InputError
from cotenant.kube import names
from cotenant.kube.units import MigSlice, NodeGpu

Thing = dict[str, Any]
Version = tuple[int, int]
DRIVER = f"gpu.{names.DOMAIN}"
VERSIONS = {(1, 32): "v1beta1", (1, 33): "v1beta2", (1, 34): "v1"}
CONSUMABLE_SINCE, COUNTERS_SINCE = (1, 34), (1, 36)
# limits of Kubernetes for one ResourceSlice: devices, devices that consume counters, and counter sets
MOST_DEVICES, MOST_COUNTING, MOST_SETS = 128, 64, 8
COMPUTE_SLICES = 7  # number of compute slices of a GPU under MIG
# values of a device's attribute `type`; there is a device class for each of them but the last
SHARE, WHOLE, MIG, GONE = "share", "gpu", "mig", "gone"


def api_version(kubernetes: Version) -> str:
    """The version of resource.k8s.io that a Kubernetes version serves. Raises InputError before 1.32."""
    known = [version for since, version in VERSIONS.items() if since <= kubernetes]
    if not known:
        raise InputError(
            f"Kubernetes {kubernetes[0]}.{kubernetes[1]} has no resource.k8s.io for claims; use 1.32 or newer"
        )
    return f"resource.k8s.io/{known[-1]}"


def device_names(gpu: NodeGpu, kubernetes: Version, counters: bool) -> dict[str, str]:
    """The devices as which a GPU is offered: type -> name. A GPU is offered both in shares and as a whole only if
    counters make the two offers exclude each other.
    """
    shares = kubernetes >= CONSUMABLE_SINCE and not gpu.whole
    found = {SHARE: f"gpu-{gpu.index}"} if shares else {}
    return found | ({WHOLE: f"gpu-{gpu.index}-whole"} if counters or not shares else {})


def mig_name(piece: MigSlice) -> str:
    """Device name of a MIG instance."""
    return piece.uuid.lower()


def devices(gpus: Iterable[NodeGpu], pieces: Iterable[MigSlice], kubernetes: Version, counters: bool) -> list[Thing]:
    """The devices of the node that can be used, without GPUs that have a fault."""
    found = []
    for gpu in gpus:
        for kind, name in device_names(gpu, kubernetes, counters).items() if not gpu.fault else ():
            device: Thing = {"name": name, **_gpu(gpu, kind)}
            found.append(device | (_draws(gpu.index, COMPUTE_SLICES) if counters else {}))
    for piece in pieces:
        if not piece.fault:
            profile = piece.resource.removeprefix(names.MIG_PREFIX)
            attributes = _attributes(MIG, piece.uuid, piece.gpu_index, profile)
            draws = _draws(piece.gpu_index, _compute_slices(profile)) if counters else {}
            found.append({"name": mig_name(piece), "attributes": attributes, **draws})
    return found


def kept(before: Iterable[Thing], now: Iterable[Thing], held: Iterable[str]) -> list[Thing]:
    """Devices that claims still hold although they cannot be used now, such as a GPU that was divided since. Their type
    is set to `gone`, which no device class selects; they stay listed, so that what they consume stays allocated.
    """
    gone = set(held) - {device["name"] for device in now}
    return [
        {
            "name": device["name"],
            "attributes": device["attributes"] | {"type": {"string": GONE}},
            "consumesCounters": device["consumesCounters"],
        }
        for device in before
        if device["name"] in gone and device.get("consumesCounters")
    ]


def resource_slices(node: str, offered: Sequence[Thing], kubernetes: Version, generation: int = 1) -> list[Thing]:
    """The slices of a node's pool: at least one with devices, and one with counters if devices consume any."""
    drawn = sorted({draw["counterSet"] for device in offered for draw in device.get("consumesCounters", ())})
    most = MOST_COUNTING if drawn else MOST_DEVICES
    flat = [_of_version(device, kubernetes) for device in offered]
    sets = [{"name": name, "counters": {"slices": {"value": str(COMPUTE_SLICES)}}} for name in drawn]
    contents: list[Thing] = [{"devices": flat[at : at + most]} for at in range(0, max(1, len(flat)), most)]
    contents += [{"sharedCounters": sets[at : at + MOST_SETS]} for at in range(0, len(sets), MOST_SETS)]
    pool = {"name": node, "generation": generation, "resourceSliceCount": len(contents)}
    return [
        {
            "apiVersion": api_version(kubernetes),
            "kind": "ResourceSlice",
            "metadata": {"name": slice_name(node, number)},
            "spec": {"driver": DRIVER, "nodeName": node, "pool": dict(pool)} | content,
        }
        for number, content in enumerate(contents)
    ]


def slice_name(node: str, number: int) -> str:
    """Return the name of a ResourceSlice of a node's pool."""
    return f"{f'{node}-{DRIVER}'[:248]}{f'-{number}' if number else ''}"


def _gpu(gpu: NodeGpu, kind: str) -> Thing:
    memory_units = gpu.memory_bytes // names.MEMORY_UNIT_BYTES
    share: Thing = {"value": str(names.SHARE_UNITS)}
    memory: Thing = {"value": f"{memory_units}Gi"}
    if kind == SHARE:
        share["requestPolicy"] = {
            "default": "1",
            "validRange": {"min": "1", "max": str(names.SHARE_UNITS), "step": "1"},
        }
        memory["requestPolicy"] = {
            "default": "1Gi",
            "validRange": {"min": "1Mi", "max": f"{memory_units}Gi", "step": "1Mi"},
        }
    found: Thing = {
        "attributes": _attributes(kind, gpu.uuid, gpu.index),
        "capacity": {"share": share, "memory": memory},
    }
    return found | ({"allowMultipleAllocations": True} if kind == SHARE else {})


def _attributes(kind: str, uuid: str, index: int, profile: str = "") -> Thing:
    """Attributes of a device. Every device has all attributes, since a device class that names a missing attribute
    would fail for all devices."""
    texts = {"type": kind, "uuid": uuid, "profile": profile}
    return {key: {"string": value} for key, value in texts.items()} | {"index": {"int": index}}


def _draws(index: int, slices: int) -> Thing:
    return {"consumesCounters": [{"counterSet": f"gpu-{index}", "counters": {"slices": {"value": str(slices)}}}]}


def _compute_slices(profile: str) -> int:
    """Compute slices of a MIG profile such as 3g.40gb."""
    digits = re.match(r"[1-7](?=g\.)", profile)
    if digits is None:
        raise InputError(f"{profile!r} is not a MIG profile such as 1g.10gb")
    return int(digits.group())


def _of_version(device: Mapping[str, Any], kubernetes: Version) -> Thing:
    if not api_version(kubernetes).endswith("/v1beta1"):
        return dict(device)
    return {"name": device["name"], "basic": {key: value for key, value in device.items() if key != "name"}}
