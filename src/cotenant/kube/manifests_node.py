"""The part of an installation that runs on every node with GPUs: agent, device plugin, the shim's files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cotenant.kube import names
from cotenant.kube.dra import DRIVER
from cotenant.kube.values import Values

Thing = dict[str, Any]
NODE = f"{names.NAME}-node"
AGENT_METRICS, PLUGIN_METRICS, WEBHOOK_METRICS = 9400, 9401, 9402


def node_objects(values: Values) -> Iterator[tuple[str | None, Thing]]:
    """The DaemonSet with its account, and what belongs to it."""
    from cotenant.kube.manifests import egress, labels, meta, service_monitor

    group = "rbac.authorization.k8s.io"
    yield None, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(values, NODE, "node")}
    yield (
        None,
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRole",
            "metadata": meta(values, NODE, "node", cluster=True),
            "rules": [
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},  # of its own node, by a field selector
                {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
            ],
        },
    )
    yield (
        None,
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta(values, NODE, "node", cluster=True),
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": NODE},
            "subjects": [{"kind": "ServiceAccount", "name": NODE, "namespace": values.namespace}],
        },
    )
    yield from _claim_rights(values)
    yield None, _daemon_set(values, meta(values, NODE, "node"), labels("node"))
    yield "monitoring.serviceMonitor", metrics_service(values, NODE)
    yield "monitoring.serviceMonitor", service_monitor(values, NODE)
    ports = [{"port": port, "protocol": "TCP"} for port in (AGENT_METRICS, PLUGIN_METRICS)]
    yield (
        "networkPolicy.enabled",
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta(values, NODE, "node"),
            "spec": {
                "podSelector": {"matchLabels": labels("node")},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"ports": ports}],
                "egress": egress(),
            },
        },
    )


def _claim_rights(values: Values) -> Iterator[tuple[str | None, Thing]]:
    """What the driver of claims needs beyond the plugin's rights."""
    from cotenant.kube.manifests import meta

    group = "rbac.authorization.k8s.io"
    yield (
        "dra.enabled",
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRole",
            "metadata": meta(values, f"{NODE}-claims", "node", cluster=True),
            "rules": [
                {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
                {
                    "apiGroups": ["resource.k8s.io"],
                    "resources": ["resourceslices"],
                    "verbs": ["get", "create", "update"],
                },
            ],
        },
    )
    yield (
        "dra.enabled",
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta(values, f"{NODE}-claims", "node", cluster=True),
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": f"{NODE}-claims"},
            "subjects": [{"kind": "ServiceAccount", "name": NODE, "namespace": values.namespace}],
        },
    )


