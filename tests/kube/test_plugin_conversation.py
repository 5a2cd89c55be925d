"""The plugin against a stand-in kubelet: register, list and watch, allocate, illness, restarts, and what pods get."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_shim import FakeShim
from held_agent import pod_cgroup, uuid_of
from kube_node import Node
from kubelet_standin import AdmissionError
from pods import patched, pod, share
from ports import reserved_ports
from waiting import stays, wait_for

from cotenant.abi.protocol import MessageType
from cotenant.agent.owners.slurm_ended import job_file
from cotenant.kube.admission.mutate import mutate
from cotenant.kube.units import gpu_of

SHARE, MEMORY = "cotenant.dev/share", "cotenant.dev/memory"


def ids(node: Node, thing: dict, resource: str = SHARE, container: str = "main") -> list[str]:
    return node.kubelet.allocated[thing["metadata"]["uid"]][container][resource]


def test_the_whole_conversation(node: Node) -> None:
    counts = Counter(gpu_of(one) for one in node.kubelet.healthy(SHARE))
    assert counts == {uuid_of(0): 100, uuid_of(1): 100}, "a unit is a percent of one GPU"
    assert Counter(gpu_of(one) for one in node.kubelet.healthy(MEMORY)) == {uuid_of(0): 8, uuid_of(1): 8}

    train = node.schedule(pod("train", annotations=share("30%", limit="60%", memory="2Gi")))
    gpu = gpu_of(ids(node, train)[0])
    assert {gpu_of(one) for one in [*ids(node, train), *ids(node, train, MEMORY)]} == {gpu}, "all of one GPU"
    given = [answer for answer in node.kubelet.answers if answer.envs]
    assert [dict(answer.envs) for answer in given] == [{"NVIDIA_VISIBLE_DEVICES": gpu}]
    assert not given[0].mounts, "the webhook has mounted what is needed"

    row = wait_for(lambda: node.held().get("team/train/main"))
    assert (row["request"], row["limit"], row["memory_bytes"], row["gpus"]) == (0.3, 0.6, 2 << 30, [gpu])
    assert row["id"] == train["metadata"]["uid"]
    index = 0 if gpu == uuid_of(0) else 1
    wait_for(lambda: node.api.events(train))
    assert node.api.events(train) == [
        ("ShareBound", f"container main has 30% of GPU {index} of node-a, at most 60%, and 2 GiB")
    ]

    node.agent.put(pod_cgroup(train["metadata"]["uid"], "ab" * 32))
    shim = FakeShim(node.agent.tenants, "container:main")
    assert shim.answer["type"] == MessageType.HELLO_REPLY, "a process of the pod reaches its tenant"
    shim.close()

    node.finish(train)
    wait_for(lambda: not node.held(), what="the share is free when the pod has ended")


def test_a_share_is_never_taken_across_two_gpus(node: Node) -> None:
    for number in range(2):
        node.schedule(pod(f"large-{number}", annotations=share("85%")))
    with pytest.raises(AdmissionError, match=r"30 units of cotenant.dev/share are free only across GPUs \(15 on GPU-0"):
        node.schedule(pod("split", annotations=share("30%")))
    small = node.schedule(pod("small", annotations=share("15%")))
    assert len({gpu_of(one) for one in ids(node, small)}) == 1
    wait_for(lambda: len(node.held()) == 3)


def test_small_shares_leave_room_for_large_ones(node: Node) -> None:
    placed = [gpu_of(ids(node, node.schedule(pod(f"s{n}", annotations=share("20%"))))[0]) for n in range(5)]
    assert len(set(placed)) == 1, "one GPU is filled before the next is begun"
    node.schedule(pod("whole", annotations=share("100%")))


def test_memory_comes_from_the_gpu_of_the_share(make_node: Callable[..., Node]) -> None:
    node = make_node(gpus=2)
    node.start_plugin()
    node.ready()
    for number in range(6):
        thing = node.schedule(pod(f"p{number}", annotations=share("20%", memory="2Gi")))
        assert {gpu_of(i) for i in ids(node, thing)} == {gpu_of(i) for i in ids(node, thing, MEMORY)}


def test_a_share_and_its_memory_are_never_on_two_gpus(node: Node) -> None:
    node.schedule(pod("a", annotations=share("90%", memory="1Gi")))
    node.schedule(pod("b", annotations=share("10%", memory="8Gi")))
    assert sorted(Counter(gpu_of(one) for one in node.kubelet.in_use(MEMORY)).values()) == [1, 8]
    # One GPU has 10 % and 7 GiB left, the other 90 % and no memory.
    with pytest.raises(AdmissionError, match=r"no GPU has enough of both .*\. This pod has failed and is not retried"):
        node.schedule(pod("c", annotations=share("50%", memory="2Gi")))
    node.schedule(pod("d", annotations=share("10%", memory="7Gi")))
    node.schedule(pod("e", annotations=share("90%")))


def asks(name: str, units: int, memory: int, **more: Any) -> dict[str, Any]:
    """A container that asks by resources of its own."""
    limits = {SHARE: str(units), MEMORY: str(memory)}
    return {"name": name, "resources": {"limits": limits}, **more}


def inits(**states: str) -> dict[str, Any]:
    """A pod's status: which init containers run and which have ended."""
    kinds: dict[str, dict[str, Any]] = {"running": {"running": {}}, "ended": {"terminated": {"exitCode": 0}}}
    rows = [{"name": name, "state": kinds[state]} for name, state in states.items()]
    return {"phase": "Pending", "initContainerStatuses": rows}


