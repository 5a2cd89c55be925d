"""What a node offers to claims, and what the scheduler makes of it: shares, whole GPUs and MIG instances of one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_standin import ApiServer, Thing
from dra_scheduler import CLASSES, Scheduler

from cotenant.kube.client import KubeApi
from cotenant.kube.dra import offer
from cotenant.kube.dra.held import NodeClaims
from cotenant.kube.dra.server import CDI_KIND
from cotenant.kube.dra.slices import NodeSlices
from cotenant.kube.inventory import Inventory
from cotenant.kube.units import MigSlice, NodeGpu

GPUS = [NodeGpu(f"GPU-{name}", index, 80 << 30) for index, name in enumerate("ab")]
PIECES = [MigSlice(f"MIG-{n}", "cotenant.dev/mig-3g.40gb", "GPU-b", 1) for n in (1, 2)]
SLICES = "/apis/resource.k8s.io/v1/resourceslices/node-a-gpu.cotenant.dev"


class Place:
    """A node's driver, its API server, and the scheduler."""

    def __init__(self, kubernetes: str = "36", dropped: tuple[str, ...] = ()) -> None:
        self.api = ApiServer()
        self.api.store["/version"] = {"major": "1", "minor": kubernetes}
        self.api.dropped = dropped
        self.inventory = Inventory()
        self.restart()
        self.scheduler = Scheduler(self.api, CLASSES)

    def restart(self) -> None:
        """A driver that knows nothing yet."""
        api = KubeApi(self.api.url)
        self.slices = NodeSlices(api, self.inventory, "node-a")
        self.claims = NodeClaims(api, self.slices, "node-a", CDI_KIND)

    def write(self) -> bool:
        """The driver looks at what it offers."""
        return self.slices.write(self.claims.held())

    def offers(self, gpus: list[NodeGpu], pieces: list[MigSlice] | None = None) -> list[str]:
        """What the node has now; the devices that a class finds."""
        self.inventory.set(gpus, pieces or [])
        self.write()
        devices, _ = self.scheduler.pool()
        return [one["name"] for one in devices if one["attributes"]["type"]["string"] != "gone"]

    def claim(self, name: str, class_name: str, *selectors: str, **capacity: str) -> str | None:
        """The device that a claim gets; the claim is stored, as a pod's would be."""
        exact: Thing = {"deviceClassName": class_name}
        exact |= {"capacity": {"requests": capacity}} if capacity else {}
        exact |= {"selectors": [{"cel": {"expression": text}} for text in selectors]} if selectors else {}
        result = self.scheduler.allocate(name, {"devices": {"requests": [{"name": "gpu", "exactly": exact}]}})
        if result is None:
            return None
        metadata = {"name": name, "namespace": "team", "uid": f"uid-of-{name}"}
        claim = {"metadata": metadata, "status": {"allocation": {"devices": {"results": [result]}}}}
        self.api.put(f"/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/{name}", claim)
        return str(result["device"])

    def prepare(self, name: str) -> Any:
        return self.claims.prepare("team", name, f"uid-of-{name}")

    def end(self, name: str) -> None:
        """The claim's pod has ended, and the claim is gone."""
        del self.scheduler.claims[name]
        self.claims.forget({("team", other) for other in self.scheduler.claims})


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.api.close()


def test_shares_of_a_gpu_and_the_whole_of_it_exclude_each_other(place: Place) -> None:
    assert place.offers(GPUS) == ["gpu-0", "gpu-0-whole", "gpu-1", "gpu-1-whole"]
    assert place.claim("a", "share.cotenant.dev", share="60", memory="8Gi") == "gpu-0"
    assert place.claim("b", "gpu.cotenant.dev") == "gpu-1-whole", "a share of GPU 0 is in use"
    assert place.claim("c", "share.cotenant.dev", share="50") is None, "60 + 50 on GPU 0, and GPU 1 is given away"
    assert place.claim("d", "share.cotenant.dev", share="40") == "gpu-0", "which draws on the counters once"
    assert place.claim("e", "gpu.cotenant.dev") is None
    place.end("b")
    assert place.claim("c", "share.cotenant.dev", share="50") == "gpu-1"


def test_memory_and_share_of_a_claim_are_on_one_gpu(place: Place) -> None:
    place.offers(GPUS)
    assert place.claim("a", "share.cotenant.dev", share="10", memory="70Gi") == "gpu-0"
    assert place.claim("b", "share.cotenant.dev", share="90", memory="5Gi") == "gpu-0"
    assert place.claim("c", "share.cotenant.dev", share="90", memory="20Gi") == "gpu-1"
    assert place.claim("d", "share.cotenant.dev", share="10", memory="61Gi") is None
    assert place.claim("e", "share.cotenant.dev", share="101") is None
    assert place.claim("f", "share.cotenant.dev", memory="60Gi") == "gpu-1", "without a share it consumes 1"


