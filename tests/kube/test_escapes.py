"""Processes on a GPU that have not come to the agent: noticed, once they have had time to come."""

from __future__ import annotations

from pathlib import Path

from api_standin import ApiServer
from pods import pod, share

from cotenant.agent.tenants.places import Place
from cotenant.kube.binding.binder import Binder
from cotenant.kube.binding.escapes import Escape, EscapeWatch
from cotenant.kube.client import KubeApi
from cotenant.kube.inventory import Inventory
from cotenant.kube.plugin.state import PluginState
from cotenant.kube.units import NodeGpu

PLACES = {
    10: Place("pod", "uid-a"),
    11: Place("pod", "uid-a"),
    12: Place("pod", "uid-b"),
    13: None,
    14: Place("slurm", "7"),
}
TENANTS = [{"pids": [10]}, {"pids": []}]


def test_who_is_not_connected_twice_in_a_row_has_escaped() -> None:
    watch = EscapeWatch(PLACES.get)
    running = {"GPU-0": [10, 11, 13, 14], "GPU-1": [12]}
    assert watch.look(running, TENANTS) == [], "they may still be on their way"
    assert watch.look(running, TENANTS) == [Escape("uid-a", 11, "GPU-0"), Escape("uid-b", 12, "GPU-1")]
    assert watch.look(running, [{"pids": [10, 11]}]) == [Escape("uid-b", 12, "GPU-1")], "11 has come to the agent"
    assert watch.look({"GPU-0": [11]}, TENANTS) == [], "seen anew"
    assert watch.look({}, TENANTS) == []


def test_the_pod_is_told_once(tmp_path: Path) -> None:
    api = ApiServer()
    thing = api.put_pod(pod("train", annotations=share()))
    state = PluginState(Inventory())
    state.inventory.set([NodeGpu("GPU-0", 3, 8 << 30)])
    binder = Binder(None, state, KubeApi(api.url), str(tmp_path / "none"), "node-a")  # type: ignore[arg-type]
    binder.pending(True)
    for _ in range(2):
        binder.escaped([Escape(thing["metadata"]["uid"], 11, "GPU-0"), Escape("another", 12, "GPU-0")])
    assert api.events() == [
        (
            "ShareNotEnforced",
            "a process uses GPU 3 without the shim: no share limits it (musl, or LD_PRELOAD lost?)",
        )
    ]
    fault = {"not_enforced": [{"text": "it left", "for_s": 1.0}]}
    binder.not_enforced([fault | {"holder": {"kind": "pod", "id": thing["metadata"]["uid"]}}, fault | {"holder": None}])
    assert api.events()[1:] == [("ShareNotEnforced", "it left")]
    api.close()
