"""Movable memory: contents survive every move, and every fault of a move, byte for byte."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from fake_agent import FakeAgent
from shim_tenants import Tenants
from waiting import stays, wait_for

from cotenant.abi.protocol import MessageType, MoveFlag, Status

Agents = Callable[..., FakeAgent]
MIB = 1 << 20
EVERYTHING = 1 << 60
OK, DENIED, OUT_OF_MEMORY = Status.OK, Status.DENIED, Status.OUT_OF_MEMORY

# A program that reads commands from standard input, one a line, and answers each with one line.
PROGRAM = """
from cuda_calls import *
import hashlib, random, sys
module = start()
kernel = function(module, b'busy')
held, expected = {}, {}
def fill(name, size, seed):
    data = random.Random(seed).randbytes(size)
    cu('cuMemcpyHtoD_v2', held[name], data, c_size_t(size))
    expected[name] = hashlib.sha256(data).hexdigest()
def check():
    for name, wanted in expected.items():
        size = sizes[name]
        data = ctypes.create_string_buffer(size)
        cu('cuMemcpyDtoH_v2', data, held[name], c_size_t(size))
        if hashlib.sha256(data.raw).hexdigest() != wanted: return 'corrupt ' + name
    return 'intact'
sizes = {}
def take(name, size):
    p = c_uint64()
    code = raw('cuMemAlloc_v2', byref(p), c_size_t(size))
    if code == 0: held[name], sizes[name] = p, size
    return code
def give(name):
    expected.pop(name, None)
    return raw('cuMemFree_v2', held.pop(name))
print('ready', flush=True)
for line in sys.stdin:
    try: print(eval(line), flush=True)
    except CudaError as error: print(error, flush=True)
