"""The webhook's patch: a pod that asks gets its share, is still the user's pod, and is patched once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pods import Pod, check_pod, patched, pod, pods, share, versions

from cotenant.core.errors import InputError
from cotenant.kube.admission.mutate import Injection, mutate
from cotenant.kube.shares import shares_of

SHIMS = "/opt/cotenant/lib/current/libcotenant-shim.so:/opt/cotenant/lib/current/libcotenant-nvml.so"


def env_of(container: Pod) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container.get("env") or []}


def done(before: Pod, **injection: Any) -> Pod:
    return patched(before, mutate(before, Injection(**injection)))


def test_a_pod_that_asks_gets_everything_it_needs() -> None:
    after = done(pod(annotations=share("30%", limit="60%", memory="8Gi")))
    main = after["spec"]["containers"][0]
    assert main["resources"] == {
        "limits": {"cotenant.dev/share": "30", "cotenant.dev/memory": "8"},
        "requests": {"cotenant.dev/share": "30", "cotenant.dev/memory": "8"},
    }
    assert main["volumeMounts"] == [
        {"name": "cotenant-lib", "mountPath": "/opt/cotenant/lib", "readOnly": True},
        {"name": "cotenant-run", "mountPath": "/opt/cotenant/run", "readOnly": True},
    ]
    assert after["spec"]["volumes"] == [
        {"name": "cotenant-lib", "hostPath": {"path": "/var/lib/cotenant/lib", "type": "Directory"}},
        {"name": "cotenant-run", "hostPath": {"path": "/run/cotenant/tenants", "type": "Directory"}},
    ]
    env = env_of(main)
    assert env["LD_PRELOAD"] == SHIMS
    assert env["COTENANT_SOCKET"] == "/opt/cotenant/run/agent.sock"
    assert env["COTENANT_TOKEN"] == "container:main"
    assert env["COTENANT_DRIVER"].split(":")[0] == "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
    assert not any("30" in str(value) or "60" in str(value) for value in env.values()), "limits come from the agent"
    for version in versions():
        check_pod(after, version)


def test_memory_for_nvidias_hook_is_in_whole_mib_and_on_request() -> None:
    names = {"NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT"}
    before = pod(annotations=share("30%", memory="1500M"))
    hooked = env_of(done(before, memory_hook=True)["spec"]["containers"][0])
    assert {name: hooked[name] for name in names} == dict.fromkeys(names, "1430")
    assert not names & env_of(done(before)["spec"]["containers"][0]).keys()
    without = done(pod(annotations=share("30%")), memory_hook=True)
    assert not names & env_of(without["spec"]["containers"][0]).keys()


def test_pod_that_raises_its_memory_past_the_hook_is_refused() -> None:
    before = pod(annotations=share("30%", memory="1Gi"))
    before["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "80000"}]
    with pytest.raises(InputError, match="sets NVIDIA_GPU_MEMORY_LIMIT, which is set"):
        mutate(before, Injection(memory_hook=True))


@pytest.mark.parametrize("memory", ["1Gi", None])
@pytest.mark.parametrize("name", ["NVIDIA_GPU_MEMORY_LIMITS", "NVIDIA_GPU_MEMORY_REQUESTS"])
def test_no_variable_that_the_hook_reads_is_the_pods(name: str, memory: str | None) -> None:
    before = pod(annotations=share("30%", **({"memory": memory} if memory else {})))
    before["spec"]["containers"][0]["env"] = [{"name": name, "value": "80000"}]
    with pytest.raises(InputError, match=f"sets {name}, which sets its own limit"):
        mutate(before, Injection(memory_hook=True))
    assert mutate(before, Injection())


@given(pods())
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_pods_stay_valid_and_lose_nothing(before: Pod) -> None:
    kept = copy.deepcopy(before)
    operations = mutate(before)
    assert before == kept, "mutate is pure"
    after = patched(before, operations)
    check_pod(after)
    assert mutate(after) == [], "twice gives the same pod"
    assert_kept(before, after)
    asking = {s.container for s in shares_of(before)}
    assert {s.container for s in shares_of(after)} == asking
    for kind in ("initContainers", "containers"):
        for old, new in zip(before["spec"].get(kind) or [], after["spec"].get(kind) or [], strict=True):
            if old["name"] not in asking:
                assert old == new, "a container that does not ask is not touched"
            else:
                assert env_of(new)["LD_PRELOAD"].startswith(SHIMS)


def assert_kept(before: Any, after: Any, path: str = "") -> None:
    """Everything of the user's is still there: maps keep their keys, lists their order, texts are the same."""
    if isinstance(before, dict):
        for key, value in before.items():
            assert key in after, f"{path}/{key} is gone"
            if before.get("name") == "LD_PRELOAD" and key in ("value", "valueFrom"):
                continue
            assert_kept(value, after[key], f"{path}/{key}")
    elif isinstance(before, list):
        if before and isinstance(before[0], dict) and path.endswith("/env"):
            assert_env_kept(before, after)
            return
        assert len(after) >= len(before), f"{path} has lost entries"
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            assert_kept(old, new, f"{path}/{index}")
    elif before is not None:
        assert str(before) == str(after), f"{path} was {before!r} and is {after!r}"


