"""Commands of `cotenant kube` that print objects: mutate, claims, slice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant.core.errors import InputError

Text = str | None
Version = Annotated[str, typer.Option("--kubernetes", metavar="1.34", help="Kubernetes version of the cluster.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")]
PodFile = Annotated[Path, typer.Argument(metavar="POD.yaml", help="Pod manifest; - reads standard input.")]
Mounts = Annotated[str, typer.Option(metavar="webhook|plugin", help="Which component mounts the shim into pods.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands of `cotenant kube` that print objects."""
    for command in (mutate, claims, slice_):
        app.command(command.__name__.rstrip("_"))(command)


def mutate(
    pod: PodFile,
    mounts: Mounts = "webhook",
    memory_hook: Annotated[
        bool, typer.Option("--memory-hook", help="Show the pod for nodes where NVIDIA's hook sets memory limits.")
    ] = False,
    patch: Annotated[bool, typer.Option("--patch", help="Print the JSON patch instead of the pod.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the webhook makes of a pod, without a cluster."""
    from cotenant.kube.admission.mutate import Injection, change
    from cotenant.kube.admission.mutate import mutate as patch_of

    thing = _read_pod(pod)
    injection = Injection(mounts=mounts == "webhook", memory_hook=memory_hook)
    with _of_file(pod):
        things = patch_of(thing, injection) if patch else [change(thing, injection)]
    _show(things, as_json)


def claims(pod: PodFile, kubernetes: Version = "1.34", as_json: AsJson = False) -> None:
    """Print the pod with resource claims (dynamic resource allocation, DRA) instead of the resources that the device
    plugin counts, and the templates of the claims.
    """
    from cotenant.kube.dra.claims import claims_of

    thing, version = _read_pod(pod), _version(kubernetes)
    with _of_file(pod):
        things = claims_of(thing, version)
    _show(things, as_json)


def slice_(
    node: Annotated[str, typer.Option(metavar="NAME", help="Name of this node.")],
    agent_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the agent's sockets.")] = None,
    whole: Annotated[str, typer.Option(metavar="all|UUID,...", help="GPUs offered only as whole GPUs.")] = "",
    kubernetes: Version = "1.34",
    as_json: AsJson = False,
) -> None:
    """Print the ResourceSlices (DRA) of this node's GPUs."""
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.folders import agent_folder
    from cotenant.kube.dra import offer
    from cotenant.kube.inventory import check_whole, gpus_of, mig_slices

    given = [part for part in whole.split(",") if part]
    with ControlClient(agent_dir or agent_folder()) as client:
        status = client.call("status")
    check_whole(given, gpus_of(status, (), {}))
    version, pieces = _version(kubernetes), mig_slices()
    divided = {piece.gpu for piece in pieces}
    gpus = [gpu for gpu in gpus_of(status, given, {}) if gpu.uuid not in divided]
    offered = offer.devices(gpus, pieces, version, version >= offer.COUNTERS_SINCE)
    _show(offer.resource_slices(node, offered, version), as_json)


# -- helpers -----------------------------------------------------------------------------------------------------------


def _show(things: list[dict[str, Any]], as_json: bool) -> None:
    import json

    import yaml

    if as_json:
        is_patch = bool(things) and "op" in things[0]
        print(json.dumps({"patch": things} if is_patch else {"apiVersion": "v1", "kind": "List", "items": things}))
    elif things and "op" in things[0]:
        print(json.dumps(things, indent=2))
    else:

        class Plain(yaml.SafeDumper):
            def ignore_aliases(self, data: Any) -> bool:
                return True

        texts = (yaml.dump(thing, Dumper=Plain, sort_keys=False, width=100_000) for thing in things)
        print("---\n".join(texts), end="")


@contextmanager
def _of_file(path: Path) -> Iterator[None]:
    """Return a context that adds the file's name to errors raised in it."""
    try:
        yield
    except InputError as error:
        raise InputError(error.message, file=path, line=error.line, field=error.field) from None


def _read_pod(path: Path) -> dict[str, Any]:
    """Return the only pod of a manifest. Raises InputError if the manifest contains anything else, and names it."""
    from cotenant.core.textfile import read_text
    from cotenant.core.yamlfile import parse_documents

    text = sys.stdin.read() if str(path) == "-" else read_text(path)
    things = [read.content for read in parse_documents(text, path) if read.content is not None]
    if len(things) != 1 or not isinstance(things[0], dict) or things[0].get("kind") != "Pod":
        kinds = ", ".join(str(t.get("kind")) if isinstance(t, dict) else type(t).__name__ for t in things) or "nothing"
        raise InputError(f"must hold exactly one Pod, not {kinds[:80]}", file=path)
    pod: dict[str, Any] = things[0]
    return pod


def _version(text: str) -> tuple[int, int]:
    parts = text.removeprefix("v").split(".")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts[:2]):
        raise InputError(f"must be a version such as 1.34, not {text!r}", field="--kubernetes")
    return int(parts[0]), int(parts[1])
