"""Pods placed by claims: the driver against a kubelet's side of dynamic resource allocation, from slice to tenant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from api_standin import Thing
from claim_kubelet import SLICE, ClaimKubelet, claims_node
from dra_scheduler import CLASSES, Scheduler
from held_agent import uuid_of
from kube_node import Node
from pods import Pod, check_pod, patched, pod, share
from waiting import wait_for

from cotenant.core.errors import InputError
from cotenant.kube import node as node_plugin
from cotenant.kube.admission.mutate import mutate
from cotenant.kube.client import KubeApi
from cotenant.kube.dra import claims, offer
from cotenant.kube.dra.held import NodeClaims
from cotenant.kube.dra.server import CDI_KIND, ClaimSettings
from cotenant.kube.dra.slices import NodeSlices
from cotenant.kube.inventory import Inventory
from cotenant.kube.messages import DRA_HEALTH, DRA_PLUGINS, caller, dra_health, open_channel
from cotenant.kube.node import NodePlugin, NodeSettings
from cotenant.kube.quantity import parse_memory
from cotenant.kube.shares import shares_of
from cotenant.kube.units import MigSlice, NodeGpu

CLAIM = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/"


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return claims_node(make_node(gpus=2))


def place(node: Node, thing: Pod, device: str = "") -> tuple[Pod, Thing]:
    """What the claim controller and the scheduler do: a claim from the template, allocated, and the pod with it.

    `device`: the scheduler is passed over, and that one is allocated.
    """
    template, after = claims.claims_of(thing, (1, 36))
    after = patched(after, mutate(after))
    check_pod(after)
    spec = template["spec"]["spec"]
    name = f"{after['metadata']['name']}-main-x7k2p"
    result = {"request": "gpu", "driver": offer.DRIVER, "pool": "node-a", "device": device} if device else (
        scheduler(node).allocate(name, spec)
    )  # fmt: skip
    assert result is not None, "no device fits"
    claim = {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-of-{name}"},
        "spec": spec,
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": after["metadata"]["uid"]}],
        },
    }
    node.api.put(f"/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/{name}", claim)
    after["status"] = {"phase": "Pending", "resourceClaimStatuses": [{"name": "main", "resourceClaimName": name}]}
    node.api.put_pod(after)
    node.kubelet.pods[after["metadata"]["uid"]] = after
    return after, claim["metadata"]


class FewClaims:
    """The API server as the driver calls it, without a connection."""

    def __init__(self) -> None:
        self.store: dict[str, Thing] = {"/version": {"major": "1", "minor": "34"}}

    def get(self, path: str) -> Thing:
        return self.store[path]

    def find(self, path: str) -> Thing | None:
        return self.store.get(path)

    def create(self, path: str, thing: Thing) -> Thing:
        self.store[f"{path}/{thing['metadata']['name']}"] = thing
        return thing

    def replace(self, path: str, thing: Thing) -> Thing:
        self.store[path] = thing
        return thing


def claims_of_node(gpus: int) -> tuple[NodeClaims, NodeSlices, FewClaims]:
    inventory, api = Inventory(), FewClaims()
    inventory.set(NodeGpu(uuid_of(index), index, 8 << 30) for index in range(gpus))
    slices = NodeSlices(api, inventory, "node-a")  # type: ignore[arg-type]
    return NodeClaims(api, slices, "node-a", CDI_KIND), slices, api  # type: ignore[arg-type]


def claimed(name: str, device: str) -> tuple[Pod, Thing]:
    """A pod with a claim of a user's own, and the claim as it is allocated and reserved."""
    annotations = share("30%") | {"cotenant.dev/placed-by": "claims"}
    thing = pod(name, annotations=annotations, resourceClaims=[{"name": "main", "resourceClaimName": name}],
                containers=[{"name": "main", "resources": {"claims": [{"name": "main"}]}}])  # fmt: skip
    result = {"request": "gpu", "driver": offer.DRIVER, "pool": "node-a", "device": device,
              "consumedCapacity": {"share": "30"}}  # fmt: skip
    status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": [{"uid": thing["metadata"]["uid"]}]}
    return thing, {"metadata": {"name": name, "uid": f"uid-of-{name}"}, "status": status}


