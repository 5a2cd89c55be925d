"""The state that a node's device plugins share, without a kubelet."""

from __future__ import annotations

from typing import Any

from cotenant.kube.inventory import Inventory
from cotenant.kube.names import MEMORY_RESOURCE, SHARE_RESOURCE
from cotenant.kube.plugin.state import Allocation, PluginState
from cotenant.kube.units import NodeGpu, gpu_of


def test_the_gpu_of_a_share_stays_shown_until_its_memory_has_come() -> None:
    """Else the kubelet would see no free memory on that GPU, and the pod would fail."""
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
    assert state.shown() not in (first, None), "the other GPU has more room now"


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
