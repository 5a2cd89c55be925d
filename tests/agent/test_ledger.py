"""The memory ledger: worked cases, and a random history against a second, simpler account."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.abi.protocol import NO_LIMIT, MemoryFamily
from cotenant.agent.memory.ledger import Ledger

GIB = 1 << 30
MIB = 1 << 20


def test_reserve_commit_release() -> None:
    ledger = Ledger()
    ledger.gpu("g", 8 * GIB)
    ledger.cap("t", "g", 4 * GIB)
    ledger.join(1, "t")
    number = ledger.reserve(1, "g", MemoryFamily.PLAIN, 3 * GIB)
    assert number is not None
    assert ledger.used("t", "g") == 3 * GIB  # charged before the driver is called
    assert ledger.reserve(1, "g", MemoryFamily.PLAIN, 2 * GIB) is None
    assert ledger.commit(1, number, 2 * GIB)
    assert ledger.used("t", "g") == 2 * GIB
    assert not ledger.commit(1, number, 2 * GIB)  # a reservation can be committed only once
    assert ledger.release(1, "g", MemoryFamily.PLAIN, 5 * GIB) == 2 * GIB
    assert ledger.used("t", "g") == 0


def test_the_driver_refused() -> None:
    ledger = Ledger()
    ledger.join(1, "t")
    number = ledger.reserve(1, "g", MemoryFamily.VMM, GIB)
    assert number is not None
    ledger.commit(1, number, 0)
    assert ledger.used("t", "g") == 0


def test_contexts_are_charged_and_never_refused() -> None:
    ledger = Ledger()
    ledger.cap("t", "g", 100)
    ledger.join(1, "t")
    assert ledger.reserve(1, "g", MemoryFamily.CONTEXT, 500) is not None
    assert ledger.used("t", "g") == 500
    assert ledger.reserve(1, "g", MemoryFamily.PLAIN, 1) is None


def test_a_cap_is_never_shown_above_the_card() -> None:
    ledger = Ledger()
    ledger.gpu("g", 14_917)
    ledger.cap("t", "g", 15_360)
    assert ledger.limit("t", "g") == 14_917
    assert ledger.limit("other", "g") == NO_LIMIT


def test_a_dead_process_gives_back_its_own_part_only() -> None:
    ledger = Ledger()
    for process, size in ((1, GIB), (2, 2 * GIB)):
        ledger.join(process, "t")
        number = ledger.reserve(process, "g", MemoryFamily.POOL, size)
        assert number is not None
        ledger.commit(process, number, size)
    ledger.reserve(1, "g", MemoryFamily.PLAIN, 7)
    assert ledger.drop(1) == {"g": GIB + 7}
    assert ledger.used("t", "g") == 2 * GIB
    assert ledger.drop(1) == {}


def test_state_replaces_what_was_known() -> None:
    ledger = Ledger()
    ledger.join(1, "t")
    ledger.state(1, "g", MemoryFamily.PLAIN, 5)
    ledger.state(1, "g", MemoryFamily.PLAIN, 3)
    assert ledger.used("t", "g") == 3
    assert ledger.families("t", "g") == {"plain": 3}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "commit", "release", "state", "drop"]),
        st.integers(1, 3),
        st.sampled_from(["g0", "g1"]),
        st.sampled_from([MemoryFamily.PLAIN, MemoryFamily.POOL]),
        st.integers(0, 100),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(operations=OPERATIONS)
def test_used_is_the_sum_of_what_processes_hold_and_never_over_the_cap(operations: list) -> None:
    ledger = Ledger()
    ledger.cap("t", "g0", 150)
    outstanding: dict[int, dict[int, tuple[str, int]]] = {}
    over = 0  # STATE and a larger COMMIT report memory that is taken already, so they may pass the limit
    for action, process, gpu, family, size in operations:
        ledger.join(process, "t")
        mine = outstanding.setdefault(process, {})
        before = ledger.used("t", gpu)
        if action == "reserve":
            number = ledger.reserve(process, gpu, family, size)
            if number is not None:
                mine[number] = (gpu, size)
            if gpu == "g0" and not over:
                assert ledger.used("t", "g0") <= 150
            assert (number is None) == (gpu == "g0" and before + size > 150)
        elif action == "commit" and mine:
            number, (where, reserved) = mine.popitem()
            over += size > reserved
            ledger.commit(process, number, size)
            del where
        elif action == "release":
            ledger.release(process, gpu, family, size)
        elif action == "state":
            over += 1
            ledger.state(process, gpu, family, size)
        elif action == "drop":
            ledger.drop(process)
            mine.clear()
        for name in ("g0", "g1"):
            held = sum(sum(ledger.held(p, name, family) for family in MemoryFamily) for p in (1, 2, 3))
            pending = sum(s for p in outstanding.values() for g, s in p.values() if g == name)
            assert ledger.used("t", name) == held + pending


def test_what_was_taken_without_asking_is_charged_over_the_cap() -> None:
    """A graph's memory is known only after its launch: 300 MiB twice under a cap of 512 are 600, and nothing fits."""
    ledger = Ledger()
    ledger.cap("a", "gpu", 512 * MIB)
    ledger.join(1, "a")
    for _ in range(2):
        ledger.take(1, "gpu", MemoryFamily.GRAPH, 300 * MIB)
    assert ledger.used("a", "gpu") == 600 * MIB
    assert ledger.families("a", "gpu") == {"graph": 600 * MIB}
    assert ledger.reserve(1, "gpu", MemoryFamily.PLAIN, 1) is None
    assert ledger.release(1, "gpu", MemoryFamily.GRAPH, 600 * MIB) == 600 * MIB
    assert ledger.used("a", "gpu") == 0


