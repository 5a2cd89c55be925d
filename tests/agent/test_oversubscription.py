"""Tenants whose memory together exceeds the card: real processes, real agent, software GPU; contents must survive."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import saved
from swap_node import CONTEXT, MIB, Node, Program, nodes_in
from waiting import stays, wait_for

from cotenant.core.errors import InputError, WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def test_three_tenants_that_do_not_fit_two_at_a_time(node: Callable[..., Node]) -> None:
    """Each gets its part, and nothing is lost."""
    here = node(3 * CONTEXT + 320 * MIB, most_moving=0.3)
    programs = {name: here.program(name) for name in ("a", "b", "c")}
    assert [program.ask("take(200)") for program in programs.values()] == ["0", "0", "0"]
    for program in programs.values():
        program.tell("work(1.5)")
    answers = [program.answer().split() for program in programs.values()]
    assert [answer[1] for answer in answers] == ["intact"] * 3
    # the last one may have worked for all of its time before the others began
    assert [program.ask("check()") for program in programs.values()] == ["intact"] * 3
    rows = [here.where(name) for name in programs]
    assert all(row["moves_in"] > 0 and row["moves_out"] > 0 for row in rows)
    assert all(row["movable_bytes"] == 200 * MIB for row in rows)
    assert min(int(answer[0]) for answer in answers) > 0


def test_a_tenant_that_makes_room_waits_for_its_turn(node: Callable[..., Node]) -> None:
    """Turns given to a process in the middle of its move would come back at once, thousands a second."""
    here = node(2 * CONTEXT + 448 * MIB)
    a, b = here.program("a", memory=700 * MIB), here.program("b", memory=700 * MIB)
    assert a.ask("raw('cuMemAlloc_v2', byref(c_uint64()), c_size_t(400 << 20))") == "0"
    b.tell("raw('cuMemAlloc_v2', byref(c_uint64()), c_size_t(400 << 20))")
    wait_for(lambda: here.where("a")["moving"] or here.where("a")["moves_out"], what="a on its way out")
    assert a.ask("work(1)").endswith("intact")
    assert b.answer() == "0"
    row = here.tenant("a")
    assert row["gpus"][0]["turns"] < 100 + 100 * row["age_s"], "turns are of 20 ms and more"


def test_nobody_moves_while_all_fit(node: Callable[..., Node]) -> None:
    here = node(2 * CONTEXT + 420 * MIB)
    programs = [here.program(name) for name in ("a", "b")]
    assert [program.ask("take(200)") for program in programs] == ["0", "0"]
    for program in programs:
        program.tell("work(1.5)")
    assert all(program.answer().endswith("intact") for program in programs)
    assert [here.where(name)["moves_out"] for name in ("a", "b")] == [0, 0]
    assert here.tenant("a")["gpus"][0]["turns"] > 1


def test_only_what_is_lacking_moves(node: Callable[..., Node]) -> None:
    """200 + 200 MiB on 320: 80 are lacking; somewhat more leave while the other one still grows."""
    here = node(2 * CONTEXT + 320 * MIB)
    one, two = (here.program(name) for name in ("a", "b"))
    assert one.ask("take(200)") == "0"
    assert two.ask("take(200)") == "0"
    assert two.ask("check()") == "intact"
    assert here.where("b")["resident_bytes"] == 200 * MIB
    assert 90 * MIB <= here.where("a")["resident_bytes"] <= 120 * MIB
    assert one.ask("check()") == "intact"
    assert here.where("b")["resident_bytes"] == 120 * MIB


def test_a_tenant_that_stays_bounds_the_others(node: Callable[..., Node]) -> None:
    """What cannot leave is counted at admission, and a program that asks for more than is left gets its error."""
    here = node(1024 * MIB)
    here.program("rock", "none", 500 * MIB)
    with pytest.raises(InputError, match="left to promise"):
        here.program("sand", "swap", 600 * MIB)
    sand = here.program("sand", "swap", 500 * MIB)
    # 524 MiB of the card are left, of which its context takes 256
    assert sand.ask("take(320)") == "2"
    assert sand.ask("check()") == "intact"


def test_host_memory_is_promised_before_anything_moves(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB, swap_memory=700 * MIB)
    here.program("first", "swap", 500 * MIB)
    with pytest.raises(InputError, match="GiB of host memory for swapping"):
        here.program("second", "swap", 500 * MIB)
    here.program("third", "swap", 150 * MIB + CONTEXT // 8).ask("1")


@pytest.mark.parametrize("dies", ["the one that leaves", "the one that comes"])
def test_killed_in_the_middle_of_a_move(node: Callable[..., Node], dies: str) -> None:
    """The other one runs on with its contents, and what the dead one held is free."""
    here = node(2 * CONTEXT + 320 * MIB)
    pair = [here.program(name) for name in ("a", "b")]
    assert [program.ask("take(240)") for program in pair] == ["0", "0"]
    for program in pair:
        assert program.ask("check()") == "intact"
    comes, leaves = pair  # b ran last, so a is brought back at b's expense
    dead, alive = (leaves, comes) if dies == "the one that leaves" else (comes, leaves)
    comes.tell("check()")
    soon = time.monotonic() + 0.3  # the move may have ended before this test sees it
    while not any(here.where(name)["moving"] for name in ("a", "b")) and time.monotonic() < soon:
        pass
    dead.process.send_signal(signal.SIGKILL)
    if alive is comes:
        assert comes.answer() == "intact"
    assert alive.ask("work(0.3)").endswith("intact")
    name = "a" if alive is comes else "b"
    wait_for(lambda: [row["name"] for row in here.call("list")["tenants"]] == [name], what="the dead tenant's end")
    assert here.where(name)["resident_bytes"] == 240 * MIB


def test_a_stopped_victim_does_not_stop_the_gpu_for_ever(node: Callable[..., Node]) -> None:
    """A process that does not answer keeps its memory: who needs it gets an error and is told why; once it goes on,
    its memory moves again."""
    here = node(2 * CONTEXT + 320 * MIB, stuck_after="1s")
    one, two = (here.program(name) for name in ("a", "b"))
    assert one.ask("take(200)") == "0"
    assert two.ask("take(96)") == "0"
    one.process.send_signal(signal.SIGSTOP)
    assert two.ask("take(96)") == "2"  # refused after four times stuck_after
    assert any("does not answer" in text for text in here.tenant("a")["warnings"])
    assert two.ask("work(0.2)").endswith("intact")
    one.process.send_signal(signal.SIGCONT)
    wait_for(lambda: here.where("a")["can_leave"], what="its answer")
    assert two.ask("take(48)") == "0"
    assert one.ask("check()") == two.ask("check()") == "intact"


@pytest.mark.parametrize("mode", ["swap", "none"])
def test_park_and_resume(node: Callable[..., Node], mode: str) -> None:
    """By its own moves or by checkpoint: memory is free meanwhile, the program waits, contents are back."""
    here = node(1024 * MIB)
    program = here.program("a", mode)
    assert program.ask("take(200)") == "0"
    parked = here.call("park", name="a")
    assert parked["method"] == ("swap" if mode == "swap" else "checkpoint")
    assert parked["freed_bytes"] == (200 * MIB if mode == "swap" else 200 * MIB + CONTEXT)
    assert here.tenant("a")["state"] == "parked"
    with pytest.raises(InputError, match="already parked"):
        here.call("park", name="a")
    program.tell("work(0.2)")
    time.sleep(0.4)
    back = here.call("resume", name="a")
    assert back["name"] == "a"
    assert program.answer().endswith("intact")
    # moved out once and in once, with the time that both took; this is counted also when whole processes move
    moves = here.where("a")
    assert (moves["moves_out"], moves["moves_in"]) == (1, 1)
    assert moves["moved_out_bytes"] == moves["moved_in_bytes"] == parked["freed_bytes"]
    assert 0 < moves["moving_s"] <= parked["seconds"] + back["seconds"]
    with pytest.raises(InputError, match="is not parked"):
        here.call("resume", name="a")


@pytest.mark.parametrize("mode", ["swap", "none"])
def test_several_processes_of_a_tenant_leave_and_return_together(node: Callable[..., Node], mode: str) -> None:
    here = node(2048 * MIB)
    programs = [here.program("a", mode, 900 * MIB), here.joined("a")]
    assert [program.ask("take(96)") for program in programs] == ["0", "0"]
    parked = here.call("park", name="a")
    assert parked["freed_bytes"] == 2 * 96 * MIB + (0 if mode == "swap" else 2 * CONTEXT)
    if mode == "none":
        assert [row[0] for row in parked["processes"]] == [program.process.pid for program in programs]
    for program in programs:
        program.tell("work(0.2)")
    time.sleep(0.3)
    here.call("resume", name="a")
    assert all(program.answer().endswith("intact") for program in programs)
    programs[0].tell("sys.exit()")
    assert programs[0].process.wait(60) == 0
    assert programs[1].ask("check()") == "intact"


def test_allocating_while_parked_waits_or_comes_later(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    swapped, whole = here.program("a", "swap", 450 * MIB), here.program("b", "none", 450 * MIB)
    assert swapped.ask("take(48)") == whole.ask("take(48)") == "0"
    for name in ("a", "b"):
        here.call("park", name=name)
    swapped.tell("(give(), take(64))")
    whole.tell("(give(), take(64))")
    time.sleep(0.3)
    for name in ("a", "b"):
        here.call("resume", name=name)
    assert swapped.answer() == whole.answer() == "(0, 0)"
    assert swapped.ask("check()") == whole.ask("check()") == "intact"
    assert here.where("a")["movable_bytes"] == 64 * MIB


def test_a_plain_process_parks_too(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    plain = Program(here, "plain", None)
    assert plain.ask("take(200)") == "0"
    name = f"pid:{plain.process.pid}"
    here.call("park", name=name)
    tenant = here.program("a", "none", 700 * MIB)
    assert tenant.ask("take(400)") == "0"  # 1024 - 256 MiB, which are there only while the other program is away
    plain.tell("check()")
    assert tenant.ask("give()") == "0"
    here.call("resume", name=name)
    assert plain.answer() == "intact"


def test_what_cannot_be_parked_is_refused_and_runs_on(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    program = here.program("a", "none")
    assert program.ask("managed(8)") == "0"
    with pytest.raises(InputError, match="managed memory"):
        here.call("park", name="a")
    assert program.ask("work(0.1)").endswith("intact")
    plain = Program(here, "plain", None)
    assert plain.ask("managed(8)") == "0"
    with pytest.raises(WorkError, match=r"does not support this call for the process"):
        here.call("park", name=f"pid:{plain.process.pid}")
    assert plain.ask("work(0.1)").endswith("intact")
    with pytest.raises(InputError, match=r"no process"):
        here.call("park", name="pid:99999999")
    no_cuda = subprocess.Popen(["sleep", "60"])
    with pytest.raises(InputError, match=r"no process that the driver can checkpoint"):
        here.call("park", name=f"pid:{no_cuda.pid}")
    no_cuda.kill()
    no_cuda.wait()
    with pytest.raises(InputError, match="there is no tenant 'nobody'"):
        here.call("park", name="nobody")


def test_no_room_on_the_way_back_keeps_it_parked(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB)
    program = here.program("a", "none", 500 * MIB)
    assert program.ask("take(200)") == "0"
    here.call("park", name="a")
    hog = Program(here, "hog", None)
    other = here.program("b", "none", 500 * MIB)
    assert other.ask("take(200)") == "0"
    assert hog.ask("take(64)") == "0"
    program.tell("check()")
    with pytest.raises(WorkError, match="cannot be brought back"):
        here.call("resume", name="a", timeout_s=0.2)
    assert here.tenant("a")["state"] == "parked"
    other.process.kill()
    wait_for(lambda: len(here.call("list")["tenants"]) == 1)
    here.call("resume", name="a")
    assert program.answer() == "intact"


def test_parked_on_one_gpu_and_back_on_another(node: Callable[..., Node]) -> None:
    here = node(1024 * MIB, count=2)
    uuids = [gpu["uuid"] for gpu in here.call("status")["gpus"]]
    program = here.program("a", "none", gpus=(uuids[0],))
    assert program.ask("take(200)") == "0"
    here.call("park", name="a")
    back = here.call("resume", name="a", gpu=uuids[1])
    assert back["gpus"] == [uuids[1]]
    row = here.tenant("a")["gpus"][0]
    assert (row["uuid"], row["memory_used_bytes"]) == (uuids[1], 200 * MIB + CONTEXT)
    assert program.ask("check()") == "intact"
    assert program.ask("take(64)") == "0"
    assert program.ask("work(0.2)").endswith("intact")
    assert here.tenant("a")["gpus"][0]["turns"] > 0
    here.call("park", name="a")
    assert here.call("resume", name="a", gpu=uuids[0])["gpus"] == [uuids[0]]
    assert program.ask("check()") == "intact"
    # The driver refuses, because more memory is in use than the agent knows of. The program stays moved out, and the
    # agent reports why.
    here.call("park", name="a")
    hog = Program(here, "hog", None)
    assert hog.ask("on(1)") == "0"
    assert hog.ask("take(640)") == "0"
    with pytest.raises(WorkError, match="GiB are needed to resume"):
        here.call("resume", name="a", gpu=uuids[1])
    assert here.tenant("a")["gpus"][0]["uuid"] == uuids[0]
    assert here.tenant("a")["state"] == "parked"


def test_whole_processes_in_turns(node: Callable[..., Node]) -> None:
    """Two tenants of kind park: each one's turn takes the other off by checkpoint."""
    here = node(CONTEXT + 400 * MIB, most_moving=0.3)
    one = here.program("a", "park")
    assert one.ask("take(200)") == "0"
    here.call("park", name="a")  # otherwise the other program's context would not find room
    two = here.program("b", "park")
    assert two.ask("take(200)") == "0"
    here.call("resume", name="a")
    one.tell("work(1)")
    two.tell("work(1)")
    assert one.answer().endswith("intact")
    assert two.answer().endswith("intact")
    rows = [here.where(name) for name in ("a", "b")]
    assert all(row["moves_in"] > 0 and row["moves_out"] > 0 and row["moving_s"] > 0 for row in rows)


