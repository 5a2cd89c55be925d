"""What pods hold when names come again and GPUs go: the binder against a stand-in kubelet and an agent."""

from __future__ import annotations

from collections.abc import Callable

from held_agent import uuid_of
from kube_node import Node
from pods import Pod, patched, pod, share
from waiting import wait_for

from cotenant.kube.admission.mutate import mutate
from cotenant.kube.binding.orders import other_name
from cotenant.kube.units import gpu_of

SHARE = "cotenant.dev/share"


def place_of(node: Node, thing: Pod) -> str:
    """The GPU whose units the kubelet gave a pod."""
    return gpu_of(node.kubelet.allocated[thing["metadata"]["uid"]]["main"][SHARE][0])


def test_a_pod_that_comes_while_the_last_of_its_name_is_still_listed(node: Node) -> None:
    """Deleted by force: the API server has the new one while the kubelet still lists what the old one had."""
    first = node.schedule(pod("db-0", annotations=share("60%")))
    wait_for(lambda: node.held().get("team/db-0/main"))
    was = place_of(node, first)
    thing = pod("db-0", annotations=share("60%"))
    second = patched(thing, mutate(thing)) | {"status": {"phase": "Pending"}}
    node.api.put_pod(second)
    wait_for(lambda: [row["id"] for row in node.held().values()] == [second["metadata"]["uid"]])
    assert node.held()["team/db-0/main"]["gpus"] == [was]
    node.kubelet.admit(second)
    node.kubelet.remove(first)
    now = place_of(node, second)
    assert now != was, "it had room only there"
    wait_for(lambda: [row["gpus"] for row in node.held().values()] == [[now]])


def test_containers_of_a_pod_whose_names_are_taken_stay_apart() -> None:
    """Alike in all that a tenant's name keeps of a long one."""
    taken = [f"team/{'w' * 46}/trainer-{side}" for side in "ab"]
    assert len({other_name(name, "uid-1") for name in taken}) == 2


def test_a_gpu_that_is_gone_takes_no_other_with_it(make_node: Callable[..., Node]) -> None:
    """Broken, or of another node of the chart: the others are offered."""
    node = make_node(gpus=1)
    node.start_plugin(f"--whole=7,{uuid_of(3)}")
    node.ready()
    wait_for(lambda: f"the agent has no GPU 7, {uuid_of(3)} to offer as a whole" in node.said())
    assert node.kubelet.allocatable(SHARE) == 100