def assert_env_kept(before: list[Pod], after: list[Pod]) -> None:
    """Variables in their order; what was in LD_PRELOAD (the last one counts) is still loaded, after ours."""
    if before == after:
        return
    last = max((i for i, entry in enumerate(before) if entry["name"] == "LD_PRELOAD"), default=None)
    kept = [entry for entry in after if entry["name"] != "COTENANT_USER_PRELOAD"]
    for index, entry in enumerate(before):
        if index != last:
            assert kept[index] == entry
    if last is not None:
        value = kept[last]["value"]
        if "valueFrom" in before[last]:
            source = next(entry for entry in after if entry["name"] == "COTENANT_USER_PRELOAD")
            assert source["valueFrom"] == before[last]["valueFrom"]
            assert value == f"{SHIMS}:$(COTENANT_USER_PRELOAD)"
            assert after.index(source) < after.index(kept[last]), "defined before it is used"
        else:
            text = before[last].get("value")
            assert value == (f"{SHIMS}:{text}" if text else SHIMS)


def test_an_existing_preload_stays_behind_ours() -> None:
    main = {
        "name": "main",
        "env": [{"name": "LD_PRELOAD", "value": "/usr/lib/libjemalloc.so"}, {"name": "A", "value": "1"}],
    }
    after = done(pod(annotations=share(), containers=[main]))["spec"]["containers"][0]
    assert env_of(after)["LD_PRELOAD"] == f"{SHIMS}:/usr/lib/libjemalloc.so"
    assert after["env"][1] == {"name": "A", "value": "1"}


def test_a_preload_from_a_config_map_stays_too() -> None:
    source = {"configMapKeyRef": {"name": "tuning", "key": "preload"}}
    main = {"name": "main", "env": [{"name": "A", "value": "1"}, {"name": "LD_PRELOAD", "valueFrom": source}]}
    before = pod(annotations=share(), containers=[main])
    after = done(before)
    assert after["spec"]["containers"][0]["env"][:3] == [
        {"name": "A", "value": "1"},
        {"name": "COTENANT_USER_PRELOAD", "valueFrom": source},
        {"name": "LD_PRELOAD", "value": f"{SHIMS}:$(COTENANT_USER_PRELOAD)"},
    ]
    assert mutate(after) == []


def test_who_asks() -> None:
    two = [{"name": "main"}, {"name": "log"}]
    assert asking(pod(annotations=share(), containers=two)) == ["main"], "the first, as for kubectl"
    preferred = share() | {"kubectl.kubernetes.io/default-container": "log"}
    assert asking(pod(annotations=preferred, containers=two)) == ["log"]
    assert asking(pod(annotations=share(containers="log"), containers=two)) == ["log"]
    both = pod(annotations=share(containers="*"), containers=two, initContainers=[{"name": "fetch"}])
    assert asking(both) == ["fetch", "main", "log"]
    own = {"name": "log", "resources": {"limits": {"cotenant.dev/share": 10}}}
    assert asking(pod(containers=[{"name": "main"}, own])) == ["log"]
    assert asking(pod()) == []
    assert asking(pod(containers=[{"name": "m", "resources": {"limits": {"cotenant.dev/mig-1g.10gb": 1}}}])) == []


def asking(before: Pod) -> list[str]:
    return [found.container for found in shares_of(before)]


def test_every_container_names_its_own_tenant() -> None:
    before = pod(
        annotations=share(containers="*"),
        initContainers=[{"name": "fetch"}, {"name": "proxy", "restartPolicy": "Always"}],
    )
    after = done(before)
    tokens = {
        c["name"]: env_of(c)["COTENANT_TOKEN"] for kind in ("initContainers", "containers") for c in after["spec"][kind]
    }
    assert tokens == {"fetch": "container:fetch", "proxy": "container:proxy", "main": "container:main"}
    alone = done(pod(annotations=share(containers="fetch"), initContainers=[{"name": "fetch"}]))
    assert env_of(alone["spec"]["initContainers"][0])["COTENANT_TOKEN"] == "container:fetch"


