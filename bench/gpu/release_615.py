"""Tests on driver 615 or newer what NVIDIA's documents leave open about memory limits by control group and protocol 3
of MPS. Run as root: release_615.py OUT.json [STEP,...]. On another machine it reports what is missing.

OUT.json gets one row per result; groups and servers are removed at the end. docs/howto/memory-limits.md uses the
results.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "src"))

from release_615_gate import gate  # noqa: E402

from cotenant.agent.mechanisms.mps_control import Control, abilities  # noqa: E402
from cotenant.core.cgroups import Cgroups, delegate_down  # noqa: E402
from cotenant.core.errors import WorkError  # noqa: E402
from cotenant.core.strength import Strength  # noqa: E402
from cotenant.devices.base import Gpu  # noqa: E402
from cotenant.devices.cards import NO_LIMIT, Card  # noqa: E402
from cotenant.devices.group_limits import reason_of  # noqa: E402
from cotenant.devices.memory_limit_probe import detect  # noqa: E402
from cotenant.devices.registry import device_named  # noqa: E402
from cotenant.policy.memory_limits import prospect  # noqa: E402

MIB = 1 << 20
LIMIT_MIB = 4096
COMMAND = "nvidia-cuda-mps-control"
MODULES = ("server", "namespace", "client", "device", "sm-partition", "feature", "memacct", "context-share")
SECONDS = float(os.environ.get("COTENANT_615_S", "10"))  # of each measurement of shares
MOST_CLIENTS = int(os.environ.get("COTENANT_615_CLIENTS", "128"))
DEVICE = device_named("soft" if os.environ.get("CUDA_VISIBLE_DEVICES") == "soft" else "all")


class Client:
    """A program that uses the driver API and joins a control group before it creates a context. It answers a line for
    each order."""

    def __init__(self, hierarchy: Cgroups | None = None, group: Path | None = None, **environment: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if (k, v) != ("CUDA_VISIBLE_DEVICES", "soft")}
        command = [sys.executable, str(HERE / "release_615_client.py"), str(DEVICE.driver()), DEVICE.name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=inherited | environment
        )
        if hierarchy is not None and group is not None:
            hierarchy.enter(group, self.process.pid)

    def ask(self, *order: object) -> list[float]:
        """Orders and answers: take MIB -> error code; free -> error code; info -> free and total MiB; sms -> number of
        SMs; busy -> seconds; count SECONDS -> kernels in that time, seconds of the first one, error code; wrong ->
        error code; context -> error code of its creation."""
        self.tell(*order)
        return self.hear()

    def tell(self, *order: object) -> None:
        """Send an order; `hear` waits for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, order)) + "\n")
        self.process.stdin.flush()

    def hear(self) -> list[float]:
        assert self.process.stdout is not None
        return [float(word) for word in self.process.stdout.readline().split()]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Card615:
    """The GPU, its control groups and the result file."""

    def __init__(self, gpu: Gpu, card: Card, hierarchy: Cgroups, out: Path, *, dmem: bool) -> None:
        self.gpu, self.card, self.hierarchy, self.out, self.dmem = gpu, card, hierarchy, out, dmem
        self.made: list[Path] = []

    def say(self, **row: object) -> None:
        with open(self.out, "a") as file:
            print(json.dumps(row), file=file, flush=True)
        print(json.dumps(row), flush=True)

    def group(self, *names: str) -> Path:
        path = self.hierarchy.root.joinpath(*names)
        if self.dmem:
            delegate_down(self.hierarchy, path, "dmem")
        self.hierarchy.create(path)
        self.made.append(path)
        return path

    def limit(self, group: Path, mib: int | None) -> str:
        """Set a limit; returns why it was refused, or nothing."""
        try:
            if mib is None:
                self.card.set_memory_limits(group, 0, NO_LIMIT)
            else:
                self.card.set_memory_limits(group, mib * MIB, mib * MIB)
        except OSError as error:
            return reason_of(error)
        return ""

    def used_mib(self, group: Path) -> float:
        return self.card.memory_limits(group).used_bytes / MIB

    def clean(self) -> None:
        for path in reversed(self.made):
            self.limit(path, None)
            until_s = time.monotonic() + 10
            while self.hierarchy.processes(path) and time.monotonic() < until_s:
                time.sleep(0.05)
            self.hierarchy.remove(path)
        self.made.clear()


