"""The shim's gate of best-effort launches in virtual time: what it lets go, what it keeps in flight, what that costs.

floor_world.c compiles the shim's own code with a clock and a GPU of its own, so figures are the same on any machine.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from native_sources import NATIVE, SHIM

from cotenant.abi.floor import LEAD_NS, RunAhead
from cotenant.policy.colocation import APART, settings_for

US, MS = 1_000, 1_000_000
LS_NS = 1_050_000  # length of an LS request
SLOW_YIELD_NS = 140_000  # time that a yield takes in a sandboxed machine
# kind, length in ns, and time in ns that the program spends on the host before the launch
Kernel = tuple[int, int, int]


class Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("scheme", "in_flight_us", "own_us", "run_ahead", "duty_cycle_permille")),
        *((name, ctypes.c_int64) for name in ("launch_ns", "event_ns", "yield_ns")),
    ]


class Launch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "length_ns", "host_ns")]


class Burst(ctypes.Structure):
    _fields_ = [("up_ns", ctypes.c_int64), ("down_ns", ctypes.c_int64)]


class Result(ctypes.Structure):
    _fields_ = [
        ("took_ns", ctypes.c_int64),
        ("busy_ns", ctypes.c_int64),
        ("events", ctypes.c_uint64),
        ("longest_in_flight_ns", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
        ("longest_wait_ns", ctypes.c_int64),
        ("launched_while_up", ctypes.c_int64),
        ("bursts", ctypes.c_int64),
    ]


@dataclass
class Seen:
    """One run: BE work over the time that LS left, and what LS waited for."""

    work: float
    mean_wait_ns: float
    longest_wait_ns: int
    longest_in_flight_ns: int
    events_per_ms: float
    launched_while_up: int


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    out = tmp_path_factory.mktemp("world") / "world.so"
    source = Path(__file__).parent / "floor_world.c"
    flags = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{NATIVE}", f"-I{SHIM}"]
    subprocess.run([compiler, *flags, "-o", str(out), str(source), "-lpthread"], check=True)
    library = ctypes.CDLL(str(out))
    library.world_divide.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_bool]
    library.world_asked_ns.restype = ctypes.c_int64
    library.world_cost.argtypes, library.world_cost.restype = [ctypes.c_int64], ctypes.c_int64
    return library


class World:
    """A program under the gate of tidal, with the scheme's own settings but for `changes`."""

    def __init__(self, library: ctypes.CDLL, yield_ns: int = 1 * US, **changes: int) -> None:
        self.library = library
        own = settings_for("tidal")
        values = {
            "scheme": 3,
            "in_flight_us": own.in_flight_us,
            "run_ahead": RunAhead.NEVER,
            "launch_ns": 5 * US,
            "event_ns": 3 * US,
        }
        library.world_start(ctypes.byref(Settings(**(values | changes | {"yield_ns": yield_ns}))))
        self.draw = random.Random(7)

    def program(self, kernels: Sequence[Kernel], seconds: float) -> ctypes.Array[Launch]:
        out: list[Kernel] = []
        at = 0
        while at < seconds * 1e9:
            for kind, length, host in kernels:
                real = max(US, round(length * (1 + self.draw.gauss(0, 0.02))))
                out.append((kind, real, host))
                at += max(real, host)
        return (Launch * len(out))(*out)

    def run(self, kernels: Sequence[Kernel], seconds: float, rate_rps: float = 100.0) -> Seen:
        bursts: list[tuple[int, int]] = []
        at = 0
        while rate_rps and at < 4e9 * seconds:
            at += round(self.draw.expovariate(rate_rps) * 1e9)
            bursts.append((at, at + LS_NS))
            at += LS_NS
        launches, found = self.program(kernels, seconds), Result()
        self.library.world_run(
            launches, len(launches), (Burst * max(1, len(bursts)))(*bursts), len(bursts), ctypes.byref(found)
        )
        left = found.took_ns - found.bursts * LS_NS
        return Seen(
            found.busy_ns / left,
            found.waited_ns / max(1, found.bursts),
            found.longest_wait_ns,
            found.longest_in_flight_ns,
            found.events / found.took_ns * 1e6,
            found.launched_while_up,
        )


Start = Callable[..., World]  # each call replaces the world that the one before has made


def warm(here: World, kernels: list[Kernel], rate_rps: float = 100.0) -> Seen:
    """A run after the lengths are known."""
    here.run(kernels, 0.06, rate_rps=0)
    return here.run(kernels, 0.25, rate_rps)


@pytest.fixture
def world(library: ctypes.CDLL) -> Start:
    def start(**changes: int) -> World:
        return World(library, **changes)

    return start


SHORT: list[Kernel] = [(1, 26 * US, 3 * US)]
MIDDLE: list[Kernel] = [(2, 195 * US, 3 * US)]
LONG: list[Kernel] = [(3, 1600 * US, 3 * US)]


def training(seed: int = 3) -> list[Kernel]:
    """Steps of short kernels of 40 kinds whose host takes longer than the GPU, in bursts."""
    draw = random.Random(seed)
    lengths = [2 * US + round(draw.expovariate(1 / 16_000)) for _ in range(40)]
    return [(100 + i % 40, lengths[i % 40], 6 * US + round(draw.expovariate(1 / 20_000))) for i in range(700)]


@pytest.mark.parametrize("kernels", [SHORT, MIDDLE, LONG, training()])
def test_nothing_is_launched_beside_ls_work(world: Start, kernels: list[Kernel]) -> None:
    assert world().run(kernels, 0.2).launched_while_up == 0


