"""The chart and what it makes: valid in every version, with no more rights than are used, and the plain file equal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm
import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from pods import check_object, pod, pods, versions

from cotenant.core.errors import InputError
from cotenant.kube import names
from cotenant.kube.dra import claims, offer
from cotenant.kube.shares import shares_of
from cotenant.kube.units import MigSlice, NodeGpu

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "cotenant"
CHART_VALUES = CHART / "values.yaml"
Thing = dict[str, Any]
ALL: dict[str, Any] = {
    "monitoring.serviceMonitor": True,
    "networkPolicy.enabled": True,
    "dra.enabled": True,
    "node.runtimeClassName": "nvidia",
    "agent.memoryLimits": True,
    "injection.memoryHook": True,
    "injection.mounts": "plugin",
    "injection.runtimeClassName": "nvidia",
    "webhook.failurePolicy": "Ignore",
    "webhook.replicas": 3,
    "plugin.whole": "0,1",
    "plugin.oneGpu": False,
    "node.nodeSelector": {"gpu": "yes", "nvidia.com/gpu.present": None},
    "agent.resources": {"limits": {"cpu": "2"}},
    "node.tolerations": [],
    "agent.quota": '100ms"x',
    "image.pullSecrets": [{"name": "registry"}],
    "webhook.tolerations": [{"key": "control", "operator": "Exists"}],
}


ODD_RELEASES = ("v1.2", "v1-2", "2nd", "c" + 52 * "a", "d" + 52 * "a", 52 * "a" + "d", 52 * "a" + "e", "a.cotenant")


def tree(paths: dict[str, Any]) -> Thing:
    found: Thing = {}
    for path, value in paths.items():
        node = found
        *heads, leaf = path.split(".")
        for head in heads:
            node = node.setdefault(head, {})
        node[leaf] = value
    return found


def install(
    chosen: dict[str, Any] | None = None, namespace: str = names.NAMESPACE, release: str = "cotenant"
) -> list[Thing]:
    """All objects that the chart makes with these values."""
    return helm.render(CHART, tree(chosen or {}), namespace, release)


def asks() -> str:
    """The condition, in CEL, by which the API server asks the webhook about a pod."""
    configuration = by_name(install())["MutatingWebhookConfiguration", "cotenant"]
    return str(configuration["webhooks"][0]["matchConditions"][0]["expression"])


def by_name(things: list[Thing]) -> dict[tuple[str, str], Thing]:
    found = {(thing["kind"], thing["metadata"]["name"]): thing for thing in things}
    assert len(found) == len(things), "no object twice"
    return found


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("chosen", [{}, ALL], ids=["defaults", "everything"])
def test_every_object_is_strictly_valid(version: str, chosen: dict[str, Any]) -> None:
    checked = 0
    for thing in install(chosen):
        if thing["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # objects of the Prometheus operator, for which Kubernetes has no schema
        if thing["apiVersion"].startswith("resource.k8s.io/") and version < "1.34":
            continue
        check_object(thing, version)
        checked += 1
    assert checked >= 15


def test_the_validator_itself_finds_no_fault() -> None:
    for thing in install({"dra.enabled": True}):
        assert kubernetes_validate.validate(thing, versions()[-1], strict=True) == versions()[-1]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(install()[0] | {"specs": {}}, versions()[-1], strict=True)


def test_the_service_monitors_scrape_what_is_there() -> None:
    things = by_name(install(ALL))
    monitors = [thing for (kind, _), thing in things.items() if kind == "ServiceMonitor"]
    assert len(monitors) == 2
    for monitor in monitors:
        assert set(monitor["spec"]) == {"selector", "endpoints"}
        service = things["Service", f"{monitor['metadata']['name']}-metrics"]
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= service["metadata"]["labels"].items()
        ports = {port["name"]: port for port in service["spec"]["ports"]}
        workload = next(
            t for (k, n), t in things.items() if k in ("DaemonSet", "Deployment") and n == monitor["metadata"]["name"]
        )
        pod = workload["spec"]["template"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        named = {port["name"] for c in pod["spec"]["containers"] for port in c["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            assert ports[endpoint["port"]]["targetPort"] in named


@pytest.mark.skipif(helm.real() is None, reason="helm is not installed")
@pytest.mark.parametrize("chosen", [{}, ALL, {"dra.enabled": True}], ids=["defaults", "everything", "dra"])
def test_helm_makes_the_same_of_the_chart(chosen: dict[str, Any], tmp_path: Path) -> None:
    program = helm.real()
    assert program is not None
    overrides = tmp_path / "values.json"
    overrides.write_text(json.dumps(tree(chosen)))
    helm.run(program, "lint", str(CHART), "-f", str(overrides))
    for release in ("c", *ODD_RELEASES):
        text = helm.run(program, "template", release, str(CHART), "-n", "ns", "-f", str(overrides))
        made = by_name([thing for thing in yaml.safe_load_all(text) if thing])
        assert made == by_name(install(chosen, "ns", release))
    overrides.write_text(json.dumps({"image": {"tag": None}}))
    with pytest.raises(AssertionError, match="tag"):
        helm.run(program, "template", "c", str(CHART), "-f", str(overrides))


def test_the_plain_file_is_the_chart_s_with_its_own_values() -> None:
    first, *things = [thing for thing in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if thing]
    assert (first["kind"], first["metadata"]["name"]) == ("Namespace", names.NAMESPACE)
    check_object(first, versions()[-1])
    # the pods need host folders and the host's process numbers
    assert first["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    made = install()
    for thing in made:  # the plain file was not installed by Helm, so it lacks these labels
        assert thing["metadata"]["labels"].pop("app.kubernetes.io/managed-by") == "Helm"
        assert thing["metadata"]["labels"].pop("helm.sh/chart") == "cotenant-0.1.0"
    assert by_name(things) == by_name(made)
    kinds = [thing["kind"] for thing in things]
    assert kinds.index("ServiceAccount") < kinds.index("DaemonSet"), "in an order in which they can be made"


def test_releases_of_odd_names_have_objects_of_names_that_are_taken() -> None:
    """Helm takes dots, digits first and 53 characters; a Service takes none of them all."""
    seen: set[tuple[str, str]] = set()
    for release in ODD_RELEASES:
        things = by_name(install({"monitoring.serviceMonitor": True}, "ns", release))
        assert not seen & things.keys()
        seen |= things.keys()
        for kind, name in things:
            assert re.fullmatch("[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name), (kind, name)


def test_two_releases_share_no_object_and_select_their_own_pods() -> None:
    first, second = by_name(install(ALL, "ns", "cotenant")), by_name(install(ALL, "ns", "lab"))
    assert {name for _, name in first.keys() & second.keys()} == {
        f"{kind}.cotenant.dev" for kind in ("share", "gpu", "mig")
    }
    for part in ("webhook", "node"):
        assert f"cotenant-{part}" not in json.dumps(list(second.values())).replace(f"lab-cotenant-{part}", "")
    for things, release in ((first, "cotenant"), (second, "lab")):
        for (kind, name), thing in things.items():
            assert thing["metadata"]["labels"]["app.kubernetes.io/instance"] == release
            spec = thing.get("spec", {})
            chosen = spec.get("selector") or spec.get("podSelector") if kind != "DeviceClass" else None
            if chosen:
                assert chosen.get("matchLabels", chosen)["app.kubernetes.io/instance"] == release, name


def leaves(node: Thing, path: str = "") -> Iterator[str]:
    """Paths of a schema's values."""
    for key, inner in node["properties"].items():
        if "properties" in inner:
            yield from leaves(inner, f"{path}{key}.")
        elif key != "global":  # Helm's own value
            yield f"{path}{key}"