def shares_held(node: Node) -> dict[str, tuple[float, int]]:
    return {key.rsplit("/")[-1]: (row["request"], row["memory_bytes"] >> 30) for key, row in node.held().items()}


def test_each_container_has_its_own_share_while_it_runs(node: Node) -> None:
    """A sidecar, two init containers and the app: an init container runs as what it asked for, whatever stands beside
    it, and the rest of the GPU can be full meanwhile."""
    thing = node.schedule(
        pod(
            "many",
            containers=[asks("main", 10, 1), asks("aux", 5, 1)],
            initContainers=[
                asks("proxy", 4, 1, restartPolicy="Always"), asks("fetch", 50, 6), {"name": "plain"},
                asks("warm", 20, 2),
            ],
        )
    )  # fmt: skip
    node.schedule(pod("other", annotations=share("46%", memory="1Gi")))
    node.api.put_pod(thing | {"status": inits(proxy="running", fetch="running")})
    first = {"proxy": (0.04, 1), "fetch": (0.5, 6)}
    wait_for(lambda: {k: v for k, v in shares_held(node).items() if k in ("proxy", "fetch", "warm", "aux")} == first)
    gpu = gpu_of(ids(node, thing, container="fetch")[0])
    assert node.held()["team/many/fetch"]["gpus"] == [gpu]
    node.api.put_pod(thing | {"status": inits(proxy="running", fetch="ended")})
    wait_for(lambda: "warm" in shares_held(node) and "fetch" not in shares_held(node))
    assert shares_held(node)["warm"] == (0.2, 2)
    node.api.put_pod(thing | {"status": inits(proxy="running", fetch="ended", warm="ended")})
    last = {"proxy": (0.04, 1), "main": (0.1, 1), "aux": (0.05, 1)}
    wait_for(lambda: {k: v for k, v in shares_held(node).items() if k in (*last, "warm", "fetch")} == last)
    # the pod gets a new sandbox, so its init containers run once more
    node.api.put_pod(thing | {"status": inits(proxy="running", fetch="running")})
    wait_for(lambda: "fetch" in shares_held(node) and "aux" not in shares_held(node))


def test_an_initialized_pod_has_its_containers_shares(node: Node) -> None:
    thing = node.schedule(pod("old", containers=[asks("main", 10, 1)], initContainers=[asks("fetch", 50, 6)]))
    # the container statuses were removed
    ready = {"phase": "Running", "conditions": [{"type": "Initialized", "status": "True"}]}
    node.api.put_pod(thing | {"status": ready})
    wait_for(lambda: shares_held(node) == {"main": (0.1, 1)})


