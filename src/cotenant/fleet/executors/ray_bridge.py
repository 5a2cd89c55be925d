"""The process that uses Ray for the controller, over JSON lines: `python -m cotenant.fleet.executors.ray_bridge`.

Ray ends a process whose cluster is gone, and needs hundreds of megabytes; neither affects the controller this way. One
detached actor without resources per node holds that node's `NodeJobs`; Ray carries orders and reports and tracks
membership, but schedules nothing.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from cotenant.core import logs
from cotenant.core.lines import serve_pipe

LOG = logging.getLogger("cotenant.fleet.executors.ray_bridge")  # under -m, __name__ is "__main__"

ANSWER_S = 4.0
LOOK_EVERY_S = 1.0
START_S = 60.0
NAMESPACE = "cotenant"


class Bridge:
    """The actors of all nodes, by node name."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import ray

        self.ray, self.settings = ray, settings
        self.tag = str(settings["tag"])
        self.pretend: list[dict[str, Any]] | None = settings["pretend"]
        ray.init(
            address=settings["address"],
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            include_dashboard=False,
        )
        self.actors: dict[str, Any] = {}
        self.specs: dict[str, dict[str, Any]] = {}
        self.homes: dict[str, str] = {}  # node name -> Ray's id of its machine
        self.unanswered: dict[str, Any] = {}
        # node name -> actor, its pending answer, machine, start time
        self.coming: dict[str, tuple[Any, Any, str, float]] = {}
        self.looked = -1e9
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.look()
            if not self.coming:
                break
            self.ray.wait([ref for _, ref, _, _ in self.coming.values()], timeout=LOOK_EVERY_S)

    # -- membership ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Update the nodes: create actors for new nodes, and forget the actors of dead nodes."""
        if time.monotonic() - self.looked < LOOK_EVERY_S:
            return
        self.looked = time.monotonic()
        alive = {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in sorted(self.ray.nodes(), key=lambda n: (n["NodeManagerHostname"], n["NodeID"]))
            if node["Alive"]
        }
        for name in [n for n, home in self.homes.items() if home not in alive]:
            self.drop(name)
        wanted = self._pretend_homes(list(alive)) if self.pretend is not None else self._own_homes(alive)
        for name, (home, spec) in wanted.items():
            if name not in self.actors and name not in self.coming:
                self._create(name, home, spec, alive[home])
        self._arrive()

    def _pretend_homes(self, alive: list[str]) -> dict[str, tuple[str, dict[str, Any] | None]]:
        """Distribute pretended nodes evenly over the machines. Nodes that have a machine keep it."""
        found: dict[str, tuple[str, dict[str, Any] | None]] = {}
        for i, spec in enumerate(self.pretend or ()):
            name = spec["name"]
            known = self.settings["homes"].get(name)
            if known is not None and known not in alive and len(alive) < self.settings["machines"]:
                continue  # the actor's machine has gone: the node is lost
            home = (
                self.homes.get(name) or (known if known in alive else None) or (alive[i % len(alive)] if alive else "")
            )
            if home:
                found[name] = (home, spec)
                self.settings["homes"][name] = home
        self.settings["machines"] = max(self.settings["machines"], len(alive))
        return found

    def _own_homes(self, alive: dict[str, str]) -> dict[str, tuple[str, dict[str, Any] | None]]:
        return {f"{address}-{home[:6]}": (home, None) for home, address in alive.items()}

    def _create(self, name: str, home: str, spec: dict[str, Any] | None, address: str) -> None:
        """Create a node's actor on the given machine, or reuse the existing actor."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        folder = str(Path(self.settings["folder"]) / "nodes" / name)
        remote = self.ray.remote(NodeActor).options(
            name=f"cotenant-{self.tag}-{name}",
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(home, soft=False),
        )
        actor = remote.remote(folder, name, spec, address)
        self.coming[name] = (actor, actor.facts.remote(), home, time.monotonic())

    def _arrive(self) -> None:
        """Make nodes whose actors have started members of the fleet."""
        for name, (actor, ref, home, since) in list(self.coming.items()):
            if not self.ray.wait([ref], timeout=0)[0]:
                if time.monotonic() - since > START_S:
                    del self.coming[name]
                continue
            del self.coming[name]
            try:
                self.specs[name] = self.ray.get(ref)
            except Exception as error:
                text = str(error).strip().splitlines()[-1][:200]
                LOG.error("node %s: its actor does not start: %s", name, text)
                continue
            if self.specs[name]["gpus"]:
                self.actors[name], self.homes[name] = actor, home

    def drop(self, name: str) -> None:
        """Forget a node whose actor or machine has died."""
        self.actors.pop(name, None)
        self.homes.pop(name, None)
        self.unanswered.pop(name, None)

    # -- orders ----------------------------------------------------------------------------------------------------

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute an order. Every answer contains the members and their machines; `members` requests only these."""
        found: dict[str, Any] = {}
        if order["op"] == "exchange":
            found["answers"] = self.exchange(order["epoch"], order["number"], order["orders"])
        elif order["op"] == "log":
            found["raw"], found["next"] = self.log(order["node"], order["path"], order["offset"])
        elif order["op"] == "retire":
            self.retire()
        places = {"homes": self.settings["homes"], "machines": self.settings["machines"]}
        return found | {"members": self.members()} | places

    def exchange(self, epoch: int, number: int, orders: dict[str, list[Any]]) -> dict[str, Any]:
        """See Executor.exchange."""
        self.look()
        refs = {}
        for name, wanted in orders.items():
            late = self.unanswered.get(name)
            if late is not None and not self.ray.wait([late], timeout=0)[0]:
                continue  # the node's previous answer is still pending
            self.unanswered.pop(name, None)
            if name in self.actors:
                refs[name] = self.actors[name].exchange.remote(epoch, number, json.dumps(wanted))
        ready: set[Any] = set()
        if refs:
            ready = set(self.ray.wait(list(refs.values()), num_returns=len(refs), timeout=ANSWER_S)[0])
        answers: dict[str, Any] = dict.fromkeys(orders)
        for name, ref in refs.items():
            if ref not in ready:
                self.unanswered[name] = ref
                continue
            try:
                answers[name] = json.loads(self.ray.get(ref))
            except Exception as error:
                LOG.warning("node %s: %s", name, str(error).splitlines()[0][:200])
                self.drop(name)
                self.looked = -1e9
        return answers

    def log(self, name: str, path: str, offset: int) -> tuple[str, int]:
        """A part of a log in base64; empty if the node is gone."""
        actor = self.actors.get(name) or next(iter(self.actors.values()), None)
        if actor is None:
            return "", offset
        try:
            raw, end = self.ray.get(actor.read_log.remote(path, offset), timeout=ANSWER_S)
        except Exception:
            return "", offset
        return base64.b64encode(raw).decode(), int(end)

    def retire(self) -> None:
        """End the actors. The jobs continue."""
        for name in list(self.actors):
            self.ray.kill(self.actors[name])
            self.drop(name)

    def members(self) -> dict[str, Any]:
        """Nodes with a living actor."""
        return {name: self.specs[name] for name in self.actors}