def scheduler(node: Node) -> Scheduler:
    """The scheduler as it is after a restart: what is allocated, it has from the claims."""
    found = Scheduler(node.api, CLASSES)
    with node.api.lock:
        for path, claim in node.api.store.items():
            if "/resourceclaims/" in path:
                found.claims[claim["metadata"]["name"]] = claim["status"]["allocation"]["devices"]["results"][0]
    return found


def test_the_driver_from_slice_to_tenant(node: Node) -> None:
    devices = node.api.store[SLICE]["spec"]["devices"]
    assert [one["attributes"]["uuid"]["string"] for one in devices] == [uuid_of(0), uuid_of(1)]
    assert not node.kubelet.endpoints, "no units beside claims: a GPU is offered once"
    kubelet = ClaimKubelet(node.folder / "kubelet" / "plugins_registry")
    assert (kubelet.info.type, kubelet.info.name) == ("DRAPlugin", "gpu.cotenant.dev")
    assert list(kubelet.info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth"]

    place(node, pod("other", annotations=share("80%")))
    train, claim = place(node, pod("train", annotations=share("30%", limit="60%", memory="2Gi")))
    for version in DRA_PLUGINS:
        prepared = kubelet.call("Prepare", claim, version=version)[claim["uid"]]
        assert prepared.error == ""
        (device,) = prepared.devices
        assert (device.pool_name, device.device_name, list(device.request_names)) == ("node-a", "gpu-1", ["gpu"])
        assert list(device.cdi_device_ids) == [f"nvidia.com/gpu={uuid_of(1)}"]
        assert device.share_id == "s-train-main-x7k2p"
    row = wait_for(lambda: node.held().get("team/train/main"))
    assert (row["request"], row["limit"], row["memory_bytes"], row["gpus"]) == (0.3, 0.6, 2 << 30, [uuid_of(1)])
    said = "container main has 30% of GPU 1 of node-a, at most 60%, and 2 GiB"
    wait_for(lambda: ("ShareBound", said) in node.api.events(train))

    assert kubelet.call("Unprepare", claim)[claim["uid"]].error == ""
    node.finish(train)
    wait_for(lambda: set(node.held()) == {"team/other/main"}, what="free when the pod has ended")


def test_the_kubelet_has_the_health_of_every_device(node: Node) -> None:
    """Bytes by hand: field 1 devices {1: {1: "node-a", 2: "gpu-0"}, 2: 1 HEALTHY, 3: time}."""
    kubelet = ClaimKubelet(node.folder / "kubelet" / "plugins_registry")
    with open_channel(kubelet.info.endpoint) as channel:
        watch = caller(channel, DRA_HEALTH, "NodeWatchResources")(dra_health.NodeWatchResourcesRequest(), timeout=60)
        first = next(watch)
        begin = b"\x0a\x0f\x0a\x06node-a\x12\x05gpu-0\x10\x01\x18"
        assert begin in first.SerializeToString()
        assert [(d.device.pool_name, d.device.device_name, d.health) for d in first.devices] == [
            ("node-a", "gpu-0", 1), ("node-a", "gpu-1", 1),
        ]  # fmt: skip
        node.agent.kill()
        health = next(found for answer in watch if 1 not in (found := [d.health for d in answer.devices]))
        assert health == [2, 2], "nobody would hold a pod to its share now"
        watch.cancel()


def test_a_killed_driver_goes_on_where_it_was(node: Node) -> None:
    train, _ = place(node, pod("train", annotations=share("30%")))
    wait_for(lambda: node.held())
    assert node.plugin is not None
    node.plugin.kill()
    node.plugin.wait()
    generation = node.api.store[SLICE]["spec"]["pool"]["generation"]
    node.start_plugin("--claims=true", f"--kubelet-plugins={node.folder}/kubelet")
    kubelet = ClaimKubelet(node.folder / "kubelet" / "plugins_registry")
    _, claim = place(node, pod("next", annotations=share("50%")))
    # a kubelet asks again when a driver that has just started does not know its GPUs in time
    wait_for(lambda: kubelet.call("Prepare", claim)[claim["uid"]].error == "")
    wait_for(lambda: set(node.held()) == {"team/train/main", "team/next/main"})
    assert node.api.store[SLICE]["spec"]["pool"]["generation"] == generation, "the offer is the same"
    assert train


def test_claims_that_cannot_be_prepared_say_why(node: Node) -> None:
    kubelet = ClaimKubelet(node.folder / "kubelet" / "plugins_registry")
    _, claim = place(node, pod("train", annotations=share("30%")), "gpu-7")
    assert kubelet.call("Prepare", claim)[claim["uid"]].error == "cotenant: there is no gpu-7 on this node"
    _, other = place(node, pod("other", annotations=share("30%")))
    path = f"/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/{other['name']}"
    node.api.store[path]["status"]["allocation"]["devices"]["results"][0]["pool"] = "node-b"
    assert "has no GPU of this node" in kubelet.call("Prepare", other)[other["uid"]].error
    stale = other | {"uid": "before"}
    assert "has been replaced by another one" in kubelet.call("Prepare", stale)["before"].error
    gone = {"namespace": "team", "name": "gone", "uid": "u"}
    assert "with 404" in kubelet.call("Prepare", gone)["u"].error


def test_a_claim_made_again_under_its_name_is_another_one(node: Node) -> None:
    """A claim of a user's own, deleted with its pod and made again: on another GPU, for a pod of the same name."""
    first, _ = place(node, pod("train", annotations=share("30%")), "gpu-0")
    wait_for(lambda: [row["gpus"] for row in node.held().values()] == [[uuid_of(0)]])
    node.kubelet.remove(first)
    node.api.drop_pod(first)
    place(node, pod("train", annotations=share("30%")), "gpu-1")
    wait_for(lambda: [row["gpus"] for row in node.held().values()] == [[uuid_of(1)]])


def test_a_claim_that_is_not_the_pods_gives_it_nothing() -> None:
    """What the API server has is of an earlier pod; the scheduler has not reserved it for this one."""
    held, _, api = claims_of_node(1)
    thing, claim = claimed("train", "gpu-0")
    api.store[CLAIM + "train"] = claim
    assert held.of_pod(thing).devices["main"]["cotenant.dev/share"][0] == f"{uuid_of(0)}::train/gpu/0000"
    held.forget({("team", "train")})
    assert held.of_pod(thing | {"metadata": thing["metadata"] | {"uid": "another"}}).devices == {}
    assert held.of_pod(thing).devices != {}
    assert held.held() == {"gpu-0"}
    held.forget(set())
    assert held.held() == set()


def test_a_divided_gpu_is_held_as_long_as_the_pod_of_its_claim(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round lists the pods; a claim that is known is not read again, and one without a pod is forgotten."""
    monkeypatch.setattr(node_plugin, "HEALTH_EVERY_S", 0.0)
    node, pieces = make_node(gpus=1), list[MigSlice]()
    node.api.store["/version"] = {"major": "1", "minor": "36"}
    settings = NodeSettings(
        "node-a", node.agent.folder, node.kubelet.plugins, node.kubelet.resources / "kubelet.sock",
        slices=lambda before: pieces, list_every_s=0.0, claims=ClaimSettings("node-a"),
    )  # fmt: skip
    plugin = NodePlugin(settings, KubeApi(node.api.url))

    def offered() -> dict[str, str]:
        plugin.round()
        return {one["name"]: one["attributes"]["type"]["string"] for one in node.api.store[SLICE]["spec"]["devices"]}

    assert offered() == {"gpu-0": "share", "gpu-0-whole": "gpu"}
    train, claim = place(node, pod("train", annotations=share("30%")))
    assert offered() == {"gpu-0": "share", "gpu-0-whole": "gpu"}
    pieces.append(MigSlice("MIG-1", "cotenant.dev/mig-3g.40gb", uuid_of(0), 0))
    assert offered() == {"mig-1": "mig", "gpu-0": "gone"}
    node.api.store.pop(CLAIM + claim["name"])  # the API server no longer has this claim
    assert offered() == {"mig-1": "mig", "gpu-0": "gone"}
    node.finish(train)
    assert offered() == {"mig-1": "mig"}


def test_the_kubelet_may_prepare_a_claim_while_the_offer_is_written() -> None:
    """Threads of gRPC prepare, the main one offers."""
    held, slices, api = claims_of_node(2)
    for name, device in (("next", "gpu-0"), ("train", "gpu-0"), ("other", "gpu-1")):
        api.store[CLAIM + name] = claimed(name, device)[1]
    during: list[str] = []

    class Slow(dict[str, Any]):
        """A claim; while it is read, the kubelet has another one prepared."""

        def get(self, *given: Any) -> Any:
            while during:
                held.prepare("team", during.pop(), "uid-of-other")
            return super().get(*given)

    api.store[CLAIM + "train"] = Slow(api.store[CLAIM + "train"])
    held.prepare("team", "train", "uid-of-train")
    held.prepare("team", "next", "uid-of-next")
    during.append("other")
    assert slices.write(held.held())
    assert held.held() == {"gpu-0", "gpu-1"}


def test_templates_of_long_names_stay_apart() -> None:
    names = [claims._template_name("p" * 250 + "-" + container) for container in ("main", "side")]
    assert len(set(names)) == 2
    assert all(len(name) <= 253 for name in names)
    thing = pod(annotations=share())
    del thing["metadata"]["name"]
    thing["metadata"]["generateName"] = "train-"
    assert claims.claims_of(thing, (1, 34))[0]["metadata"]["name"] == "train-main"


def test_an_agent_that_is_away_offers_nothing(node: Node) -> None:
    node.agent.kill()
    wait_for(lambda: node.api.store[SLICE]["spec"]["devices"] == [])
    node.agent.start()
    wait_for(lambda: len(node.api.store[SLICE]["spec"]["devices"]) == 2)
    assert node.api.store[SLICE]["spec"]["pool"]["generation"] == 3


def test_a_pod_of_claims_takes_no_units() -> None:
    _, after = claims.claims_of(pod(annotations=share("30%", memory="1Gi")), (1, 34))
    operations = mutate(after)
    assert operations
    assert not any("resources" in op["path"] for op in operations)
    both = pod(annotations=share() | {"cotenant.dev/placed-by": "claims"},
               containers=[{"name": "main", "resources": {"limits": {"cotenant.dev/share": 30}}}])  # fmt: skip
    with pytest.raises(InputError, match="takes units, and the pod is placed by claims; keep one of them"):
        mutate(both)
    with pytest.raises(InputError, match="'luck' is not units or claims"):
        mutate(pod(annotations=share() | {"cotenant.dev/placed-by": "luck"}))


def test_what_resources_say_becomes_annotations() -> None:
    limits = {"cotenant.dev/share": 40, "cotenant.dev/memory": 8, "cpu": "1"}
    _, after = claims.claims_of(pod(containers=[{"name": "main", "resources": {"limits": limits}}]), (1, 34))
    assert after["metadata"]["annotations"] == {
        "cotenant.dev/request": "40%", "cotenant.dev/limit": "100%", "cotenant.dev/memory": "8192Mi",
        "cotenant.dev/containers": "main", "cotenant.dev/placed-by": "claims",
    }  # fmt: skip
    assert after["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "1"}
    two = [{"name": n, "resources": {"limits": {"cotenant.dev/share": u}}} for n, u in (("a", 10), ("b", 20))]
    with pytest.raises(InputError, match="containers request different shares by resources"):
        claims.claims_of(pod(containers=two), (1, 34))


@pytest.mark.parametrize("count", [2 << 30, 500_000_001, (1 << 20) + 1, 3 * 10**9])
def test_the_memory_of_a_share_is_written_as_an_annotation_is_read(count: int) -> None:
    thing = pod("train", annotations=share("30%", memory="8Gi"))
    (one,) = shares_of(thing)
    said = claims._terms([dataclasses.replace(one, memory_bytes=count)])["cotenant.dev/memory"]
    assert parse_memory(said, "memory") == count
