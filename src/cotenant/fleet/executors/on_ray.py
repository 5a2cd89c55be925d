"""The executor over Ray. Only a separate process (ray_bridge) uses Ray, since Ray ends a process whose cluster dies."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.core.lines import LineClient
from cotenant.fleet.executors import ray_head
from cotenant.fleet.executors.base import Executor, Orders
from cotenant.fleet.nodes import NodeSpec, node_from_dict

CONNECT_S = 120.0
ANSWER_S = 8.0  # time limit for an answer; a working bridge answers sooner
LOG_FILE = "ray.log"
BRIDGE = "cotenant.fleet.executors.ray_bridge"


class RayExecutor(Executor):
    """Nodes of a Ray cluster. `address` None: a local cluster, started if absent and again when it dies; `pretend`:
    pretended nodes instead of the machines' own GPUs; `token_folder`: where `ray_head` created the cluster.
    """

    name = "ray"

    def __init__(
        self, folder: Path, pretend: Sequence[NodeSpec] | None, address: str | None, token_folder: Path | None = None
    ) -> None:
        self.folder, self.address, self._token_folder = folder, address, token_folder
        folder.mkdir(parents=True, exist_ok=True)
        self._settings: dict[str, Any] = {
            "folder": str(folder.absolute()),
            "tag": hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12],
            "pretend": None if pretend is None else [node.to_dict() for node in pretend],
            "homes": {},
            "machines": 0,
        }
        self._members: dict[str, NodeSpec] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._bridge: LineClient | None = None  # connection to a bridge that has answered
        self._coming: LineClient | None = None  # connection to the bridge process started last
        self._lock = threading.Lock()
        self._fault = ""
        self._connecting: threading.Thread | None = None
        self._closed = False
        self._connect()
        if self._fault:
            if self.address is None:
                ray_head.stop(folder)
            raise WorkError(self._fault)

    # -- contract --------------------------------------------------------------------------------------------------

    def members(self) -> dict[str, NodeSpec]:
        """See Executor."""
        return dict(self._members)

    def fault(self) -> str:
        """See Executor."""
        return self._fault

    def exchange(self, epoch: int, orders: Orders) -> dict[str, dict[str, Any] | None]:
        """See Executor."""
        # exchanges are numbered by the machine's monotonic clock, which increases across restarts of the bridge
        answer = self._call("exchange", epoch=epoch, number=time.monotonic_ns(), orders=orders)
        if answer is None:
            return dict.fromkeys(orders)
        found: dict[str, dict[str, Any] | None] = answer["answers"]
        return found

    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        """See Executor."""
        answer = self._call("log", node=node, path=path, offset=offset)
        if answer is None:
            return b"", max(0, offset)
        return base64.b64decode(answer["raw"]), int(answer["next"])

    def close(self) -> None:
        """See Executor."""
        self._closed = True
        if self._coming is not None and self._coming is not self._bridge:
            self._coming.hang_up()
        if self._connecting is not None:
            self._connecting.join(CONNECT_S)
        with self._lock:
            self._end_bridge()

    def shutdown(self) -> None:
        """See Executor."""
        if self._bridge is not None:
            self._call("retire")
        self.close()
        if self.address is None:
            ray_head.stop(self.folder)

    # -- the bridge ------------------------------------------------------------------------------------------------

    def _call(self, op: str, **order: Any) -> dict[str, Any] | None:
        """Send one order to the bridge. Returns None if no bridge runs; then a new one is being started."""
        with self._lock:
            if self._bridge is None:
                self._reconnect()
                return None
            try:
                answer = self._bridge.call(op, **order)
            except WorkError:
                self._fault = "Ray does not answer; reconnecting"
                self._members = {}
                self._end_bridge()
                self._reconnect()
                return None
            self._take(answer)
            self._fault = "" if self._members else "no node of the Ray cluster answers"
            return answer

    def _take(self, answer: dict[str, Any]) -> None:
        self._members = {name: _spec(spec) for name, spec in answer["members"].items()}
        self._settings["homes"], self._settings["machines"] = answer["homes"], answer["machines"]

    def _reconnect(self) -> None:
        """Start a bridge in the background: connecting takes seconds, and jobs need the controller meanwhile."""
        if self._closed or (self._connecting is not None and self._connecting.is_alive()):
            return
        self._connecting = threading.Thread(target=self._connect, name="ray bridge", daemon=True)
        self._connecting.start()

    def _connect(self) -> None:
        try:
            address = self.address or ray_head.ensure(self.folder)
        except WorkError as error:
            self._fault = str(error)
            time.sleep(1.0)
            return
        ours, theirs = socket.socketpair()
        with theirs, (self.folder / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", BRIDGE, json.dumps(self._settings | {"address": address})],
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=log,
                env=ray_head.environment(self.folder if self.address is None else self._token_folder),
            )  # fmt: skip
        self._coming = bridge = LineClient(ours, "process", f"the Ray cluster {address}")
        bridge.within(0.0 if self._closed else CONNECT_S)
        try:
            hello = bridge.call("members")
        except WorkError:
            bridge.close()
            process.kill()
            process.wait()
            self._fault = f"the Ray cluster at {address} cannot be reached; see {self.folder / LOG_FILE}"
            return
        bridge.within(ANSWER_S)
        self._take(hello)
        none = "no node of the Ray cluster has a GPU; for a trial, --nodes spreads pretended nodes over it"
        self._fault = "" if self._members else none
        self._process, self._bridge = process, bridge

    def _end_bridge(self) -> None:
        process, bridge, self._bridge = self._process, self._bridge, None
        if process is None or bridge is None:
            return
        bridge.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _spec(data: dict[str, Any]) -> NodeSpec:
    return node_from_dict({key: value for key, value in data.items() if key != "pid"})