def test_an_init_container_of_unknown_place_is_an_event(node: Node) -> None:
    assert node.plugin is not None
    thing = node.schedule(
        pod("lost", containers=[{"name": "main"}], initContainers=[asks("fetch", 50, 6)]), webhook=True
    )
    wait_for(lambda: "fetch" in shares_held(node))
    node.agent.call("let_go", kind="pod", id=thing["metadata"]["uid"])
    node.plugin.kill()
    node.plugin.wait()
    count = len(node.kubelet.registered)
    node.api.put_pod(thing | {"status": inits(fetch="running")})
    node.agent.call("let_go", kind="pod", id=thing["metadata"]["uid"])
    node.start_plugin()
    wait_for(lambda: len(node.kubelet.registered) > count)
    wait_for(lambda: any("its GPU is unknown" in text for _, text in node.api.events(thing)))


def test_a_pod_of_which_only_an_init_container_asks(node: Node) -> None:
    thing = node.schedule(pod("fetch", annotations=share("20%", containers="load"), initContainers=[{"name": "load"}]))
    row = wait_for(lambda: node.held().get("team/fetch/load"))
    assert row["gpus"] == [gpu_of(ids(node, thing, container="load")[0])]
    status = {"phase": "Running", "initContainerStatuses": [{"name": "load", "state": {"terminated": {"exitCode": 0}}}]}
    node.api.put_pod(thing | {"status": status})
    wait_for(lambda: not node.held(), what="an init container that has ended gives its share back")


def test_an_agent_that_is_away_makes_every_unit_unhealthy(node: Node) -> None:
    node.agent.kill()
    wait_for(lambda: node.kubelet.allocatable(SHARE) == 0, what="nothing is offered that nobody would enforce")
    node.agent.start()
    wait_for(lambda: node.kubelet.allocatable(SHARE) == 200)


def test_a_kubelet_that_restarts_is_told_again(node: Node) -> None:
    train = node.schedule(pod("train", annotations=share("30%")))
    before = ids(node, train)
    wait_for(lambda: node.held())
    node.kubelet.restart()
    node.ready(count=2)
    assert ids(node, train) == before, "its checkpoint still names the same units"
    after = node.schedule(pod("next", annotations=share("60%")))
    assert not set(ids(node, after)) & set(before)
    assert "team/train/main" in node.held()


def test_a_killed_plugin_loses_nothing_and_frees_what_ended_meanwhile(node: Node) -> None:
    keeps = node.schedule(pod("stays", annotations=share("30%")))
    goes = node.schedule(pod("goes", annotations=share("40%")))
    wait_for(lambda: len(node.held()) == 2)
    wait_for(lambda: node.api.events(keeps))
    assert node.plugin is not None
    node.plugin.send_signal(signal.SIGKILL)
    node.plugin.wait()
    node.finish(goes, "Failed")
    stays(lambda: len(node.held()) == 2, what="nobody is there to let go of it")
    node.start_plugin()
    node.ready(count=2)
    wait_for(lambda: set(node.held()) == {"team/stays/main"})
    assert node.held()["team/stays/main"]["gpus"] == [gpu_of(ids(node, keeps)[0])]
    assert [reason for reason, _ in node.api.events(keeps)] == ["ShareBound"], "said once, by whichever plugin"


def test_a_pod_that_comes_again_by_the_same_name(node: Node) -> None:
    first = node.schedule(pod("db-0", annotations=share("60%")))
    wait_for(lambda: node.held().get("team/db-0/main"))
    node.kubelet.remove(first)
    node.api.drop_pod(first)
    second = node.schedule(pod("db-0", annotations=share("60%")))
    wait_for(lambda: [row["id"] for row in node.held().values()] == [second["metadata"]["uid"]])


def test_the_annotations_of_a_running_pod_can_change_its_limit_but_not_its_claim(node: Node) -> None:
    thing = node.schedule(pod("train", annotations=share("30%", limit="60%")))
    wait_for(lambda: node.held().get("team/train/main"))
    thing["metadata"]["annotations"] |= {"cotenant.dev/limit": "80%"}
    node.api.put_pod(thing)
    wait_for(lambda: node.held()["team/train/main"]["limit"] == 0.8)
    thing["metadata"]["annotations"] |= {"cotenant.dev/request": "90%", "cotenant.dev/limit": "95%"}
    node.api.put_pod(thing)
    wait_for(lambda: any(reason == "ShareUnclear" for reason, _ in node.api.events(thing)))
    assert node.held()["team/train/main"]["request"] == 0.3, "the kubelet gave it 30 units"


