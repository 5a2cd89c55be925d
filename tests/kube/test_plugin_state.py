"""The state that a node's device plugins share, without a kubelet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cotenant.kube.inventory import Inventory
from cotenant.kube.names import MEMORY_RESOURCE, SHARE_RESOURCE
from cotenant.kube.plugin.state import SETTLED_S, Allocation, PluginState
from cotenant.kube.units import NodeGpu, gpu_of


def test_the_gpu_that_is_shown_stays_until_no_pod_comes() -> None:
    """Else the kubelet would see no free memory on the GPU of a share, and the pod would fail; and the next pod of a
    burst would get its share and its memory on two GPUs, as two messages tell the kubelet of the change."""
    state = PluginState(Inventory(), waiting=lambda fresh: [(90, 1)])
    state.inventory.set([NodeGpu(f"GPU-{number}", number, 8 << 30) for number in range(2)])
    first = state.shown()
    assert first is not None
    mine = {
        resource: [one for one in state.inventory.of(resource) if gpu_of(one) == first][:count]
        for resource, count in ((SHARE_RESOURCE, 90), (MEMORY_RESOURCE, 1))
    }
    state.note(SHARE_RESOURCE, mine[SHARE_RESOURCE])
    assert state.shown() == first
    state.note(MEMORY_RESOURCE, mine[MEMORY_RESOURCE])
    state.listed([])
    assert state.shown() == first, "more pods may be on their way"
    last = state.log[-1].at_s - SETTLED_S
    state.log[-1] = replace(state.log[-1], at_s=last)
    assert state.shown() == first, "one thread decides for both resources"
    version = state.inventory.version
    state.listed([])
    assert state.shown() not in (first, None), "the other GPU has more room now"
    assert state.inventory.version > version, "both resources are told"


def test_the_kubelet_may_allocate_while_the_last_allocations_are_read() -> None:
    state = PluginState(Inventory())

    class Slow(frozenset[str]):
        """Ids; while they are compared, another container gets its own."""

        def __and__(self, other: object) -> Any:
            state.note(SHARE_RESOURCE, ["GPU-1::0000", "GPU-1::0001"])
            return frozenset(self).intersection(["GPU-0::0000"])

    state.log.extend(Allocation(0.0, SHARE_RESOURCE, Slow(["GPU-0::0000"])) for _ in range(3))
    assert state.unclaimed(SHARE_RESOURCE, 1, {"pod": {"main": {SHARE_RESOURCE: ["GPU-0::0000"]}}}) == []
    assert len(state.log) == 6


def test_an_allocation_while_the_listed_ones_are_read_counts_as_taken() -> None:
    """The list of PodResources was made before it."""
    state = PluginState(Inventory())
    allocating = threading.Thread(target=state.note, args=(SHARE_RESOURCE, ["GPU-1::0000"]))

    class Slow(tuple[str, ...]):
        """Ids; while they are read, another container gets its own, as soon as it may."""

        def __iter__(self) -> Iterator[str]:
            allocating.start()
            allocating.join(0.3)
            return super().__iter__()

    ids: Any = Slow(["GPU-0::0000"])
    state.log.append(Allocation(time.monotonic(), SHARE_RESOURCE, ids))
    state.listed([])
    allocating.join()
    assert state.taken == {SHARE_RESOURCE: {"GPU-0::0000", "GPU-1::0000"}}