"""


class Program:
    """The program above under the shim, spoken to line by line."""

    def __init__(self, tenants: Tenants, agent: FakeAgent, **extra: str) -> None:
        self.process: subprocess.Popen[str] = tenants.python(agent, "import ctypes\n" + PROGRAM, **extra)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        assert self.output.readline().strip() == "ready", self.process.stderr and self.process.stderr.read()

    def tell(self, line: str) -> None:
        self.input.write(line + "\n")
        self.input.flush()

    def answer(self) -> str:
        line = self.output.readline().strip()
        if not line and self.process.stderr:
            raise AssertionError(self.process.stderr.read()[-2000:])
        return line

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()


def started(tenants: Tenants, agent: Agents, memory: int = 4096 * MIB, **settings: object) -> tuple[FakeAgent, Program]:
    """An agent that oversubscribes by swap, short turns, and a program with three buffers of known contents."""
    tenants.environment["COTENANT_SOFTGPU_MEMORY"] = str(memory)
    broker = agent(oversubscribe=1, backing_bytes=226 * MIB, turn_ns=2_000_000, **settings)
    program = Program(tenants, broker)
    for name, size in (("large", 10 * MIB), ("odd", 3 * MIB + 17), ("small", 1000), ("tiny", 16)):
        assert program.ask(f"take({name!r}, {size})") == "0"
        program.ask(f"fill({name!r}, {size}, {size})")
    closed(broker)
    return broker, program


def closed(broker: FakeAgent) -> None:
    """Give no more turns, and wait until the one under way has ended."""
    broker.pause()
    wait_for(lambda: broker.holder is None)


def moved(message: object) -> tuple[int, int, int, int]:
    """status, bytes moved, resident, away of a MOVE_DONE or MOVE_STATE."""
    return (message.status, message["bytes"], message["resident_bytes"], message["away_bytes"])  # type: ignore[attr-defined]


def sizes(broker: FakeAgent) -> list[tuple[int, int]]:
    """(here, away) as the program has told it so far."""
    return [moved(state)[2:] for state in broker.clients[0].of(MessageType.MOVE_STATE)]  # type: ignore[misc]


def test_contents_leave_and_come_back_at_the_same_addresses(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    # 40 MiB; 3 MiB + 17 bytes, rounded up to granules of 2 MiB; and one granule for each size class of the small
    # allocations of 1000 and 16 bytes
    held = (10 + 4 + 2 + 2) * MIB
    before = program.ask("[p.value for p in held.values()]")
    assert program.ask("raw('cuMemGetInfo_v2', byref(c_size_t()), byref(c_size_t()))") == "0"
    out = broker.move(MessageType.MOVE_OUT, EVERYTHING)
    assert moved(out) == (OK, held, 0, held)
    assert broker.clients[0].of(MessageType.MOVE_PROGRESS) == []  # none, because progress is reported at every 64 MiB
    back = broker.move(MessageType.MOVE_IN, EVERYTHING)
    assert moved(back) == (OK, held, held, 0)
    broker.resume()
    assert program.ask("check()") == "intact"
    assert program.ask("[p.value for p in held.values()]") == before


def test_a_part_leaves_largest_pieces_first(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    out = broker.move(MessageType.MOVE_OUT, 1)
    assert moved(out) == (OK, 10 * MIB, 8 * MIB, 10 * MIB)
    assert moved(broker.move(MessageType.MOVE_OUT, EVERYTHING, base=10 * MIB)) == (OK, 8 * MIB, 0, 18 * MIB)
    broker.move(MessageType.MOVE_IN, EVERYTHING)
    broker.resume()
    assert program.ask("check()") == "intact"


def test_many_moves_with_changes_between(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    for turn in range(40):
        assert moved(broker.move(MessageType.MOVE_OUT, EVERYTHING, base=(turn % 5) * 2 * MIB))[0] == OK
        assert moved(broker.move(MessageType.MOVE_IN, EVERYTHING))[0] == OK
        if turn % 10 == 0:
            broker.resume()
            assert program.ask("check()") == "intact"
            program.ask(f"fill('large', {10 * MIB}, {turn})")
            program.ask(f"fill('tiny', 16, {turn})")
            closed(broker)
    broker.resume()
    assert program.ask("check()") == "intact"


def test_allocating_and_freeing_while_away(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    broker.move(MessageType.MOVE_OUT, EVERYTHING)
    assert program.ask("take('new', 8 << 20)") == "0"
    assert program.ask("give('odd')") == "0"
    # the thread that pins host memory reports too, so check the order of the sizes and not the number of reports
    wait_for(lambda: (0, 22 * MIB) in sizes(broker))
    assert (0, 26 * MIB) in sizes(broker)[: sizes(broker).index((0, 22 * MIB))]
    # a launch waits for the turn, and the turn for the memory
    program.tell("fill('new', 8 << 20, 1)")
    back = broker.move(MessageType.MOVE_IN, EVERYTHING)
    assert moved(back) == (OK, 22 * MIB, 22 * MIB, 0)
    broker.resume()
    program.answer()
    assert program.ask("check()") == "intact"
    assert program.ask("give('new')") == "0"


def test_a_grant_that_crosses_an_allocation_is_given_back(tenants: Tenants, agent: Agents) -> None:
    """The agent grants while memory is away (it did not know): nothing runs, the turn comes back at once."""
    broker, program = started(tenants, agent)
    broker.move(MessageType.MOVE_OUT, EVERYTHING)
    releases = len(broker.releases())
    program.tell("check()")
    broker.resume()
    wait_for(lambda: len(broker.releases()) != releases)
    assert broker.releases()[-1]["launches"] == 0
    closed(broker)
    broker.move(MessageType.MOVE_IN, EVERYTHING)
    broker.resume()
    assert program.answer() == "intact"


def test_the_way_in_goes_no_further_than_allowed(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    broker.move(MessageType.MOVE_OUT, EVERYTHING)
    client = broker.clients[0]
    client.send(MessageType.MOVE_IN, slot=0, sequence=7, bytes=10 * MIB)
    stays(lambda: len(client.of(MessageType.MOVE_DONE)) == 1)
    client.send(MessageType.MOVE_ALLOW, slot=0, bytes=EVERYTHING)
    wait_for(lambda: len(client.of(MessageType.MOVE_DONE)) >= 2)
    assert client.of(MessageType.MOVE_DONE)[-1].sequence == 7
    broker.resume()
    assert program.ask("check()") == "intact"


def test_no_memory_on_the_way_back_loses_nothing(tenants: Tenants, agent: Agents) -> None:
    """While it is away somebody else fills the card: the move ends with OUT_OF_MEMORY, a later one brings all back."""
    broker, program = started(tenants, agent, memory=570 * MIB)  # 570 MiB, of which a context takes 256
    broker.move(MessageType.MOVE_OUT, EVERYTHING)
    script = "from cuda_calls import *\nstart()\np = c_uint64()\ncu('cuMemAlloc_v2', byref(p), c_size_t(50 << 20))\n"
    hog = tenants.python(None, script + "print('up', flush=True)\ninput()\n")
    assert hog.stdout is not None
    assert hog.stdout.readline().strip() == "up"
    status, _, here, away = moved(broker.move(MessageType.MOVE_IN, EVERYTHING))
    assert status == OUT_OF_MEMORY
    assert here + away == 18 * MIB
    assert away > 0
    hog.communicate("\n", timeout=60)
    assert moved(broker.move(MessageType.MOVE_IN, EVERYTHING))[0::3] == (OK, 0)
    broker.resume()
    assert program.ask("check()") == "intact"


def test_a_full_card_asks_for_room_and_takes_the_answer(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent, memory=400 * MIB)
    client = broker.clients[0]
    # The tenant has no turn, and the agent denies room for now: the allocation succeeds and gets its memory in the next
    # turn.
    broker.room_answers = [DENIED]
    assert program.ask("take('later', 200 << 20)") == "0"
    wait_for(lambda: (18 * MIB, 200 * MIB) in sizes(broker))
    assert program.ask("give('later')") == "0"
    # The card can never have so much room: the program gets CUDA_ERROR_OUT_OF_MEMORY (2).
    assert program.ask("take('never', 200 << 20)") == "2"
    assert len(client.of(MessageType.MOVE_ROOM)) == 2
    broker.resume()
    assert program.ask("check()") == "intact"


def test_less_host_memory_than_promised_is_told_and_kept_to(tenants: Tenants, agent: Agents) -> None:
    """The system gives 12 of 256 MiB: what does not fit there stays on the GPU, and nothing is lost."""
    broker, program = started(tenants, agent, backing_there=12 * MIB)
    client = broker.clients[0]
    wait_for(lambda: any(b"of host memory for swapping" in m.fields["text"] for m in client.of(MessageType.WARNING)))
    status, out, here, away = moved(broker.move(MessageType.MOVE_OUT, EVERYTHING))
    # nothing could be moved out, because host memory is registered in spans of 256 MiB and the system does not have
    # even one
    assert (status, out, here, away) == (OK, 0, 18 * MIB, 0)
    broker.resume()
    assert program.ask("check()") == "intact"


def test_a_program_that_ends_after_moves_ends_well(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    broker.move(MessageType.MOVE_OUT, EVERYTHING)
    program.tell("sys.exit()")
    assert program.process.wait(60) == 0


def test_orders_during_a_turn_are_refused(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    broker.turn_ns = None
    broker.resume()
    assert program.ask("check()") == "intact"
    assert moved(broker.move(MessageType.MOVE_OUT, EVERYTHING))[0] == DENIED
    assert program.ask("check()") == "intact"


def test_a_hold_on_physical_memory_ends_moving_and_says_so(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    address = "ctypes.c_void_p(held['large'].value)"
    assert program.ask(f"raw('cuMemRetainAllocationHandle', byref(c_uint64()), {address})") == "0"
    client = broker.clients[0]
    wait_for(lambda: client.of(MessageType.MOVE_STATE)[-1]["flags"] == MoveFlag.FIXED)
    said = lambda: [m.fields["text"] for m in client.of(MessageType.WARNING)]  # noqa: E731
    wait_for(lambda: b"takes the memory behind an allocation" in b"".join(said()[-1:]))
    assert moved(broker.move(MessageType.MOVE_OUT, EVERYTHING))[0] == DENIED
    assert program.ask("take('plain', 4096)") == "0"
    broker.resume()
    assert program.ask("check()") == "intact"
    assert program.ask("give('plain')") == "0"


def test_what_a_program_loads_can_keep_its_memory_in_place(tenants: Tenants, agent: Agents) -> None:
    tenants.environment["COTENANT_FIXED_WITH"] = "libnothing,libpython,libc.so"
    broker, program = started(tenants, agent)
    warnings = lambda: [message.fields["text"] for message in broker.clients[0].of(MessageType.WARNING)]  # noqa: E731
    wait_for(lambda: any(b"which passes memory to other processes" in text for text in warnings()))
    assert moved(broker.move(MessageType.MOVE_OUT, EVERYTHING))[0] == DENIED
    broker.resume()
    assert program.ask("check()") == "intact"


def test_fail_open_brings_the_memory_back_first(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent, fail_mode=1)
    broker.move(MessageType.MOVE_OUT, EVERYTHING)
    broker.close()
    assert program.ask("check()") == "intact"


def test_extents_are_those_of_the_allocations(tenants: Tenants, agent: Agents) -> None:
    _, program = started(tenants, agent)
    ask = "b, s = c_uint64(), c_size_t(); "
    ask += "cu('cuMemGetAddressRange_v2', byref(b), byref(s), c_uint64(held[n].value + 5))"
    program.ask(f"exec('''def extent(n):\\n    {ask}\\n    return b.value - held[n].value, s.value''', globals())")
    assert program.ask("extent('odd')") == f"(0, {3 * MIB + 17})"
    assert program.ask("extent('tiny')") == "(0, 16)"
    assert program.ask("raw('cuMemFree_v2', c_uint64(held['odd'].value + 4096))") != "0"
    freed = "raw('cuMemGetAddressRange_v2', byref(c_uint64()), byref(c_size_t()), p), raw('cuMemFree_v2', p)"
    # CUDA_ERROR_INVALID_VALUE from both calls
    assert program.ask(f"[(p := held['tiny'], give('tiny')) and ({freed})]") == "[(1, 1)]"


# Frees one allocation from two threads at the same time, many times, and prints the status that each thread got.
TWICE = """
import collections, threading
context = c_void_p()
cu('cuCtxGetCurrent', byref(context))
def free(address, both, codes):
    cu('cuCtxSetCurrent', context)
    both.wait()
    codes.append(raw('cuMemFree_v2', address))
