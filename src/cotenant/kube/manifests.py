"""Every object of an installation, from one set of values. Pure. The node's part is in manifests_node.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cotenant.kube import dra, names
from cotenant.kube.manifests_node import WEBHOOK_METRICS, container, metrics_service, node_objects, probe, security
from cotenant.kube.values import Values

Thing = dict[str, Any]
Found = tuple[str | None, Thing]  # the value that the object depends on, and the object
WEBHOOK = f"{names.NAME}-webhook"
SECRET = f"{names.NAME}-webhook-tls"
PORT = 8443


def objects(values: Values) -> Iterator[Found]:
    """All objects in an order in which they can be created."""
    yield from node_objects(values)
    yield from _webhook_account(values)
    yield None, _deployment(values)
    yield None, _service(values)
    yield None, configuration(values)
    yield None, _disruption_budget(values)
    yield "monitoring.serviceMonitor", metrics_service(values, WEBHOOK)
    yield "monitoring.serviceMonitor", service_monitor(values, WEBHOOK)
    yield "networkPolicy.enabled", _network_policy(values)
    for thing in dra.device_classes():
        yield "dra.enabled", thing


def namespace(name: str) -> Thing:
    """The namespace; its own pods need the host's folders and process numbers, so it is a privileged one."""
    level = "pod-security.kubernetes.io"
    labels_ = {f"{level}/enforce": "privileged", f"{level}/audit": "privileged", f"{level}/warn": "privileged"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels_}}


def install(values: Values) -> list[Thing]:
    """What `kubectl apply` takes: the namespace, and all objects that the values want."""
    wanted = [thing for condition, thing in objects(values) if condition is None or values.when(condition)]
    return [namespace(values.namespace), *wanted]


def meta(values: Values, name: str, part: str, *, cluster: bool = False) -> Thing:
    """Metadata of one of our objects."""
    found: Thing = {"name": name, "labels": labels(part)}
    return found if cluster else found | {"namespace": values.namespace}


def labels(part: str) -> dict[str, str]:
    """Labels of a part."""
    return {"app.kubernetes.io/name": names.NAME, "app.kubernetes.io/component": part}


# -- webhook -----------------------------------------------------------------------------------------------------------


def _webhook_account(values: Values) -> Iterator[Found]:
    """May keep its certificate in one Secret and its authority in one configuration, and nothing else."""
    subject = {"kind": "ServiceAccount", "name": WEBHOOK, "namespace": values.namespace}
    yield None, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(values, WEBHOOK, "webhook")}
    group = "rbac.authorization.k8s.io"
    yield (
        None,
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": meta(values, WEBHOOK, "webhook"),
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["secrets"],
                    "verbs": ["create"],
                },  # creating has no name to limit it to
                {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [SECRET], "verbs": ["get", "update"]},
            ],
        },
    )
    yield (
        None,
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta(values, WEBHOOK, "webhook"),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": WEBHOOK},
            "subjects": [subject],
        },
    )
    yield (
        None,
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRole",
            "metadata": meta(values, WEBHOOK, "webhook", cluster=True),
            "rules": [
                {
                    "apiGroups": ["admissionregistration.k8s.io"],
                    "resources": ["mutatingwebhookconfigurations"],
                    "resourceNames": [names.NAME],
                    "verbs": ["get", "update"],
                }
            ],
        },
    )
    yield (
        None,
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta(values, WEBHOOK, "webhook", cluster=True),
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": WEBHOOK},
            "subjects": [subject],
        },
    )


