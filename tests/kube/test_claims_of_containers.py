"""Claims of init containers, sidecars and app containers of one pod: which share each of them has while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from api_standin import Thing
from claim_kubelet import ClaimKubelet, claims_node, start_claims_plugin
from dra_scheduler import CLASSES, Scheduler
from held_agent import uuid_of
from kube_node import Node
from pods import Pod, check_pod, patched, pod, share
from waiting import stays, wait_for

from cotenant.core.errors import InputError
from cotenant.kube.admission.mutate import mutate
from cotenant.kube.dra.claims import claims_of

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/"
NOT_ENFORCED = "ShareNotEnforced"
Sizes = dict[str, tuple[int, str]]  # request of a claim -> its share, and its memory (empty: none is requested)


class Placed:
    """A node whose pods are placed by claims, with its kubelet and the scheduler."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.kubelet = ClaimKubelet(node.folder / "kubelet" / "plugins_registry")
        self.scheduler = Scheduler(node.api, CLASSES)

    def place(self, thing: Pod, **claims: Sizes) -> Pod:
        """Place a pod whose claims a user has written by hand; returns it as it waits for its first container."""
        after = patched(thing, mutate(thing))
        check_pod(after)
        after["status"] = {"phase": "Pending", "resourceClaimStatuses": []}
        for name, sizes in claims.items():
            full = f"{after['metadata']['name']}-{name}-x7k2p"
            requests = [_request(one, *size) for one, size in sizes.items()]
            results = [self.scheduler.allocate(f"{full}/{r['name']}", {"devices": {"requests": [r]}}) for r in requests]
            assert all(results), "no device fits"
            claim = {
                "metadata": {"name": full, "namespace": "team", "uid": f"uid-of-{full}"},
                "spec": {"devices": {"requests": requests}},
                "status": {
                    "allocation": {"devices": {"results": results}},
                    "reservedFor": [{"resource": "pods", "name": full, "uid": after["metadata"]["uid"]}],
                },
            }
            self.node.api.put(CLAIMS + full, claim)
            after["status"]["resourceClaimStatuses"].append({"name": name, "resourceClaimName": full})
        self.node.api.put_pod(after)
        self.node.kubelet.pods[after["metadata"]["uid"]] = after
        rows = after["status"]["resourceClaimStatuses"]
        asked = [{"namespace": "team", "name": r["resourceClaimName"], "uid": f"uid-of-{r['resourceClaimName']}"}
                 for r in rows]  # fmt: skip
        assert all(answer.error == "" for answer in self.kubelet.call("Prepare", *asked).values())
        return after

    def runs(self, thing: Pod, **states: str) -> None:
        """Write the pod's status: which init containers run and which have ended."""
        kinds: dict[str, Thing] = {"running": {"running": {}}, "ended": {"terminated": {"exitCode": 0}}}
        rows = [{"name": name, "state": kinds[state]} for name, state in states.items()]
        self.node.api.put_pod(thing | {"status": thing["status"] | {"initContainerStatuses": rows}})

    def shares(self, name: str = "many") -> dict[str, tuple[float, int | None]]:
        """Request and memory, in MiB, of each container of a pod."""
        rows = {key: row for key, row in self.node.held().items() if key.startswith(f"team/{name}/")}
        return {
            key.rpartition("/")[2]: (row["request"], row["memory_bytes"] and row["memory_bytes"] >> 20)
            for key, row in rows.items()
        }


def _request(name: str, units: int, memory: str) -> Thing:
    capacity = {"share": str(units)} | ({"memory": memory} if memory else {})
    return {"name": name, "exactly": {"deviceClassName": "share.cotenant.dev", "capacity": {"requests": capacity}}}


def uses(name: str, *claims: str, **more: Any) -> Thing:
    """A container that uses claims, each as CLAIM or CLAIM/REQUEST."""
    parts = [one.partition("/") for one in claims]
    rows = [{"name": claim} | ({"request": request} if request else {}) for claim, _, request in parts]
    return {"name": name, "image": "a"} | ({"resources": {"claims": rows}} if rows else {}) | more


def by_hand(*claims: str, name: str = "many", annotations: dict[str, str], **spec: Any) -> Pod:
    """A pod as a user writes it, with one template for each claim."""
    rows = [{"name": claim, "resourceClaimTemplateName": f"{name}-{claim}"} for claim in claims]
    placed = annotations | {"cotenant.dev/placed-by": "claims"}
    return pod(name, annotations=placed, resourceClaims=rows, **spec)