@pytest.mark.parametrize(
    ("annotations", "found"),
    [
        (share("12.5%"), (0.125, 1.0, None, 13, 0)),
        (share("0%"), (0.0, 1.0, None, 1, 0)),
        ({"cotenant.dev/limit": "60%"}, (0.01, 0.6, None, 1, 0)),
        ({"cotenant.dev/limit": "0.5%"}, (0.005, 0.005, None, 1, 0)),
        ({"cotenant.dev/memory": "500Mi"}, (0.01, 1.0, 500 << 20, 1, 1)),
        (share("100%", memory="8Gi"), (1.0, 1.0, 8 << 30, 100, 8)),
        (share("29%"), (0.29, 1.0, None, 29, 0)),
    ],
)
def test_units_are_what_the_scheduler_counts(annotations: dict[str, str], found: tuple[Any, ...]) -> None:
    before = pod(annotations=annotations)
    for one in (before, done(before)):
        mine = shares_of(one)[0]
        assert (mine.request, mine.limit, mine.memory_bytes, mine.units, mine.memory_units) == found


def test_a_share_by_resource() -> None:
    limits = {"cotenant.dev/share": 40, "cotenant.dev/memory": "8Gi"}
    before = pod(annotations={"cotenant.dev/limit": "80%"}, containers=[{"name": "m", "resources": {"limits": limits}}])
    after = done(before)
    expected = {"cotenant.dev/share": 40, "cotenant.dev/memory": "8"}
    assert after["spec"]["containers"][0]["resources"]["limits"] == expected
    mine = shares_of(after)[0]
    assert (mine.request, mine.limit, mine.memory_bytes) == (0.4, 0.8, 8 << 30)


def test_a_whole_gpu_is_injected_too() -> None:
    after = done(pod(containers=[{"name": "m", "resources": {"limits": {"cotenant.dev/gpu": 2}}}]))
    assert env_of(after["spec"]["containers"][0])["LD_PRELOAD"] == SHIMS
    assert shares_of(after)[0].gpus == 2


@pytest.mark.parametrize(
    "annotations", [{"cotenant.dev/inject": value} | share() for value in ("false", "no", "off", "n", "False", "0")]
)
def test_opting_out(annotations: dict[str, str]) -> None:
    assert mutate(pod(annotations=annotations)) == []


@pytest.mark.parametrize("namespace", ["kube-system", "kube-public", "kube-node-lease"])
def test_the_systems_namespaces_are_left_alone(namespace: str) -> None:
    before = pod(annotations=share() | {"cotenant.dev/rubbish": "x"})
    before["metadata"]["namespace"] = namespace
    assert mutate(before) == []
    before["metadata"]["namespace"] = ""
    assert mutate(before, namespace=namespace) == [], "the review's namespace counts"


def test_keys_are_escaped_and_no_map_is_replaced() -> None:
    limits = {"example.com/a~b": 1, "cpu": "1"}
    before = pod(annotations=share() | {"a~1/b": "c"}, containers=[{"name": "m", "resources": {"limits": limits}}])
    operations = mutate(before)
    paths = [op["path"] for op in operations]
    assert "/spec/containers/0/resources/limits/cotenant.dev~1share" in paths
    assert "/spec/containers/0/resources/limits" not in paths
    assert patched(before, operations)["spec"]["containers"][0]["resources"]["limits"] == limits | {
        "cotenant.dev/share": "30"
    }


def test_volumes_of_the_same_name_are_another_thing() -> None:
    before = pod(annotations=share(), volumes=[{"name": "cotenant-lib", "emptyDir": {}}])
    after = done(before)
    assert [v["name"] for v in after["spec"]["volumes"]] == ["cotenant-lib", "cotenant-lib-2", "cotenant-run"]
    assert after["spec"]["containers"][0]["volumeMounts"][0]["name"] == "cotenant-lib-2"
    assert mutate(after) == []


def test_with_mounts_of_the_plugin_no_volume_is_added() -> None:
    after = done(pod(annotations=share()), mounts=False)
    assert "volumes" not in after["spec"]
    assert "volumeMounts" not in after["spec"]["containers"][0]


def test_a_runtime_class_is_set_where_none_is() -> None:
    assert done(pod(annotations=share()), runtime_class="nvidia")["spec"]["runtimeClassName"] == "nvidia"
    kept = done(pod(annotations=share(), runtimeClassName="kata"), runtime_class="nvidia")
    assert kept["spec"]["runtimeClassName"] == "kata"


