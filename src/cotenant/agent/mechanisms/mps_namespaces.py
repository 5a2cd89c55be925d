"""Backend of the mechanism mps for MPS control protocol 3: one daemon with a namespace per tenant, which has the
tenant's SM limit; the tenant's programs cannot raise it.

A tenant that requests a fraction of the SMs gets an SM partition. From driver release 620 on, a partition can lend its
SMs to other tenants, and a tenant with a weight gets an MPS server of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.mechanisms.base import Enforcement, ShareSpec
from cotenant.agent.mechanisms.mps_control import (
    CLIENT_PRIORITY,
    LOG_FOLDER,
    PATIENCE_S,
    PIPE_FOLDER,
    Abilities,
    Control,
)
from cotenant.agent.mechanisms.mps_names import DEFAULT, SERVER, free_place
from cotenant.agent.mechanisms.proof import Client, Look, Place, Sms
from cotenant.core.errors import WorkError
from cotenant.devices.base import Gpu

LOG = logging.getLogger(__name__)
Answer = TypeVar("Answer")

# limits of clients that name no namespace
DEFAULT_LIMITS = ("--active-thread-percentage=1", "--pinned-memory-limit=256M")
STEP_MIB = 256  # granularity of the driver's memory limits
PARTITION = "CUDA_MPS_SM_PARTITION"


class _Row(NamedTuple):
    """A line of `sm-partition list`."""

    name: str
    chunks: int
    sms: int
    id: str


@dataclass
class _Granted:
    """The intended state of a tenant's namespace."""

    place: Place
    gpus: tuple[str, ...]
    percent: float
    memory_mib: int | None
    priority: int
    weight: float = 0.0
    enforcement: Enforcement = field(default_factory=Enforcement)

    def options(self) -> list[str]:
        """Options for `namespace set`."""
        found = [f"--active-thread-percentage={self.percent:g}", f"--client-priority={self.priority}"]
        return found if self.memory_mib is None else [*found, f"--pinned-memory-limit={self.memory_mib}M"]

    def differs(self, memory: str, percent: str, priority: str) -> bool:
        """Whether the limits that `namespace list` shows are not the intended ones. The driver may round sizes."""
        same_priority = not priority.isdigit() or int(priority) == self.priority
        if not same_priority or abs(float(percent.rstrip("% ")) - self.percent) > 0.01:
            return True
        size = mib_of(memory)
        if size is None or self.memory_mib is None:
            return (size is None) != (self.memory_mib is None)
        return abs(size - self.memory_mib) > STEP_MIB


