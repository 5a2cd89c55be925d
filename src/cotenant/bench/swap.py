"""`cotenant bench swap`: rates of swapping GPU memory out and in, compared with pinned copies in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.host_memory import available_bytes
from cotenant.bench.harness import Bench
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.registry import device_named

# a tenant's memory limit is the size of the contents to swap plus this, for contexts, modules and work space
CONTEXT_BYTES = 2 << 30
SOFT_CONTEXT_BYTES = 32 << 20
COPY_BYTES = 1 << 30
PIN_STALL_S = 60.0  # if pinning makes no progress for this long, the benchmark fails
REFILL_EVERY = 5
STEADY_S = 1.0  # duration in s of the measurement with two processes
# time from the command to copy until the copies start, so that both processes start at the same time
LEAD_NS = 20_000_000

Progress = Callable[[str], None]


def measure(
    size: int,
    moves: int,
    *,
    gpus: str = "soft",
    park: bool = True,
    check_every: int = 1,
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """Return the rates of swap-out and swap-in of `size` bytes in GB/s (1e9 bytes): medians of `moves` moves in each
    direction alone, and of two tenants in both directions at the same time.

    `copy_gbps` are rates of pinned copies by one process; `copy_two_processes_gbps` those of two processes, of which
    one copies out while the other copies in. `parts_ms` splits the time of a move. Contents are rewritten every few
    moves and checked after every `check_every`th. InputError if the GPU or the host cannot hold two tenants; WorkError
    if a move fails.
    """
    if size < 2 << 20 or moves < 1:
        field = "--size" if moves >= 1 else "--moves"
        raise InputError("the size must be at least 2 MiB, and there must be at least one move", field=field)
    cap = size + (SOFT_CONTEXT_BYTES if device_named(gpus).simulated else CONTEXT_BYTES)
    if 2 * cap > (available_bytes() or 2 * cap):
        raise InputError(
            f"two tenants of {size / 2**30:.1f} GiB need {2 * cap / 2**30:.1f} GiB of host memory, and"
            f" {available_bytes() / 2**30:.1f} GiB are available",
            field="--size",
        )
    with Bench(gpus, {"swap_memory": f"{3 * cap}B"}) as bench:
        with ControlClient(bench.folder) as client:
            card = client.call("status")["gpus"][0]["memory_bytes"]
        if 2 * cap > card:
            raise InputError(
                f"both tenants are on the GPU at the beginning and need 2 x {cap / 2**30:.1f} GiB, but it has"
                f" {card / 2**30:.1f} GiB",
                field="--size",
            )
        progress("pinned copies")
        copies, two = _copies(bench, size)
        pair = [Mover(bench, name, size, cap, index) for index, name in enumerate(("swap-a", "swap-b"))]
        pin_s = wait_until_pinned(bench, cap)
        progress(f"host memory pinned after {pin_s:.1f} s; moving")
        swap, parts, corrupted = _move(bench, pair, moves, check_every, progress)
        gpu = pair[0].workload.gpu
        for mover in pair:
            mover.workload.close()
        found: dict[str, Any] = {
            "gpu": gpu,
            "size_bytes": size,
            "moves": moves,
            "copy_gbps": {way: rate / 1e9 for way, rate in copies.items()},
            "copy_two_processes_gbps": {way: rate / 1e9 for way, rate in two.items()},
            "swap_gbps": {way: median(rates) / 1e9 for way, rates in swap.items()},
            "swap_over_copy": {way: median(rates) / copies[way] for way, rates in swap.items()},
            "swap_over_copy_two_processes": {"both": median(swap["both"]) / two["both"]},
            "parts_ms": {way: parts_ms(rows) for way, rows in parts.items()},
            "pin_s": pin_s,
            "corrupted": corrupted,
        }
        if park:
            progress("parking")
            found["park_s"], intact = _park(bench, size, cap)
            found["corrupted"] += not intact
    return found


class Mover:
    """A tenant that runs swap_worker with `size` bytes of contents and a memory limit of `cap` bytes."""

    def __init__(self, bench: Bench, name: str, size: int, cap: int, seed: int, oversubscribe: str = "swap") -> None:
        spec = TenantSpec(name, memory_bytes=cap, oversubscribe=oversubscribe)
        self.name, self.size, self.seed = name, size, seed
        self.workload = bench.tenant("swap", check_spec(spec), program=_program(bench, size, seed))
        self.workload.wait_ready()

    def ask(self, order: str) -> dict[str, Any]:
        """Send a command to swap_worker and wait for its answer."""
        return self.workload.ask(order, None)

    def refill(self, seed: int) -> None:
        """Overwrite the contents of the tenant's memory."""
        self.ask(f"fill {seed}")

    def intact(self) -> bool:
        """Whether the contents of the tenant's memory are the last ones written."""
        return bool(self.ask("check")["intact"])


def _program(bench: Bench, size: int, seed: int) -> list[str]:
    return ["cotenant.bench.swap_worker", bench.backend, str(size), str(seed)]


