"""Keeps the agent's tenants equal to the pods to which the kubelet has allocated devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import grpc

from cotenant.core.errors import InputError, TakenNameError, WorkError
from cotenant.core.strength import NOT_ENFORCED
from cotenant.kube import names
from cotenant.kube.binding.events import PodEvents
from cotenant.kube.binding.orders import (
    NO_MEMORY,
    Devices,
    Order,
    PodKey,
    annotations_fault,
    containers_left,
    described,
    devices_by_pod,
    ended,
    init_order,
    init_share,
    other_name,
    started,
    wanted,
)
from cotenant.kube.binding.pods import NodePods
from cotenant.kube.dra.claims import by_claims, claims_of_pod
from cotenant.kube.dra.held import NodeClaims, PodClaims
from cotenant.kube.messages import POD_RESOURCES, caller, devices_of, error_text, open_channel, pod_resources
from cotenant.kube.plugin.state import PluginState

LOG = logging.getLogger(__name__)

# A container that the kubelet no longer lists loses its share at once if the API server confirms its end. If the API
# server still lists it as running, or cannot be asked, it loses its share after it was missing in this many rounds.
MISSED_BEFORE_GONE = 10
Held = dict[tuple[str, str], dict[str, Any]]  # (pod's UID, container) -> the tenant that the agent holds for it


class Agent(Protocol):
    """Interface for orders to the node's agent, such as `call("hold", ...)`. Raises the InputError or WorkError that
    the agent answers with."""

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        """Send one order to the agent and return the agent's answer."""
        ...