class NodeActor:
    """The Ray actor that holds one node's jobs. All state is in the node's folder, where a later actor finds it."""

    def __init__(self, folder: str, name: str, spec: dict[str, Any] | None, address: str) -> None:
        from cotenant.core.errors import WorkError
        from cotenant.fleet.noderuntime.nodejobs import NodeJobs
        from cotenant.fleet.nodes import NodeSpec, node_from_dict

        if spec is not None:
            found = node_from_dict(spec | {"address": address})
        else:
            from cotenant.fleet.noderuntime.inventory import this_machine

            try:
                found = this_machine(name, address)
            except WorkError:  # a node without GPUs is not a member
                found = NodeSpec(name, 0.0, 0, ())
        self.jobs = NodeJobs(Path(folder), found, patience_s=10.0)

    def facts(self) -> dict[str, Any]:
        """Description of the node as plain data."""
        return self.jobs.spec.to_dict() | {"pid": os.getpid()}

    def exchange(self, epoch: int, number: int, orders: str) -> str:
        """See NodeJobs.exchange."""
        return json.dumps(self.jobs.exchange(epoch, number, json.loads(orders)))

    def read_log(self, path: str, offset: int) -> tuple[bytes, int]:
        """See nodejobs.read_log."""
        from cotenant.fleet.noderuntime.nodejobs import read_log

        return read_log(path, offset)


def main() -> None:
    """Serve the controller until its connection closes."""
    logs.configure()
    serve_pipe(lambda: Bridge(json.loads(sys.argv[1])).answer)


if __name__ == "__main__":
    main()
