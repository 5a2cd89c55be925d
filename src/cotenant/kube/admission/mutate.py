"""Computes the JSON patch for a pod. The patch gives each container that requests a share of a GPU that share, as the
command `cotenant run` does for a program. Pure functions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cotenant.agent.tenants.places import container_token
from cotenant.core.errors import InputError
from cotenant.kube import names
from cotenant.kube.shares import ContainerShare, Pod, shares_of
from cotenant.native.libraries import DRIVER_SHIM, NVML_SHIM

Operation = dict[str, Any]
MEMORY_VARIABLES = ("NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT")
# names that the hook of NVIDIA's container toolkit reads: both variables, also with a final S; which spelling counts if
# a container has both is not documented
HOOK_VARIABLES = (*MEMORY_VARIABLES, *(f"{name}S" for name in MEMORY_VARIABLES))
# If a pod sets LD_PRELOAD by reference (valueFrom), its value is kept in this variable.
USER_PRELOAD = "COTENANT_USER_PRELOAD"
LIBRARY_VOLUME, SOCKET_VOLUME = "cotenant-lib", "cotenant-run"


@dataclass(frozen=True)
class Injection:
    """How containers get the shim. `mounts` False: the device plugin mounts the shim, so that pods need no hostPath."""

    host_libraries: str = str(names.HOST_LIBRARIES)
    host_sockets: str = str(names.HOST_SOCKETS)
    mounts: bool = True
    # the runtime class that the webhook sets in pods that name none; None: the webhook sets no runtime class
    runtime_class: str | None = None
    # whether the nodes have NVIDIA's container toolkit with the hook that limits GPU memory in the driver; it reads the
    # limits from a container's MEMORY_VARIABLES
    memory_hook: bool = False


class Patch:
    """A pod that is being changed, and the JSON patch operations (RFC 6902) that make the same changes to the
    original."""

    def __init__(self, pod: Pod) -> None:
        self.pod: dict[str, Any] = copy.deepcopy(dict(pod))
        self.operations: list[Operation] = []

    def at(self, *path: str | int) -> Any:
        """Return the value at a path in the pod; None if there is none."""
        node: Any = self.pod
        for step in path:
            try:
                node = node[step]
            except (KeyError, IndexError, TypeError):
                return None
        return node

    def put(self, value: Any, *path: str | int) -> None:
        """Add or replace a member of a map or list of the pod; missing or null maps on the path are created."""
        for end in range(1, len(path)):
            if self.at(*path[:end]) is None:
                self._do({}, *path[:end])
        if self.at(*path) != value:
            self._do(value, *path)

    def append(self, value: Any, *path: str | int) -> None:
        """Append a value to a list in the pod. If the list is missing, it is created."""
        if not self.at(*path):
            self.put([value], *path)
        else:
            self.at(*path).append(copy.deepcopy(value))
            self.operations.append({"op": "add", "path": pointer(*path) + "/-", "value": value})

    def insert(self, value: Any, *path: str | int) -> None:
        """Insert a value into a list of the pod. The last part of `path` is the value's index in the list."""
        self.at(*path[:-1]).insert(path[-1], copy.deepcopy(value))
        self.operations.append({"op": "add", "path": pointer(*path), "value": value})

    def _do(self, value: Any, *path: str | int) -> None:
        parent = self.at(*path[:-1])
        known = path[-1] in parent if isinstance(parent, dict) else True
        parent[path[-1]] = copy.deepcopy(value)
        self.operations.append({"op": "replace" if known else "add", "path": pointer(*path), "value": value})