def test_a_pod_that_the_webhook_did_not_see_is_reported(node: Node) -> None:
    limits = {"cotenant.dev/share": "30"}
    thing = node.schedule(
        pod("bare", containers=[{"name": "main", "resources": {"limits": limits, "requests": limits}}]), webhook=False
    )
    wait_for(lambda: "ShareNotEnforced" in dict(node.api.events(thing)))
    assert "webhook has not patched it" in dict(node.api.events(thing))["ShareNotEnforced"]


def test_a_share_that_the_agent_refuses_is_an_event(node: Node) -> None:
    for job in ("other", "more"):  # as the prologs do: a job without its file has ended
        job_file(node.agent.folder, job).touch()
    node.agent.call("hold", kind="slurm", id="7", tenant={"name": "other", "request": 0.9, "gpus": [uuid_of(0)]})
    node.agent.call("hold", kind="slurm", id="8", tenant={"name": "more", "request": 0.9, "gpus": [uuid_of(1)]})
    thing = node.schedule(pod("late", annotations=share("30%")))
    wait_for(lambda: node.api.events(thing))
    (reason, message) = node.api.events(thing)[0]
    assert reason == "ShareRefused"
    assert "has 10% left to promise; team/late/main asks for 30%" in message
    node.agent.call("let_go", kind="slurm", id="7")
    node.agent.call("let_go", kind="slurm", id="8")
    wait_for(lambda: node.held().get("team/late/main"), what="tried again")


def test_a_pod_demands_by_what_its_memory_is_limited(node: Node) -> None:
    demand = "cotenant.dev/enforce-memory"
    weak = node.schedule(pod("weak", annotations=share("30%", memory="1Gi") | {demand: "driver"}))
    wait_for(lambda: node.api.events(weak))
    (reason, message) = node.api.events(weak)[0]
    assert reason == "ShareRefused"
    assert "must be limited by the driver or something stronger, which is not possible" in message
    node.schedule(pod("content", annotations=share("30%", memory="1Gi") | {demand: "shim"}))
    wait_for(lambda: "team/content/main" in node.held())
    assert node.held()["team/content/main"]["enforce_memory"] == "shim"
    assert "team/weak/main" not in node.held()


@pytest.mark.slow
def test_an_api_server_that_is_away_stops_nothing(node: Node) -> None:
    thing = node.schedule(pod("train", annotations=share("30%")))
    wait_for(lambda: node.held())
    node.api.down = True
    node.kubelet.remove(thing)
    wait_for(lambda: not node.held(), what="after some rounds the kubelet is believed alone")
    node.api.down = False
    after = node.schedule(pod("next", annotations=share("100%")))
    wait_for(lambda: node.held().get("team/next/main"))
    assert after


def test_whole_gpus(make_node: Callable[..., Node]) -> None:
    node = make_node(gpus=3)
    node.start_plugin("--whole=0,1", "--mounts=plugin", "--cdi-kind=nvidia.com/gpu")
    node.ready(SHARE, "cotenant.dev/gpu")
    assert node.kubelet.healthy("cotenant.dev/gpu") == [uuid_of(0), uuid_of(1)]
    assert {gpu_of(one) for one in node.kubelet.healthy(SHARE)} == {uuid_of(2)}
    node.schedule(pod("big", containers=[{"name": "main", "resources": {"limits": {"cotenant.dev/gpu": 2}}}]))
    answer = node.kubelet.answers[-1]
    assert [one.name for one in answer.cdi_devices] == [f"nvidia.com/gpu={uuid_of(i)}" for i in range(2)]
    assert not answer.envs
    assert [(m.container_path, m.host_path, m.read_only) for m in answer.mounts] == [
        ("/opt/cotenant/lib", "/var/lib/cotenant/lib", True),
        ("/opt/cotenant/run", "/run/cotenant/tenants", True),
    ]
    row = wait_for(lambda: node.held().get("team/big/main"))
    assert (row["mechanism"], row["gpus"], row["request"]) == ("whole", [uuid_of(0), uuid_of(1)], 1.0)


