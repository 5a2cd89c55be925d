"""What an installation can choose: one table of defaults and what each is for, behind manifests and chart."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.yamlfile import parse_value, read_yaml
from cotenant.kube import names

GPU_NODES = {"nvidia.com/gpu.present": "true"}
GPU_TAINT = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


@dataclass(frozen=True)
class Value:
    """One choice. `choices`: the only values there are; empty: any of the default's type."""

    path: str
    default: Any
    doc: str
    choices: tuple[Any, ...] = ()


VALUES: tuple[Value, ...] = (
    Value("image.repository", "cotenant", "Image of all parts; built with deploy/docker/Dockerfile."),
    Value("image.tag", "0.1.0", "Its tag."),
    Value("image.pullPolicy", "IfNotPresent", "When the kubelet pulls it.", ("IfNotPresent", "Always", "Never")),
    Value("agent.gpus", "all", "GPUs the agent of each node owns: all, UUIDs, or soft for a trial without GPUs."),
    Value("agent.fail", "closed", "Tenants while the agent is away: closed, they wait; open, they go on.",
          ("closed", "open")),
    Value("agent.quota", "250ms", "Length of a turn while a tenant's bursts are not known."),
    Value("agent.resources", {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
          "Of the agent's container."),
    Value("plugin.whole", "", "GPUs given away entire as cotenant.dev/gpu: indices or UUIDs with commas, or all."),
    Value("plugin.oneGpu", False, "Show the scheduler no more free units than one GPU has, so that no pod comes that"
          " would fit only across two; nodes then fill one GPU after the other, as fast as their status is renewed."),
    Value("plugin.resources", {"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}},
          "Of the plugin's container."),
    Value("injection.mounts", "webhook", "Who mounts the shim into pods: webhook, by hostPath; or plugin, where Pod"
          " Security forbids hostPath.", ("webhook", "plugin")),
    Value("injection.runtimeClassName", "", "Runtime class for pods with a share that name none; empty: the default."),
    Value("injection.cdiKind", "", "Name devices to the runtime by CDI with this kind, as nvidia.com/gpu; empty: by"
          " NVIDIA_VISIBLE_DEVICES."),
    Value("webhook.replicas", 2, "Pods of the webhook."),
    Value("webhook.failurePolicy", "Fail", "Pods that ask for a share while no webhook answers: Fail, they are refused;"
          " Ignore, they are created without one. Other pods are never asked about.", ("Fail", "Ignore")),
    Value("webhook.fail", "closed", "What the webhook cannot handle itself: closed, refused; open, left as it was.",
          ("closed", "open")),
    Value("webhook.timeoutSeconds", 5, "How long the API server waits for the webhook."),
    Value("webhook.resources", {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}},
          "Of the webhook's container."),
    Value("node.runtimeClassName", "", "Runtime class of the agent, where the default one shows no GPU."),
    Value("node.nodeSelector", GPU_NODES, "Nodes that get an agent."),
    Value("node.tolerations", GPU_TAINT, "Taints that its pods tolerate."),
    Value("node.priorityClassName", "system-node-critical", "Priority of its pods."),
    Value("networkPolicy.enabled", True, "Limit what may reach the parts to their ports."),
    Value("monitoring.serviceMonitor", False, "Have the Prometheus operator scrape all parts."),
    Value("monitoring.interval", "15s", "How often."),
    Value("dra.enabled", False, "Place pods by claims of dynamic resource allocation instead of units (Kubernetes 1.34"
          " with the feature DRAConsumableCapacity)."),
)  # fmt: skip
_BY_PATH = {value.path: value for value in VALUES}


class Values:
    """Chosen values over the defaults. `namespace` stands apart: a chart has it from its release."""

    def __init__(self, chosen: Mapping[str, Any] | None = None, namespace: str = names.NAMESPACE) -> None:
        self.namespace = namespace
        self._found = {value.path: copy.deepcopy(value.default) for value in VALUES}
        for path, given in (chosen or {}).items():
            self._found[path] = _over(self._found.get(path), checked(path, given))

    def __call__(self, path: str) -> Any:
        """The value of a path. KeyError: there is no such choice, which is a fault of ours."""
        return self._found[path]

    def join(self, pattern: str, *paths: str) -> Any:
        """A text with values in it, at each %v."""
        text = pattern
        for path in paths:
            value = self(path)
            text = text.replace("%v", json.dumps(value) if isinstance(value, bool) else str(value), 1)
        return text

    def when(self, path: str) -> bool:
        """Whether something that depends on a value is there."""
        return bool(self(path))


def _over(before: Any, given: Any) -> Any:
    """A value over its default as Helm does it: maps are merged, and null takes a key away."""
    if not isinstance(before, dict) or not isinstance(given, dict):
        return given
    merged = before | {key: _over(before.get(key), value) for key, value in given.items()}
    return {key: value for key, value in merged.items() if value is not None}


def checked(path: str, given: Any) -> Any:
    """A given value. InputError: unknown, of another type, or none of the choices."""
    value = _BY_PATH.get(path)
    if value is None:
        near = difflib.get_close_matches(path, _BY_PATH, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_BY_PATH)}"
        raise InputError(f"there is no such value{hint}", field=path)
    if type(given) is not type(value.default):
        kind = {bool: "true or false", int: "a whole number", str: "a text", dict: "a map", list: "a list"}
        raise InputError(f"{given!r:.60} is not {kind[type(value.default)]}", field=path)
    if value.choices and given not in value.choices:
        raise InputError(f"{given!r} is not one of {', '.join(value.choices)}", field=path)
    if isinstance(given, int) and not isinstance(given, bool) and not 1 <= given <= 30:
        raise InputError(f"{given} is not from 1 to 30", field=path)
    return given


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A values file's tree as paths; a map below a known path is that path's value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        inner = any(known.startswith(f"{path}.") for known in _BY_PATH)
        if inner and isinstance(value, dict):
            found |= flatten(value, f"{path}.")
        else:
            found[path] = value
    return found


def read(file: Path | None, settings: list[str]) -> dict[str, Any]:
    """Values of a YAML file, and over them `path=value` settings, whose values are YAML too. InputError."""
    found: dict[str, Any] = {}
    if file is not None:
        source = read_yaml(file)
        if not isinstance(source.content or {}, dict):
            raise InputError("a values file is a map", file=file)
        found = flatten(source.content or {})
        with source.located():
            for path, given in found.items():
                checked(path, given)
    for text in settings:
        path, sign, value = text.partition("=")
        if not sign:
            raise InputError(f"{text!r} is not PATH=VALUE", field="--set")
        given = parse_value(value, path) if value else ""
        wants_text = path in _BY_PATH and isinstance(_BY_PATH[path].default, str)
        found[path] = value if wants_text else given
    return found


def to_yaml(thing: Any) -> str:
    """YAML for people: keys in their order, nothing folded, nothing by reference."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return str(yaml.dump(thing, Dumper=Plain, sort_keys=False, width=100_000))


def as_yaml() -> str:
    """values.yaml with every choice explained."""
    lines = ["# Values of the chart; the same as --set and --values of `cotenant kube manifests`.", ""]
    group = ""
    for value in VALUES:
        head, _, leaf = value.path.partition(".")
        if head != group:
            lines += [f"{head}:"] if not group else ["", f"{head}:"]
            group = head
        lines.append(f"  # {value.doc}" + (f" One of {', '.join(map(str, value.choices))}." if value.choices else ""))
        lines.append(f"  {leaf}: {json.dumps(value.default)}")
    return "\n".join(lines) + "\n"
