"""A fleet over TCP: a process per node that holds its NodeJobs, and an executor that reaches them by address.

Stand-in for Ray where many drills are run: it starts in a second. Run as `python tcp_fleet.py node FOLDER NODE.json`
or `python tcp_fleet.py controller CONFIG.json`.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cotenant.core import logs
from cotenant.fleet import session
from cotenant.fleet.executors.base import Executor, Orders
from cotenant.fleet.noderuntime.nodejobs import NodeJobs
from cotenant.fleet.nodes import NodeSpec, node_from_dict
from cotenant.fleet.session import Fleet, FleetOptions

PORT = 7700
ANSWER_S, CONNECT_S = 1.5, 1.0


def serve_node(folder: Path, spec: NodeSpec) -> None:
    """Serve a node's jobs at its address until killed."""
    jobs, lock = NodeJobs(folder, spec, patience_s=10.0), threading.Lock()

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                order = json.loads(line)
                with lock:
                    answer = jobs.exchange(order["epoch"], order["number"], order["orders"])
                try:
                    connection.sendall(json.dumps(answer | {"number": order["number"]}).encode() + b"\n")
                except OSError:
                    return

    with socket.create_server((spec.address, PORT)) as server:
        while True:
            connection = server.accept()[0]
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


class TcpExecutor(Executor):
    """A node is a member while a connection to it is open. A node that does not answer in time loses its connection,
    but orders that were sent on it may arrive later."""

    name = "tcp"

    def __init__(self, nodes: list[NodeSpec]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._open: dict[str, socket.socket] = {}
        self._closed = False
        for name in self._nodes:
            threading.Thread(target=self._connect, args=(name,), daemon=True).start()
        deadline = time.monotonic() + 10.0
        while len(self._open) < len(nodes) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _connect(self, name: str) -> None:
        while not self._closed:
            if name not in self._open:
                try:
                    made = socket.create_connection((self._nodes[name].address, PORT), CONNECT_S)
                    self._open[name] = made
                except OSError:
                    pass
            time.sleep(0.1)

    def members(self) -> dict[str, NodeSpec]:
        return {name: self._nodes[name] for name in sorted(self._open)}

    def _drop(self, name: str) -> None:
        connection = self._open.pop(name, None)
        if connection is not None:
            connection.close()

    def exchange(self, epoch: int, orders: Orders) -> dict[str, dict[str, Any] | None]:
        number = time.monotonic_ns()
        answers: dict[str, dict[str, Any] | None] = dict.fromkeys(orders)
        waiting: dict[socket.socket, tuple[str, bytes]] = {}
        for name, wanted in orders.items():
            connection = self._open.get(name)
            if connection is None:
                continue
            line = json.dumps({"epoch": epoch, "number": number, "orders": wanted}).encode() + b"\n"
            try:
                connection.sendall(line)
                waiting[connection] = (name, b"")
            except OSError:
                self._drop(name)
        deadline = time.monotonic() + ANSWER_S
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for connection in select.select(list(waiting), [], [], left_s)[0]:
                name, had = waiting.pop(connection)
                try:
                    piece = connection.recv(1 << 20)
                except OSError:
                    piece = b""
                if not piece:
                    self._drop(name)
                elif piece.endswith(b"\n"):
                    answers[name] = json.loads(had + piece)
                else:
                    waiting[connection] = (name, had + piece)
        for name, _ in waiting.values():
            self._drop(name)
        return answers

    def read_log(self, node: str, path: str, offset: int) -> tuple[bytes, int]:
        return b"", offset

    def close(self) -> None:
        self._closed = True
        for name in list(self._open):
            self._drop(name)


def run_controller(config: dict[str, Any]) -> None:
    """Run a controller until it is told to end; `store`: URL of its store, or None."""
    logs.configure()
    nodes = [node_from_dict(node) for node in config["nodes"]]
    options = FleetOptions(
        folder=Path(config["folder"]), store=config["store"], lease_s=1.0, keep_s=config["keep_s"], grace_s=1.0
    )

    session.make_executor = lambda _: TcpExecutor(nodes)  # called only when this controller leads
    fleet = Fleet(options, waiting=lambda: print("waits", flush=True))
    fleet.start()
    print("leads", flush=True)
    fleet.join()


if __name__ == "__main__":
    if sys.argv[1] == "node":
        serve_node(Path(sys.argv[2]), node_from_dict(json.loads(Path(sys.argv[3]).read_text())))
    else:
        run_controller(json.loads(Path(sys.argv[2]).read_text()))
