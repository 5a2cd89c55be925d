"""Random work, allocations, frees, parking and preemption of four tenants that never fit together: nothing is lost."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from swap_node import CONTEXT, MIB, Node, Program

from cotenant.core.errors import InputError, WorkError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
SECONDS = 5.0
NAMES = "abcd"


@pytest.fixture
def here(short_folder: Path) -> Iterator[Node]:
    made = Node(short_folder, 4 * CONTEXT + 360 * MIB)
    yield made
    made.close()


def drive(program: Program, chance: random.Random, end: float, faults: list[str]) -> None:
    """One tenant's life; every answer must be that of a program alone on its card, or its own out-of-memory (2)."""
    held = 0
    while time.monotonic() < end and not faults:
        order = chance.choice(["take", "take", "work", "work", "check", "give"])
        if order == "take" and held < 160:
            size = chance.choice([8, 16, 32, 64])
            answer = program.ask(f"take({size}, {chance.choice([1, 2, 8])})")
            held += size
            good = answer in ("0", "2")
        elif order == "give":
            answer, held = program.ask("give()"), 0
            good = answer == "0"
        else:
            answer = program.ask("check()" if order == "check" else f"work({chance.random() * 0.2})")
            good = answer.endswith("intact")
        if not good:
            faults.append(f"{order}: {answer}")


def park_and_resume(here: Node, chance: random.Random, end: float) -> None:
    """An operator who parks tenants and brings them back."""
    while time.monotonic() < end:
        time.sleep(chance.random() * 0.4)
        name = chance.choice(NAMES)
        try:
            here.call("park", name=name, timeout_s=10.0)
        except (InputError, WorkError):
            continue
        time.sleep(chance.random() * 0.2)
        here.call("resume", name=name, timeout_s=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_contents_survive(here: Node, seed: int) -> None:
    programs = {name: here.program(name, "swap", 480 * MIB) for name in NAMES}
    end = time.monotonic() + SECONDS
    faults: list[str] = []
    threads = [
        threading.Thread(target=drive, args=(program, random.Random(f"{seed}{name}"), end, faults))
        for name, program in programs.items()
    ]
    threads.append(threading.Thread(target=park_and_resume, args=(here, random.Random(seed), end)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert not any(thread.is_alive() for thread in threads), here.said()
    assert all(program.ask("check()") == "intact" for program in programs.values())
    assert sum(here.where(name)["moves_out"] for name in NAMES) > 3