def test_what_is_kept_for_one_is_refused_to_the_others() -> None:
    """A card of 8 GiB, 3 kept for ls: others get 5 in all, ls its 3 whatever they hold."""
    ledger = Ledger()
    ledger.gpu("g", 8 * GIB)
    ledger.keep("ls", "g", 3 * GIB)
    ledger.cap("ls", "g", 3 * GIB)
    for process, tenant in ((1, "be"), (2, "ls"), (3, "other")):
        ledger.join(process, tenant)
    assert ledger.left("be", "g") == 5 * GIB
    taken = ledger.reserve(1, "g", MemoryFamily.PLAIN, 4 * GIB)
    assert taken is not None
    assert ledger.reserve(3, "g", MemoryFamily.POOL, GIB + 1) is None
    assert ledger.reserve(3, "g", MemoryFamily.CONTEXT, 2 * GIB) is not None, "contexts are never refused"
    assert ledger.reserve(3, "g", MemoryFamily.PLAIN, MIB) is None, "and count"
    assert ledger.reserve(2, "g", MemoryFamily.PLAIN, 2 * GIB) is not None, "its own is there"
    assert ledger.kept_from("be", "g") == GIB, "what it has taken is not kept twice"
    ledger.forget("ls")
    assert ledger.left("be", "g") == NO_LIMIT


def test_tenants_whose_contents_make_way_are_not_held_to_what_is_kept() -> None:
    ledger = Ledger()
    ledger.gpu("g", 8 * GIB)
    ledger.keep("ls", "g", 3 * GIB)
    ledger.keep("swapped", "g", None, movable=True)
    ledger.join(1, "swapped")
    ledger.join(2, "be")
    assert ledger.reserve(1, "g", MemoryFamily.VMM, 7 * GIB) is not None, "the agent moves it out of the way"
    assert ledger.left("be", "g") == 5 * GIB, "and what it holds takes nothing from the others"


def test_nothing_is_kept_where_a_tenant_has_left() -> None:
    """A tenant with 3 of 8 GiB kept for it moves to another card: the first card is the others' again."""
    ledger = Ledger()
    ledger.gpu("home", 8 * GIB)
    ledger.keep("ls", "home", 3 * GIB)
    ledger.cap("ls", "home", 3 * GIB)
    assert ledger.left("be", "home") == 5 * GIB
    ledger.leave("ls", "home")
    assert ledger.left("be", "home") == NO_LIMIT
    assert ledger.limit("ls", "home") == NO_LIMIT
