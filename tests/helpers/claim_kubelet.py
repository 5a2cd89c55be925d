"""The kubelet's part of dynamic resource allocation, and a node whose plugin places pods by claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from api_standin import Thing
from kube_node import Node
from waiting import wait_for

from cotenant.kube.messages import DRA_PLUGINS, PLUGIN_REGISTRATION, caller, open_channel, registration

SLICE = "/apis/resource.k8s.io/v1/resourceslices/node-a-gpu.cotenant.dev"


class ClaimKubelet:
    """What the kubelet does with a driver: finds its socket, asks who it is, says that it is taken, prepares claims."""

    def __init__(self, registry: Path) -> None:
        wait_for(lambda: self._meet(registry))

    def _meet(self, registry: Path) -> bool:
        """False while there is no driver, or only the socket of one that was killed."""
        socket = next(iter(registry.glob("*-reg.sock")), None)
        if socket is None:
            return False
        with open_channel(socket) as channel:
            try:
                self.info = caller(channel, PLUGIN_REGISTRATION, "GetInfo")(registration.InfoRequest(), timeout=60)
            except grpc.RpcError:
                return False
            caller(channel, PLUGIN_REGISTRATION, "NotifyRegistrationStatus")(
                registration.RegistrationStatus(plugin_registered=True), timeout=60
            )
        return True

    def call(self, verb: str, *claims: Thing, version: str = "v1.DRAPlugin") -> dict[str, Any]:
        service, package = DRA_PLUGINS[version]
        asked = [package.Claim(namespace=c["namespace"], name=c["name"], uid=c["uid"]) for c in claims]
        request = getattr(package, f"Node{verb}ResourcesRequest")(claims=asked)
        with open_channel(self.info.endpoint) as channel:
            return dict(caller(channel, service, f"Node{verb}Resources")(request, timeout=60).claims)


def start_claims_plugin(node: Node) -> None:
    """Start the node's plugin so that it places by claims."""
    node.start_plugin("--claims=true", f"--kubelet-plugins={node.folder}/kubelet")


def claims_node(node: Node) -> Node:
    """Start the plugin of a node of Kubernetes 1.34, and wait for what it offers to claims."""
    (node.folder / "kubelet" / "plugins_registry").mkdir()
    node.api.store["/version"] = {"major": "1", "minor": "34+"}
    start_claims_plugin(node)
    wait_for(lambda: SLICE in node.api.store, what=node.said())
    return node