@pytest.fixture
def placed(make_node: Callable[..., Node]) -> Placed:
    return Placed(claims_node(make_node(gpus=2)))


# -- cotenant kube claims ----------------------------------------------------------------------------------------------


def claims_used(thing: Pod) -> dict[str, list[str]]:
    containers = [*(thing["spec"].get("initContainers") or []), *thing["spec"]["containers"]]
    return {c["name"]: [row["name"] for row in (c.get("resources") or {}).get("claims", [])] for c in containers}


def test_an_init_container_uses_the_claim_of_the_next_container_that_stays() -> None:
    """As the kubelet passes units on: the pod is charged once for what is never used at the same time."""
    sidecar = {"name": "proxy", "restartPolicy": "Always"}
    inits = [{"name": "fetch"}, sidecar, {"name": "plain"}, {"name": "warm"}]
    wants = share("60%", containers="fetch,proxy,warm,main")
    *templates, after = claims_of(pod("many", annotations=wants, initContainers=inits), (1, 36))
    assert [one["metadata"]["name"] for one in templates] == ["many-proxy", "many-main"]
    assert claims_used(after) == {"fetch": ["proxy"], "proxy": ["proxy"], "plain": [], "warm": ["main"],
                                  "main": ["main"]}  # fmt: skip
    assert [row["name"] for row in after["spec"]["resourceClaims"]] == ["proxy", "main"]
    check_pod(patched(after, mutate(after)))


def test_init_containers_alone_use_one_claim() -> None:
    wants = share("60%", containers="fetch,warm")
    thing = pod("many", annotations=wants, initContainers=[{"name": "fetch"}, {"name": "warm"}])
    *templates, after = claims_of(thing, (1, 36))
    assert [one["metadata"]["name"] for one in templates] == ["many-warm"]
    assert claims_used(after) == {"fetch": ["warm"], "warm": ["warm"], "main": []}


def test_init_containers_that_ask_for_other_shares_by_resources_are_refused() -> None:
    def asks(name: str, units: int) -> Thing:
        return {"name": name, "resources": {"limits": {"cotenant.dev/share": units}}}

    with pytest.raises(InputError, match="containers request different shares by resources"):
        claims_of(pod(containers=[asks("main", 10)], initContainers=[asks("fetch", 50)]), (1, 36))
    *templates, after = claims_of(pod(containers=[asks("main", 50)], initContainers=[asks("fetch", 50)]), (1, 36))
    assert len(templates) == 1
    assert after["spec"]["initContainers"][0]["resources"] == {"limits": {}, "claims": [{"name": "main"}]}


def test_what_the_command_wrote_runs(placed: Placed) -> None:
    """60 % for each container of a pod on GPUs of which one is in use, as with units."""
    placed.place(by_hand("main", name="other", annotations=share("80%"), containers=[uses("main", "main")]),
                 main={"gpu": (80, "")})  # fmt: skip
    thing = pod("many", annotations=share("60%", containers="fetch,main"), initContainers=[{"name": "fetch"}])
    _, after = claims_of(thing, (1, 36))
    after = placed.place(after, main={"gpu": (60, "")})
    wait_for(lambda: placed.shares() == {"fetch": (0.6, None)})
    placed.runs(after, fetch="ended")
    wait_for(lambda: placed.shares() == {"main": (0.6, None)})


# -- claims by hand ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", ["", "50%"], ids=["by the claims", "request of the largest"])
def test_each_container_has_the_share_of_its_own_claim_while_it_runs(placed: Placed, request_: str) -> None:
    """A sidecar, an init container and the app with claims of three sizes; a claim limits share and memory."""
    annotations = share(request_, containers="proxy,fetch,main") if request_ else {
        "cotenant.dev/containers": "proxy,fetch,main"
    }  # fmt: skip
    inits = [uses("proxy", "side", restartPolicy="Always"), uses("fetch", "big"), uses("plain")]
    thing = by_hand("side", "big", "small", annotations=annotations, initContainers=inits,
                    containers=[uses("main", "small")])  # fmt: skip
    thing = placed.place(thing, side={"gpu": (4, "512Mi")}, big={"gpu": (50, "6Gi")}, small={"gpu": (10, "")})
    placed.runs(thing, proxy="running", fetch="running")
    wait_for(lambda: placed.shares() == {"proxy": (0.04, 512), "fetch": (0.5, 6144)})
    assert placed.node.held()["team/many/fetch"]["gpus"] == [uuid_of(0)]
    placed.runs(thing, proxy="running", fetch="ended")
    wait_for(lambda: placed.shares() == {"proxy": (0.04, 512), "main": (0.1, None)})
    placed.runs(thing, proxy="running", fetch="running")  # a new sandbox: the init containers run once more
    wait_for(lambda: placed.shares() == {"proxy": (0.04, 512), "fetch": (0.5, 6144)})
    wait_for(lambda: placed.node.api.events(thing))
    assert {reason for reason, _ in placed.node.api.events(thing)} == {"ShareBound"}


