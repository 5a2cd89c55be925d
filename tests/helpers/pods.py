"""Pods for tests, written by hand or drawn at random, and validation as the API server does it, as far as schemas
allow."""

from __future__ import annotations

import base64
import functools
import json
import re
import uuid
from random import Random
from typing import Any

import jsonpatch
from hypothesis import strategies as st

Pod = dict[str, Any]


def pod(name: str = "train", *, annotations: dict[str, str] | None = None, node: str = "node-a", **spec: Any) -> Pod:
    """A pod with one container `main`, unless `containers` says otherwise."""
    metadata: dict[str, Any] = {"name": name, "namespace": "team", "uid": str(uuid.uuid4())}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "train:1"}]} | spec,
    }


def share(request: str = "30%", **more: str) -> dict[str, str]:
    """Annotations of a pod that requests a share."""
    return {"cotenant.dev/request": request} | {f"cotenant.dev/{key}": value for key, value in more.items()}


def patched(before: Pod, operations: list[dict[str, Any]]) -> Pod:
    """The pod after a patch, applied by an implementation other than ours."""
    result: Pod = jsonpatch.apply_patch(json.loads(json.dumps(before)), operations)
    return result


def review(thing: Any, *, resource: str = "pods", group: str = "", operation: str = "CREATE", **more: Any) -> bytes:
    """An AdmissionReview as the API server sends it."""
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": group, "version": "v1", "kind": "Pod"},
        "resource": {"group": group, "version": "v1", "resource": resource},
        "operation": operation,
        "namespace": "team",
        "object": thing,
    }
    return json.dumps(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request | more}
    ).encode()


def decoded(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The operations of a response."""
    operations: list[dict[str, Any]] = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
    return operations


# -- schemas -----------------------------------------------------------------------------------------------------------


@functools.cache
def versions() -> tuple[str, ...]:
    """Kubernetes versions for which objects must be valid: from 1.28 to the newest that is known."""
    from kubernetes_validate import utils

    found = {utils.major_minor(v) for v in utils.all_versions()}
    known = sorted(found, key=lambda v: tuple(map(int, v.split("."))))
    return tuple(v for v in known if tuple(map(int, v.split("."))) >= (1, 28))


@functools.cache
def _definitions(folder: str) -> Any:
    from kubernetes_validate import utils

    return utils.schema_contents(f"kubernetes-json-schema/{folder}/_definitions.json", folder)


@functools.cache
def _validator(kind: str, version: str) -> Any:
    import jsonschema
    from kubernetes_validate import utils
    from referencing import Registry, Resource

    folder = next(f"v{v}-local-strict" for v in utils.all_versions() if utils.major_minor(v) == version)
    schema = utils.schema_contents(f"kubernetes-json-schema/{folder}/{kind}.json", version)
    registry: Any = Resource.from_contents(_definitions(folder)) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


def check_object(thing: dict[str, Any], version: str) -> None:
    """Assert that an object is strictly valid in that version, by the schema that kubernetes-validate has for its kind.
    Each schema is read once."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", thing["apiVersion"])
    _validator(f"{thing['kind'].lower()}-{group}", version).validate(thing)


def check_pod(thing: Pod, version: str | None = None) -> None:
    """Assert that a pod is strictly valid by its schema and by rules that schemas cannot express: names of volumes,
    mounts and environment variables."""
    _validator("pod-v1", version or versions()[-1]).validate(thing)
    volumes = [volume["name"] for volume in thing["spec"].get("volumes") or []]
    assert len(volumes) == len(set(volumes)), "volumes have names of their own"
    for kind in ("initContainers", "containers"):
        for container in thing["spec"].get(kind) or []:
            mounts = container.get("volumeMounts") or []
            assert {mount["name"] for mount in mounts} <= set(volumes), "every mount has its volume"
            paths = [mount["mountPath"] for mount in mounts]
            assert len(paths) == len(set(paths)), "no two mounts at one place"
            resources = container.get("resources") or {}
            for name, count in (resources.get("limits") or {}).items():
                if name.startswith("cotenant.dev/"):
                    assert str(resources["requests"][name]) == str(count), "requested as it is limited"
                    assert str(count).isdigit()


# -- drawn pods --------------------------------------------------------------------------------------------------------

_SMALL, _DASHED = "abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnopqrstuvwxyz0123456789-"


_DRAW = Random(7)


def _word(first: str, middle: str, most: int) -> str:
    """A word: its first letter and its last are from `first`, what is between from `middle`."""
    between = "".join(_DRAW.choices(middle, k=_DRAW.randint(0, most)))
    return f"{_DRAW.choice(first)}{between}{_DRAW.choice(first)}"


# Draw words once. The tests vary the structure of pods, and drawing each letter for each pod would take longer than the
# test.
_NAME = st.sampled_from([_word(_SMALL, _DASHED, 18) for _ in range(200)])
_TEXT = st.one_of(
    st.sampled_from(
        ["", "a b", "$(HOME)", "\u00e9\u4e16\U0001f600", "~1/~0", "x" * 4000, *(_word(_SMALL, _DASHED, 9),) * 3]
    ),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=4),
)
_KEY = st.builds(
    lambda prefix, name: f"{prefix}/{name}" if prefix else name,
    st.sampled_from(["", "example.com", "a.b-c.io", "kubernetes.io"]),
    st.sampled_from([_word(_SMALL + "XYZ09", _DASHED + "._~", 18) for _ in range(200)]),
)
_ENV_NAME = st.sampled_from([_word(_SMALL.upper(), _SMALL.upper() + "_0", 10) for _ in range(100)])
_QUANTITY = st.sampled_from(["1", "500m", "2Gi", "100Mi", "0.5", 1, "1e3"])
_PATH = st.sampled_from(
    ["".join(f"/{_word(_SMALL, _DASHED, 4)}" for _ in range(parts)) for parts in (1, 2, 3) for _ in range(30)]
)
_SOURCE = st.sampled_from(
    [{"fieldRef": {"fieldPath": "metadata.name"}}, {"configMapKeyRef": {"name": "c", "key": "k"}},
     {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}]
)  # fmt: skip


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