def costs(card: Card615) -> None:
    """Measure how long it takes to create, limit, read and clear a group."""
    kinds: dict[str, list[float]] = {"group": [], "set": [], "get": [], "clear": []}
    for i in range(50):
        began = time.perf_counter()
        group = card.group(f"cotenant-615-{i}")
        for kind, work in (
            ("group", lambda: None),
            ("set", lambda group=group: card.limit(group, LIMIT_MIB)),
            ("get", lambda group=group: card.used_mib(group)),
            ("clear", lambda group=group: card.limit(group, None)),
        ):
            work()
            kinds[kind].append((time.perf_counter() - began) * 1e3)
            began = time.perf_counter()
    card.say(row="costs", **{f"{kind}_ms": round(statistics.median(found), 3) for kind, found in kinds.items()})


def rounding(card: Card615) -> None:
    """Set limits that are not round numbers, and read what the driver returns."""
    group = card.group("cotenant-615")
    for asked in (1000 * MIB, 1000 * MIB + 1, 4000 * MIB, 4096 * MIB + 4095):
        card.card.set_memory_limits(group, asked, asked)
        found = card.card.memory_limits(group)
        card.say(row="rounding", asked=asked, hard=found.hard_bytes, soft=found.soft_bytes)


def seen(card: Card615) -> None:
    """Find out what a program sees and gets with a limit on its group, and with one on the parent group."""
    for where in ("leaf", "parent"):
        parent = card.group(f"cotenant-615-{where}")
        leaf = card.group(parent.name, "leaf")
        card.limit(leaf if where == "leaf" else parent, LIMIT_MIB)
        client = Client(card.hierarchy, leaf)
        free_mib, total_mib = client.ask("info")
        context_mib, got = card.used_mib(leaf if where == "leaf" else parent), 0
        while (code := client.ask("take", 64)[0]) == 0 and got < 2 * LIMIT_MIB:
            got += 64
        card.say(row="seen", limit_on=where, limit_mib=LIMIT_MIB, free_mib=free_mib, total_mib=total_mib,
                 context_mib=context_mib, got_mib=got, code_past_it=code)  # fmt: skip
        client.end()


def order(card: Card615) -> None:
    """Find out whether memory allocated before the first limit counts, and what a limit below the present use does."""
    group = card.group("cotenant-615")
    client = Client(card.hierarchy, group)
    client.ask("take", 1024)
    refused = card.limit(group, LIMIT_MIB)
    card.say(row="limit after 1024 MiB", refused=refused, used_mib=card.used_mib(group))
    client.ask("take", 1024)
    refused = card.limit(group, 512)
    card.say(row="limit below use", refused=refused, used_mib=card.used_mib(group), next_code=client.ask("take", 1)[0])
    client.end()


def uncharged(card: Card615) -> None:
    """Measure the time until freed memory no longer counts, which matters for tenants whose memory is moved."""
    group = card.group("cotenant-615")
    card.limit(group, LIMIT_MIB)
    client = Client(card.hierarchy, group)
    client.ask("info")
    base, waits, refused = card.used_mib(group), [], 0
    for _ in range(30):
        refused += client.ask("take", 2048)[0] != 0
        client.ask("free")
        began = time.perf_counter()
        while card.used_mib(group) > base + 1 and time.perf_counter() - began < 2:
            pass
        waits.append((time.perf_counter() - began) * 1e3)
    card.say(row="uncharged", median_ms=round(statistics.median(waits), 2), most_ms=round(max(waits), 2),
             refused=refused, left_mib=card.used_mib(group) - base)  # fmt: skip
    client.end()


def texts(card: Card615) -> None:
    """Record the help texts of the MPS control command, unchanged, for the stand-in."""
    for words_ in (("-h",), *((module, "help") for module in MODULES), ("server", "set", "help"),
                   ("namespace", "set", "help"), ("sm-partition", "create", "help")):  # fmt: skip
        try:
            command = [COMMAND, "-p", "3", *words_]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            card.say(row="text", of=words_, error=str(error))
            return
        card.say(row="text", of=words_, code=done.returncode, out=done.stdout, err=done.stderr)