def test_mig_instances_are_claimed_by_their_profile(place: Place) -> None:
    assert place.offers(GPUS[:1], PIECES) == ["gpu-0", "gpu-0-whole", "mig-1", "mig-2"]
    profile = "device.attributes['gpu.cotenant.dev'].profile == '{}'".format
    assert place.claim("a", "mig.cotenant.dev", profile("1g.10gb")) is None
    assert place.claim("b", "mig.cotenant.dev", profile("3g.40gb")) == "mig-1"
    assert place.claim("c", "mig.cotenant.dev") == "mig-2"
    assert place.claim("d", "mig.cotenant.dev") is None
    (device,) = place.prepare("b")
    assert (device["device_name"], device["cdi_device_ids"]) == ("mig-1", ["nvidia.com/gpu=MIG-1"])


@pytest.mark.parametrize("restarted", [False, True])
def test_a_gpu_divided_while_a_share_is_held_gives_no_instance(place: Place, restarted: bool) -> None:
    """A claim that holds a share and runs nothing does not keep MIG from being switched on."""
    place.offers(GPUS)
    assert place.claim("a", "share.cotenant.dev", share="60") == "gpu-0"
    assert place.claim("b", "share.cotenant.dev", share="60") == "gpu-1"
    for name in ("a", "b"):
        place.prepare(name)
    if restarted:
        place.restart()
        place.prepare("b")  # the binder's first round reads the claims of the pods on its node
    assert place.offers(GPUS[:1], PIECES) == ["gpu-0", "gpu-0-whole", "mig-1", "mig-2"]
    assert place.claim("c", "mig.cotenant.dev") is None, "the share of GPU 1 has not ended"
    place.end("b")
    place.write()
    assert place.claim("c", "mig.cotenant.dev") == "mig-1"
    place.prepare("c")
    place.offers(GPUS)  # MIG is switched off again: the instances are gone, but one of them is still claimed
    assert place.claim("d", "gpu.cotenant.dev") is None, "of GPU 0 a share is held, of GPU 1 an instance"
    assert place.claim("e", "share.cotenant.dev", share="50") is None, "GPU 0 has 40 left"


@pytest.mark.parametrize(
    ("kubernetes", "dropped"), [("34+", ()), ("36", ("consumesCounters", "sharedCounters"))], ids=["1.34", "gate off"]
)
def test_without_counters_no_gpu_is_offered_in_two_ways(kubernetes: str, dropped: tuple[str, ...]) -> None:
    place = Place(kubernetes, dropped)
    try:
        gpus = [GPUS[0], NodeGpu("GPU-b", 1, 80 << 30, whole=True)]
        assert place.offers(gpus) == ["gpu-0", "gpu-1-whole"]
        assert len([path for path in place.api.store if "/resourceslices/" in path]) == 1
        first, second = place.api.store[SLICES]["spec"]["devices"]
        assert first["allowMultipleAllocations"] is True
        assert first["capacity"]["share"] == {
            "value": "100", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "100", "step": "1"}},
        }  # fmt: skip
        assert first["capacity"]["memory"]["value"] == "80Gi"
        assert "allowMultipleAllocations" not in second
    finally:
        place.api.close()


def test_large_nodes_have_several_slices_of_one_generation(place: Place) -> None:
    """16 GPUs with 7 instances on eight of them: 8 x 2 + 8 x 7 = 72 devices in two slices, 16 counter sets in two."""
    gpus = [NodeGpu(f"GPU-{i}", i, 80 << 30) for i in range(8)]
    pieces = [
        MigSlice(f"MIG-{i}-{n}", "cotenant.dev/mig-1g.10gb", f"GPU-{i}", i) for i in range(8, 16) for n in range(7)
    ]
    assert len(place.offers(gpus, pieces)) == 72
    slices = [thing["spec"] for path, thing in sorted(place.api.store.items()) if "/resourceslices/" in path]
    assert [len(one.get("devices", ())) for one in slices] == [64, 8, 0, 0]
    assert [len(one.get("sharedCounters", ())) for one in slices] == [0, 0, 8, 8]
    assert {(one["pool"]["generation"], one["pool"]["resourceSliceCount"]) for one in slices} == {(1, 4)}
    assert not place.write(), "nothing has changed"
    assert len(place.offers(gpus[:2])) == 4
    left = [thing["spec"]["pool"] for path, thing in place.api.store.items() if "/resourceslices/" in path]
    assert [pool["generation"] for pool in left] == [2, 2]


def test_older_versions_offer_whole_gpus_only() -> None:
    (device,) = offer.devices(GPUS[:1], [], (1, 33), counters=False)
    assert device["attributes"]["type"] == {"string": "gpu"}


def test_a_driver_killed_between_two_slices_completes_the_pool(place: Place) -> None:
    place.offers(GPUS)
    del place.api.store[SLICES]  # the slice with the devices, which is written last
    assert place.scheduler.pool() == ([], {}), "an incomplete pool gives nothing"
    place.restart()
    assert place.offers(GPUS) == ["gpu-0", "gpu-0-whole", "gpu-1", "gpu-1-whole"]


def test_devices_that_need_counters_are_never_offered_where_the_server_drops_them() -> None:
    place = Place("36", ("consumesCounters", "sharedCounters"))
    offered: list[list[str]] = []
    put = place.api.put
    place.api.put = lambda path, thing: offered.append(  # type: ignore[method-assign]
        [device["name"] for device in thing["spec"].get("devices", ())]
    ) or put(path, thing)  # fmt: skip
    try:
        place.offers(GPUS)
        assert offered == [[], ["gpu-0", "gpu-1"]]
    finally:
        place.api.close()