def _copies(bench: Bench, size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes per second of pinned copies: by one process (out, in, both at once), and by two processes at the
    same time (out, in, and as `both` the lower of them).
    """
    size = min(size, COPY_BYTES)
    pair = [bench.native("swap", program=_program(bench, 8 << 20, 0)) for _ in range(2)]
    for native in pair:
        native.wait_ready()
    one = pair[0].ask(f"copy {size}", None)
    two = {}
    # the short commands of the first pass only make both programs allocate their memory
    for seconds in (0.05, STEADY_S):
        start_ns = time.monotonic_ns() + LEAD_NS
        for native, way in zip(pair, ("out", "in"), strict=True):
            native.tell(f"steady {way} {size} {start_ns} {seconds}")
        two = {way: float(native.result()["rate"]) for native, way in zip(pair, ("out", "in"), strict=True)}
    for native in pair:
        native.close()
    return {way: float(one[way]) for way in ("out", "in", "both")}, two | {"both": min(two.values())}


def wait_until_pinned(bench: Bench, cap: int) -> float:
    """Wait until the host memory of all tenants is pinned. Returns the seconds that this took. WorkError if there is no
    progress.
    """
    began = grown = time.monotonic()
    wanted = cap // (2 << 20) * (2 << 20)
    last = -1
    while True:
        tenants = [row for row in bench.tenants() if row["oversubscribe"] == "swap"]
        fixed = [text for row in tenants for text in row["warnings"] if "stays on the GPU" in text]
        if fixed:
            raise WorkError(fixed[0])
        pinned = min(row["gpus"][0]["residency"]["pinned_bytes"] for row in tenants)
        if pinned >= wanted:
            return time.monotonic() - began
        if pinned > last:
            last, grown = pinned, time.monotonic()
        if time.monotonic() - grown > PIN_STALL_S:
            raise WorkError(f"only {pinned / 2**30:.1f} of {wanted / 2**30:.1f} GiB of host memory were pinned")
        time.sleep(0.05)


def exchange(
    client: ControlClient,
    out: list[Mover],
    back: list[Mover],
    parts: list[dict[str, Any]] | None = None,
    *,
    hand: bool = True,
) -> float:
    """Swap tenants out and others in at the same time. Returns bytes per second in each direction, counting all memory
    of a tenant. `parts` gets the agent's report of each move. `hand`: device memory may be handed from one tenant to
    another."""
    names = {"out": [mover.name for mover in out], "in": [mover.name for mover in back]}
    moves = client.call("exchange", hand=hand, **names)["moves"]
    if parts is not None:
        parts += moves
    for move, mover in zip(moves, [*out, *back], strict=True):
        if move["bytes"] < mover.size:
            raise WorkError(f"{mover.name} moved {move['bytes']} of {mover.size} bytes")
    return float(min(move["bytes"] for move in moves) / max(move["seconds"] for move in moves))


def parts_ms(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians in ms by direction: the whole move as the agent ordered it, the process's part of it, and of that
    part the time for mapping and for waiting for copies.
    """
    named = {"order": "seconds", "process": "process_s", "mapping": "mapping_s", "copying": "copying_s"}
    return {
        way: {name: median([row[key] * 1e3 for row in rows if row["way"] == way]) for name, key in named.items()}
        for way in sorted({row["way"] for row in rows})
    }


def _move(
    bench: Bench, pair: list[Mover], moves: int, check_every: int, progress: Progress
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, Any]]], int]:
    one, two = pair
    rates: dict[str, list[float]] = {"out": [], "in": [], "both": []}
    parts: dict[str, list[dict[str, Any]]] = {"out": [], "in": [], "both": []}
    corrupted = 0

    def look(mover: Mover, index: int) -> None:
        nonlocal corrupted
        if index % check_every and index != moves - 1:
            return
        corrupted += not mover.intact()
        if index % (REFILL_EVERY * check_every) == 0:
            mover.refill(index + 7)

    with ControlClient(bench.folder, timeout_s=600) as client:
        for index in range(moves):
            rates["out"].append(exchange(client, [one], [], parts["out"]))
            rates["in"].append(exchange(client, [], [one], parts["in"]))
            look(one, index)
        progress("both ways at once")
        exchange(client, [two], [])
        for index in range(moves):
            rates["both"].append(exchange(client, [one], [two], parts["both"]))
            look(two, index)
            one, two = two, one
        exchange(client, [], [two])
        corrupted += not two.intact()
    return rates, parts, corrupted


def _park(bench: Bench, size: int, cap: int) -> tuple[dict[str, float], bool]:
    """Park and resume a tenant by the driver's checkpoint. Returns the seconds by direction, and whether the contents
    were intact."""
    mover = Mover(bench, "parked", size, cap, 3, "none")
    with ControlClient(bench.folder, timeout_s=600) as client:
        out = client.call("park", name=mover.name)["seconds"]
        back = client.call("resume", name=mover.name)["seconds"]
    intact = mover.intact()
    mover.workload.close()
    return {"out": float(out), "in": float(back)}, intact


def text(result: dict[str, Any]) -> str:
    """Return the result of the benchmark as text."""
    lines = [f"{result['gpu']}: {result['moves']} moves of {result['size_bytes'] / 2**30:g} GiB"]
    both = result["swap_gbps"]["both"]
    for way, label in (("out", "off the GPU"), ("in", "back"), ("both", "each way, both at once")):
        swap, copy = result["swap_gbps"][way], result["copy_gbps"][way]
        lines.append(f"  {label:22} {swap:6.1f} GB/s   pinned copy {copy:6.1f} GB/s   {swap / copy:.1%}")
    two = result["copy_two_processes_gbps"]["both"]
    lines.append(f"  {'':22} relative to copies by two processes, one per direction: {two:.1f} GB/s   {both / two:.1%}")
    if "park_s" in result:
        lines.append(f"  by checkpoint: out {result['park_s']['out']:.2f} s, back {result['park_s']['in']:.2f} s")
    lines.append(f"  corrupted: {result['corrupted']}")
    return "\n".join(lines)
