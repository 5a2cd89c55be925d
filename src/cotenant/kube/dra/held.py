"""Reads the claims of a node's pods, and tells the kubelet and the binder which devices are allocated for them.

Allocations of claims are read from the API server, so nothing is lost when the plugin is restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cotenant.core.errors import InputError
from cotenant.kube import names
from cotenant.kube.client import KubeApi
from cotenant.kube.dra import claims, offer
from cotenant.kube.dra.slices import NodeSlices
from cotenant.kube.shares import containers_of, shares_of


@dataclass
class PodClaims:
    """What the containers of a pod have by claims."""

    # container -> resource -> ids as in PodResources; the same id in two containers is one unit that both use
    devices: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    # container -> bytes on each of its GPUs, if its claims request memory
    memory: dict[str, int] = field(default_factory=dict)
    # (container, claim, GPU's UUID): a claim that gives part of a GPU to a container that requests no share by claims
    unasked: list[tuple[str, str, str]] = field(default_factory=list)
    without: list[str] = field(default_factory=list)  # containers that request a share and use no claim


class NodeClaims:
    """Allocated claims of one node. The kubelet's calls come from other threads than the binder's."""

    def __init__(self, api: KubeApi, slices: NodeSlices, node: str, cdi_kind: str) -> None:
        self._api, self._slices, self._node, self._cdi_kind = api, slices, node, cdi_kind
        self._known: dict[tuple[str, str], dict[str, Any]] = {}  # (namespace, name) -> the claim with its allocation
        self._lock = threading.Lock()  # protects `_known`

    def prepare(self, namespace: str, name: str, uid: str) -> list[dict[str, Any]]:
        """Devices of an allocated claim for the kubelet. InputError or WorkError say why there are none."""
        self._slices.await_first()
        claim = self._claim(namespace, name)
        if claim["metadata"].get("uid") != uid:
            raise InputError(f"claim {namespace}/{name} has been replaced by another one")
        devices = []
        for result in claims.allocated(claim, self._node):
            device: dict[str, Any] = {
                "request_names": [result["request"]],
                "pool_name": result["pool"],
                "device_name": result["device"],
                "cdi_device_ids": [f"{self._cdi_kind}={self._slices.uuid_of(result['device'])}"],
            }
            if result.get("shareID"):
                device["share_id"] = result["shareID"]
            devices.append(device)
        if not devices:
            raise InputError(f"claim {namespace}/{name} has no GPU of this node")
        return devices

    def _claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Read a ResourceClaim from the API server. Raises ApiError."""
        group = offer.api_version(self._slices.kubernetes())
        found = self._api.get(f"/apis/{group}/namespaces/{namespace}/resourceclaims/{name}")
        with self._lock:
            self._known.pop((namespace, name), None)
            if claims.has_allocation(found):
                self._known[namespace, name] = found
        return found

    def _claim_of(self, pod: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a pod's claim. A known claim is used as long as it is reserved for that pod, since its allocation
        cannot change meanwhile. A claim that was deleted and created again under the same name is another claim.
        """
        namespace = pod["metadata"]["namespace"]
        known = self._known.get((namespace, name))
        return known if known is not None and claims.reserved(known, pod) else self._claim(namespace, name)

    def of_pod(self, pod: Mapping[str, Any]) -> PodClaims:
        """What a pod's containers have by their claims. Raises ApiError, InputError."""
        found = PodClaims()
        instances = self._slices.instances()
        asking = {share.container: share for share in shares_of(pod)}
        for _, _, container in containers_of(pod):
            name, share = container["name"], asking.get(container["name"])
            if share is not None and share.claimed and not claims.uses_claims(container):
                found.without.append(name)
            memory: dict[str, int] = {}  # GPU -> bytes
            for claim, result in self._results(pod, container):
                if share is None and not claims.consumes_share(result):
                    # the claim gives the pod a whole GPU or MIG instance that no other pod uses, so no limit is needed
                    continue
                uuid = self._slices.uuid_of(result["device"])
                if uuid in instances:  # the hardware isolates a MIG instance, so the agent needs no tenant for it
                    continue
                full = claim["metadata"]["name"]
                if share is None or not share.claimed:
                    found.unasked.append((name, full, uuid))
                    continue
                ids = [f"{uuid}::{full}/{result['request']}/{n:04d}" for n in range(claims.units_of_result(result))]
                found.devices.setdefault(name, {}).setdefault(names.SHARE_RESOURCE, []).extend(ids)
                if (amount := claims.memory_of_result(claim, result)) is not None:
                    memory[uuid] = memory.get(uuid, 0) + amount
            if memory:
                found.memory[name] = min(memory.values())  # the agent has one limit for all GPUs of a container
        return found

    def _results(
        self, pod: Mapping[str, Any], container: Mapping[str, Any]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The devices of this node that a container has, each with its claim."""
        for name, request in claims.claims_of_container(pod, container).items():
            claim = self._claim_of(pod, name)
            results = claims.allocated(claim, self._node) if claims.reserved(claim, pod) else []
            for result in claims.of_request(results, request):
                yield claim, result

    def forget(self, live: set[tuple[str, str]]) -> None:
        """Keep only claims (namespace, name) that pods still use."""
        with self._lock:
            self._known = {key: claim for key, claim in self._known.items() if key in live}

    def held(self) -> frozenset[str]:
        """Names of this node's devices that are allocated to a ResourceClaim."""
        with self._lock:  # the kubelet's calls change the claims in other threads, so a copy is read
            known = list(self._known.values())
        return frozenset(result["device"] for claim in known for result in claims.allocated(claim, self._node))
