"""A stand-in for nvidia-cuda-mps-control: a daemon of protocol 2 or 3 with real sockets, and its command.

`MPS_STANDIN_RELEASE` (595, 615, 620) says which driver it is of, `MPS_STANDIN_GPUS` (UUID=SMS,...) what the node has.
Files in the pipe folder make it fail: `refuse` the start, `slow` one second for start and end, `mute` no answer to
get_server_list, `initializing` clients wait for as long as the file is there, `silent` servers end when they are made.
`standin fault SERVER` puts a server into its state of fault. Programs connect by the socket `control` of their pipe
folder: "client NAME=VALUE ..." (visible GPUs and CUDA_MPS_* variables), then "device UUID" for each context.
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
from pathlib import Path

from mps_world import FAULT, MODULES, Client, RefusedError, Server, World

RELEASE = int(os.environ.get("MPS_STANDIN_RELEASE", "595"))
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
    sys.path.insert(0, {helpers!r})
    import mps_standin
    sys.exit(mps_standin.main(words))
sys.exit(ask(words))
"""


def install(folder: Path) -> Path:
    """The command as a file; an order to a daemon that runs takes no more of Python than it must."""
    command = folder / "nvidia-cuda-mps-control"
    command.write_text(COMMAND.format(python=sys.executable, helpers=str(Path(__file__).resolve().parent)))
    command.chmod(0o755)
    return command


class Daemon:
    """Serves until it is told to quit."""

    def __init__(self, protocol: int, multiuser: bool) -> None:
        pairs = [pair.split("=") for pair in os.environ.get("MPS_STANDIN_GPUS", "").split(",") if pair]
        self.protocol = protocol
        self.world = World({uuid: int(sms) for uuid, sms in pairs}, RELEASE, os.geteuid(), multiuser=multiuser)
        self.world.pipe = str(PIPE)
        self.selector = selectors.DefaultSelector()
        self.doors: dict[tuple[str, str], socket.socket] = {}
        self.programs: dict[socket.socket, Client] = {}
        self.waiting: list[tuple[socket.socket, tuple[str, str], list[str]]] = []
        self.alive, self.keep = os.pipe()  # the servers end when the daemon does
        self.running = True

    def run(self) -> None:
        self.open_doors()
        with contextlib.suppress(OSError):
            os.setsid()
        while self.running:
            for key, _ in self.selector.select(0.05):
                key.data(key.fileobj)
            self.look()

    def open_doors(self) -> None:
        """A socket for each namespace, and the main one."""
        wanted = {("", "default"), *((s.name, n) for s in self.world.servers.values() for n in s.spaces)}
        for server, space in wanted - set(self.doors):
            for path in self.paths(server, space):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                door.bind(str(path))
                door.listen(32)
                os.chmod(path, 0o666)
                self.doors[(server, space)] = door
                self.selector.register(door, selectors.EVENT_READ, lambda d, k=(server, space): self.accept(d, k))
        for key in set(self.doors) - wanted:
            self.selector.unregister(self.doors[key])
            self.doors.pop(key).close()
            for path in self.paths(*key):
                path.unlink(missing_ok=True)

    def paths(self, server: str, space: str) -> list[Path]:
        if not server:
            return [PIPE / "control"]
        return [PIPE / server / "control"] if space == "default" else [PIPE / server / space / "control"]

    def look(self) -> None:
        """What happens by itself: servers that were killed, clients that were terminated or may come in now."""
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
        self.open_doors()
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
            os.close(self.keep)
            self.selector.close()
            os.closerange(3, self.alive)
            os.read(self.alive, 1)
            os._exit(0)
        return pid

    def accept(self, door: socket.socket, key: tuple[str, str]) -> None:
        connection, _ = door.accept()
        self.selector.register(connection, selectors.EVENT_READ, lambda c: self.hear(c, key))

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
            answer = f"ok {int(sms) // 2 * 2} 0"
        else:
            answer = self.world.connect(client)
        self.start_servers()
        if answer.startswith("ok"):
            self.programs[connection] = client
        connection.sendall(answer.encode() + b"\n")

    def order(self, words: list[str], uid: int) -> tuple[int, str, str]:
        """Exit code and output of a command."""
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
            for path in PIPE.rglob("control"):  # before the answer: a daemon may be started right after it
                path.unlink()
            return 0, "", ""
        if self.protocol == 2:
            if words[0] == "get_server_list":
                muted = (PIPE / "mute").exists()
                return int(muted), "".join(f"{s.pid}\n" for s in self.world.servers.values()), ""
            if words[0] == "get_client_list":
                return 0, "".join(f"{c.pid}\n" for c in self.world.clients), ""
            return 1, "", f"unknown command {' '.join(words)}"  # also what protocol 3 would take
        try:
            out = self.world.command(words, uid)
        except (RefusedError, KeyError, ValueError) as error:
            return 1, "", str(error)
        self.start_servers()
        self.open_doors()
        return 0, out, ""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", raw)[:2]


def start(protocol: int, multiuser: bool) -> int:
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
    daemon.open_doors()
    os.close(reading)
    os.close(writing)
    daemon.run()
    os._exit(0)


def main(arguments: list[str]) -> int:
    protocol, words, flags = 2, [], set()
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
