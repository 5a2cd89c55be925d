"""Resource claims (DRA) derived from pods' shares, and the devices allocated for them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from cotenant.core.errors import InputError
from cotenant.kube import names
from cotenant.kube.dra.offer import CONSUMABLE_SINCE, DRIVER, api_version
from cotenant.kube.quantity import parse_quantity
from cotenant.kube.shares import ContainerShare, Pod, percent, shares_of

Thing = dict[str, Any]
MOST_NAME = 253  # longest name of a Kubernetes object
SHARE_CLASS, GPU_CLASS = f"share.{names.DOMAIN}", f"gpu.{names.DOMAIN}"


def claim_template(name: str, namespace: str, share: ContainerShare, kubernetes: tuple[int, int]) -> Thing:
    """A ResourceClaimTemplate for one container's share; request and limit are opaque parameters for the driver."""
    exact: Thing = {"deviceClassName": GPU_CLASS if share.whole else SHARE_CLASS}
    if share.whole:
        exact["count"] = share.gpus
    elif kubernetes >= CONSUMABLE_SINCE:
        wanted = {"share": str(share.units)}
        if share.memory_bytes is not None:
            wanted["memory"] = f"{-(-share.memory_bytes // 2**20)}Mi"
        exact["capacity"] = {"requests": wanted}
    else:
        raise InputError("a claim for a share of a GPU needs consumable capacity, in Kubernetes 1.34 or newer")
    flat = api_version(kubernetes).endswith("/v1beta1")
    request = {"name": "gpu"} | (exact if flat else {"exactly": exact})
    return {
        "apiVersion": api_version(kubernetes),
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def claims_of(pod: Pod, kubernetes: tuple[int, int]) -> list[Thing]:
    """Return claim templates for every requesting container of a pod, and the pod, which requests claims instead of
    units.

    The share is also written into the pod's annotations, from which the limits of every pod are read. Raises InputError
    if containers request different shares by resources, which annotations cannot express.
    """
    changed: Thing = copy.deepcopy(dict(pod))
    shares = shares_of(pod)
    if not shares:
        return [changed]
    if len({(s.request, s.limit, s.memory_bytes, s.gpus) for s in shares}) > 1:
        raise InputError(
            "containers request different shares by resources; claims need pods whose annotations state the share"
        )
    metadata, spec = changed["metadata"], changed["spec"]
    name = metadata.get("name") or str(metadata.get("generateName") or "pod").rstrip("-")
    namespace = metadata.get("namespace") or "default"
    metadata["annotations"] = (metadata.get("annotations") or {}) | _terms(shares)
    templates = []
    for share in shares:
        template = _template_name(f"{name}-{share.container}")
        templates.append(claim_template(template, namespace, share, kubernetes))
        spec.setdefault("resourceClaims", []).append({"name": share.container, "resourceClaimTemplateName": template})
        container = spec[share.list_name][share.index]
        resources = container.setdefault("resources", {})
        for kind in ("limits", "requests"):
            for key in list(resources.get(kind) or {}):
                if key in names.RESOURCES:
                    del resources[kind][key]
        resources.setdefault("claims", []).append({"name": share.container})
    return [*templates, changed]


def _template_name(name: str) -> str:
    """Shorten a name to the limit of Kubernetes. Different long names that begin alike stay different."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 11]}-{digest}"


def _terms(shares: list[ContainerShare]) -> dict[str, str]:
    """Return the pod's annotations that request the share that all entries of `shares` have."""
    first = shares[0]
    found = {
        names.REQUEST: percent(first.request),
        names.LIMIT: percent(first.limit),
        names.CONTAINERS: ",".join(share.container for share in shares),
        names.PLACED_BY: "claims",
    }
    return found | ({} if first.memory_bytes is None else {names.MEMORY: _with_unit(first.memory_bytes)})


def _with_unit(count: int) -> str:
    """Bytes in exact notation for an annotation: 2048Mi, or 500000.001k."""
    mib, rest = divmod(count, 1 << 20)
    return f"{count // 1000}.{count % 1000:03}k" if rest else f"{mib}Mi"


def allocated(claim: Mapping[str, Any], node: str) -> list[Thing]:
    """The devices of a claim that belong to this driver and node."""
    status = claim.get("status") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
    return [one for one in results if one.get("driver") == DRIVER and one.get("pool") == node]


def units_of_result(result: Mapping[str, Any]) -> int:
    """Return how many share units of an allocated device a claim has: the part that the claim consumes, or all of them.
    """
    consumed = (result.get("consumedCapacity") or {}).get("share")
    return names.SHARE_UNITS if consumed is None else int(parse_quantity(consumed, "consumedCapacity"))


def reserved(claim: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Return whether a claim is reserved for a pod; the scheduler reserves it before it binds the pod to a node."""
    rows = (claim.get("status") or {}).get("reservedFor") or []
    return any(row.get("uid") == pod["metadata"]["uid"] for row in rows)


def claims_of_pod(pod: Mapping[str, Any]) -> dict[str, str]:
    """Names of a pod's ResourceClaims that have been created, by the names that its containers give them."""
    made = {
        one.get("name"): one.get("resourceClaimName")
        for one in (pod.get("status") or {}).get("resourceClaimStatuses") or []
    }
    rows = pod["spec"].get("resourceClaims") or []
    found = {str(one["name"]): one.get("resourceClaimName") or made.get(one["name"]) for one in rows}
    return {name: str(claim) for name, claim in found.items() if claim}


def claims_of_container(pod: Mapping[str, Any], container: Mapping[str, Any]) -> list[str]:
    """Names of the ResourceClaims of a container that have been created."""
    wanted = {one.get("name") for one in (container.get("resources") or {}).get("claims") or []}
    return [claim for name, claim in claims_of_pod(pod).items() if name in wanted]
