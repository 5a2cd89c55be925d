"""Imitates nvidia-cuda-mps-control for the software GPU: the command and the MPS control daemon that it starts.

`python -m cotenant.softgpu.mps FOLDER 595|615|620` writes the command, as of that driver release, into a folder. The
environment variable COTENANT_SOFTGPU_MPS must then name the command. The daemon has real sockets.

Like NVIDIA's daemon, it has two protocols, which are two sets of commands. Protocol 2 is the default: one server, and
commands that list servers and clients. Protocol 3 (from release 615 on, if `--protocol 3` or
CUDA_MPS_PROTOCOL_VERSION=3 asks for it) also has namespaces and SM partitions (mps_world.py).

Tests change the imitation in three ways:

- Variables: MPS_STANDIN_RELEASE sets another driver release than that of the command, and MPS_STANDIN_GPUS
  (UUID=SMS,...) other GPUs than those of the software GPU.
- Files in the pipe folder make the daemon misbehave. With `refuse` it does not start; with `slow` it takes one second
  to start, and one to end; with `mute` get_server_list fails (protocol 2); with `initializing` clients wait; with
  `silent` it forgets new servers, as if they had ended at once.
- The command `standin fault SERVER` puts a server into the state of fault.

A program connects to the socket `control` in its pipe folder and sends the line "client NAME=VALUE ..." with its
visible GPUs and its CUDA_MPS_* variables, then a line "device UUID" for each context.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path

from cotenant.softgpu.mps_world import FAULT, MODULES, Client, RefusedError, Server, World

RELEASES = (595, 615, 620)
RELEASE = int(os.environ.get("MPS_STANDIN_RELEASE") or RELEASES[0])
# UUIDs and SMs of the software GPU's devices (native/softgpu/state.c, native/abi/contention.h)
SOFT_GPUS = ",".join(f"GPU-636f7465-6e61-6e74-{ord('0') + i:02x}73-6f6674677075=132" for i in range(16))
PIPE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
USAGE = "usage: nvidia-cuda-mps-control [-d | -f] [-v] [-h]"
USAGE_3 = (
    "usage: nvidia-cuda-mps-control [-d | -f] [-m | --multiuser] [-p | --protocol 2|3] [-q | --quit] [-v] [-h]\n"
    f"modules: {' '.join(MODULES)}"
)


COMMAND = """#!{python} -SE
import sys
from _socket import AF_UNIX, SHUT_WR, SOCK_STREAM, socket
from os import environ
def ask(words):
    connection = socket(AF_UNIX, SOCK_STREAM)
    try:
        connection.connect(environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps") + "/control")
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    connection.sendall(b"order " + chr(31).join(words).encode())
    connection.shutdown(SHUT_WR)
    answer = b""
    while part := connection.recv(65536):
        answer += part
    code, out, error = answer.decode().split(chr(31))
    sys.stdout.write(out)
    sys.stderr.write(error)
    return int(code)
words = sys.argv[1:]
if words == ["-q"] or words == ["--quit"]:
    sys.exit(ask(["quit"]))
if not words:
    sys.exit(max([ask(line.split()) for line in sys.stdin if line.strip()], default=0))
if words[0].startswith("-") or words[-1] == "help":
    environ["MPS_STANDIN_RELEASE"] = environ.get("MPS_STANDIN_RELEASE") or "{release}"
    sys.path.insert(0, {source!r})
    from cotenant.softgpu.mps import main
    sys.exit(main(words))
sys.exit(ask(words))
"""


def install(folder: Path, release: int = RELEASES[0]) -> Path:
    """Write a stand-in for nvidia-cuda-mps-control into a folder and return its path. The stand-in imports little,
    since tests call it often."""
    command = folder / "nvidia-cuda-mps-control"
    source = str(Path(__file__).resolve().parents[2])
    command.write_text(COMMAND.format(python=sys.executable, source=source, release=release))
    command.chmod(0o755)
    return command


class Daemon:
    """The imitated MPS control daemon: it serves programs and commands until it gets the command to quit."""

    def __init__(self, protocol: int, multiuser: bool) -> None:
        pairs = [pair.split("=") for pair in (os.environ.get("MPS_STANDIN_GPUS") or SOFT_GPUS).split(",")]
        self.protocol = protocol
        sms = {uuid: int(count) for uuid, count in pairs}
        self.world = World(sms, RELEASE, os.geteuid(), multiuser=multiuser, pipe=str(PIPE))
        self.selector = selectors.DefaultSelector()
        self.sockets: dict[tuple[str, str], socket.socket] = {}
        self.programs: dict[socket.socket, Client] = {}
        self.waiting: list[tuple[socket.socket, tuple[str, str], list[str]]] = []
        self.alive, self.keep = os.pipe()  # a pipe whose closing ends the servers together with the daemon
        self.running = True

    def run(self) -> None:
        self.open_sockets()
        with contextlib.suppress(OSError):
            os.setsid()
        while self.running:
            for key, _ in self.selector.select(0.05):
                key.data(key.fileobj)
            if self.running:  # after the order to quit, the sockets may be those of the next daemon
                self.look()

    def open_sockets(self) -> None:
        """Open the main socket and a socket for each new namespace of a server, and close those of deleted namespaces.
        """
        wanted = {("", "default"), *((s.name, n) for s in self.world.servers.values() for n in s.spaces)}
        for server, space in wanted - set(self.sockets):
            for path in self.paths(server, space):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(str(path))
                listener.listen(32)
                os.chmod(path, 0o666)
                self.sockets[(server, space)] = listener
                self.selector.register(listener, selectors.EVENT_READ, partial(self.accept, key=(server, space)))
        for key in set(self.sockets) - wanted:
            self.selector.unregister(self.sockets[key])
            self.sockets.pop(key).close()
            for path in self.paths(*key):
                path.unlink(missing_ok=True)

    def paths(self, server: str, space: str) -> list[Path]:
        if not server:
            return [PIPE / "control"]
        return [PIPE / server / "control"] if space == "default" else [PIPE / server / space / "control"]

    def look(self) -> None:
        """Notice servers that were killed, end the connections of terminated clients, and accept clients that had to
        wait.
        """
        for server in list(self.world.servers.values()):
            if server.pid and not Path(f"/proc/{server.pid}/stat").exists():
                del self.world.servers[server.name]
                for there in [c for c in self.world.clients if c.server == server.name]:
                    self.world.clients.remove(there)
                    self.world.dropped.append(there)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        while self.world.dropped:
            client = self.world.dropped.pop()
            for connection, mine in list(self.programs.items()):
                if mine is client:
                    del self.programs[connection]
                    with contextlib.suppress(OSError):
                        connection.send(b"error 810\n")
        self.open_sockets()
        if self.waiting and not (PIPE / "initializing").exists():
            waiting, self.waiting = self.waiting, []
            for connection, key, words in waiting:
                self.welcome(connection, key, words)

    def start_servers(self) -> None:
        for server in self.world.servers.values():
            if not server.pid:
                server.pid = self.start_server()
        if (PIPE / "silent").exists():
            self.world.servers.clear()

    def start_server(self) -> int:
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            # all files but one are closed, since a command waits until its connection is closed
            os.closerange(3, self.alive)
            os.closerange(self.alive + 1, 65536)
            os.read(self.alive, 1)
            os._exit(0)
        return pid

    def accept(self, listener: socket.socket, key: tuple[str, str]) -> None:
        connection, _ = listener.accept()
        self.selector.register(connection, selectors.EVENT_READ, partial(self.hear, key=key))

    def hear(self, connection: socket.socket, key: tuple[str, str]) -> None:
        try:
            text = connection.recv(65536).decode()
        except OSError:
            text = ""
        if not text:
            self.selector.unregister(connection)
            client = self.programs.pop(connection, None)
            if client is not None:
                self.world.gone(client)
            connection.close()
            return
        for line in text.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "client":
                self.welcome(connection, key, rest.split())
            elif kind == "device" and connection in self.programs:
                self.programs[connection].devices.append(rest)
            elif kind == "order":
                answer = self.order(rest.split("\x1f"), peer_of(connection)[1])
                connection.sendall("\x1f".join(map(str, answer)).encode())

    def welcome(self, connection: socket.socket, key: tuple[str, str], words: list[str]) -> None:
        if (PIPE / "initializing").exists():
            self.waiting.append((connection, key, words))
            return
        pid, uid = peer_of(connection)
        variables = dict(word.split("=", 1) for word in words)
        visible = tuple(filter(None, variables.pop("visible", "").split(",")))
        client = Client(pid, uid, *key, visible, variables)
        if self.protocol == 2:
            percent = float(variables.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
            sms = next(iter(self.world.sms.values())) * percent / 100
            self.world.servers.setdefault("2", Server("2", uid, tuple(self.world.sms)))
            client.server = "2"
            self.world.clients.append(client)
            answer = f"ok {int(sms) // 2 * 2} {self.world.memory_of(client, None) or 0}"
        else:
            answer = self.world.connect(client)
        self.start_servers()
        if answer.startswith("ok"):
            self.programs[connection] = client
        connection.sendall(answer.encode() + b"\n")

    def order(self, words: list[str], uid: int) -> tuple[int, str, str]:
        """Carry out a command of a caller with user id `uid`; return its exit code, output and error text."""
        with contextlib.suppress(OSError), open(PIPE / "calls", "a") as calls:
            calls.write(" ".join(words) + "\n")
        if words[:2] == ["standin", "fault"]:
            self.world.servers[words[2]].status = FAULT
            return 0, "", ""
        if words[0] == "quit":
            if (PIPE / "slow").exists():
                (PIPE / "slow").unlink()
                time.sleep(1)
                with open(PIPE / "calls", "a") as calls:
                    calls.write("ended\n")
            self.running = False
            # the sockets are removed before the answer is sent, since another daemon may be started right after it
            for path in PIPE.rglob("control"):
                path.unlink()
            return 0, "", ""
        if self.protocol == 2:
            if words[0] == "get_server_list":
                muted = (PIPE / "mute").exists()
                return int(muted), "".join(f"{s.pid}\n" for s in self.world.servers.values()), ""
            if words[0] == "get_client_list":
                return 0, "".join(f"{c.pid}\n" for c in self.world.clients), ""
            return 1, "", f"unknown command {' '.join(words)}"  # commands of protocol 3 are unknown, too
        try:
            out = self.world.command(words, uid)
        except (RefusedError, KeyError, ValueError) as error:
            return 1, "", str(error)
        self.start_servers()
        self.open_sockets()
        return 0, out, ""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user id of a connected process."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def start(protocol: int, multiuser: bool) -> int:
    """Start the imitated MPS control daemon in the background; return the exit code of the command that starts it."""
    if (PIPE / "refuse").exists():
        print("An instance of this daemon is already running", file=sys.stderr)
        return 1
    if (PIPE / "slow").exists():
        time.sleep(1)
    PIPE.mkdir(parents=True, exist_ok=True)
    with open(PIPE / "calls", "a") as calls:
        calls.write(f"start {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n")
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)
        return 0
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    daemon = Daemon(protocol, multiuser)
    daemon.open_sockets()
    os.close(reading)
    os.close(writing)
    daemon.run()
    os._exit(0)


def main(arguments: list[str]) -> int:
    """Carry out a command of nvidia-cuda-mps-control with these arguments; return its exit code."""
    protocol = 2
    words: list[str] = []
    flags: set[str] = set()
    pending = iter(arguments)
    for word in pending:
        if word in ("-p", "--protocol") and RELEASE >= 615:
            protocol = int(next(pending))
        elif word.startswith("-") and not words:
            flags.add(word)
        else:
            words.append(word)
    protocol = int(os.environ.get("CUDA_MPS_PROTOCOL_VERSION", protocol)) if RELEASE >= 615 else 2
    newer = {"-m", "--multiuser", "-a", "--apply", "-p", "-q", "--quit"} & flags
    if "-v" in flags:
        print("CUDA MPS Version 13010")
        return 0
    if "-h" in flags or (newer and protocol == 2):
        print(USAGE_3 if protocol == 3 else USAGE, file=sys.stdout if "-h" in flags else sys.stderr)
        return 0 if "-h" in flags and not newer else 1 if newer else 0
    if "-d" in flags:
        return start(protocol, bool({"-m", "--multiuser"} & flags))
    print(World({}, RELEASE, 0).command(words, 0), end="")  # help
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in map(str, RELEASES):
        sys.exit(f"usage: python -m cotenant.softgpu.mps FOLDER {'|'.join(map(str, RELEASES))}")
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    print(install(Path(sys.argv[1]), int(sys.argv[2])))
