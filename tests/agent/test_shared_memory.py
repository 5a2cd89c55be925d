"""Programs of one tenant that share GPU memory by CUDA IPC while the tenant's memory moves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swap_node import CONTEXT, MIB, Node, nodes_in

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")


@pytest.fixture
def node(short_folder: Path) -> Iterator[Callable[..., Node]]:
    with nodes_in(short_folder) as make:
        yield make


def test_memory_shared_between_processes_stays_and_the_rest_makes_room(node: Callable[..., Node]) -> None:
    """A program hands one of its blocks to another of the same tenant (CUDA IPC), beside a tenant that needs room."""
    here = node(3 * CONTEXT + 320 * MIB)
    owner = here.program("a")
    assert owner.ask("take(160, 32)") == "0"
    guest, other = here.joined("a"), here.program("b")
    handle = owner.ask("share(2)")
    assert guest.ask(f"open_shared({handle!r}, 32)") == owner.ask("contents(2)")
    assert other.ask("take(200)") == "0"
    for program in (owner, other):
        program.tell("work(1.5)")
    assert [program.answer().split()[1] for program in (owner, other)] == ["intact", "intact"]
    assert guest.ask("shared_contents()") == owner.ask("contents(2)")
    row = here.where("a")
    assert row["movable_bytes"] == 128 * MIB
    assert row["can_leave"]
    assert row["moves_out"] > 0
    assert here.where("b")["moves_out"] > 0
    assert any("32 MiB" in text for text in here.tenant("a")["warnings"])
    owner.process.kill()
    # the memory lives as long as any process has it open
    assert guest.ask("shared_contents()") == guest.ask("first_contents")