def _deployment(values: Values) -> Thing:
    arguments = [
        "kube",
        "webhook",
        "--host=0.0.0.0",
        f"--port={PORT}",
        "--self-signed",
        f"--namespace={values.namespace}",
        f"--service={WEBHOOK}",
        f"--secret={SECRET}",
        f"--configuration={names.NAME}",
        f"--metrics-port={WEBHOOK_METRICS}",
        values.join("--fail=%v", "webhook.fail"),
        values.join("--mounts=%v", "injection.mounts"),
        values.join("--runtime-class=%v", "injection.runtimeClassName"),
    ]
    health = {"httpGet": {"path": "/healthz", "port": "https", "scheme": "HTTPS"}}
    main = container(values, "webhook", arguments, values("webhook.resources")) | {
        "ports": [{"name": "https", "containerPort": PORT}, {"name": "metrics", "containerPort": WEBHOOK_METRICS}],
        "securityContext": security(root=False),
        "startupProbe": health | {"periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": probe(health),
        "livenessProbe": probe(health, period=20),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "serviceAccountName": WEBHOOK,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels("webhook")},
            }
        ],
        "containers": [main],
        "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta(values, WEBHOOK, "webhook"),
        "spec": {
            "replicas": values("webhook.replicas"),
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": labels("webhook")},
            "template": {"metadata": {"labels": labels("webhook")}, "spec": spec},
        },
    }


def _service(values: Values) -> Thing:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(values, WEBHOOK, "webhook"),
        "spec": {
            "selector": labels("webhook"),
            "ports": [{"name": "https", "port": 443, "targetPort": "https", "protocol": "TCP"}],
        },
    }


def configuration(values: Values) -> Thing:
    """The MutatingWebhookConfiguration. Only pods that ask are sent, so a webhook that is down stops no others.

    caBundle is filled by the webhook itself.
    """
    skipped = {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": [*names.SKIPPED_NAMESPACES, values.namespace],
    }
    webhook = {
        "name": f"pods.{names.DOMAIN}",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"service": {"name": WEBHOOK, "namespace": values.namespace, "path": "/mutate", "port": 443}},
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
                "operations": ["CREATE"],
                "scope": "Namespaced",
            }
        ],
        "matchConditions": [{"name": "asks-for-a-share", "expression": asks()}],
        "namespaceSelector": {"matchExpressions": [skipped]},
        "failurePolicy": values("webhook.failurePolicy"),
        "matchPolicy": "Equivalent",
        "reinvocationPolicy": "IfNeeded",
        "sideEffects": "None",
        "timeoutSeconds": values("webhook.timeoutSeconds"),
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": meta(values, names.NAME, "webhook", cluster=True),
        "webhooks": [webhook],
    }


def asks() -> str:
    """In CEL: whether a pod has an annotation or a resource under our domain. Without optionals, which 1.28 lacks."""
    ours = f"exists(k, k.startsWith('{names.DOMAIN}/') || k.contains('.{names.DOMAIN}/'))"
    parts = [f"(has(object.metadata.annotations) && object.metadata.annotations.{ours})"]
    resources = " || ".join(
        f"(has(c.resources.{kind}) && c.resources.{kind}.{ours})" for kind in ("limits", "requests")
    )
    parts += [
        f"(has(object.spec.{kind}) && object.spec.{kind}.exists(c, has(c.resources) && ({resources})))"
        for kind in ("containers", "initContainers")
    ]
    return " || ".join(parts)


def _disruption_budget(values: Values) -> Thing:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(values, WEBHOOK, "webhook"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels("webhook")}},
    }


def service_monitor(values: Values, name: str) -> Thing:
    """Scraping of one part."""
    part = name.removeprefix(f"{names.NAME}-")
    endpoint = {"port": "metrics", "interval": values("monitoring.interval")}
    endpoints = [endpoint, endpoint | {"port": "plugin-metrics"}] if part == "node" else [endpoint]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": meta(values, name, part),
        "spec": {"selector": {"matchLabels": labels(part)}, "endpoints": endpoints},
    }


def _network_policy(values: Values) -> Thing:
    ports = [{"port": port, "protocol": "TCP"} for port in (PORT, WEBHOOK_METRICS)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta(values, WEBHOOK, "webhook"),
        "spec": {
            "podSelector": {"matchLabels": labels("webhook")},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": ports}],  # the API server has no label to name it by
            "egress": egress(),
        },
    }


def egress() -> list[Thing]:
    """To the API server and to DNS."""
    return [
        {"ports": [{"port": port, "protocol": "TCP"} for port in (443, 6443)]},
        {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]},
    ]