def pointer(*path: str | int) -> str:
    """Join keys to a JSON pointer (RFC 6901); ~ and / within a key are escaped."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def mutate(pod: Pod, injection: Injection | None = None, namespace: str | None = None) -> list[Operation]:
    """Return the patch that gives every container the share that it requests; empty for a pod that requests no share or
    is already patched. `namespace`: where the pod is created, if the pod does not state it. InputError says what is
    wrong with the request.
    """
    return _changed(pod, injection or Injection(), namespace).operations


def change(pod: Pod, injection: Injection | None = None) -> dict[str, Any]:
    """Return the pod as the patch of `mutate` changes it."""
    return _changed(pod, injection or Injection(), None).pod


def _changed(pod: Pod, injection: Injection, namespace: str | None) -> Patch:
    patch = Patch(pod)
    metadata = pod.get("metadata")
    where = namespace or (metadata.get("namespace") if isinstance(metadata, dict) else None)
    shares = [] if where in names.SKIPPED_NAMESPACES else shares_of(pod)
    if not shares:
        return patch
    if isinstance(os_ := pod["spec"].get("os"), dict) and os_.get("name") == "windows":
        raise InputError("a Windows pod cannot have a share of a GPU", field="spec.os.name")
    volumes: dict[str, str] = {}
    if injection.mounts:
        volumes = {
            str(names.LIBRARIES): _volume(patch, LIBRARY_VOLUME, injection.host_libraries),
            str(names.SOCKETS): _volume(patch, SOCKET_VOLUME, injection.host_sockets),
        }
    if injection.runtime_class and not patch.at("spec", "runtimeClassName"):
        patch.put(injection.runtime_class, "spec", "runtimeClassName")
    for share in shares:
        here = ("spec", share.list_name, share.index)
        _count(patch, here, share)
        for path, volume in volumes.items():
            _mount(patch, here, share.container, path, volume)
        _environment(patch, here, share, injection)
    return patch


def _count(patch: Patch, here: tuple[str | int, ...], share: ContainerShare) -> None:
    """Set requests and limits of the extended resources, which the API requires to be equal."""
    for name, count in share.resources().items():
        for kind in ("limits", "requests"):
            if _number(patch.at(*here, "resources", kind, name)) != count:
                patch.put(str(count), *here, "resources", kind, name)


def _number(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() else None


def _volume(patch: Patch, name: str, path: str) -> str:
    """Name of the pod's volume for a folder of the node. A missing volume is added, under another name if the usual
    name is taken.
    """
    wanted = {"path": path, "type": "Directory"}
    taken = set()
    for volume in patch.at("spec", "volumes") or []:
        if isinstance(volume, dict):
            if volume.get("hostPath") == wanted:
                return str(volume["name"])
            taken.add(volume.get("name"))
    free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)
    patch.append({"name": free, "hostPath": wanted}, "spec", "volumes")
    return free


def _mount(patch: Patch, here: tuple[str | int, ...], container: str, path: str, volume: str) -> None:
    wanted = {"name": volume, "mountPath": path, "readOnly": True}
    for mount in patch.at(*here, "volumeMounts") or []:
        if not isinstance(mount, dict) or str(mount.get("mountPath", "")).rstrip("/") != path:
            continue
        if mount.get("name") == volume and mount.get("readOnly") is True:
            return
        raise InputError(f"container {container} has a mount of its own at {path}, where Cotenant's libraries must be")
    patch.append(wanted, *here, "volumeMounts")


def environment(container: str) -> dict[str, str]:
    """Environment variables that tell a container's processes where Cotenant's files are. They grant no permissions."""
    places = names.LIBRARY_PLACES
    return {
        "COTENANT_SOCKET": str(names.SOCKETS / names.SOCKET_FILE),
        "COTENANT_TOKEN": container_token(container),
        "COTENANT_DRIVER": ":".join(f"{place}/{names.DRIVER_FILE}" for place in places),
        "COTENANT_NVML": ":".join(f"{place}/{names.NVML_REAL_FILE}" for place in places),
    }


def preload() -> str:
    """The value that LD_PRELOAD needs to load the shims."""
    folder = names.LIBRARIES / names.CURRENT
    return f"{folder / DRIVER_SHIM}:{folder / NVML_SHIM}"


def memory_variables(share: ContainerShare) -> dict[str, str]:
    """Return the two variables that NVIDIA's hook reads from a container: memory on each of the container's GPUs, in
    whole MiB. The hook requires both variables.
    """
    if share.memory_bytes is None:
        return {}
    return dict.fromkeys(MEMORY_VARIABLES, str(max(1, share.memory_bytes >> 20)))


def _environment(patch: Patch, here: tuple[str | int, ...], share: ContainerShare, injection: Injection) -> None:
    container = share.container
    wanted = environment(container) | (memory_variables(share) if injection.memory_hook else {})
    entries = [e for e in patch.at(*here, "env") or [] if isinstance(e, dict)]
    # if a name occurs several times the last entry counts, as for the kubelet
    known = {entry.get("name"): entry for entry in entries}
    for name in HOOK_VARIABLES if injection.memory_hook else ():
        if name in known and name not in wanted:
            raise InputError(f"container {container} sets {name}, which sets its own limit on GPU memory: leave it out")
    for name, value in wanted.items():
        entry = known.get(name)
        if entry is None:
            patch.append({"name": name, "value": value}, *here, "env")
        elif entry.get("value") != value or "valueFrom" in entry:
            raise InputError(f"container {container} sets {name}, which is set by Cotenant: leave it out")
    _preload(patch, here)


def _preload(patch: Patch, here: tuple[str | int, ...]) -> None:
    """Put the paths of the shims before the previous value of LD_PRELOAD."""
    entries = patch.at(*here, "env") or []
    index = max(
        (i for i, e in enumerate(entries) if isinstance(e, dict) and e.get("name") == "LD_PRELOAD"), default=None
    )
    if index is None:
        patch.append({"name": "LD_PRELOAD", "value": preload()}, *here, "env")
        return
    entry: Mapping[str, Any] = entries[index]
    if "valueFrom" in entry:
        patch.insert({"name": USER_PRELOAD, "valueFrom": entry["valueFrom"]}, *here, "env", index)
        patch.put({"name": "LD_PRELOAD", "value": f"{preload()}:$({USER_PRELOAD})"}, *here, "env", index + 1)
        return
    before = str(entry.get("value") or "")
    if before == preload() or before.startswith((f"{preload()}:", f"{preload()} ")):
        return
    patch.put(f"{preload()}:{before}" if before else preload(), *here, "env", index, "value")