class MpsNamespaces:
    """The agent's MPS daemon and its namespaces. One thread sends all commands to the daemon, in order, so that the
    agent's event loop does not wait for them.
    """

    def __init__(self, folder: Path, command: str, can: Abilities, gpus: tuple[Gpu, ...]) -> None:
        """`can`: what the daemon can do. `gpus`: the GPUs that tenants may get."""
        self._control = Control(command, folder / "mps" / "pipe", folder / "mps" / "log", 3)
        self._can = can
        self._all = tuple(gpu.uuid for gpu in gpus)
        self._granted: dict[str, _Granted] = {}
        # partitions of ended tenants that could not be deleted: (server, UUID of the GPU, name)
        self._left: set[tuple[str, str, str]] = set()
        self._prepared: dict[str, ShareSpec] = {}  # shares that are prepared but not granted yet, by tenant
        self._orders = ThreadPoolExecutor(1, "mps-orders")

    def prepare(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """Create the tenant's namespace in advance."""
        self._in_order(self._make, spec, gpus)
        self._prepared[spec.name] = spec

    def settle(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
        if spec.name in self._prepared:
            self.revoke(spec.name)

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """Create the tenant's namespace, or change its limits."""
        if self._prepared.pop(spec.name, None) != spec:
            self._in_order(self._make, spec, gpus)
        return self._granted[spec.name].enforcement

    def resize(self, spec: ShareSpec) -> str:
        """See Mechanism."""
        granted = self._granted[spec.name]
        at_once = "memory and weight at once" if granted.weight else "memory at once"
        if any(one.reserved for one in granted.enforcement.sms.values()):
            return (
                f"{at_once}, the SM limit for processes started from now on; reserved SMs stay as they "
                "are while a program is on the GPU"
            )
        return f"{at_once}, the SM percentage for processes started from now on"

    def revoke(self, name: str) -> None:
        """Delete a removed tenant's namespace and SM partition. After the last tenant the MPS daemon quits."""
        self._prepared.pop(name, None)
        gone = self._granted.pop(name, None)
        if gone is not None:
            self._orders.submit(self._drop, gone)

    def has(self, name: str) -> bool:
        """Whether this backend serves a tenant."""
        return name in self._granted

    def sweep(self) -> None:
        """Delete servers, namespaces and partitions that an earlier agent left and no tenant uses."""
        if self._control.pipe.exists():
            self._in_order(self._sweep)

    def look(self) -> Look | None:
        """See Mechanism."""
        return self._in_order(self._look) if self._granted else None

    def close(self) -> None:
        """Quit the MPS daemon and wait until it has ended."""
        if self._granted:
            self._granted.clear()
            self._orders.submit(self._quit)
        self._orders.shutdown()

    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs with tenants of this backend."""
        return tuple({uuid for one in list(self._granted.values()) for uuid in one.gpus})

    def server(self, uuid: str) -> int | None:
        """Pid of a GPU's MPS server; None if there is none."""
        used = {one.place.server for one in list(self._granted.values()) if uuid in one.gpus}
        try:
            rows = self._in_order(self._control.rows, "server", "list")
        except WorkError:
            return None
        return next((int(row[2]) for row in rows if row[0] in used and row[2].isdigit()), None)

    # -- in the thread that sends commands -------------------------------------------------------------------------

    def _in_order(self, call: Callable[..., Answer], *arguments: object) -> Answer:
        try:
            return self._orders.submit(call, *arguments).result()
        # the daemon of this driver release lists other columns than those that are parsed here
        except (ValueError, IndexError, TypeError) as error:
            raise WorkError(f"mps: the control daemon's list cannot be parsed: {error}") from None

    def _make(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        uuids = tuple(gpu.uuid for gpu in gpus)
        before = self._granted.get(spec.name)  # the present namespace of a tenant whose share is changed
        weighted = before.weight > 0 if before else self._can.weights and spec.weight > 0
        taken = {one.place for one in self._granted.values()}
        place = before.place if before else free_place(spec.name, taken, weighted=weighted)
        made = _Granted(
            place,
            uuids,
            percent=max(1.0, round(spec.limit * 100, 2)),
            memory_mib=None if spec.memory_bytes is None else max(1, spec.memory_bytes >> 20),
            priority=0 if spec.priority >= 0 else 1,
            weight=spec.weight if weighted else 0.0,
        )
        try:
            self._serve(place.server, uuids if weighted else self._all)
            self._put_right(made)
            made.enforcement = self._enforcement(spec, made)
        except WorkError:
            if spec.name not in self._granted:
                self._drop(made)
            raise
        self._granted[spec.name] = made
        self._left = {one for one in self._left if Place(one[0], one[2]) != made.place}
        if weighted:
            self._share_time()

    def _serve(self, name: str, uuids: tuple[str, ...]) -> None:
        """Start the MPS daemon and its server `name` if they do not run. `uuids`: the server's GPUs; empty: all GPUs.
        """
        if not self._control.answers():
            multiuser = ["--multiuser"] if self._can.multiuser and os.geteuid() == 0 else []
            self._control.start("-p", "3", *multiuser)
        listed = {row[0]: row for row in self._control.rows("server", "list")}
        if name in listed and not all(uuid in ",".join(listed[name]) for uuid in uuids):
            # the server is left over from an agent with other GPUs; while it has clients, the daemon refuses to delete
            # it
            self._control.order("server", "delete", name)
            del listed[name]
        if name not in listed:
            self._control.order("server", "create", name, *([f"--allowed-devices={','.join(uuids)}"] if uuids else []))
            if name not in {row[0] for row in self._control.rows("server", "list")}:
                raise WorkError(
                    f"mps: the server for {', '.join(uuids) or 'all GPUs'} ended at once; the driver may not know "
                    f"these GPUs: see {self._control.log}/{name}/server.log"
                )
            # clients that name no namespace get the limits that are set here; namespaces do not inherit them
            self._control.order("server", "set", name, *DEFAULT_LIMITS)

    def _put_right(self, made: _Granted) -> str:
        """Create a namespace or correct its limits. Returns in words which limits were wrong; empty if none was."""
        server, space = made.place
        before = self._limits(made.place)
        if before and not made.differs(*before):
            return ""
        if not before:
            self._control.order("namespace", "create", space, f"--server={server}")
        self._control.order("namespace", "set", space, f"--server={server}", *made.options())
        now = self._limits(made.place)
        if not now or made.differs(*now):
            raise WorkError(f"mps: the limits of {made.place} were set and read back as {', '.join(now) or 'none'}")
        return f"had {before[1]} % of the SMs and {before[0]} of memory" if before else "was gone"

    def _limits(self, place: Place) -> list[str]:
        """Return the memory limit, SM percentage and priority of a namespace; empty if the namespace does not exist."""
        rows = self._control.rows("namespace", "list", f"--server={place.server}")
        return next((row[3:6] for row in rows if row[0] == place.namespace), [])

    def _enforcement(self, spec: ShareSpec, made: _Granted) -> Enforcement:
        server, space = made.place
        environment = {
            "CUDA_VISIBLE_DEVICES": ",".join(made.gpus),
            PIPE_FOLDER: str(self._control.pipe / server / space),
            LOG_FOLDER: str(self._control.log),
            CLIENT_PRIORITY: str(made.priority),
        }
        sms, remarks = {}, []
        if spec.weight > 0 and not made.weight:
            why = "MPS has weights from driver 620 on"
            if self._can.weights:
                why = "it has to be given when the tenant starts"
            remarks.append(f"the tenant's weight of {spec.weight:g} has no effect: {why}")
        for uuid in made.gpus:
            row, total, remark = None, 0, ""
            try:
                row, total, remark = self._reserve(spec, made, uuid)
            except WorkError as error:
                remark = f"the tenant's request of {spec.request:.0%} is not reserved on GPU {uuid}: {error}"
            remarks += [remark] if remark else []
            most = math.floor(total * made.percent / 100)
            if row is not None:
                environment[PARTITION] = row.id
                most = max(row.sms, most) if self._can.shareable else min(row.sms, most)
            sms[uuid] = Sms(row.sms if row else 0, most)
        return Enforcement(environment, SlotFlag.UNGATED, {CLIENT_PRIORITY: "1"}, sms, tuple(remarks))

    def _reserve(self, spec: ShareSpec, made: _Granted, uuid: str) -> tuple[_Row | None, int, str]:
        """Reserve the SMs of a tenant's request on a GPU. Returns the SM partition (None: there is none), the largest
        number of SMs that the GPU may have (the daemon does not report it exactly), and why there is no partition.
        """
        server, space = made.place
        where = (f"--server={server}", f"--device={uuid}")
        rows = self._partitions(where)
        chunks, total = sum(row.chunks for row in rows), sum(row.sms for row in rows)
        # SMs that do not fill a whole chunk are missing in the daemon's list
        total += total // chunks - 1 if chunks else 0
        mine = next((row for row in rows if row.name == space), None)
        wanted = math.ceil(spec.request * chunks - 1e-6)
        if mine is not None and mine.chunks == wanted:
            return mine, total, ""
        if spec.request <= 0 or made.weight > 0 or len(made.gpus) > 1:
            several = "only tenants with one GPU can have partitions" if len(made.gpus) > 1 and spec.request > 0 else ""
            return None, total, several and f"the tenant's request of {spec.request:.0%} is not reserved: {several}"
        try:
            if mine is not None:
                self._control.order("sm-partition", "delete", space, *where)
            lending = [] if not self._can.shareable else [
                "--shareable=true", f"--max-chunks={max(wanted, math.floor(spec.limit * chunks))}"
            ]  # fmt: skip
            self._control.order("sm-partition", "create", space, *where, f"--chunks={wanted}", *lending)
        except WorkError as error:
            kept = f"{mine.sms} SMs stay reserved" if mine is not None else "no SMs are reserved"
            remark = f"the tenant's request of {spec.request:.0%} is not enforced, {kept}: {error}"
            return mine, total, f"{remark}; MPS reserves SMs only on a GPU without programs and with enough free SMs"
        return next((row for row in self._partitions(where) if row.name == space), None), total, ""

    def _partitions(self, where: tuple[str, ...]) -> list[_Row]:
        rows = self._control.rows("sm-partition", "list", *where)
        return [_Row(row[2], int(row[3]), int(row[4]), row[7]) for row in rows]

    def _share_time(self) -> None:
        """Set each MPS server's part of a GPU's time slices. The server of tenants without a weight has weight 1."""
        weighted = {one.place.server: one.weight for one in self._granted.values() if one.weight > 0}
        if any(one.place.server == SERVER for one in self._granted.values()):
            weighted[SERVER] = 1.0
        for server, weight in weighted.items():
            percent = max(1, round(100 * weight / sum(weighted.values())))
            self._control.order("server", "set", server, f"--timeslice-pct={percent}")

    def _look(self) -> Look:
        try:
            listed, spaces = self._control.rows("client", "list", "--all"), self._control.rows("namespace", "list")
        except WorkError:
            listed, spaces = [], []  # the daemon has died; it is started again when the missing namespaces are created
        clients = tuple({Client(int(row[0]), Place(row[1], row[3])) for row in listed if row[0].isdigit()})
        self._delete_left({row[2] for row in listed})
        found = {Place(row[1], row[0]): row[3:6] for row in spaces}
        put_right = {}
        for name, made in list(self._granted.items()):
            limits = found.get(made.place)
            if limits is None or made.differs(*limits):
                self._serve(made.place.server, made.gpus if made.weight else self._all)
                was = self._put_right(made) or "was changed"
                put_right[name] = f"the tenant's {made.place} {was}: it was restored"
        return Look(clients, {name: made.place for name, made in self._granted.items()}, put_right)

    def _drop(self, gone: _Granted) -> None:
        server, space = gone.place
        if gone.weight > 0:
            self._try("server", "delete", server, "--force")
        else:
            self._try("namespace", "delete", space, f"--server={server}", "--force")
            self._drop_partitions(server, {space})
        if not self._granted:
            self._quit()
        elif gone.weight > 0:
            self._share_time()

    def _sweep(self) -> None:
        if not self._control.answers():
            return
        if not self._granted:
            self._quit()
            return
        places = {made.place for made in self._granted.values()}
        servers = {place.server for place in places}
        for server in {row[0] for row in self._control.rows("server", "list")} - servers:
            self._try("server", "delete", server, "--force")
        for name, server, *_ in self._control.rows("namespace", "list"):
            if name != DEFAULT and Place(server, name) not in places:
                self._try("namespace", "delete", name, f"--server={server}", "--force")
        reserved = self._control.rows("sm-partition", "list")
        for server, name in {(row[0], row[2]) for row in reserved if row[2] and Place(row[0], row[2]) not in places}:
            self._drop_partitions(server, {name})

    def _drop_partitions(self, server: str, names: set[str]) -> None:
        try:
            rows = self._control.rows("sm-partition", "list", f"--server={server}")
        except WorkError:
            return  # the server does not exist any more, so its partitions do not either
        for row in rows:
            if row[2] in names:
                self._left.add((server, row[1], row[2]))
        self._delete_left(set())

    def _delete_left(self, used: set[str]) -> None:
        """Delete the SM partitions of ended tenants on unused GPUs; on used GPUs the daemon refuses to delete them."""
        for server, device, name in [one for one in self._left if one[1] not in used]:
            with contextlib.suppress(WorkError):
                self._control.order("sm-partition", "delete", name, f"--server={server}", f"--device={device}")
                self._left.discard((server, device, name))

    def _try(self, *order: str) -> None:
        try:
            self._control.order(*order)
        except WorkError as error:
            LOG.warning("%s", error)  # the agent that is started next deletes servers and namespaces that were left

    def _quit(self) -> None:
        self._left.clear()
        if self._control.answers():
            self._try("--quit")
            until = time.monotonic() + PATIENCE_S
            while self._control.answers() and time.monotonic() < until:
                time.sleep(0.02)


def mib_of(text: str) -> float | None:
    """Parse a size that `namespace list` shows (2048M, 2G, 2.00 GiB, or bytes) into MiB; None for unlimited."""
    found = re.fullmatch(r"([\d.]+)\s*([KMG]?)i?B?", text.strip())
    if found is None and text.strip() != "unlimited":
        raise ValueError(f"{text!r} is not a size")
    return float(found[1]) * {"": 2**-20, "K": 2**-10, "M": 1, "G": 2**10}[found[2]] if found else None
