"""The devices that a node offers for claims, and the ResourceSlices in which they are written."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from cotenant.core.errors import InputError
from cotenant.kube.client import KubeApi
from cotenant.kube.dra import offer
from cotenant.kube.inventory import Inventory

LOG = logging.getLogger(__name__)
FIRST_LOOK_S = 5.0


class NodeSlices:
    """The devices of one node that are offered for claims."""

    def __init__(self, api: KubeApi, inventory: Inventory, node: str) -> None:
        self._api, self._inventory, self._node = api, inventory, node
        self._offered: tuple[int, frozenset[str]] | None = None
        self._counters: bool | None = None  # whether the API server supports shared counters; None: not known yet
        self._version: tuple[int, int] | None = None

    def known(self) -> list[tuple[str, str, str]]:
        """Return the devices of this node as (name, UUID, why the device cannot be used)."""
        found = [
            (name, gpu.uuid, gpu.fault)
            for gpu in self._inventory.gpus
            for name in offer.device_names(gpu, self._version or offer.COUNTERS_SINCE, self._counters is True).values()
        ]
        return found + [(offer.mig_name(piece), piece.uuid, piece.fault) for piece in self._inventory.slices]

    def await_first(self) -> None:
        """Wait, for a short time, until a plugin that has just started knows its GPUs."""
        self._inventory.wait(0, FIRST_LOOK_S)

    def instances(self) -> set[str]:
        """UUIDs of the MIG instances among the node's devices."""
        return {piece.uuid for piece in self._inventory.slices}

    def uuid_of(self, device: str) -> str:
        """UUID of a device. Raises InputError if the node has none of that name, or if it cannot be used."""
        for name, uuid, fault in self.known():
            if name == device:
                if fault:
                    raise InputError(f"{device} cannot be used: {fault}")
                return uuid
        raise InputError(f"there is no {device} on this node")

    def kubernetes(self) -> tuple[int, int]:
        """Version of the cluster's API server. Raises ApiError."""
        if self._version is None:
            found = self._api.get("/version")
            minor = "".join(c for c in str(found.get("minor", "")) if c in "0123456789")
            self._version = (int(found.get("major", 1)), int(minor or 34))
        return self._version

    def write(self, held: frozenset[str]) -> bool:
        """Write the node's ResourceSlices if the node's devices have changed, or the devices that claims hold. Returns
        whether any slice was written. Raises ApiError, InputError."""
        now = self._inventory.version, held
        if now == self._offered:
            return False
        kubernetes = self.kubernetes()
        if self._counters is None:
            self._counters = kubernetes >= offer.COUNTERS_SINCE
        changed = self._write(held, kubernetes)
        self._offered = now
        return changed

    def _write(self, held: frozenset[str], kubernetes: tuple[int, int]) -> bool:
        """Write the node's ResourceSlices. The slice with counters is written first: whether the API server supports
        counters must be known before devices that need them are published.
        """
        node, counters = self._node, self._counters is True
        path = f"/apis/{offer.api_version(kubernetes)}/resourceslices"
        wanted = offer.devices(self._inventory.gpus, self._inventory.slices, kubernetes, counters)
        before = self._existing(path, len(offer.resource_slices(node, wanted, kubernetes)))
        if counters:
            was = [device for one in before.values() for device in one["spec"].get("devices") or ()]
            wanted += offer.kept(was, wanted, held)
        same = dict(enumerate(map(_content, offer.resource_slices(node, wanted, kubernetes))))
        if {number: _content(one) for number, one in before.items()} == same:
            return False
        generation = max((one["spec"]["pool"]["generation"] for one in before.values()), default=0)
        slices = offer.resource_slices(node, wanted, kubernetes, generation + 1)
        for number, one in reversed(list(enumerate(slices))):
            if number in before:
                one["metadata"] = before[number]["metadata"]
                written = self._api.replace(f"{path}/{one['metadata']['name']}", one)
            else:
                written = self._api.create(path, one)
            if counters and _counting(written) != _counting(one):
                LOG.warning(
                    "the API server has no shared counters (feature DRAPartitionableDevices): a GPU is offered "
                    "either as shares or as a whole"
                )
                self._counters = False
                return self._write(held, kubernetes)
        for number in before.keys() - dict(enumerate(slices)).keys():
            self._api.delete(f"{path}/{before[number]['metadata']['name']}")
        return True

    def _existing(self, path: str, least: int) -> dict[int, dict[str, Any]]:
        """The existing slices of this node, by number; the first ones may be missing, if a driver was killed."""
        found: dict[int, dict[str, Any]] = {}
        for number in itertools.count():
            one = self._api.find(f"{path}/{offer.slice_name(self._node, number)}")
            if one is not None:
                found[number] = one
            elif number > least:
                return found
        raise AssertionError("unreachable")


def _content(one: Mapping[str, Any]) -> list[Any]:
    """The content by which two versions of a slice are compared."""
    spec = one["spec"]
    return [spec["pool"]["resourceSliceCount"], spec.get("devices") or [], spec.get("sharedCounters") or []]


def _counting(one: Mapping[str, Any]) -> list[bool]:
    """Return whether a ResourceSlice has counters, and which of its devices consume counters."""
    spec = one["spec"]
    return [bool(spec.get("sharedCounters")), *(bool(d.get("consumesCounters")) for d in spec.get("devices") or ())]
