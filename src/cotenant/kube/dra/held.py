"""The claims of a node's pods: their devices for the kubelet and for the binder.

Allocations of claims are read from the API server, so nothing is lost when the plugin is restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from cotenant.core.errors import InputError
from cotenant.kube import names
from cotenant.kube.client import KubeApi
from cotenant.kube.dra import claims, offer
from cotenant.kube.dra.slices import NodeSlices
from cotenant.kube.shares import shares_of


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
            if claims.allocated(found, self._node):
                self._known[namespace, name] = found
        return found

    def _claim_of(self, pod: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a pod's claim. A known claim is used as long as it is reserved for that pod, since its allocation
        cannot change meanwhile. A claim that was deleted and created again under the same name is another claim.
        """
        namespace = pod["metadata"]["namespace"]
        known = self._known.get((namespace, name))
        return known if known is not None and claims.reserved(known, pod) else self._claim(namespace, name)

    def devices(self, pod: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
        """Devices of a pod's containers by their claims, in units as in PodResources. Raises ApiError, InputError."""
        found: dict[str, dict[str, list[str]]] = {}
        instances = self._slices.instances()
        for share in shares_of(pod):
            container = pod["spec"][share.list_name][share.index]
            for name in claims.claims_of_container(pod, container) if share.claimed else ():
                claim = self._claim_of(pod, name)
                results = claims.allocated(claim, self._node) if claims.reserved(claim, pod) else []
                for result in results:
                    uuid = self._slices.uuid_of(result["device"])
                    if uuid in instances:  # the hardware isolates a MIG instance, so the agent needs no tenant for it
                        continue
                    ids = [f"{uuid}::claim{n:04d}" for n in range(claims.units_of_result(result))]
                    found.setdefault(share.container, {}).setdefault(names.SHARE_RESOURCE, []).extend(ids)
        return found

    def forget(self, live: set[tuple[str, str]]) -> None:
        """Keep only claims (namespace, name) that pods still use."""
        with self._lock:
            self._known = {key: claim for key, claim in self._known.items() if key in live}

    def held(self) -> frozenset[str]:
        """Names of this node's devices that are allocated to a ResourceClaim."""
        with self._lock:  # the kubelet's calls change the claims in other threads, so a copy is read
            known = list(self._known.values())
        return frozenset(result["device"] for claim in known for result in claims.allocated(claim, self._node))