def _daemon_set(values: Values, metadata: Thing, labels: dict[str, str]) -> Thing:
    spec = {
        "serviceAccountName": NODE,
        "hostPID": True,  # a process that connects is known by its number on the host
        "priorityClassName": values("node.priorityClassName"),
        "nodeSelector": values("node.nodeSelector"),
        "tolerations": values("node.tolerations"),
        "terminationGracePeriodSeconds": 10,
        "initContainers": [_shim(values)],
        "containers": [_agent(values), _plugin(values)],
        "volumes": [
            _folder("agent", str(names.HOST_AGENT), "DirectoryOrCreate"),
            _folder("tenants", str(names.HOST_SOCKETS), "DirectoryOrCreate"),
            _folder("libraries", str(names.HOST_LIBRARIES), "DirectoryOrCreate"),
            _folder("device-plugins", str(names.DEVICE_PLUGINS), "Directory"),
            _folder("pod-resources", str(names.POD_RESOURCES), "Directory"),
            _folder("plugins", str(names.KUBELET_PLUGINS / DRIVER), "DirectoryOrCreate"),
            _folder("plugins-registry", str(names.PLUGINS_REGISTRY), "Directory"),
            {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
        ],
    }
    if values.when("node.runtimeClassName"):
        spec["runtimeClassName"] = values("node.runtimeClassName")
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def _folder(name: str, path: str, kind: str) -> Thing:
    return {"name": name, "hostPath": {"path": path, "type": kind}}


def _shim(values: Values) -> Thing:
    """Puts the shim on the node, beside older ones that running pods have loaded."""
    found = container(values, "shim", ["kube", "install", f"--to={names.HOST_LIBRARIES}"], values("plugin.resources"))
    return found | {
        "securityContext": security(root=True),
        "volumeMounts": [_mount("libraries", names.HOST_LIBRARIES), _mount("tmp", "/tmp")],
    }


def _agent(values: Values) -> Thing:
    arguments = [
        "agent",
        f"--dir={names.HOST_AGENT}",
        f"--tenant-socket={names.HOST_SOCKETS / names.SOCKET_FILE}",
        f"--http=0.0.0.0:{AGENT_METRICS}",
        values.join("--gpus=%v", "agent.gpus"),
        values.join("--fail=%v", "agent.fail"),
        values.join("--quota=%v", "agent.quota"),
    ]
    health = {"httpGet": {"path": "/healthz", "port": "metrics"}}
    found = container(values, "agent", arguments, values("agent.resources"))
    return found | {
        "env": [
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility,compute"},
        ],
        "ports": [{"name": "metrics", "containerPort": AGENT_METRICS}],
        "securityContext": security(root=True, add=["KILL", "SYS_NICE"]),
        "startupProbe": health | {"periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": probe(health, period=20),
        "volumeMounts": [
            _mount("agent", names.HOST_AGENT),
            _mount("tenants", names.HOST_SOCKETS),
            _mount("tmp", "/tmp"),
        ],
    }


def _plugin(values: Values) -> Thing:
    arguments = [
        "kube",
        "plugin",
        "--node=$(NODE_NAME)",
        f"--agent-dir={names.HOST_AGENT}",
        "--host=0.0.0.0",
        f"--metrics-port={PLUGIN_METRICS}",
        values.join("--whole=%v", "plugin.whole"),
        values.join("--one-gpu=%v", "plugin.oneGpu"),
        values.join("--mounts=%v", "injection.mounts"),
        values.join("--cdi-kind=%v", "injection.cdiKind"),
        values.join("--claims=%v", "dra.enabled"),
    ]
    health = {"httpGet": {"path": "/healthz", "port": "plugin-metrics"}}
    found = container(values, "plugin", arguments, values("plugin.resources"))
    return found | {
        "env": [
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
        ],
        "ports": [{"name": "plugin-metrics", "containerPort": PLUGIN_METRICS}],
        "securityContext": security(root=True),
        "startupProbe": health | {"periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": probe(health, period=20),
        "volumeMounts": [
            _mount("agent", names.HOST_AGENT),
            _mount("device-plugins", names.DEVICE_PLUGINS),
            _mount("pod-resources", names.POD_RESOURCES) | {"readOnly": True},
            _mount("plugins", names.KUBELET_PLUGINS / DRIVER),
            _mount("plugins-registry", names.PLUGINS_REGISTRY),
            _mount("tmp", "/tmp"),
        ],
    }


# -- what all parts have -----------------------------------------------------------------------------------------------


def container(values: Values, name: str, arguments: list[Any], resources: Any) -> Thing:
    """A container of our image."""
    return {
        "name": name,
        "image": values.join("%v:%v", "image.repository", "image.tag"),
        "imagePullPolicy": values("image.pullPolicy"),
        "args": arguments,
        "resources": resources,
    }


def security(*, root: bool, add: list[str] | None = None) -> Thing:
    """No more rights than the part needs."""
    capabilities: Thing = {"drop": ["ALL"]}
    if add:
        capabilities["add"] = add
    found: Thing = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }
    return found | ({"runAsUser": 0} if root else {"runAsUser": 65532, "runAsGroup": 65532})


def probe(what: Thing, period: int = 5) -> Thing:
    """A probe that forgives a slow moment."""
    return what | {"periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": 3}


def _mount(name: str, path: object) -> Thing:
    return {"name": name, "mountPath": str(path)}


def metrics_service(values: Values, name: str) -> Thing:
    """A headless Service by which Prometheus finds one part's pods."""
    from cotenant.kube.manifests import labels, meta

    part = name.removeprefix(f"{names.NAME}-")
    ports = [{"name": "metrics", "port": AGENT_METRICS if part == "node" else WEBHOOK_METRICS, "targetPort": "metrics"}]
    if part == "node":
        ports.append({"name": "plugin-metrics", "port": PLUGIN_METRICS, "targetPort": "plugin-metrics"})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(values, f"{name}-metrics", part),
        "spec": {"clusterIP": "None", "selector": labels(part), "ports": ports},
    }