@contextlib.contextmanager
def mps(card: Card615, row: str, needs: str = "") -> Iterator[tuple[Control, Callable[..., Client]]]:
    """Run a daemon of protocol 3; yields its control, and a function that starts a program in a namespace of a server.
    All end with the block. `needs`: features of release 620. WorkError with the row's name if the command lacks one."""
    can = abilities(COMMAND)
    if can.protocol != 3:
        raise WorkError(f"{row}: {COMMAND} does not speak protocol 3")
    if needs and not getattr(can, needs):
        raise WorkError(f"{row}: what this asks about comes with release 620")
    folder = Path(tempfile.mkdtemp(prefix="cot-"))
    control = Control(COMMAND, folder / "pipe", folder / "log", 3)
    control.start()
    clients: list[Client] = []

    def start(server: str, space: str, **environment: str) -> Client:
        clients.append(Client(CUDA_MPS_PIPE_DIRECTORY=str(folder / "pipe" / server / space), **environment))
        return clients[-1]

    try:
        yield control, start
    finally:
        for client in clients:
            client.end()
        control.order("-q")


def serve(card: Card615, control: Control, server: str, *spaces: str) -> None:
    """Create a server for the GPU with namespaces."""
    control.order("server", "create", server, f"--allowed-devices={card.gpu.uuid}")
    for space in spaces:
        control.order("namespace", "create", space, f"--server={server}")


def namespaces(card: Card615) -> None:
    """Find out whether a running program follows a changed limit of its namespace, and how long the order takes."""
    with mps(card, "namespaces") as (control, start):
        serve(card, control, "s", "n")
        began = time.perf_counter()
        control.order("namespace", "set", "n", "--server=s", "--active-thread-percentage=50")
        order_ms = (time.perf_counter() - began) * 1e3
        client = start("s", "n")
        before = (client.ask("sms")[0], client.ask("busy")[0])
        control.order("namespace", "set", "n", "--server=s", "--active-thread-percentage=25")
        after = (client.ask("sms")[0], client.ask("busy")[0])
        card.say(row="namespaces", order_ms=round(order_ms, 1), sms=(before[0], after[0]),
                 slower_after_half=round(after[1] / before[1], 2), clients=control.order("client", "list"))  # fmt: skip


def together(first: Client, second: Client) -> tuple[list[float], list[float]]:
    """Let both programs count kernels at the same time."""
    for client in (first, second):
        client.tell("count", SECONDS)
    return first.hear(), second.hear()


def weights(card: Card615) -> None:
    """Find out whether servers with weights divide the GPU's time by them, and over which period."""
    with mps(card, "weights", "weights") as (control, start):
        clients = []
        for server in ("a", "b"):
            serve(card, control, server, "n")
            clients.append(start(server, "n"))
        alone = [client.ask("count", SECONDS)[0] for client in clients]
        for percent in (50, 70, 90):
            control.order("server", "set", "a", f"--timeslice-pct={percent}")
            control.order("server", "set", "b", f"--timeslice-pct={100 - percent}")
            a, b = together(*clients)
            card.say(row="weights", asked=percent, got_percent=round(100 * a[0] / max(1, a[0] + b[0]), 1),
                     seconds=SECONDS, of_alone=round(a[0] / alone[0] + b[0] / alone[1], 2))  # fmt: skip


def partitions(card: Card615, control: Control, *options: str) -> list[str]:
    """Divide the GPU's SMs into two partitions; returns the variables that place programs in them."""
    where = ("--server=s", f"--device={card.gpu.uuid}")
    chunks = max(int(row[3]) for row in control.rows("sm-partition", "list", *where) if row[6] == "unallocated")
    made = []
    for name in ("a", "b"):
        lent = [option.format(chunks=chunks) for option in options]
        text = control.order("sm-partition", "create", name, *where, f"--chunks={chunks // 2}", *lent)
        made.append(text.rpartition("CUDA_MPS_SM_PARTITION=")[2].strip())
    return made


