"""One resource's device plugin, without a kubelet."""

from __future__ import annotations

from typing import Any

from cotenant.kube.inventory import Inventory
from cotenant.kube.names import MEMORY_RESOURCE, SHARE_RESOURCE
from cotenant.kube.plugin.resource import Allocation, Desk
from cotenant.kube.units import NodeGpu, gpu_of


def test_the_gpu_of_a_share_stays_shown_until_its_memory_has_come() -> None:
    """Else the kubelet would see no free memory on that GPU, and the pod would fail."""
    desk = Desk(Inventory(), pending=lambda anew: [(90, 1)])
    desk.inventory.set([NodeGpu(f"GPU-{number}", number, 8 << 30) for number in range(2)])
    first = desk.shown()
    assert first is not None
    mine = {
        resource: [one for one in desk.inventory.of(resource) if gpu_of(one) == first][:count]
        for resource, count in ((SHARE_RESOURCE, 90), (MEMORY_RESOURCE, 1))
    }
    desk.note(SHARE_RESOURCE, mine[SHARE_RESOURCE])
    assert desk.shown() == first
    desk.note(MEMORY_RESOURCE, mine[MEMORY_RESOURCE])
    assert desk.shown() not in (first, None), "the other GPU has more room now"


def test_the_kubelet_may_allocate_while_the_last_allocations_are_read() -> None:
    desk = Desk(Inventory())

    class Slow(frozenset[str]):
        """Ids; while they are compared, another container gets its own."""

        def __and__(self, other: object) -> Any:
            desk.note(SHARE_RESOURCE, ["GPU-1::0000", "GPU-1::0001"])
            return frozenset(self).intersection(["GPU-0::0000"])

    desk.log.extend(Allocation(0.0, SHARE_RESOURCE, Slow(["GPU-0::0000"])) for _ in range(3))
    assert desk.unclaimed(SHARE_RESOURCE, 1, {"pod": {"main": {SHARE_RESOURCE: ["GPU-0::0000"]}}}) == []
    assert len(desk.log) == 6