def test_managed_tenants_are_prefetched_in_bulk(node: Callable[..., Node]) -> None:
    here = node(2 * CONTEXT + 320 * MIB)
    one, two = (here.program(name, "managed") for name in ("a", "b"))
    assert one.ask("take(100)") == two.ask("take(100)") == "0"
    moves = here.call("exchange", out=["a"])["moves"]
    assert moves[0]["bytes"] == 96 * MIB
    assert here.where("a")["resident_bytes"] == 0
    here.call("exchange", **{"in": ["a"]})
    assert one.ask("check()") == two.ask("check()") == "intact"


def test_preempt_frees_what_was_asked_lowest_priority_first(node: Callable[..., Node]) -> None:
    here = node(2048 * MIB)
    for name, priority in (("low", 0), ("high", 9)):
        assert here.program(name, priority=priority).ask("take(96)") == "0"
    answer = here.call("preempt", gpu="0", free_bytes=64 * MIB)
    assert [row["name"] for row in answer["parked"]] == ["low"]
    assert answer["enough"]
    assert here.tenant("high")["state"] == "running"
    answer = here.call("preempt", gpu="0")
    assert [row["name"] for row in answer["parked"]] == ["high"]


def test_an_agent_that_restarts_finds_what_is_away(node: Callable[..., Node]) -> None:
    """Killed while one tenant is swapped out and two are parked: the next agent brings all of them back."""
    here = node(2048 * MIB)
    swapped, parked, whole = here.program("a"), here.program("b"), here.program("c", "none")
    for program in (swapped, parked, whole):
        assert program.ask("take(96)") == "0"
    here.call("exchange", out=["a"])
    here.call("park", name="b")
    here.call("park", name="c")
    counts = ("moves_out", "moved_out_bytes", "moving_s")
    before = [here.where("b")[name] for name in counts]
    assert before[:2] == [1, 96 * MIB]

    def written() -> list[Any]:
        moves = saved(here.folder, "b").get("moves") or {}
        return [moves.get(name) for name in ("moves_out", "out_bytes", "seconds")]

    wait_for(lambda: written() == before)
    here.agent.kill()
    here.agent.wait()
    here.start()
    wait_for(lambda: len(here.tenant("a")["pids"]) == 1 and len(here.tenant("b")["pids"]) == 1, what="their return")
    assert {row["name"] for row in here.call("parked")["parked"]} == {"b", "c"}
    assert [here.where("b")[name] for name in counts] == before, "what it has moved is still counted"
    assert swapped.ask("check()") == "intact"
    parked.tell("check()")
    whole.tell("check()")
    stays(lambda: here.where("b")["resident_bytes"] == 0)
    here.call("resume", name="b")
    here.call("resume", name="c")
    assert parked.answer() == whole.answer() == "intact"