MAIN = {"name": "main"}
SHARE, LIB = "cotenant.dev/share", "/opt/cotenant/lib"


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        (pod(annotations=share("70%", limit="60%")), "container main requests 70% of a GPU, over its limit of 60%"),
        (pod(annotations=share("130%")), "'130%' is over 100% of a GPU"),
        (pod(annotations=share("30%", limit="0%")), "a limit of 0% would let nothing run"),
        (pod(annotations=share("a lot")), "'a lot' is not a share of a GPU; write it like 30% or 0.3"),
        (pod(annotations=share(memory="8 gigs")), "'8 gigs' is not an amount of memory; write it like 8Gi or 500M"),
        (pod(annotations=share() | {"cotenant.dev/enforce-memory": "driver"}),
         "container main has no limit on its memory that could be enforced: give cotenant.dev/memory"),
        (pod(annotations=share(memory="8Gi") | {"cotenant.dev/enforce-memory": "luck"}),
         "'luck' is not one of kernel, driver, hardware, server, shim"),
        (pod(annotations={"cotenant.dev/enforce-memory": "shim"},
             containers=[MAIN | {"resources": {"limits": {"cotenant.dev/gpu": 1}}}]), "takes whole GPUs"),
        (pod(annotations={"cotenant.dev/requests": "30%"}),
         "unknown annotation cotenant.dev/requests; did you mean cotenant.dev/request?"),
        (pod(annotations={"gpu.cotenant.dev/x": "1"}), "unknown annotation gpu.cotenant.dev/x; "),
        (pod(annotations={"cotenant.dev/inject": "maybe"}), "'maybe' is not true or false"),
        (pod(annotations=share(containers="train")), "there is no container 'train'; the containers are main"),
        (pod(annotations={"cotenant.dev/containers": "main"}), "it selects containers, but no share"),
        (pod(containers=[MAIN | {"resources": {"limits": {"cotenant.dev/shares": 1}}}]),
         "unknown resource cotenant.dev/shares; did you mean cotenant.dev/share?"),
        (pod(containers=[MAIN | {"resources": {"limits": {"cotenant.dev/share": 130}}}]),
         "130 units of cotenant.dev/share in container main; write 1 to 100"),
        (pod(containers=[MAIN | {"resources": {"limits": {"cotenant.dev/share": "0.5"}}}]), "write 1 to 100"),
        (pod(containers=[MAIN | {"resources": {"limits": {SHARE: 5}, "requests": {SHARE: 4}}}]),
         "cotenant.dev/share is limited to 5 and requested as 4; they must be equal"),
        (pod(annotations=share(), containers=[MAIN | {"resources": {"limits": {"cotenant.dev/share": 50}}}]),
         "takes 50 units of cotenant.dev/share, but the pod's cotenant.dev/request of 30% makes 30 units; remove one"),
        (pod(annotations=share(), containers=[MAIN | {"resources": {"limits": {"cotenant.dev/gpu": 1}}}]),
         "container main takes whole GPUs, which cannot be combined with share, limit or memory"),
        (pod(annotations=share() | {"cotenant.dev/inject": "false"},
             containers=[MAIN | {"resources": {"limits": {"cotenant.dev/share": 30}}}]),
         "container main takes a share of a GPU and cannot opt out: its share would not be enforced"),
        (pod(annotations=share(), containers=[MAIN | {"env": [{"name": "COTENANT_SOCKET", "value": "/tmp/mine"}]}]),
         "container main sets COTENANT_SOCKET, which is set by Cotenant: leave it out"),
        (pod(annotations=share(), containers=[MAIN | {"volumeMounts": [{"name": "x", "mountPath": LIB + "/"}]}],
             volumes=[{"name": "x", "emptyDir": {}}]),
         "container main has a mount of its own at /opt/cotenant/lib"),
        (pod(annotations=share(), os={"name": "windows"}), "a Windows pod cannot have a share of a GPU"),
        ({"metadata": {"annotations": ["x"]}, "spec": {"containers": []}}, "not a map of names and values"),
        ({"metadata": {"annotations": share()}}, "the pod has no spec"),
        ({"metadata": {"annotations": share()}, "spec": {"containers": [{}]}}, "not a list of containers with names"),
        ({"metadata": {"annotations": {"cotenant.dev/request": 30}}, "spec": {"containers": [MAIN]}},
         "30 is not a string; put it in quotes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(before: Pod, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        mutate(before)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