@st.composite
def _env(draw: st.DrawFn) -> list[Pod]:
    entries: list[Pod] = []
    for name in draw(st.lists(st.one_of(_ENV_NAME, st.just("LD_PRELOAD")), max_size=4)):
        if draw(st.booleans()):
            entries.append({"name": name, "valueFrom": draw(_SOURCE)})
        elif draw(st.booleans()):
            entries.append({"name": name, "value": draw(st.one_of(_TEXT, st.just("/usr/lib/libjemalloc.so:/b.so")))})
        else:
            entries.append({"name": name})
    return entries


@st.composite
def _container(draw: st.DrawFn, name: str, volumes: list[str], *, init: bool) -> Pod:
    found: Pod = {"name": name, "image": draw(st.sampled_from(["a", "b:1", "c@sha256:" + "0" * 64]))}
    env = draw(_maybe(_env()))
    if env is not None or draw(st.booleans()):
        found["env"] = env
    resources = draw(_maybe(st.dictionaries(st.sampled_from(["limits", "requests"]), st.dictionaries(
        st.sampled_from(["cpu", "memory", "example.com/nic"]), _QUANTITY, max_size=2), max_size=2)))  # fmt: skip
    if resources is not None or draw(st.booleans()):
        found["resources"] = resources
    if volumes and draw(st.booleans()):
        paths = draw(st.lists(_PATH, max_size=3, unique_by=lambda path: path.rstrip("/")))
        found["volumeMounts"] = [{"name": draw(st.sampled_from(volumes)), "mountPath": path} for path in paths]
    if init and draw(st.booleans()):
        found["restartPolicy"] = "Always"
    if draw(st.booleans()):
        found["command"] = draw(st.lists(_TEXT, max_size=2))
    return found


@st.composite
def pods(draw: st.DrawFn) -> Pod:
    """Any pod with a valid request for a share, and with any other content that pods may have."""
    names = draw(st.lists(_NAME, min_size=1, max_size=4, unique=True))
    split = draw(st.integers(0, len(names) - 1))
    volume_names = draw(
        st.lists(st.one_of(_NAME, st.sampled_from(["cotenant-lib", "cotenant-run"])), max_size=3, unique=True)
    )
    sources = [{"emptyDir": {}}, {"hostPath": {"path": "/var/lib/cotenant/lib"}}, {"configMap": {"name": "c"}}]
    volumes = [{"name": name} | draw(st.sampled_from(sources)) for name in volume_names]
    spec: Pod = {
        "containers": [draw(_container(name, volume_names, init=False)) for name in names[split:]],
    }
    if split:
        spec["initContainers"] = [draw(_container(name, volume_names, init=True)) for name in names[:split]]
    if volumes or draw(st.booleans()):
        spec["volumes"] = volumes or draw(st.sampled_from([None, []]))
    metadata: Pod = {"name": draw(_NAME), "namespace": "team"}
    for key in ("labels", "annotations"):
        chosen = draw(_maybe(st.dictionaries(_KEY, st.sampled_from(["", "a", "web", "x-1"]), max_size=3)))
        if chosen is not None:
            metadata[key] = chosen
    found: Pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    _ask(draw, found, names)
    return found


def _ask(draw: st.DrawFn, found: Pod, names: list[str]) -> None:
    """Add a request to the pod: by annotations, by resources, or none."""
    how = draw(st.sampled_from(["annotations", "annotations", "resources", "gpu", "not"]))
    if how == "annotations":
        percent = draw(st.integers(0, 100))
        mine = {"cotenant.dev/request": draw(st.sampled_from([f"{percent}%", f"{percent / 100:.3f}"]))}
        if draw(st.booleans()):
            mine["cotenant.dev/limit"] = f"{draw(st.integers(max(1, percent), 100))}%"
        if draw(st.booleans()):
            mine["cotenant.dev/memory"] = draw(st.sampled_from(["8Gi", "500Mi", "1e9", "2G", "8GiB"]))
        if draw(st.booleans()):
            chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            mine["cotenant.dev/containers"] = draw(st.sampled_from([",".join(chosen), ", ".join(chosen), "*"]))
        found["metadata"]["annotations"] = (found["metadata"].get("annotations") or {}) | mine
    elif how in ("resources", "gpu"):
        kind = draw(st.sampled_from([k for k in ("containers", "initContainers") if found["spec"].get(k)]))
        container = draw(st.sampled_from(found["spec"][kind]))
        resources = container["resources"] = container.get("resources") or {}
        where = draw(st.sampled_from(["limits", "requests"]))
        resource = (
            "cotenant.dev/gpu" if how == "gpu" else draw(st.sampled_from(["cotenant.dev/share", "cotenant.dev/memory"]))
        )
        count = draw(st.integers(1, 8))
        resources[where] = (resources.get(where) or {}) | {resource: draw(st.sampled_from([count, str(count)]))}