def twice(size, times):
    seen = collections.Counter()
    for _ in range(times):
        take('twice', size)
        codes, both, address = [], threading.Barrier(2), held.pop('twice')
        threads = [threading.Thread(target=free, args=(address, both, codes)) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        seen[tuple(sorted(codes))] += 1
    return sorted(seen.items())
"""


@pytest.mark.parametrize("size", [4 * MIB, 500])
def test_two_threads_that_free_the_same_memory(tenants: Tenants, agent: Agents, size: int) -> None:
    """One frees it and the other is told that there was nothing: neither memory nor books are given back twice."""
    broker, program = started(tenants, agent)
    program.ask(f"exec({TWICE!r}, globals())")
    program.ask(f"take('stays', {size})")
    before = broker.total_used
    assert program.ask(f"twice({size}, 200)") == "[((0, 1), 200)]"
    wait_for(lambda: broker.total_used == before)
    broker.resume()
    assert program.ask("check()") == "intact"


def test_freeing_in_stream_order(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    before = broker.total_used
    assert program.ask("raw('cuMemFreeAsync', held['large'], None)") == "0"
    program.ask("(held.pop('large'), expected.pop('large'))")
    wait_for(lambda: broker.total_used == before - 10 * MIB)
    broker.resume()
    assert program.ask("check()") == "intact"


def test_small_allocations_share_pieces(tenants: Tenants, agent: Agents) -> None:
    broker, program = started(tenants, agent)
    before = broker.total_used
    assert program.ask("[take(f's{i}', 500) for i in range(4096)] == [0] * 4096") == "True"
    assert broker.total_used - before <= 2 * MIB
    assert program.ask("len({held[f's{i}'].value for i in range(4096)})") == "4096"
    assert program.ask("sum(give(f's{i}') for i in range(4096))") == "0"
    broker.resume()
    assert program.ask("check()") == "intact"
