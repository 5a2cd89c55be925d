"""Processes of pods on a GPU that have not connected to the agent: the agent finds them, the plugin reports them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from api_standin import ApiServer
from held_agent import pod_cgroup
from kube_node import Node
from pods import pod, share
from waiting import wait_for

from cotenant.agent.audit.processes import UnseenWatch
from cotenant.agent.owners.owners import Owners
from cotenant.agent.tenants.places import Place
from cotenant.agent.tenants.registry import Registry
from cotenant.kube import node as node_plugin
from cotenant.kube.binding.binder import Binder
from cotenant.kube.binding.events import PodEvents
from cotenant.kube.binding.pods import NodePods
from cotenant.kube.client import KubeApi
from cotenant.kube.inventory import Inventory
from cotenant.kube.node import NodePlugin, NodeSettings
from cotenant.kube.plugin.state import PluginState
from cotenant.kube.units import NodeGpu
from cotenant.native.libraries import SOFT_DRIVER, library_path

PROGRAM = """
import ctypes, sys
cuda, context = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
sys.stdin.read()
"""


def test_an_unseen_process_has_its_pod_or_job() -> None:
    places = {os.getppid(): Place("pod", "uid-a", "f00")}
    watch = UnseenWatch(Registry((), {}), Owners(places.get))
    running = {"GPU-0": [os.getppid(), 1]}
    watch.look(running)
    found = {row.process.pid: row.as_dict() for row in watch.look(running)}
    assert found[os.getppid()]["holder"] == {"kind": "pod", "id": "uid-a"}
    assert found[1]["holder"] is None


def test_a_pod_with_a_process_past_the_shim_gets_an_event(
    make_node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_plugin, "HEALTH_EVERY_S", 0.1)
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "gpu"))
    node = make_node(gpus=0)  # no pretended GPUs: the node uses the software GPU
    thing = node.api.put_pod(pod("train", annotations=share()))
    settings = NodeSettings(
        "node-a", node.agent.folder, node.kubelet.plugins, node.kubelet.resources / "kubelet.sock",
        list_every_s=1.0, one_gpu=False,
    )  # fmt: skip
    plugin = NodePlugin(settings, KubeApi(node.api.url))
    thread = threading.Thread(target=plugin.run, daemon=True)
    command = [sys.executable, "-c", PROGRAM, str(library_path(SOFT_DRIVER))]
    program = subprocess.Popen(command, stdin=subprocess.PIPE)
    node.agent.put(pod_cgroup(thing["metadata"]["uid"]), program.pid)
    thread.start()
    try:
        wait_for(lambda: plugin.state.metrics.escaped == 1)
        text = "a process uses GPU 0 without the shim: no share limits it (musl, or LD_PRELOAD lost?)"
        wait_for(lambda: ("ShareNotEnforced", text) in node.api.events())
    finally:
        program.communicate()
    wait_for(lambda: plugin.state.metrics.escaped == 0)
    plugin.stop()
    thread.join(10)


def test_a_pod_gets_one_event_for_a_finding(tmp_path: Path) -> None:
    api = ApiServer()
    thing = api.put_pod(pod("train", annotations=share()))
    state = PluginState(Inventory())
    state.inventory.set([NodeGpu("GPU-0", 3, 8 << 30)])
    client = KubeApi(api.url)
    pods = NodePods(client, "node-a")
    binder = Binder(None, state, pods, PodEvents(client, "node-a"), str(tmp_path / "none"))  # type: ignore[arg-type]
    pods.refresh((), force=True)
    mine = {"kind": "pod", "id": thing["metadata"]["uid"]}
    unseen = [{"gpu": "GPU-0", "pid": 11, "holder": mine}, {"gpu": "GPU-0", "pid": 12, "holder": mine | {"id": "none"}}]
    for _ in range(2):
        binder.escaped(unseen)
    assert api.events() == [
        (
            "ShareNotEnforced",
            "a process uses GPU 3 without the shim: no share limits it (musl, or LD_PRELOAD lost?)",
        )
    ]
    fault = {"not_enforced": [{"text": "it left", "for_s": 1.0}]}
    binder.not_enforced([fault | {"holder": mine}, fault | {"holder": None}])
    assert api.events()[1:] == [("ShareNotEnforced", "it left")]
    api.close()