def lending(card: Card615) -> None:
    """Measure how much an idle partition lends to another one, and how soon its owner gets it back."""
    with mps(card, "lending", "shareable") as (control, start):
        serve(card, control, "s", "n")
        clients = partitions(card, control, "--shareable=true", "--max-chunks={chunks}")
        a, b = (start("s", "n", CUDA_MPS_SM_PARTITION=one) for one in clients)
        alone = a.ask("count", SECONDS)
        b.ask("busy")
        quiet = b.ask("count", SECONDS)
        first, second = together(a, b)
        card.say(row="lending", alone=alone[0], beside=(first[0], second[0]), first_kernel_ms=round(second[1] * 1e3, 2),
                 first_kernel_alone_ms=round(quiet[1] * 1e3, 2), sms=(a.ask("sms")[0], b.ask("sms")[0]))  # fmt: skip


def faults(card: Card615) -> None:
    """Find out what a fault in one namespace does to a program in another namespace of the same server, and to the
    server."""
    _fault(card, "faults")


def partition_faults(card: Card615) -> None:
    """Repeat `faults` with an SM partition for each program, which should keep a fault from the other program."""
    _fault(card, "partition_faults", divided=True)


def _fault(card: Card615, row: str, *, divided: bool = False) -> None:
    with mps(card, row) as (control, start):
        serve(card, control, "s", "a", "b")
        mine = [{"CUDA_MPS_SM_PARTITION": one} for one in partitions(card, control)] if divided else [{}, {}]
        wrong, other = start("s", "a", **mine[0]), start("s", "b", **mine[1])
        other.ask("busy")
        other.tell("count", 2)
        code = wrong.ask("wrong")
        done = other.hear()
        status = control.rows("server", "list", "s")[0][3]
        wrong.end()
        after = control.rows("server", "list", "s")[0][3]
        card.say(row=row, code=code[0], other_kernels=done[0], other_code=done[2], server=status,
                 server_after=after, next_code=start("s", "b").ask("context")[0])  # fmt: skip


def clients(card: Card615) -> None:
    """Find out how many programs one server accepts."""
    with mps(card, "clients") as (control, start):
        serve(card, control, "s", "n")
        codes = []
        while len(codes) < MOST_CLIENTS and not any(codes):
            codes.append(start("s", "n").ask("context")[0])
        card.say(row="clients", taken=codes.count(0), tried=len(codes), last_code=codes[-1])


def gated(card: Card615) -> None:
    """Whether the driver shim, the agent's check of shares and the gate of latency-sensitive work hold under MPS."""
    if abilities(COMMAND).protocol != 3:
        raise WorkError(f"gate: {COMMAND} does not speak protocol 3")
    card.say(row="gate", seconds=SECONDS, **gate("soft" if DEVICE.simulated else card.gpu.uuid, SECONDS))


STEPS: dict[str, Callable[[Card615], None]] = {
    "costs": costs, "rounding": rounding, "seen": seen, "order": order, "uncharged": uncharged, "texts": texts,
    "namespaces": namespaces, "weights": weights, "lending": lending, "faults": faults,
    "partition_faults": partition_faults, "clients": clients, "gate": gated,
}  # fmt: skip


def main() -> int:
    """Run the requested steps, or report why this machine cannot answer."""
    steps = sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-") or set(steps) - set(STEPS):
        print(f"usage: release_615.py OUT.json [STEP,...]\nsteps: {', '.join(STEPS)}", file=sys.stderr)
        return 2
    gpus = DEVICE.gpus()
    hierarchy = DEVICE.cgroups()
    card = DEVICE.card(gpus[0].uuid) if gpus else None
    if card is None:
        print("there is no NVIDIA GPU here", file=sys.stderr)
        return 1
    found = detect(DEVICE, gpus[0])
    holds = prospect(found)
    if not holds.by.at_least(Strength.DRIVER) or hierarchy is None:
        print(f"this machine cannot answer: {holds.obstacles[0]}", file=sys.stderr)
        return 1
    machine = Card615(gpus[0], card, hierarchy, Path(sys.argv[1]), dmem=found.dmem)
    machine.say(row="machine", release=found.release, gpu=gpus[0].name, by=holds.by, why=holds.why,
                obstacles=holds.obstacles, kernel=os.uname().release)  # fmt: skip
    for name in steps:
        try:
            STEPS[name](machine)
        except (OSError, WorkError) as error:
            machine.say(row="fault", step=name, error=reason_of(error))
        finally:
            machine.clean()
    return 0


if __name__ == "__main__":
    sys.exit(main())
