"""The executor over Ray. Ray itself is spoken by a process of its own (ray_bridge), which may die with its cluster."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.fleet.executors import ray_head
from cotenant.fleet.executors.base import Executor, Orders
from cotenant.fleet.nodes import NodeSpec, node_from_dict

CONNECT_S = 120.0
ANSWER_S = 8.0  # more than a bridge that lives takes
LOG_FILE = "ray.log"
BRIDGE = "cotenant.fleet.executors.ray_bridge"


class RayExecutor(Executor):
    """Nodes of a Ray cluster. `address` None: a local cluster, started if it is not there and again when it dies;
    `pretend`: nodes by number alone, not the machines' own GPUs; `token_folder`: where `ray_head` made the cluster.
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
        self._lock = threading.Lock()
        self._buffer = b""
        self._trouble = ""
        self._connecting: threading.Thread | None = None
        self._closed = False
        self._connect()
        if self._trouble:
            if self.address is None:
                ray_head.stop(folder)
            raise WorkError(self._trouble)

    # -- contract --------------------------------------------------------------------------------------------------

    def members(self) -> dict[str, NodeSpec]:
        """See Executor."""
        return dict(self._members)

    def trouble(self) -> str:
        """See Executor."""
        return self._trouble

    def exchange(self, epoch: int, orders: Orders) -> dict[str, dict[str, Any] | None]:
        """See Executor."""
        # the machine's monotonic clock numbers exchanges: it rises through every restart of the bridge
        order = {"op": "exchange", "epoch": epoch, "number": time.monotonic_ns(), "orders": orders}
        answer = self._call(order)
        if answer is None:
            return dict.fromkeys(orders)
        found: dict[str, dict[str, Any] | None] = answer["answers"]
        return found

    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        """See Executor."""
        answer = self._call({"op": "log", "node": node, "path": path, "offset": offset})
        if answer is None:
            return b"", max(0, offset)
        return base64.b64decode(answer["raw"]), int(answer["next"])

    def close(self) -> None:
        """See Executor."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.join(CONNECT_S)
        with self._lock:
            self._end_bridge()

    def shutdown(self) -> None:
        """See Executor."""
        if self._process is not None:
            self._call({"op": "retire"})
        self.close()
        if self.address is None:
            ray_head.stop(self.folder)

    # -- the bridge ------------------------------------------------------------------------------------------------

    def _call(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """One order to the bridge; None when there is none, and a new one is being started."""
        with self._lock:
            if self._process is None:
                self._reconnect()
                return None
            answer = self._ask(order)
            if answer is None:
                self._trouble = "Ray does not answer; connecting anew"
                self._members = {}
                self._end_bridge()
                self._reconnect()
                return None
            self._members = {name: _spec(spec) for name, spec in answer["members"].items()}
            self._settings["homes"], self._settings["machines"] = answer["homes"], answer["machines"]
            self._trouble = "" if self._members else "no node of the Ray cluster answers"
            return answer

    def _ask(self, order: dict[str, Any]) -> dict[str, Any] | None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._read(self._process, ANSWER_S)

    def _read(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
        """One line of the bridge; None when it has ended or says nothing in time."""
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._closed or not select.select([process.stdout], [], [], min(left_s, 0.5))[0]:
                if left_s <= 0 or self._closed or process.poll() is not None:
                    return None
                continue
            chunk = process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

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
            self._trouble = str(error)
            time.sleep(1.0)
            return
        with (self.folder / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", BRIDGE, json.dumps(self._settings | {"address": address})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=ray_head.environment(self.folder if self.address is None else self._token_folder),
            )  # fmt: skip
        self._buffer = b""
        hello = self._read(process, CONNECT_S)
        if hello is None or self._closed:
            process.kill()
            process.wait()
            self._trouble = f"the Ray cluster at {address} cannot be reached; see {self.folder / LOG_FILE}"
            return
        self._settings["homes"] = hello["homes"]
        self._members = {name: _spec(spec) for name, spec in hello["members"].items()}
        self._trouble = "" if self._members else "no node of the Ray cluster has a GPU"
        self._process = process

    def _end_bridge(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _spec(data: dict[str, Any]) -> NodeSpec:
    return node_from_dict({key: value for key, value in data.items() if key != "pid"})
