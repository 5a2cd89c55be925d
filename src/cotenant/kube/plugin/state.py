"""State that the device plugins of a node's resources share: past allocations, and the GPU from which the next units
should be taken."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cotenant.core.errors import InputError
from cotenant.kube import names, units
from cotenant.kube.inventory import Inventory
from cotenant.kube.metrics import PluginMetrics

# A container may need units of two resources, share and memory. The kubelet asks for the second one within this time
# after the first.
TOGETHER_S = 2.0
LISTED_WITHIN_S = 5.0  # PodResources lists an allocation after this time at the latest
# If the plugin begins to advertise another GPU, the kubelet gets one message per resource, and a pod that the kubelet
# admits between the two messages fails. So the advertised GPU changes only when no allocation was made for this long.
SETTLED_S = 1.0
OTHER = {names.SHARE_RESOURCE: names.MEMORY_RESOURCE, names.MEMORY_RESOURCE: names.SHARE_RESOURCE}


@dataclass(frozen=True)
class Grant:
    """Settings for what a container gets together with its devices."""

    mounts: bool = False  # True: the plugin mounts the libraries and the socket; False: the webhook does
    # the CDI kind under which devices are passed to containers, such as nvidia.com/gpu; empty: by an environment
    # variable
    cdi_kind: str | None = None
    host_libraries: str = str(names.HOST_LIBRARIES)
    host_sockets: str = str(names.HOST_SOCKETS)


@dataclass(frozen=True)
class Allocation:
    """One allocation that the plugin confirmed (call Allocate)."""

    at_s: float
    resource: str
    ids: frozenset[str]


@dataclass
class PluginState:
    """Shared state of the plugins of a node's resources: the inventory, and the latest allocations."""

    inventory: Inventory
    grant: Grant = field(default_factory=Grant)
    one_gpu: bool = True  # whether to advertise at most the free units of one GPU
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
    taken: dict[str, set[str]] = field(default_factory=dict)  # resource -> ids that PodResources lists as allocated
    log: deque[Allocation] = field(default_factory=lambda: deque(maxlen=4096))
    kick: threading.Event = field(default_factory=threading.Event)
    # Guards `log` and `taken`. When `listed` replaces `taken`, an allocation that `note` records meanwhile must not be
    # lost.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Returns the (share units, memory units) of the containers on this node that have no devices yet. With the argument
    # True it asks the API server again.
    waiting: Callable[[bool], list[tuple[int, int]]] = lambda fresh: []
    # the last allocation, as long as its container has not got units of the other resource (share or memory)
    _half: Allocation | None = None
    _shown: str | None = None  # GPU whose free units are advertised; None: not chosen yet

    def note(self, resource: str, ids: list[str]) -> None:
        """Record an allocation that the plugin has confirmed. PodResources will show later which container has it."""
        allocation = Allocation(time.monotonic(), resource, frozenset(ids))
        if resource in OTHER:
            alone = self._needs(resource, len(ids)) == {0}
            self._half = None if alone or self._other_half(resource) else allocation
        with self._lock:
            self.log.append(allocation)
            self.taken.setdefault(resource, set()).update(ids)
        self.kick.set()
        if self.one_gpu:
            self.inventory.wake()

    def listed(self, rows: Iterable[tuple[str, Iterable[str]]]) -> None:
        """Record the allocated devices (resource, ids) of PodResources, which may lack the latest allocations."""
        taken: dict[str, set[str]] = {}
        for resource, ids in rows:
            taken.setdefault(resource, set()).update(ids)
        now = time.monotonic()
        with self._lock:
            for allocation in self.log:
                if now - allocation.at_s < LISTED_WITHIN_S:
                    taken.setdefault(allocation.resource, set()).update(allocation.ids)
            before = self.taken, self._shown
            self.taken = taken
        if all(now - allocation.at_s >= SETTLED_S for allocation in list(self.log)[-1:]):
            self._shown = self._roomiest()
        if self.one_gpu and before != (self.taken, self._shown):
            self.inventory.wake()

    def shown(self) -> str | None:
        """The only GPU whose free units, of share and of memory, are advertised; None: the units of all GPUs are
        advertised."""
        if not self.one_gpu:
            return None
        half = self._half
        if half is not None and time.monotonic() - half.at_s <= TOGETHER_S:
            # A container has one of the two resources on this GPU and is about to get the other one, so the kubelet
            # must still see units of that resource as free there.
            return units.gpu_of(next(iter(half.ids)))
        if not self._shown:
            self._shown = self._roomiest()
        return self._shown

    def _roomiest(self) -> str:
        found = {resource: self.inventory.of(resource) for resource in OTHER}
        return units.roomiest(list(found.values()), [set(self.taken.get(resource, ())) for resource in found])

    def _needs(self, resource: str, size: int) -> set[int]:
        """Return how many units of the other resource (memory for share, and the reverse) the waiting containers need
        that need `size` units of this one; several numbers if the containers differ.
        """
        mine = int(resource == names.MEMORY_RESOURCE)
        for fresh in (False, True):
            found = {pair[1 - mine] for pair in self.waiting(fresh) if pair[mine] == size}
            if found:
                break
        return found

    def _other_half(self, resource: str) -> Allocation | None:
        """Return the last allocation, if its container still needs units of the other resource."""
        half = self._half
        if half is None or half.resource != OTHER[resource] or time.monotonic() - half.at_s > TOGETHER_S:
            return None
        return half

    def unclaimed(
        self, resource: str, count: int, listed: Mapping[Any, Mapping[str, Mapping[str, list[str]]]]
    ) -> list[str]:
        """GPUs of the newest allocation of `count` devices that does not belong to any container in `listed` (from
        PodResources); empty if there is none.
        """
        claimed = {one for pod in listed.values() for mine in pod.values() for ids in mine.values() for one in ids}
        # the newest allocation need not be that of this container, since the kubelet may have made other allocations in
        # the meantime
        for allocation in reversed(list(self.log)):
            if allocation.resource == resource and len(allocation.ids) == count and not allocation.ids & claimed:
                return sorted({units.gpu_of(one) for one in allocation.ids})
        return []

    def check_together(self, resource: str, size: int, gpu: str) -> None:
        """Raise InputError if a container's other resource (share or memory) was placed on another GPU: no GPU had room
        for both resources.
        """
        half = self._other_half(resource) if resource in OTHER else None
        if half is None or len(half.ids) not in self._needs(resource, size):
            return
        where = units.gpu_of(next(iter(half.ids)))
        if where != gpu:
            self._half = None
            raise InputError(
                f"no GPU has enough of both resources free: {len(half.ids)} units of {half.resource} are free on"
                f" {where}, and {size} units of {resource} on {gpu}. {units.FAILED}"
            )

    def beside(self, resource: str, size: int) -> tuple[str, set[str] | None]:
        """Find the GPU for a container's units of one resource, so that its units of the other are on the same GPU.

        The kubelet does not tell for which container it asks, but the pods that wait on this node show how many units
        of the other resource such a container takes. If these have just been allocated, returns their GPU and None.
        Otherwise returns an empty name and the GPUs with room for both resources, or None if any GPU will do.
        """
        needs, half, other = self._needs(resource, size), self._other_half(resource), OTHER[resource]
        if half is not None and (not needs or len(half.ids) in needs):
            return units.gpu_of(next(iter(half.ids))), None
        need, taken = max(needs, default=0), self.taken.get(other, set())
        if not need:
            return "", None
        free = Counter(units.gpu_of(one) for one, good in self.inventory.of(other).items() if good and one not in taken)
        return "", {uuid for uuid, count in free.items() if count >= need}
