"""Makes the orders that tell the agent which tenants a node's pods need. The input is the kubelet's list of allocated
devices (PodResources) and the pods' objects. The functions have no side effects."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.core.errors import InputError
from cotenant.core.strength import NOT_ENFORCED
from cotenant.kube import names
from cotenant.kube.admission.mutate import preload
from cotenant.kube.shares import ContainerShare, containers_of, percent, present, shares_of
from cotenant.kube.units import gpu_of

MOST_NAME = 63  # longest name that a tenant can have
Devices = Mapping[str, Mapping[str, list[str]]]  # container -> resource -> ids of its devices
PodKey = tuple[str, str]  # namespace, name
NO_MEMORY: Mapping[str, int] = {}


@dataclass(frozen=True)
class Order:
    """The intended tenant of a container."""

    uid: str
    container: str
    container_id: str
    tenant: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        """The pod and the container to which the tenant belongs."""
        return self.uid, self.container


@dataclass(frozen=True)
class Remark:
    """A remark about a pod, for an event."""

    reason: str
    message: str
    warning: bool = True


@dataclass
class Wanted:
    """The intended tenants of the containers of one pod, and remarks about the pod."""

    orders: list[Order] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)


def ended(pod: Mapping[str, Any]) -> bool:
    """Return whether all containers of a pod have ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def wanted(pod: Mapping[str, Any], devices: Devices, memory: Mapping[str, int] = NO_MEMORY) -> Wanted:
    """Return the intended tenants of a pod's containers that run now, and remarks about the pod. `devices`: what the
    kubelet has allocated to the pod; `memory`: for each container whose claims request memory, how many bytes the
    claims give it on each of its GPUs.

    A tenant's request is never larger than the kubelet's allocation, even if the pod's annotations have changed; the
    tenant's limit and memory come from the pod. A claim's memory is a further bound on the tenant's memory. Containers
    that use one claim at the same time divide the claim's share and memory.
    """
    found = Wanted()
    try:
        asked = shares_of(pod)
        shares = {share.container: share for share in present(asked, _finished_inits(pod))}
    except InputError as error:
        # A user can edit the annotations of a running pod. The pod then keeps its share, and an event reports the
        # error.
        found.remarks.append(Remark("ShareUnclear", str(error)))
        return found
    for container, resources in sorted(devices.items()):
        share = shares.get(container)
        ids = resources.get(names.SHARE_RESOURCE) or resources.get(names.GPU_RESOURCE) or []
        if not ids or share is None:
            continue
        gpus = sorted({gpu_of(device) for device in ids})
        if not share.whole and not share.claimed and len(gpus) > 1:
            found.remarks.append(
                Remark(
                    "ShareRefused",
                    f"the units of container {container} are on the GPUs {' and '.join(gpus)}, but must be on one GPU",
                )
            )
            continue
        users = _users(share, asked, devices) if share.claimed else [1] * len(ids)
        most_bytes = memory[container] // max(users) if container in memory else None
        found.orders.append(_order(pod, share, sum(1 / count for count in users), gpus, most_bytes))
        shares.pop(container)
        if not injected(pod, share):
            found.remarks.append(
                Remark(
                    NOT_ENFORCED,
                    f"container {container} has a share, but Cotenant's webhook has not patched it: its share is "
                    "not enforced",
                )
            )
    for share in shares.values():
        gpus = [] if share.claimed else _handed_on(share, asked, devices)
        if share.ends and len(gpus) == max(1, share.gpus):
            found.orders.append(init_order(pod, share, gpus))
    return found


def _handed_on(share: ContainerShare, asked: list[ContainerShare], devices: Devices) -> list[str]:
    """Return the GPUs of an init container. PodResources does not list init containers; the GPUs are those of the pod's
    next container with the same resource. Empty if no later container has the resource.
    """
    resource = names.GPU_RESOURCE if share.whole else names.SHARE_RESOURCE
    for other in asked[asked.index(share) + 1 :]:
        if ids := devices.get(other.container, {}).get(resource):
            return sorted({gpu_of(device) for device in ids})
    return []


def _users(share: ContainerShare, asked: list[ContainerShare], devices: Devices) -> list[int]:
    """Return for each unit of the claims of the container of `share`, how many containers use the unit at the same
    time. The container itself counts, too.

    This is the largest number at any time while the container runs, so that its share and memory stay the same.
    """
    ids = {one.container: devices.get(one.container, {}).get(names.SHARE_RESOURCE, []) for one in asked}
    inits = [one.container for one in asked if one.ends]
    users = dict.fromkeys(ids[share.container], 1)
    for count in range(len(inits) + 1):
        beside = present(asked, inits[:count])
        if share in beside:
            now = Counter(unit for one in beside for unit in ids[one.container])
            users = {unit: max(most, now[unit]) for unit, most in users.items()}
    return list(users.values())


def containers_left(pod: Mapping[str, Any]) -> set[str]:
    """Containers of a pod that run, or will run after its init containers; empty once the pod has ended."""
    if ended(pod):
        return set()
    finished = _finished_inits(pod)
    with contextlib.suppress(InputError):
        shares = shares_of(pod)
        now = present(shares, finished)
        if any(share.ends for share in now):
            return {share.container for share in now}
    return {c["name"] for _, _, c in containers_of(pod)} - finished