def test_with_one_gpu_shown_no_pod_comes_that_would_not_fit(make_node: Callable[..., Node]) -> None:
    node = make_node(gpus=2)
    node.start_plugin("--one-gpu=true")
    node.ready()
    assert node.kubelet.allocatable(SHARE) == 100, "the scheduler sees one GPU's worth"
    node.schedule(pod("a", annotations=share("60%")))
    # 60 % of one GPU are taken, and the other GPU's 100 are the most that one GPU has free
    wait_for(lambda: node.kubelet.allocatable(SHARE) == 160)
    node.schedule(pod("b", annotations=share("70%")))
    wait_for(lambda: node.kubelet.allocatable(SHARE) == 60 + 70 + 40)


def shown(node: Node) -> set[str]:
    """GPUs whose free units the kubelet has, of share or memory."""
    kubelet = node.kubelet
    return {gpu_of(one) for kind in (SHARE, MEMORY) for one in set(kubelet.healthy(kind)) - kubelet.in_use(kind)}


@pytest.mark.parametrize(
    ("there", "left", "comes"),
    [
        # 10 % of one GPU and 40 % of the other are left
        ([("60%", None), ("60%", None), ("30%", None)], (190, 8), ("50%", None)),
        # 10 % with 7 GiB of one GPU and 90 % without memory of the other are left
        ([("90%", "1Gi"), ("10%", "8Gi")], (110, 16), ("50%", "2Gi")),
    ],
)
def test_a_fragmented_node_makes_pods_wait_and_none_fail(
    make_node: Callable[..., Node], there: list[tuple[str, str | None]], left: tuple[int, int], comes: tuple[str, str]
) -> None:
    node = make_node(gpus=2)
    node.start_plugin("--one-gpu=true")
    node.ready()
    for number, (request, memory) in enumerate(there):
        thing = pod(f"p{number}", annotations=share(request, **({"memory": memory} if memory else {})))
        # The share and the memory are sent as two messages. Wait until both show the GPU with more room, so that no
        # change is pending.
        wait_for(lambda: shown(node) == {uuid_of(number % 2)})  # noqa: B023
        assert node.kubelet.fits(patched(thing, mutate(thing)))
        node.schedule(thing)
    wait_for(lambda: (node.kubelet.allocatable(SHARE), node.kubelet.allocatable(MEMORY)) == left)
    big = pod("big", annotations=share(comes[0], **({"memory": comes[1]} if comes[1] else {})))
    assert not node.kubelet.fits(patched(big, mutate(big))), "the scheduler keeps it pending"


def test_settings_that_do_not_fit_end_with_a_sentence(make_node: Callable[..., Node]) -> None:
    node = make_node(gpus=1)
    node.start_plugin("--whole=GPU-none")
    assert node.plugin is not None
    assert node.plugin.wait(60) == 2
    assert "the agent has no GPU 'GPU-none'" in node.said()
    assert "Traceback" not in node.said()


@pytest.fixture
def reserved() -> Iterator[list[int]]:
    with reserved_ports() as found:
        yield found


def test_metrics_are_served(make_node: Callable[..., Node], reserved: list[int]) -> None:
    import urllib.request

    (port,) = reserved
    node = make_node(gpus=1)
    node.start_plugin(f"--metrics-port={port}")
    node.ready()
    node.schedule(pod("a", annotations=share("60%")))

    def text() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    wait_for(lambda: "cotenant_plugin_bound_containers 1" in text())
    assert 'cotenant_plugin_devices{resource="cotenant.dev/share",health="healthy"} 100' in text()
    assert 'cotenant_plugin_allocations_total{resource="cotenant.dev/share",outcome="granted"} 1' in text()
    assert 'cotenant_plugin_allocations_total{resource="cotenant.dev/memory",outcome="refused"} 0' in text()
    if shutil.which("promtool"):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text(), capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
