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
    """Return the claim templates for the containers of a pod that request a share of a GPU, and after them a copy of
    the pod that requests claims instead of units. As with units, an init container uses the claim of a later container,
    since they never run at the same time.

    In the copy, the share is also written into the annotations, from which the limits of every pod are read. Raises
    InputError if containers request different shares by resources, which annotations cannot express.
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
    for index, share in enumerate(shares):
        user = _claim_user(shares[index:])
        if user is share:
            template = _template_name(f"{name}-{share.container}")
            templates.append(claim_template(template, namespace, share, kubernetes))
            row = {"name": share.container, "resourceClaimTemplateName": template}
            spec.setdefault("resourceClaims", []).append(row)
        container = spec[share.list_name][share.index]
        resources = container.setdefault("resources", {})
        for kind in ("limits", "requests"):
            for key in list(resources.get(kind) or {}):
                if key in names.RESOURCES:
                    del resources[kind][key]
        resources.setdefault("claims", []).append({"name": user.container})
    return [*templates, changed]


def _claim_user(shares: list[ContainerShare]) -> ContainerShare:
    """Return the container whose claim the first container in `shares` uses. A sidecar or app container uses its own
    claim. An init container uses that of the next sidecar or app container; if there is none, that of the last init
    container."""
    return next((share for share in shares if not share.ends), shares[-1])


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
    return [one for one in _results(claim) if one.get("driver") == DRIVER and one.get("pool") == node]


def has_allocation(claim: Mapping[str, Any]) -> bool:
    """Return whether any driver's devices are allocated to a claim."""
    return bool(_results(claim))


def _results(claim: Mapping[str, Any]) -> list[Thing]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return (allocation.get("devices") or {}).get("results") or []


def of_request(results: list[Thing], request: str) -> list[Thing]:
    """The devices of one request of a claim, or all devices if no request is named. A request with alternatives has
    results named REQUEST/ALTERNATIVE.
    """
    return [one for one in results if not request or str(one["request"]).partition("/")[0] == request]


def units_of_result(result: Mapping[str, Any]) -> int:
    """Return how many share units of an allocated device a claim has: the number that the claim consumes, or all units
    if the device is allocated as a whole."""
    consumed = (result.get("consumedCapacity") or {}).get("share")
    return names.SHARE_UNITS if consumed is None else int(parse_quantity(consumed, "consumedCapacity"))


def consumes_share(result: Mapping[str, Any]) -> bool:
    """Return whether an allocated device is a part of a GPU, neither a whole GPU nor a MIG instance."""
    return (result.get("consumedCapacity") or {}).get("share") is not None


def memory_of_result(claim: Mapping[str, Any], result: Mapping[str, Any]) -> int | None:
    """Return how many bytes of an allocated device's memory a claim has; None if its request states no memory, since
    Kubernetes then only counts the default amount, which is not meant as a limit.
    """
    name, _, alternative = str(result["request"]).partition("/")
    requests = ((claim.get("spec") or {}).get("devices") or {}).get("requests") or []
    request: Thing = next((one for one in requests if one.get("name") == name), {})
    choices = request.get("firstAvailable") or []
    exact = next((one for one in choices if one.get("name") == alternative), request.get("exactly") or {})
    if "memory" not in ((exact.get("capacity") or {}).get("requests") or {}):
        return None
    consumed = (result.get("consumedCapacity") or {}).get("memory")
    return None if consumed is None else int(parse_quantity(consumed, "consumedCapacity"))


def reserved(claim: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Return whether a claim is reserved for a pod; the scheduler reserves it before it binds the pod to a node."""
    rows = (claim.get("status") or {}).get("reservedFor") or []
    return any(row.get("uid") == pod["metadata"]["uid"] for row in rows)


def by_claims(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod has claims, or states that it is placed by claims."""
    annotations = pod["metadata"].get("annotations") or {}
    return bool(pod["spec"].get("resourceClaims")) or annotations.get(names.PLACED_BY) == "claims"


def claims_of_pod(pod: Mapping[str, Any]) -> dict[str, str]:
    """Names of a pod's ResourceClaims that have been created, by the names that its containers give them."""
    made = {
        one.get("name"): one.get("resourceClaimName")
        for one in (pod.get("status") or {}).get("resourceClaimStatuses") or []
    }
    rows = pod["spec"].get("resourceClaims") or []
    found = {str(one["name"]): one.get("resourceClaimName") or made.get(one["name"]) for one in rows}
    return {name: str(claim) for name, claim in found.items() if claim}


def claims_of_container(pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, str]:
    """The ResourceClaims of a container that have been created: name -> the request of the claim that the container
    uses; empty: all of its requests.
    """
    wanted = {row.get("name"): row.get("request") or "" for row in _claim_rows(container)}
    return {claim: wanted[name] for name, claim in claims_of_pod(pod).items() if name in wanted}


def uses_claims(container: Mapping[str, Any]) -> bool:
    """Return whether a container uses any claim, whatever it is for."""
    return bool(_claim_rows(container))


def _claim_rows(container: Mapping[str, Any]) -> list[Thing]:
    return (container.get("resources") or {}).get("claims") or []