def test_annotations_below_a_claim_limit_it(placed: Placed) -> None:
    thing = by_hand("main", annotations=share("20%", memory="1Gi"), containers=[uses("main", "main")])
    placed.place(thing, main={"gpu": (50, "2Gi")})
    wait_for(lambda: placed.shares() == {"main": (0.2, 1024)})


def test_claims_of_one_container_on_one_gpu_add_up(placed: Placed) -> None:
    thing = by_hand("one", "two", annotations={"cotenant.dev/limit": "25%"}, containers=[uses("main", "one", "two")])
    placed.place(thing, one={"gpu": (20, "1Gi")}, two={"gpu": (10, "2Gi")})
    wait_for(lambda: placed.shares() == {"main": (0.25, 3072)}, what="a request is never above the limit")


def test_a_container_has_the_request_of_a_claim_that_it_names(placed: Placed) -> None:
    """One claim of two requests, as a template can have."""
    thing = by_hand("all", annotations={"cotenant.dev/containers": "fetch,main"},
                    initContainers=[uses("fetch", "all/big")], containers=[uses("main", "all/small")])  # fmt: skip
    thing = placed.place(thing, all={"big": (50, "6Gi"), "small": (10, "1Gi")})
    wait_for(lambda: placed.shares() == {"fetch": (0.5, 6144)})
    placed.runs(thing, fetch="ended")
    wait_for(lambda: placed.shares() == {"main": (0.1, 1024)})


def test_containers_that_run_at_the_same_time_divide_their_claim(placed: Placed) -> None:
    """What the agent holds is never more than what the scheduler has allocated."""
    inits = [uses("fetch", "one"), uses("proxy", "one", restartPolicy="Always")]
    thing = by_hand("one", annotations=share("60%", memory="4Gi", containers="*"), initContainers=inits,
                    containers=[uses("main", "one")])  # fmt: skip
    thing = placed.place(thing, one={"gpu": (60, "4Gi")})
    wait_for(lambda: placed.shares() == {"fetch": (0.6, 4096)})
    placed.runs(thing, fetch="ended", proxy="running")
    wait_for(lambda: placed.shares() == {"proxy": (0.3, 2048), "main": (0.3, 2048)})
    placed.place(by_hand("main", name="other", annotations=share("40%"), containers=[uses("main", "main")]),
                 main={"gpu": (40, "")})  # fmt: skip
    wait_for(lambda: placed.shares("other") == {"main": (0.4, None)}, what="the rest of that GPU is free")


def test_a_claim_of_a_container_that_requests_no_share_is_an_event(placed: Placed) -> None:
    """It has the GPU, and no shim."""
    inits = [uses("fetch", "big"), uses("plain")]
    thing = by_hand("big", "small", annotations=share("10%"), initContainers=inits, containers=[uses("main", "small")])
    thing = placed.place(thing, big={"gpu": (50, "")}, small={"gpu": (10, "")})
    said = ("container fetch can use GPU 0 of node-a by claim many-big-x7k2p, but requests no share: it is not limited."
            " Name it in cotenant.dev/containers, and write cotenant.dev/placed-by: claims")  # fmt: skip
    wait_for(lambda: (NOT_ENFORCED, said) in placed.node.api.events(thing))
    placed.runs(thing, fetch="ended")
    wait_for(lambda: placed.shares() == {"main": (0.1, None)})
    assert [reason for reason, _ in placed.node.api.events(thing)].count(NOT_ENFORCED) == 1


