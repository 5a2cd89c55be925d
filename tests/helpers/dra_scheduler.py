"""The scheduler's part of dynamic resource allocation: pools, classes, consumed capacity and shared counters.

Written from the public interface (KEP-4381, 5075 and 4815). A pool counts when all slices of its newest generation
exist. A request takes a device of its class that is free, or that allows several allocations and has capacity left. A
device in use consumes its counters once, for any number of claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from api_standin import ApiServer
from helm import render

from cotenant.kube.quantity import parse_quantity

Thing = dict[str, Any]
CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "cotenant"
CLASSES = [
    thing for thing in render(CHART, {"dra": {"enabled": True}}, "cotenant-system", "cotenant")
    if thing["kind"] == "DeviceClass"
]  # fmt: skip
COMPARED = re.compile(r"device\.attributes\['([^']+)'\]\.(\w+) == '([^']*)'")


def number(text: Any) -> float:
    return float(parse_quantity(text, "quantity"))


class Scheduler:
    """One node's pool, and the claims that were allocated from it."""

    def __init__(self, api: ApiServer, classes: Iterable[Thing]) -> None:
        self._api = api
        self._classes = {one["metadata"]["name"]: one for one in classes}
        self.claims: dict[str, Thing] = {}

    def pool(self) -> tuple[list[Thing], dict[str, dict[str, float]]]:
        """Devices and counters of the pool; none while it is incomplete."""
        with self._api.lock:
            specs = [thing["spec"] for path, thing in self._api.store.items() if "/resourceslices/" in path]
        newest = max((spec["pool"]["generation"] for spec in specs), default=0)
        specs = [spec for spec in specs if spec["pool"]["generation"] == newest]
        assert all(("devices" in spec) != ("sharedCounters" in spec) for spec in specs), "either of them in a slice"
        if len(specs) != (specs[0]["pool"]["resourceSliceCount"] if specs else 0):
            return [], {}
        devices = [device for spec in specs for device in spec.get("devices", ())]
        sets = [one for spec in specs for one in spec.get("sharedCounters", ())]
        return devices, {s["name"]: {n: number(c["value"]) for n, c in s["counters"].items()} for s in sets}

    def allocate(self, name: str, spec: Thing) -> Thing | None:
        """Allocate a claim with one request. Returns the result, None if no device fits."""
        (request,) = spec["devices"]["requests"]
        exact = request["exactly"]
        devices, counters = self.pool()
        for device in devices:
            if not self._matches(device, exact):
                continue
            consumed = self._fits(device, exact)
            if consumed is None or not self._counted(device, devices, counters):
                continue
            result: Thing = {"request": request["name"], "driver": "gpu.cotenant.dev", "pool": "node-a",
                             "device": device["name"]}  # fmt: skip
            if device.get("allowMultipleAllocations"):
                result |= {"shareID": f"s-{name}", "consumedCapacity": {k: f"{v:.0f}" for k, v in consumed.items()}}
            self.claims[name] = result
            return result
        return None

    def _matches(self, device: Thing, exact: Thing) -> bool:
        """Whether a device has all requested attributes. In the real scheduler a CEL expression fails if an attribute
        is missing."""
        selectors = [*self._classes[exact["deviceClassName"]]["spec"]["selectors"], *exact.get("selectors", ())]
        found = True
        for selector in selectors:
            for domain, name, value in COMPARED.findall(selector["cel"]["expression"]):
                assert domain == "gpu.cotenant.dev"
                found = found and device["attributes"][name]["string"] == value
        return found

    def _fits(self, device: Thing, exact: Thing) -> Mapping[str, float] | None:
        """Capacity that a request would consume of a device; None if the request does not fit."""
        users = [one for one in self.claims.values() if one["device"] == device["name"]]
        asked = exact.get("capacity", {}).get("requests", {})
        if not device.get("allowMultipleAllocations"):
            enough = all(number(value) <= number(device["capacity"][key]["value"]) for key, value in asked.items())
            return {} if enough and not users else None
        found = {}
        for key, capacity in device["capacity"].items():
            policy = capacity["requestPolicy"]
            low, most, step = (number(policy["validRange"][word]) for word in ("min", "max", "step"))
            wanted = max(low, number(asked.get(key, policy["default"])))
            wanted = low + -(-(wanted - low) // step) * step
            used = sum(number(one["consumedCapacity"][key]) for one in users)
            if wanted > most or used + wanted > number(capacity["value"]):
                return None
            found[key] = wanted
        return found

    def _counted(self, device: Thing, devices: list[Thing], counters: dict[str, dict[str, float]]) -> bool:
        """Whether the counters have room for a device that is not in use yet."""
        used = {one["device"] for one in self.claims.values()}
        if device["name"] in used:
            return True
        left = {name: dict(values) for name, values in counters.items()}
        for one in devices:
            for draw in one.get("consumesCounters", ()) if one["name"] in used | {device["name"]} else ():
                for name, counter in draw["counters"].items():
                    left[draw["counterSet"]][name] -= number(counter["value"])
        drawn = [draw["counterSet"] for draw in device.get("consumesCounters", ())]
        return all(value >= 0 for name in drawn for value in left[name].values())
