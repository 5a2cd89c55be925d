"""Imitates the state of an MPS control daemon of protocol 3: servers, namespaces, clients, SM partitions.

All texts are from the manual (NVIDIA's pages for releases 615 and 620) as far as it shows them; none was recorded from
a driver. `World` starts no processes: the daemon in mps.py gives it commands and clients.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

NAME = re.compile(r"[a-z0-9_]{1,64}")
SIZE = re.compile(r"(\d+)([KMG]?)")
CHUNK_SMS = 8
READY, FAULT, INITIALIZING = "Ready", "Fault", "Initializing"
NOT_PERMITTED, SERVER_NOT_READY, CLIENT_TERMINATED = 800, 807, 810
MODULES = ["server", "namespace", "client", "device", "sm-partition", "feature", "memacct", "context-share"]
LIMITS = ("--pinned-memory-limit", "--active-thread-percentage", "--client-priority")
HELP = {  # help texts from the manual; `NEWER` is what release 620 adds to them
    ("server", "set"): "server set NAME --pinned-memory-limit= --active-thread-percentage= --client-priority=",
    ("namespace", "set"): "namespace set NAME --server= --pinned-memory-limit= --active-thread-percentage=",
    ("sm-partition", "create"): "sm-partition create NAME --server= --device= --chunks= --include-remainder=",
}
NEWER = {
    ("server", "set"): " --timeslice-pct=",
    ("namespace", "set"): " --cgroup= --cgroup-depth=",
    ("sm-partition", "create"): " --shareable= --max-chunks=",
}


class RefusedError(Exception):
    """Raised if the MPS daemon refuses a command; the text is its error message."""


@dataclass
class Limits:
    """The limits of a namespace of an MPS server."""

    percent: float = 100.0
    memory: int | None = None
    priority: int = 0


@dataclass
class Server:
    """A named MPS server and its namespaces."""

    name: str
    uid: int
    devices: tuple[str, ...]
    pid: int = 0
    status: str = READY
    spaces: dict[str, Limits] = field(default_factory=lambda: {"default": Limits()})
    weight: int | None = None
    locality: bool = False


@dataclass
class Partition:
    """A partition of an MPS server: chunks of SMs of one GPU."""

    server: str
    device: str
    name: str
    chunks: int
    # the most chunks that the partition may use, including those that it borrows from other partitions; equal to
    # `chunks` if it may not borrow
    most: int
    id: str


@dataclass
class Client:
    """A process that is connected to an MPS server."""

    pid: int
    uid: int
    server: str
    space: str
    visible: tuple[str, ...]
    variables: dict[str, str]
    devices: list[str] = field(default_factory=list)


def size_of(text: str) -> int | None:
    """Parse a size such as 4G or 512M into bytes; None for unlimited."""
    found = SIZE.fullmatch(text)
    if text == "unlimited":
        return None
    if found is None:
        raise RefusedError(f"invalid size '{text}'")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]


class World:
    """The state of one MPS control daemon."""

    def __init__(self, sms: dict[str, int], release: int, uid: int, *, multiuser: bool = False, pipe: str = "") -> None:
        """Create the state of a daemon without servers. `sms`: SMs of each GPU of the node by UUID. `pipe`: path of
        the daemon's pipe folder, which `server list` and `namespace list` show.
        """
        self.sms, self.release, self.uid, self.multiuser = sms, release, uid, multiuser
        self.servers: dict[str, Server] = {}
        self.partitions: list[Partition] = []
        self.clients: list[Client] = []
        self.dropped: list[Client] = []  # terminated clients, whose connections the daemon closes
        self.pipe = pipe

    # -- commands --------------------------------------------------------------------------------------------------

    def command(self, words: list[str], uid: int) -> str:
        """Carry out a command `MODULE VERB ...` and return its output. Raises RefusedError with the text for standard
        error.
        """
        if uid not in (0, self.uid):
            raise RefusedError("permission denied: commands are accepted from root and the daemon's owner")
        plain = [word for word in words if "=" not in word and not word.startswith("--")]
        options = {}
        for word in words:
            if "=" in word or word.startswith("--"):
                key, _, value = word.partition("=")
                options["--" + key.lstrip("-")] = value
        module, verb = [*plain, "", ""][:2]
        if module not in MODULES:
            raise RefusedError(f"unknown module '{module}'")
        if plain[-1] == "help":
            newer = NEWER if self.release >= 620 else {}
            return "usage: " + HELP.get((module, verb), module) + newer.get((module, verb), "") + "\n"
        name = f"_{module.replace('-', '_')}_{verb}"
        if not hasattr(self, name):
            raise RefusedError(f"unknown command '{module} {verb}'")
        return str(getattr(self, name)(plain[2:], options))

    def _server_create(self, names: list[str], options: dict[str, str]) -> str:
        (name,) = names
        if not NAME.fullmatch(name):
            raise RefusedError(f"invalid server name '{name}'")
        if name in self.servers:
            raise RefusedError(f"server '{name}' already exists")
        uid = int(options.get("--uid", self.uid))
        if self.multiuser and uid != 0:
            raise RefusedError("only --uid=0 is allowed in multi-user mode")
        devices = tuple(filter(None, options.get("--allowed-devices", "").split(","))) or tuple(self.sms)
        if all(device in self.sms for device in devices):
            self.servers[name] = Server(name, uid, devices, locality=options.get("--locality-domains") == "true")
        return f"server '{name}' created\n"  # a server that sees no GPU ends at once, but the command succeeds

    def _server_delete(self, names: list[str], options: dict[str, str]) -> str:
        server = self._server(names[0])
        self._end_clients([c for c in self.clients if c.server == server.name], "--force" in options)
        del self.servers[server.name]
        self.partitions = [one for one in self.partitions if one.server != server.name]
        return ""

    def _server_list(self, names: list[str], options: dict[str, str]) -> str:
        head = "name uid pid status pipe-directory allowed-devices context-ids"
        rows = [
            [s.name, s.uid, s.pid, s.status, f"{self.pipe}/{s.name}", " ".join(s.devices), ""]
            for s in self.servers.values()
            if not names or s.name == names[0]
        ]
        return table(head, rows, options)

    def _server_set(self, names: list[str], options: dict[str, str]) -> str:
        server = self._server(names[0])
        if "--timeslice-pct" in options:
            if self.release < 620:
                raise RefusedError("unknown option '--timeslice-pct'")
            server.weight = int(options.pop("--timeslice-pct"))
            return ""
        self._limit(server.spaces["default"], options)
        return ""

    def _namespace_create(self, names: list[str], options: dict[str, str]) -> str:
        server = self._server(options.pop("--server", ""))
        if not NAME.fullmatch(names[0]):
            raise RefusedError(f"invalid namespace name '{names[0]}'")
        if names[0] in server.spaces:
            raise RefusedError(f"namespace '{names[0]}' already exists")
        # the namespace inherits no limits, so it has the whole GPU until limits are set
        server.spaces[names[0]] = Limits()
        return ""

    def _namespace_delete(self, names: list[str], options: dict[str, str]) -> str:
        server, _ = self._space(names, options)
        if names[0] == "default":
            raise RefusedError("the default namespace cannot be deleted")
        there = [c for c in self.clients if (c.server, c.space) == (server.name, names[0])]
        self._end_clients(there, "--force" in options)
        del server.spaces[names[0]]
        return ""

    def _namespace_list(self, names: list[str], options: dict[str, str]) -> str:
        head = "name server server-status pinned-memory-limit active-thread-percentage client-priority pipe-directory"
        wanted = options.get("--server")
        rows = [
            [n, s.name, s.status, self._size(x.memory), f"{x.percent:.2f}", x.priority, f"{self.pipe}/{s.name}/{n}"]
            for s in self.servers.values()
            for n, x in s.spaces.items()
            if wanted in (None, s.name) and (not names or n == names[0])
        ]
        return table(head, rows, options)

    def _namespace_set(self, names: list[str], options: dict[str, str]) -> str:
        self._limit(self._space(names, options)[1], options)
        return ""

    def _client_list(self, names: list[str], options: dict[str, str]) -> str:
        rows = [
            [c.pid, c.server, device, c.space, "program"]
            for c in self.clients
            for device in c.devices or [""]
            if options.get("--server") in (None, c.server)
        ]
        return table("pid server device namespace command", rows, options)

    def _client_terminate(self, names: list[str], options: dict[str, str]) -> str:
        there = [c for c in self.clients if str(c.pid) == names[0]]
        if not there:
            raise RefusedError(f"no client {names[0]}")
        self._end_clients(there, True)
        return ""

    def _sm_partition_create(self, names: list[str], options: dict[str, str]) -> str:
        server, device = self._server(options["--server"]), options["--device"]
        chunks, newer = int(options["--chunks"]), {"--shareable", "--max-chunks"} & set(options)
        if newer and self.release < 620:
            raise RefusedError(f"unknown option '{min(newer)}'")
        if device not in server.devices:
            raise RefusedError(f"device '{device}' is not of server '{server.name}'")
        if server.locality:
            raise RefusedError("SM partitions are not supported with locality domains")
        if any(device in c.devices for c in self.clients):
            raise RefusedError("the device has active clients")
        if any((one.server, one.device, one.name) == (server.name, device, names[0]) for one in self.partitions):
            raise RefusedError(f"SM partition '{names[0]}' already exists")
        if chunks > self._free(device):
            raise RefusedError(f"not enough SM chunks: {chunks} requested, {self._free(device)} available")
        most = int(options.get("--max-chunks", chunks)) if options.get("--shareable") == "true" else chunks
        made = Partition(server.name, device, names[0], chunks, most, f"{device}/{secrets.token_urlsafe(27)}")
        self.partitions.append(made)
        what = f"SM partition '{names[0]}' created (sm-count={chunks * CHUNK_SMS})"
        return f"{what}\nCUDA_MPS_SM_PARTITION={made.id}\n"

    def _sm_partition_delete(self, names: list[str], options: dict[str, str]) -> str:
        found = [p for p in self.partitions if (p.server, p.device, p.name) == self._key(names, options)]
        if not found:
            raise RefusedError(f"no SM partition '{names[0]}'")
        if any(found[0].device in c.devices for c in self.clients):
            raise RefusedError("the device has active clients")
        self.partitions.remove(found[0])
        return ""

    def _sm_partition_list(self, names: list[str], options: dict[str, str]) -> str:
        head = "server device name chunks sm-count include-remainder status visible-uuid"
        rows: list[list[Any]] = [
            [p.server, p.device, p.name, p.chunks, p.chunks * CHUNK_SMS, "false", "created", p.id]
            for p in self.partitions
        ]
        for server in self.servers.values():
            for device in server.devices:
                left = self._free(device)
                rows.append([server.name, device, "", left, left * CHUNK_SMS, "false", "unallocated", ""])
        server_name, device_id = options.get("--server"), options.get("--device")
        return table(head, [r for r in rows if server_name in (None, r[0]) and device_id in (None, r[1])], options)

    # -- clients ---------------------------------------------------------------------------------------------------

    def connect(self, client: Client) -> str:
        """Admit a process that connected to the socket of a namespace, or to the main socket if `server` is empty.
        Returns "ok SMS BYTES" (the number of SMs that the process sees, and its limit of GPU memory, 0 for none) or
        "error N", N being the CUDA error code that the process gets.
        """
        if client.server == "":  # each user gets a server of its own, without any limit
            client.server = f"uid_{client.uid}"
            if client.server not in self.servers:
                self.servers[client.server] = Server(client.server, client.uid, tuple(self.sms))
        server = self.servers[client.server]
        if client.uid != self.uid and not self.multiuser:
            return f"error {NOT_PERMITTED}"
        if server.status == FAULT:
            return f"error {SERVER_NOT_READY}"
        limits = server.spaces[client.space]
        self.clients.append(client)
        return f"ok {self._sms(client, limits)} {self.memory_of(client, limits.memory) or 0}"

    def gone(self, client: Client) -> None:
        """Remove an ended client. A server in the state of fault accepts clients again when all clients that it had
        have ended.
        """
        if client in self.clients:
            self.clients.remove(client)
        server = self.servers.get(client.server)
        if server is not None and not any(c.server == server.name for c in self.clients):
            server.status = READY if server.status == FAULT else server.status

    def _sms(self, client: Client, limits: Limits) -> int:
        """Return the number of SMs that a client sees: the percentage of the GPU's SMs that its namespace allows, but
        at most those that its partition may use. The client's own variable for a percentage has no effect.
        """
        whole = self.sms.get(client.visible[0] if client.visible else "", next(iter(self.sms.values())))
        most = math.floor(whole * limits.percent / 100)
        named = [p for p in self.partitions if p.id == client.variables.get("CUDA_MPS_SM_PARTITION")]
        return max(2, min([most, *(p.most * CHUNK_SMS for p in named)]) // 2 * 2)

    def memory_of(self, client: Client, most: int | None) -> int | None:
        """Return the memory limit of a client. The client's variable can only lower the limit `most`, but an entry in
        it for a GPU that the client does not see removes the limit.
        """
        own, found = client.variables.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""), [most]
        for entry in filter(None, own.split(",")):
            device, _, text = entry.partition("=")
            if device not in client.visible and device not in map(str, range(len(client.visible))):
                return None
            found.append(size_of(text))
        return min((size for size in found if size is not None), default=None)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _server(self, name: str) -> Server:
        if name not in self.servers:
            raise RefusedError(f"no server '{name}'")
        return self.servers[name]

    def _space(self, names: list[str], options: dict[str, str]) -> tuple[Server, Limits]:
        server = self._server(options.pop("--server", ""))
        if not names or names[0] not in server.spaces:
            raise RefusedError(f"no namespace '{names[0] if names else ''}'")
        return server, server.spaces[names[0]]

    def _key(self, names: list[str], options: dict[str, str]) -> tuple[str, str, str]:
        return options.get("--server", ""), options.get("--device", ""), names[0]

    def _limit(self, limits: Limits, options: dict[str, str]) -> None:
        if not options or not set(options) <= set(LIMITS):
            raise RefusedError(f"set takes {', '.join(LIMITS)}")
        percent = float(options.get("--active-thread-percentage", limits.percent))
        if not 1 <= percent <= 100:
            raise RefusedError(f"invalid active thread percentage '{percent:g}'")
        limits.percent = percent
        if "--pinned-memory-limit" in options:
            limits.memory = size_of(options["--pinned-memory-limit"])
        limits.priority = int(options.get("--client-priority", limits.priority))

    def _end_clients(self, there: list[Client], force: bool) -> None:
        if there and not force:
            raise RefusedError("there are active clients; use --force to terminate them")
        for client in there:
            self.clients.remove(client)
            self.dropped.append(client)

    def _free(self, device: str) -> int:
        return self.sms[device] // CHUNK_SMS - sum(p.chunks for p in self.partitions if p.device == device)

    def _size(self, size: int | None) -> str:
        return "unlimited" if size is None else f"{size >> 20}M"


def table(head: str, rows: list[list[Any]], options: dict[str, str]) -> str:
    """Format rows of a list as the option --format=table|csv[,noheader] demands."""
    form = options.get("--format", "table")
    lines = [head.split(), *[[str(cell) for cell in row] for row in rows]]
    if form.startswith("csv"):
        return "".join(",".join(line) + "\n" for line in lines["noheader" in form :])
    return "".join("  ".join(cell or "-" for cell in line) + "\n" for line in lines)