def test_what_launches_cost_is_learned(world: Start) -> None:
    here = world()
    here.run([*SHORT * 8, *MIDDLE, (4, 60 * US, 3 * US)], 0.2, rate_rps=0)
    for kind, length in ((1, 26 * US), (2, 195 * US), (4, 60 * US)):
        assert here.library.world_cost(kind) == pytest.approx(length, rel=0.1)


def test_events_are_few_where_lengths_are_known(world: Start) -> None:
    """An event costs the card 3 us: one for each piece of 50 us takes 5 % of short kernels' time."""
    clocked = warm(world(), SHORT)
    assert clocked.events_per_ms < 7  # an event every 156 us, after three pieces of two kernels
    assert clocked.work > 0.98


@pytest.mark.parametrize(("kernels", "length"), [(SHORT, 26 * US), (MIDDLE, 195 * US)])
def test_what_is_really_in_flight_is_bounded(world: Start, kernels: list[Kernel], length: int) -> None:
    """At most the interval, or a kernel and the lead before its end; what an LS request finds is half of that."""
    seen = warm(world(), kernels, 400)
    own = settings_for("tidal")
    # 25 us more, because the lengths vary
    assert seen.longest_wait_ns <= max(own.in_flight_us * US, length + LEAD_NS) + 25 * US
    assert seen.mean_wait_ns < max(0.75 * own.in_flight_us * US, 0.62 * length)
    assert seen.work > 0.98


def test_a_gpu_that_becomes_slower_is_noticed(world: Start) -> None:
    """Kernels that last twice as long all of a sudden: what is in flight is bounded again within some milliseconds."""
    here = world()
    here.run(SHORT, 0.05, rate_rps=0)
    slower: list[Kernel] = [(1, 52 * US, 3 * US)]
    first = here.run(slower, 0.01, rate_rps=0)
    later = here.run(slower, 0.2)
    assert first.longest_in_flight_ns < 5 * settings_for("tidal").in_flight_us * US
    assert later.longest_wait_ns < 1.3 * settings_for("tidal").in_flight_us * US


def test_a_machine_that_yields_slowly_costs_little(world: Start) -> None:
    for kernels in (SHORT, MIDDLE):
        assert warm(world(yield_ns=SLOW_YIELD_NS), kernels).work > 0.98


def test_a_program_that_its_host_holds_back_may_run_ahead(world: Start) -> None:
    """A budget of its own, a fixed 100 us, keeps less of its work than one that grows; LS waits for less on average."""
    native = world(scheme=0).run(training(), 0.4, rate_rps=0).work
    small, large = warm(world(own_us=100), training()), warm(world(), training())
    assert large.work > small.work + 0.003
    assert large.work / native > 0.97
    assert large.mean_wait_ns < 100 * US


def test_a_program_that_keeps_the_gpu_busy_may_not(world: Start) -> None:
    fixed, grown = warm(world(own_us=100), SHORT), warm(world(), SHORT)
    assert grown.longest_in_flight_ns < fixed.longest_in_flight_ns + 30 * US


@pytest.mark.parametrize(("kernels", "kind"), [(SHORT, 1), (MIDDLE, 2)])
def test_gaps_that_a_duty_asks_for_do_not_count_as_work(world: Start, kernels: list[Kernel], kind: int) -> None:
    here = world(duty_cycle_permille=800)
    seen = warm(here, kernels)
    assert seen.work == pytest.approx(0.8, abs=0.02)
    assert here.library.world_cost(kind) == pytest.approx(kernels[0][1], rel=0.05)
    assert seen.launched_while_up == 0


@pytest.mark.parametrize("length_us", [250, 400, 700, 1600])
def test_a_program_with_a_fast_host_keeps_the_gpu_busy_with_kernels_of_any_length(world: Start, length_us: int) -> None:
    """While two are in flight it must not sleep through the end of the first: the second is timed from there."""
    assert warm(world(), [(3, length_us * US, 3 * US)], rate_rps=0).work > 0.98


@pytest.mark.parametrize(
    ("tenants", "parts", "lost", "bound_us"),
    [
        (3, 0, False, 33),  # an old agent, which does not report who has work
        (3, 1, False, 100),  # the other tenants are idle
        (3, 2, False, 50),
        (3, 2, True, 33),  # the agent is lost, so nobody observes any more which tenants have work
    ],
)
def test_the_bound_is_divided_as_the_agent_says(
    world: Start, tenants: int, parts: int, lost: bool, bound_us: int
) -> None:
    kernels: list[Kernel] = [(5, 8 * US, 1 * US)]
    here = world(own_us=100)
    here.run(kernels, 0.05, rate_rps=0)
    here.library.world_divide(tenants, parts, lost)
    here.run(kernels, 0.01, rate_rps=0)
    seen = here.run(kernels, 0.1, rate_rps=0)
    assert seen.longest_in_flight_ns == pytest.approx(bound_us * US, abs=17 * US)
    assert here.library.world_asked_ns() < 20 * US


def test_one_that_is_not_counted_has_little_more_than_a_launch_in_flight(world: Start) -> None:
    """The lead lets a kernel be queued before the end of the one in front: that is all that it adds to the sum."""
    for length in (8 * US, 40 * US):
        kernels: list[Kernel] = [(5, length, 1 * US)]
        here = world()
        here.run(kernels, 0.05, rate_rps=0)
        here.library.world_divide(2, APART, False)
        here.run(kernels, 0.01, rate_rps=0)
        seen = here.run(kernels, 0.1, rate_rps=0)
        assert seen.longest_in_flight_ns < 1.1 * length + LEAD_NS + 8 * US