def test_a_program_of_the_last_agent_can_be_parked_by_the_next(node: Callable[..., Node]) -> None:
    here = node(2048 * MIB)
    program = here.program("a", "none")
    assert program.ask("take(96)") == "0"
    wait_for(lambda: saved(here.folder, "a").get("processes"), what="it is written down")
    here.agent.kill()
    here.agent.wait()
    here.start()
    assert program.ask("work(0.1)").endswith("intact")
    assert here.call("park", name="a")["processes"]
    here.call("resume", name="a")
    assert program.ask("check()") == "intact"


def test_what_a_tenant_that_stays_was_promised_is_kept_for_it(node: Callable[..., Node]) -> None:
    """The rock uses nothing of its 500 MiB yet; the sand, alone on the card, may still not take them."""
    here = node(1100 * MIB)
    rock = here.program("rock", "none", 500 * MIB)
    sand = here.program("sand", "swap", 600 * MIB)
    # 600 MiB are for this program, of which its context takes 256
    assert sand.ask("take(320)") == "0"
    assert sand.ask("take(64)") == "2"
    assert rock.ask("take(240)") == "0"
    assert rock.ask("check()") == sand.ask("check()") == "intact"


def test_a_name_used_again_starts_fresh(node: Callable[..., Node]) -> None:
    """A tenant dies while it is parked; the next one of its name runs."""
    here = node(1024 * MIB)
    first = here.program("a")
    assert first.ask("take(64)") == "0"
    here.call("park", name="a")
    first.process.kill()
    wait_for(lambda: not here.call("list")["tenants"], what="its end")
    assert here.call("parked")["parked"] == []
    again = here.program("a")
    assert again.ask("take(64)") == "0"
    assert again.ask("work(0.2)").endswith("intact")