def test_every_value_has_a_default_and_a_schema() -> None:
    schema, values = json.loads((CHART / "values.schema.json").read_text()), yaml.safe_load(CHART_VALUES.read_text())
    jsonschema.validate(values, schema)
    known = set(leaves(schema))
    assert {f"{head}.{leaf}" for head, inner in values.items() for leaf in inner} == known
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", "".join(x.read_text() for x in CHART.glob("templates/*"))))
    assert used == known


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("webhook.replica", 3), ("webhook.replicas", "many"), ("webhook.replicas", 0),
        ("webhook.failurePolicy", "Maybe"), ("plugin.oneGpu", "perhaps"), ("node.nodeSelector", "x"),
        ("node.nodeSelector", {"gpu": True}), ("plugin.whole", [0]),
        ("agent.fail", "open "), ("image.pullSecrets", ["registry"]), ("webhook.tolerations", {}),
        ("webhok.replicas", 2), ("image.tag", None), ("image.tag", ""), ("agent.gpus", None), ("monitoring", None),
        ("node.tolerations", ["gpu"]),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(path: str, value: object) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load(CHART_VALUES.read_text())  # Helm merges the values first and then validates them
    jsonschema.validate(helm.merge(values, tree(ALL)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(helm.merge(values, tree({path: value})), schema)


def test_the_rights_are_those_that_are_used() -> None:
    rules = {
        (kind, name): thing["rules"]
        for (kind, name), thing in by_name(install()).items()
        if kind in ("Role", "ClusterRole")
    }
    assert rules == {
        ("ClusterRole", "cotenant-node"): [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        ],
        ("Role", "cotenant-webhook"): [
            {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["cotenant-webhook-tls"],
             "verbs": ["get", "update"]},
        ],
        ("ClusterRole", "cotenant-webhook"): [
            {"apiGroups": ["admissionregistration.k8s.io"], "resources": ["mutatingwebhookconfigurations"],
             "resourceNames": ["cotenant"], "verbs": ["get", "update"]},
        ],
    }  # fmt: skip


def test_nothing_runs_privileged_and_only_the_node_as_root() -> None:
    for thing in install():
        if thing["kind"] not in ("DaemonSet", "Deployment"):
            continue
        spec = thing["spec"]["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert "privileged" not in context
            assert (context["runAsUser"] == 0) == (thing["kind"] == "DaemonSet")


def test_the_agent_that_limits_memory_itself_is_the_one_that_is_privileged() -> None:
    for thing in install({"agent.memoryLimits": True}):
        if thing["kind"] in ("DaemonSet", "Deployment"):
            privileged = [c["name"] for c in thing["spec"]["template"]["spec"]["containers"]
                          if c["securityContext"].get("privileged")]  # fmt: skip
            assert privileged == (["agent"] if thing["kind"] == "DaemonSet" else [])


def test_every_argument_is_an_option_of_its_command(call: Any) -> None:
    for thing in install(ALL):
        if thing["kind"] not in ("DaemonSet", "Deployment"):
            continue
        spec = thing["spec"]["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            words = [word for word in container["args"] if not word.startswith("--")]
            text = call(*words, "--help")[1]
            for word in container["args"]:
                if word.startswith("--"):
                    assert word.partition("=")[0] in text.replace("\n", " "), f"{words} has no {word}"


def test_only_pods_that_ask_are_sent_to_the_webhook() -> None:
    configuration = by_name(install())["MutatingWebhookConfiguration", "cotenant"]
    webhook = configuration["webhooks"][0]
    assert webhook["failurePolicy"] == "Fail"
    assert webhook["sideEffects"] == "None"
    assert webhook["reinvocationPolicy"] == "IfNeeded"
    assert webhook["rules"] == [
        {
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "resources": ["pods"],
            "operations": ["CREATE"],
            "scope": "Namespaced",
        }
    ]
    skipped = webhook["namespaceSelector"]["matchExpressions"][0]
    assert skipped["values"] == ["kube-system", "kube-public", "kube-node-lease", "cotenant-system"]


@given(pods())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_the_condition_says_who_asks_as_the_translator_does(thing: Thing) -> None:
    import cel

    thing = json.loads(json.dumps(thing))
    for kind in ("containers", "initContainers"):  # the API server leaves out fields that are null
        for container in thing["spec"].get(kind) or []:
            if container.get("resources") is None:
                container.pop("resources", None)
    found = cel.evaluate(asks(), {"object": thing})
    assert found is bool(shares_of(thing))


@pytest.mark.parametrize(
    ("thing", "asked"),
    [
        (pod(), False),
        (pod(annotations={}), False),
        (pod(annotations={"example.com/cotenant.dev": "x", "notcotenant.dev/x": "y"}), False),
        (pod(annotations={"cotenant.dev/rubbish": "x"}), True),
        (pod(annotations={"gpu.cotenant.dev/x": "y"}), True),
        (pod(containers=[{"name": "a", "resources": {}}]), False),
        (pod(containers=[{"name": "a"}, {"name": "b", "resources": {"requests": {"cotenant.dev/gpu": "1"}}}]), True),
        (pod(initContainers=[{"name": "a", "resources": {"limits": {"cotenant.dev/share": "1"}}}]), True),
    ],
)
def test_the_condition(thing: Thing, asked: bool) -> None:
    import cel

    assert cel.evaluate(asks(), {"object": thing}) is asked


def test_the_folders_of_the_node_are_those_that_pods_mount() -> None:
    from cotenant.kube.admission.mutate import Injection

    daemon = by_name(install())["DaemonSet", "cotenant-node"]
    spec = daemon["spec"]["template"]["spec"]
    assert spec["hostPID"] is True, "who connects is known by its process number on the host"
    paths = {volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert {Injection().host_libraries, Injection().host_sockets} <= paths
    agent = spec["containers"][0]
    assert "--tenant-socket=/run/cotenant/tenants/agent.sock" in agent["args"]
    assert "--dir=/run/cotenant/agent" in agent["args"], "the control socket is in a folder that no pod mounts"


# -- dynamic resource allocation ---------------------------------------------------------------------------------------

GPUS = [
    NodeGpu("GPU-a", 0, 80 << 30),
    NodeGpu("GPU-b", 1, 80 << 30, whole=True),
    NodeGpu("GPU-c", 2, 8 << 30, fault="lost"),
]
PIECES = [MigSlice("MIG-1b3f", "cotenant.dev/mig-3g.40gb", "GPU-d", 3)]


@pytest.mark.parametrize("version", [v for v in versions() if v >= "1.32"])
def test_slices_are_valid_where_they_are_served(version: str) -> None:
    kubernetes = (1, int(version.partition(".")[2]))
    offered = offer.devices(GPUS, PIECES, kubernetes, kubernetes >= offer.COUNTERS_SINCE)
    things = offer.resource_slices("node-a", offered, kubernetes)
    assert len(things) == (2 if kubernetes >= (1, 36) else 1)
    for thing in things:
        check_object(thing, version)


@pytest.mark.parametrize("version", [v for v in versions() if v >= "1.34"])
def test_claims_are_valid_and_replace_units(version: str) -> None:
    from pods import share

    kubernetes = (1, int(version.partition(".")[2]))
    things = claims.claims_of(pod(annotations=share("30%", limit="60%", memory="8Gi")), kubernetes)
    for thing in things:
        check_object(thing, version)
    template, changed = things
    request = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    assert request == {
        "deviceClassName": "share.cotenant.dev",
        "capacity": {"requests": {"share": "30", "memory": "8192Mi"}},
    }
    assert changed["spec"]["containers"][0]["resources"]["claims"] == [{"name": "main"}]
    assert changed["spec"]["resourceClaims"] == [{"name": "main", "resourceClaimTemplateName": "train-main"}]


def test_what_a_version_does_not_have_is_said() -> None:
    from pods import share

    mine = shares_of(pod(annotations=share()))[0]
    with pytest.raises(InputError, match=r"Kubernetes 1.31 has no resource.k8s.io for claims; use 1.32 or newer"):
        offer.api_version((1, 31))
    with pytest.raises(InputError, match=r"needs consumable capacity, in Kubernetes 1.34 or newer"):
        claims.claim_template("x", "y", mine, (1, 33))
    assert names.SHARE_UNITS == 100