def _finished_inits(pod: Mapping[str, Any]) -> set[str]:
    """Init containers that have ended; all of them once the pod is initialized."""
    status = pod.get("status") or {}
    conditions = {row.get("type"): row.get("status") for row in status.get("conditions") or []}
    if conditions.get("Initialized") == "True":
        return {
            c["name"] for kind, _, c in containers_of(pod)
            if kind == "initContainers" and c.get("restartPolicy") != "Always"
        }  # fmt: skip
    return {
        str(row.get("name"))
        for row in status.get("initContainerStatuses") or []
        if ((row.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
    }


def init_share(pod: Mapping[str, Any]) -> ContainerShare | None:
    """The share of the init container that runs now or will run next."""
    try:
        return next((share for share in present(shares_of(pod), _finished_inits(pod)) if share.ends), None)
    except InputError:
        return None


def annotations_fault(pod: Mapping[str, Any]) -> str:
    """Return what is wrong with a pod's request for a share; empty if nothing is."""
    try:
        shares_of(pod)
    except InputError as error:
        return str(error)
    return ""


def started(pod: Mapping[str, Any], container: str) -> bool:
    """Whether an init container runs."""
    rows = (pod.get("status") or {}).get("initContainerStatuses") or []
    return any(row.get("name") == container and "running" in (row.get("state") or {}) for row in rows)


def init_order(pod: Mapping[str, Any], share: ContainerShare, gpus: list[str]) -> Order:
    """Return the order to the agent to hold an init container's share, on the GPUs that were allocated to the
    container.
    """
    return _order(pod, share, share.units or share.gpus, gpus)


def _order(
    pod: Mapping[str, Any], share: ContainerShare, units: float, gpus: list[str], most_bytes: int | None = None
) -> Order:
    """Return the order for a container that has `units` share units, in total on all of its GPUs. `most_bytes`: the
    memory that its claims give it on each GPU; None if they do not limit memory."""
    metadata = pod["metadata"]
    request = 1.0 if share.whole else min(share.request, units / len(gpus) / names.SHARE_UNITS)
    memory = [amount for amount in (share.memory_bytes, most_bytes) if amount is not None]
    tenant = {
        "name": tenant_name(metadata["namespace"], metadata["name"], share.container, metadata["uid"]),
        "request": request,
        "limit": max(share.limit, request),
        "memory_bytes": min(memory, default=None),
        "enforce_memory": share.enforce_memory,
        "gpus": gpus,
        "gpu_count": len(gpus),
        "mechanism": mechanisms.EXCLUSIVE if share.whole else mechanisms.AUTO,
    }
    return Order(metadata["uid"], share.container, container_id(pod, share.container), tenant)


def tenant_name(namespace: str, pod: str, container: str, uid: str) -> str:
    """namespace/pod/container; long names are truncated, with a hash of the pod's UID to keep them unique."""
    whole = f"{namespace}/{pod}/{container}"
    return whole if len(whole) <= MOST_NAME else other_name(whole, uid)


def other_name(name: str, uid: str) -> str:
    """Return a name, made unique by the pod's UID, for the tenant of a pod's container. It replaces `name`, the usual
    name, while the tenant of a previous pod of the same name still exists.
    """
    digest = hashlib.sha256(f"{uid}/{name}".encode()).hexdigest()[:10]
    return f"{name[: MOST_NAME - 11]}-{digest}"


def container_id(pod: Mapping[str, Any], container: str) -> str:
    """The runtime's id of a container; empty until the pod's status contains it."""
    status = pod.get("status") or {}
    for kind in ("containerStatuses", "initContainerStatuses"):
        for row in status.get(kind) or []:
            if row.get("name") == container:
                return str(row.get("containerID") or "").rpartition("//")[2]
    return ""


def injected(pod: Mapping[str, Any], share: ContainerShare) -> bool:
    """Whether the webhook has patched this container."""
    container = pod["spec"][share.list_name][share.index]
    found = [e.get("value") or "" for e in container.get("env") or [] if e.get("name") == "LD_PRELOAD"]
    return bool(found) and str(found[-1]).startswith(preload())


def described(tenant: Mapping[str, Any], where: str) -> str:
    """A tenant's share in words."""
    if tenant["mechanism"] == mechanisms.EXCLUSIVE:
        return f"has all of {where}"
    memory = tenant["memory_bytes"]
    amount = "all memory" if memory is None else f"{memory / 2**30:.4g} GiB"
    return f"has {percent(tenant['request'])} of {where}, at most {percent(tenant['limit'])}, and {amount}"


def devices_by_pod(
    listed: Iterable[tuple[PodKey, str, str, list[str]]],
) -> dict[PodKey, dict[str, dict[str, list[str]]]]:
    """Nest rows of PodResources (pod, container, resource, ids): pod -> container -> resource -> ids. Only Cotenant's
    resources are kept."""
    found: dict[PodKey, dict[str, dict[str, list[str]]]] = {}
    for pod, container, resource, ids in listed:
        if names.in_domain(resource) and ids:
            found.setdefault(pod, {}).setdefault(container, {}).setdefault(resource, []).extend(ids)
    return found