def test_a_pod_with_a_claim_and_no_annotation_is_an_event(placed: Placed) -> None:
    bare = pod("many", resourceClaims=[{"name": "one", "resourceClaimTemplateName": "one"}],
               containers=[uses("main", "one"), uses("aux")])  # fmt: skip
    thing = placed.place(bare, one={"gpu": (50, "")})
    wait_for(lambda: NOT_ENFORCED in dict(placed.node.api.events(thing)))
    assert not placed.shares()


def test_a_claim_that_no_container_uses_holds_nothing(placed: Placed) -> None:
    thing = by_hand("one", "main", annotations=share("10%"), containers=[uses("main", "main")])
    thing = placed.place(thing, one={"gpu": (50, "")}, main={"gpu": (10, "")})
    wait_for(lambda: placed.shares() == {"main": (0.1, None)})
    wait_for(lambda: placed.node.api.events(thing))
    assert [reason for reason, _ in placed.node.api.events(thing)] == ["ShareBound"]


def test_a_container_without_a_claim_has_no_share_of_anothers(placed: Placed) -> None:
    """The runtime gives it no GPU, so it must not hold the share of the claim of the next container."""
    thing = by_hand("main", annotations=share("60%", containers="fetch,main"), initContainers=[uses("fetch")],
                    containers=[uses("main", "main")])  # fmt: skip
    thing = placed.place(thing, main={"gpu": (10, "")})
    placed.runs(thing, fetch="running")
    said = "container fetch requests a share, but uses no claim: it gets no GPU"
    wait_for(lambda: ("ShareRefused", said) in placed.node.api.events(thing))
    assert not placed.shares()
    placed.runs(thing, fetch="ended")
    wait_for(lambda: placed.shares() == {"main": (0.1, None)})


def test_a_pod_placed_by_claims_without_any_is_an_event(placed: Placed) -> None:
    thing = placed.place(pod("many", annotations=share("30%") | {"cotenant.dev/placed-by": "claims"}))
    said = "container main requests a share, but uses no claim: it gets no GPU"
    wait_for(lambda: placed.node.api.events(thing) == [("ShareRefused", said)])


def test_wrong_annotations_of_a_running_pod_are_an_event(placed: Placed) -> None:
    thing = by_hand("main", annotations=share("30%"), containers=[uses("main", "main")])
    thing = placed.place(thing, main={"gpu": (30, "")})
    wait_for(lambda: placed.shares() == {"main": (0.3, None)})
    thing["metadata"]["annotations"]["cotenant.dev/limit"] = "5%"
    placed.node.api.put_pod(thing)
    wait_for(lambda: "ShareUnclear" in dict(placed.node.api.events(thing)))
    assert placed.shares() == {"main": (0.3, None)}, "it keeps its share"


# -- a restart ---------------------------------------------------------------------------------------------------------


def test_a_plugin_that_restarts_while_an_init_container_runs(placed: Placed) -> None:
    node = placed.node
    thing = by_hand("big", "small", annotations=share("50%", containers="fetch,main"),
                    initContainers=[uses("fetch", "big")], containers=[uses("main", "small")])  # fmt: skip
    thing = placed.place(thing, big={"gpu": (20, "")}, small={"gpu": (10, "")})
    placed.runs(thing, fetch="running")
    wait_for(lambda: placed.shares() == {"fetch": (0.2, None)})
    wait_for(lambda: node.api.events(thing), what="the plugin has told the pod of its share")
    assert node.plugin is not None
    node.plugin.kill()
    node.plugin.wait()
    claim = node.api.store.pop(f"{CLAIMS}many-big-x7k2p")  # and the API server cannot say what the claim is
    start_claims_plugin(node)
    wait_for(lambda: "resourceclaims/many-big-x7k2p" in node.said())
    stays(lambda: placed.shares() == {"fetch": (0.2, None)}, 1.0, "what the agent holds stays as it was")
    assert {reason for reason, _ in node.api.events(thing)} == {"ShareBound"}
    node.agent.call("let_go", kind="pod", id=thing["metadata"]["uid"])  # the agent no longer knows it either
    stays(lambda: not placed.shares(), 1.0)
    node.api.put(f"{CLAIMS}many-big-x7k2p", claim)
    wait_for(lambda: placed.shares() == {"fetch": (0.2, None)})
    assert {reason for reason, _ in node.api.events(thing)} == {"ShareBound"}, "no event asks to delete the pod"
    placed.runs(thing, fetch="ended")
    wait_for(lambda: placed.shares() == {"main": (0.1, None)})
