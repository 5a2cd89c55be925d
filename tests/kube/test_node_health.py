"""GPUs that fall ill and recover, and MIG slices: the plugin in this process, with NVML's answers given."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held_agent import uuid_of
from kube_node import Node
from kubelet_standin import AdmissionError
from nvml_standin import Card, StandIn
from pods import pod, share
from waiting import wait_for

from cotenant.kube import inventory
from cotenant.kube import node as node_plugin
from cotenant.kube.client import KubeApi
from cotenant.kube.inventory import nvml_faults
from cotenant.kube.node import NodePlugin, NodeSettings
from cotenant.kube.units import MigSlice, NodeGpu, gpu_of

SHARE = "cotenant.dev/share"


class World:
    """What NVML would say."""

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self.slices: list[MigSlice] = []


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def node(make_node: Callable[..., Node], world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(node_plugin, "HEALTH_EVERY_S", 0.1)
    found = make_node(gpus=2)
    settings = NodeSettings(
        "node-a", found.agent.folder, found.kubelet.plugins, found.kubelet.resources / "kubelet.sock",
        faults=lambda rows: world.faults, slices=lambda before: world.slices, list_every_s=1.0, one_gpu=False,
    )  # fmt: skip
    plugin = NodePlugin(settings, KubeApi(found.api.url))
    thread = threading.Thread(target=plugin.run, daemon=True)
    thread.start()
    found.ready()
    yield found
    plugin.stop()
    thread.join(10)


def per_gpu(node: Node) -> dict[str, int]:
    return dict(Counter(gpu_of(one) for one in node.kubelet.healthy(SHARE)))


def test_a_sick_gpu_is_not_given_out_and_comes_back(node: Node, world: World) -> None:
    running = node.schedule(pod("running", annotations=share("30%")))
    wait_for(lambda: node.held())
    world.faults = {uuid_of(0): "reading GPU 0 failed because the GPU fell off the bus"}
    wait_for(lambda: per_gpu(node) == {uuid_of(1): 100}, what="its units, taken ones too, are unhealthy")
    node.schedule(pod("next", annotations=share("60%")))
    assert {gpu_of(one) for one in node.kubelet.in_use(SHARE)} == {uuid_of(0), uuid_of(1)}
    with pytest.raises(AdmissionError, match="Requested: 60, Available: 40"):
        node.schedule(pod("third", annotations=share("60%")))
    assert "team/running/main" in node.held(), "what runs is not touched"
    world.faults = {}
    wait_for(lambda: per_gpu(node) == {uuid_of(0): 100, uuid_of(1): 100})
    assert running


def test_mig_slices_are_offered_as_they_are(node: Node, world: World) -> None:
    # GPU 1 is divided by MIG: its slices are devices, and its units are not offered.
    world.slices = [MigSlice(f"MIG-{n}", "cotenant.dev/mig-1g.10gb", uuid_of(1), 1) for n in "ab"]
    world.slices.append(MigSlice("MIG-c", "cotenant.dev/mig-3g.40gb", uuid_of(1), 1))
    node.ready("cotenant.dev/mig-1g.10gb", "cotenant.dev/mig-3g.40gb")
    wait_for(lambda: per_gpu(node) == {uuid_of(0): 100})
    limits = {"cotenant.dev/mig-1g.10gb": 2}
    thing = node.schedule(pod("cut", containers=[{"name": "main", "resources": {"limits": limits}}]), webhook=False)
    assert dict(node.kubelet.answers[-1].envs) == {"NVIDIA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    node.schedule(pod("train", annotations=share("30%")))
    wait_for(lambda: set(node.held()) == {"team/train/main"}, what="slices need no agent")
    assert thing
    world.slices = []
    wait_for(lambda: per_gpu(node) == {uuid_of(0): 100, uuid_of(1): 100})


class Answers(StandIn):
    """NVML's stand-in with the calls by which health is asked; GPUs in `lost` have fallen off the bus."""

    lost: tuple[str, ...] = ()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        for index, card in enumerate(self.cards):
            if card.uuid == uuid:
                return index
        self.fail("NOT_FOUND")
        raise AssertionError

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if self.cards[handle].uuid in self.lost:
            self.fail("GPU_IS_LOST")
        return super().nvmlDeviceGetMigMode(handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:  # noqa: N802
        if self.cards[handle].uuid in self.lost:
            self.fail("GPU_IS_LOST")
        return object()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """In place of the library."""
    import cotenant.devices.nvml as module

    library = Answers(Card(), Card(uuid="GPU-bbbbbbbb-1111-2222-3333-444444444444"))
    original = module.Nvml
    monkeypatch.setattr(module, "Nvml", lambda: original(library))
    return library


def rows(*uuids: str, kind: str = "nvidia") -> list[dict[str, Any]]:
    return [{"uuid": uuid, "kind": kind} for uuid in uuids]


def test_faults_as_nvml_tells_them(nvml: Answers) -> None:
    first, second = (card.uuid for card in nvml.cards)
    assert nvml_faults(rows(first, second)) == {}
    nvml.lost = (second,)
    assert nvml_faults(rows(first, second)) == {second: f"reading {second} failed because the GPU fell off the bus"}, (
        "the other one is well"
    )
    gone = "opening GPU-gone failed: the driver found no such GPU or instance"
    assert nvml_faults(rows("GPU-gone")) == {"GPU-gone": gone}
    assert nvml_faults(rows("GPU-gone", kind="soft")) == {}, "the software GPU is not NVML's"


def test_slices_as_nvml_lists_them(nvml: Answers) -> None:
    from cotenant.devices import mig
    from cotenant.devices.nvml import Nvml

    card: Card = nvml.cards[0]
    with Nvml() as session:
        mig.apply(session, card.uuid, "3,2,1,1")
    found = inventory.mig_slices()
    assert Counter(piece.resource.rpartition("-")[2] for piece in found) == {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}
    assert {piece.gpu for piece in found} == {card.uuid}
    assert len({piece.uuid for piece in found}) == 4


def test_a_gpu_that_is_lost_keeps_its_slices_out_of_use(nvml: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them it would be offered in shares, and the slices of the other GPU must stay."""
    from cotenant.devices import mig
    from cotenant.devices.nvml import Nvml

    first, second = (card.uuid for card in nvml.cards)
    with Nvml() as session:
        for uuid in (first, second):
            mig.apply(session, uuid, "7")
    before = inventory.mig_slices()
    assert [(piece.gpu, piece.fault) for piece in before] == [(first, ""), (second, "")]
    nvml.lost = (second,)
    after = inventory.mig_slices(before)
    assert [piece.uuid for piece in after] == [piece.uuid for piece in before]
    assert [bool(piece.fault) for piece in after] == [False, True]
    nvml.lost = ()
    assert inventory.mig_slices(after) == before
    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: nvml.fail("UNKNOWN"))
    assert all(piece.fault for piece in inventory.mig_slices(before))


def test_devices_are_named_after_their_gpu() -> None:
    found = inventory.Inventory()
    assert found.set([NodeGpu("GPU-x", 0, 3 << 30)])
    assert not found.set([NodeGpu("GPU-x", 0, 3 << 30)]), "nothing new"
    assert list(found.of("cotenant.dev/memory")) == ["GPU-x::0000", "GPU-x::0001", "GPU-x::0002"]
    assert found.resources() == ["cotenant.dev/share", "cotenant.dev/memory"]
    assert found.all_sick("no agent")
    assert not any(found.of("cotenant.dev/share").values())
    assert Path("GPU-x::0000").name == "GPU-x::0000", "a device's name is no path"