class Binder:
    """Keeps the agent's tenants equal to the pods of one node. `round()` updates the agent once."""

    def __init__(
        self,
        agent: Agent,
        state: PluginState,
        pods: NodePods,
        events: PodEvents,
        pod_resources_socket: str,
        claims: NodeClaims | None = None,
    ) -> None:
        self._agent, self._state, self._pods, self._events = agent, state, pods, events
        self._socket, self._claims = pod_resources_socket, claims
        self._missed: dict[tuple[str, str], int] = {}
        self._faults: dict[str, str] = {}

    def round(self) -> None:
        """Read the kubelet's allocations and the API server's pods, and update the agent's tenants. If the kubelet or
        the API server does not answer, nothing is changed.
        """
        devices = self._devices()
        if devices is None:
            return
        self._state.listed(row for pod in devices.values() for found in pod.values() for row in found.items())
        self._pods.with_devices = devices.keys()
        fresh = self._pods.refresh(devices)
        try:
            held: Held = {(row["id"], row["container"]): row for row in self._agent.call("held", kind="pod")["held"]}
        except (WorkError, InputError) as error:
            self._say_once("agent", str(error))
            return
        self._say_once("agent", "")
        claimed, unclear = self._claimed(fresh)
        orders, more = self._orders(devices | {key: mine.devices for key, mine in claimed.items()}, claimed)
        unclear |= more
        orders += self._init_orders(devices, held, {order.key for order in orders})
        self._let_go(held, {order.key for order in orders}, unclear, fresh)
        self._hold(held, orders)

    def escaped(self, unseen: list[dict[str, Any]]) -> None:
        """Report to pods that one of their processes uses a GPU without being connected to the agent. `unseen`: these
        processes, which the agent has found.
        """
        pods = self._pods.by_uid()
        for row in unseen:
            if pod := pods.get(row["holder"]["id"]):
                where = self._state.inventory.index_of(row["gpu"])
                text = f"a process uses {where} without the shim: no share limits it (musl, or LD_PRELOAD lost?)"
                self._events.say(pod, NOT_ENFORCED, text, warning=True)

    def not_enforced(self, tenants: list[dict[str, Any]]) -> None:
        """Report to pods why their tenants are not limited to their shares. `tenants`: the agent's tenants, each with
        the faults that the agent has detected."""
        pods = self._pods.by_uid()
        for row in tenants:
            pod = pods.get(row["holder"]["id"]) if row["holder"] else None
            if pod is not None:
                for fault in row["not_enforced"]:
                    self._events.say(pod, NOT_ENFORCED, fault["text"], warning=True)

    # -- looking ---------------------------------------------------------------------------------------------------

    def _devices(self) -> dict[PodKey, Devices] | None:
        """Return the devices that the kubelet has allocated, by pod; None if the kubelet does not answer."""
        try:
            with open_channel(self._socket) as channel:
                answer = caller(channel, POD_RESOURCES, "List")(pod_resources.ListPodResourcesRequest(), timeout=5.0)
        except grpc.RpcError as error:
            self._say_once("kubelet", f"the kubelet's PodResources at {self._socket}: {error_text(error)}")
            return None
        self._say_once("kubelet", "")
        rows = (
            ((pod.namespace, pod.name), container.name, resource, ids)
            for pod in answer.pod_resources
            for container in pod.containers
            for resource, ids in devices_of(container)
        )
        return dict(devices_by_pod(rows))

    # -- deciding --------------------------------------------------------------------------------------------------

    def _orders(
        self, devices: dict[PodKey, Devices], claimed: Mapping[PodKey, PodClaims]
    ) -> tuple[list[Order], set[str]]:
        """Return the tenants to make for all pods, and the UIDs of the pods whose annotations are invalid now. Those
        pods keep their present shares."""
        orders: list[Order] = []
        unclear: set[str] = set()
        for key, containers in devices.items():
            pod = self._pods.by_key.get(key)
            if pod is None or ended(pod):
                continue
            found = wanted(pod, containers, claimed[key].memory if key in claimed else NO_MEMORY)
            orders += found.orders
            for remark in found.remarks:
                if remark.reason == "ShareUnclear":
                    unclear.add(pod["metadata"]["uid"])
                self._events.say(pod, remark.reason, remark.message, warning=remark.warning)
        return orders, unclear

    def _claimed(self, fresh: bool) -> tuple[dict[PodKey, PodClaims], set[str]]:
        """Return the claims of pods that have devices by claims, and the UIDs of the pods whose claims or annotations
        cannot be read now. `fresh`: the list of this node's pods is complete, so claims of pods that are not listed can
        be forgotten."""
        found: dict[PodKey, PodClaims] = {}
        unclear: set[str] = set()
        if self._claims is None:
            return found, unclear
        pods = self._pods.by_key.items()
        theirs = {key: pod for key, pod in pods if by_claims(pod) and not ended(pod)}
        if fresh:
            self._claims.forget({(key[0], name) for key, pod in theirs.items() for name in claims_of_pod(pod).values()})
        for key, pod in theirs.items():
            try:
                mine = self._claims.of_pod(pod)
            except (InputError, WorkError) as error:
                unclear.add(pod["metadata"]["uid"])
                self._say_once(f"claims of {key[0]}/{key[1]}", str(error))
                if fault := annotations_fault(pod):
                    self._events.say(pod, "ShareUnclear", fault, warning=True)
                continue
            self._remark_claims(pod, mine)
            if mine.devices:
                found[key] = mine
        return found, unclear

    def _remark_claims(self, pod: dict[str, Any], mine: PodClaims) -> None:
        """Report to a pod which of its containers use a claim without a share, or request a share without a claim."""
        for container, claim, uuid in mine.unasked:
            where = f"{self._state.inventory.index_of(uuid)} of {self._pods.node}"
            text = (
                f"container {container} can use {where} by claim {claim}, but requests no share: it is not limited. "
                f"Name it in {names.CONTAINERS}, and write {names.PLACED_BY}: claims"
            )
            self._events.say(pod, NOT_ENFORCED, text, warning=True)
        for container in mine.without:
            text = f"container {container} requests a share, but uses no claim: it gets no GPU"
            self._events.say(pod, "ShareRefused", text, warning=True)

    def _init_orders(self, devices: dict[PodKey, Devices], held: Held, ordered: set[tuple[str, str]]) -> list[Order]:
        """The tenants to make for init containers whose devices no other container uses. The plugin knows the GPU of
        these devices from the kubelet's Allocate call.
        """
        found = []
        for pod in self._pods.by_key.values():
            share = None if ended(pod) else init_share(pod)
            if share is None or share.claimed or (pod["metadata"]["uid"], share.container) in ordered:
                continue
            before = held.get((pod["metadata"]["uid"], share.container))
            resource = names.GPU_RESOURCE if share.whole else names.SHARE_RESOURCE
            gpus = before["gpus"] if before else self._state.unclaimed(resource, share.gpus or share.units, devices)
            if gpus:
                found.append(init_order(pod, share, gpus))
            elif started(pod, share.container):
                text = (
                    f"init container {share.container}: its GPU is unknown, since the plugin was started after "
                    "it; its processes are refused. Delete the pod to have it placed again"
                )
                self._events.say(pod, "ShareRefused", text, warning=True)
        return found

    def _let_go(self, held: Held, keep: set[tuple[str, str]], unclear: set[str], fresh: bool) -> None:
        """Release the shares of containers that the kubelet no longer lists and that have ended, or were missing in
        MISSED_BEFORE_GONE rounds."""
        running = {(uid, name) for uid, pod in self._pods.by_uid().items() for name in containers_left(pod)}
        for key, row in list(held.items()):
            if key in keep or key[0] in unclear:
                self._missed.pop(key, None)
                continue
            missed = self._missed[key] = self._missed.get(key, 0) + 1
            if missed == 1 and not fresh:
                self._pods.expire()
            if key in running and missed < MISSED_BEFORE_GONE:
                continue
            if not fresh and self._pods.fault and missed < MISSED_BEFORE_GONE:
                continue
            self._agent.call("let_go", kind="pod", id=key[0], container=key[1], name=row["name"])
            self._missed.pop(key, None)
            del held[key]

    def _hold(self, held: Held, orders: list[Order]) -> None:
        bound = refused = 0
        for order in orders:
            before = held.get(order.key)
            try:
                if before is None or changed(before, order):
                    self._place(order, before)
                bound += 1
            except InputError as error:
                refused += 1
                self._tell(order, "ShareRefused", f"container {order.container}: {error.message}", warning=True)
        self._state.metrics.bound = bound
        self._state.metrics.unbound = refused

    def _place(self, order: Order, before: dict[str, Any] | None) -> None:
        tenant = dict(order.tenant)
        if before is not None:
            tenant["name"] = before["name"]
        place = {"kind": "pod", "id": order.uid, "container": order.container, "container_id": order.container_id}
        try:
            self._agent.call("hold", tenant=tenant, **place)
        except TakenNameError:
            if before is not None:
                raise
            # a previous pod of the same name still has running processes, so the tenant gets another name
            self._agent.call("hold", tenant=tenant | {"name": other_name(tenant["name"], order.uid)}, **place)
        where = " and ".join(self._state.inventory.index_of(uuid) for uuid in tenant["gpus"])
        text = described(tenant, f"{where} of {self._pods.node}")
        self._tell(order, "ShareBound", f"container {order.container} {text}")

    def _tell(self, order: Order, reason: str, message: str, *, warning: bool = False) -> None:
        if pod := self._pods.by_uid().get(order.uid):
            self._events.say(pod, reason, message, warning=warning)

    def _say_once(self, whom: str, fault: str) -> None:
        if self._faults.get(whom, "") != fault:
            LOG.log(logging.WARNING if fault else logging.INFO, fault or f"the {whom} answers again")
            self._faults[whom] = fault


def changed(row: dict[str, Any], order: Order) -> bool:
    """Return whether the tenant that the agent has differs from the intended one."""
    same = all(row[key] == order.tenant[key] for key in ("request", "limit", "memory_bytes", "enforce_memory"))
    # The GPUs may differ: when the tenant was registered, the known GPUs may still have been those of an earlier pod
    # with the same name, or of an earlier claim.
    same = same and set(row["gpus"]) == set(order.tenant["gpus"])
    return not same or (bool(order.container_id) and row["container_id"] != order.container_id)
