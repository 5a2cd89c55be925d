"""Models of which one returns while others leave, and the host memory that they need: by hand and at random."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_residency import GIB, model, models, parts, replace_idle, resident

from cotenant.policy.residency import Action, Do, ModelResidency, MoveRates, Place


def changing(host: int | None = None) -> ModelResidency:
    """Models a and b of 60 GiB, of which one fits: a is evicted, b has been idle for long."""
    it = models(model("a", 60), model("b", 60), model("c", 60), host=host)
    resident(it, "a")
    replace_idle(it, "a", "b", 50.0)
    assert [it.rows[name].place for name in "ab"] == [Place.EVICTED, Place.RESIDENT]
    return it


@pytest.mark.parametrize("first", ["a", "b"])
def test_memory_of_an_exchange_is_free_for_no_other_model(first: str) -> None:
    """80 GiB: while a and b of 60 change places, there is no room for c, whichever has ended first."""
    it = changing()
    it.arrived("a", 100.0)
    it.arrived("c", 100.1)
    assert it.decide(100.1) == [Action(Do.EXCHANGE, "a", 0, ("b",))]
    assert it.decide(100.2) == []
    it.settled(first, 100.4)
    assert it.decide(100.4) == []
    it.settled("b" if first == "a" else "a", 100.5)
    assert it.decide(100.5) == []


def test_the_victim_of_an_exchange_has_to_find_host_memory_beside_the_returning_model() -> None:
    it = changing(host=120 * GIB)
    it.arrived("a", 100.0)
    assert it.decide(100.0) == [Action(Do.EXCHANGE, "a", 0, ("b",))]
    it.settled("b", 100.4)
    it.failed("a", 100.4, again_s=1.0)
    assert [it.rows[name].place for name in "ab"] == [Place.EVICTED] * 2
    # with less, b is stopped, and then a returns to memory that is free
    it = changing(host=119 * GIB)
    it.arrived("a", 100.0)
    assert it.decide(100.0) == [Action(Do.STOP, "b", 0)]
    it.settled("b", 101.0)
    assert it.decide(101.0) == [Action(Do.BRING, "a", 0)]


def test_a_busy_victim_is_exchanged_when_its_streams_have_ended() -> None:
    it = changing()
    it.arrived("b", 100.0)
    it.began("b", 100.0)
    it.arrived("a", 100.0)
    assert it.decide(100.0) == []
    assert not it.admits("b")
    it.ended("b", 101.0)
    assert it.decide(101.0) == [Action(Do.EXCHANGE, "a", 0, ("b",))]


def test_what_leaves_already_is_awaited_before_a_return() -> None:
    """a of 60 returns to a GPU of 80 from which c of 40 already leaves for b: only then d leaves for it."""
    it = models(model("a", 60), model("b", 40), model("c", 40), model("d", 40))
    resident(it, "a")
    replace_idle(it, "a", "c", 50.0)
    resident(it, "d", now=60.0)
    it.arrived("b", 100.0)
    assert it.decide(100.0) == [Action(Do.EVICT, "c", 0)]
    it.withdrawn("b", 100.1)
    it.arrived("a", 100.1)
    assert it.decide(100.1) == [Action(Do.EVICT, "d", 0)]
    it.settled("c", 100.4)
    assert it.decide(100.4) == []
    it.settled("d", 100.5)
    assert it.decide(100.5) == [Action(Do.BRING, "a", 0)]


def test_an_exchange_is_measured_as_one() -> None:
    rates = MoveRates(in_bps=40 * GIB, both_bps=30 * GIB, fixed_s=0.0)
    it = ModelResidency([80 * GIB], [model("a", 60), model("b", 60)], rates=rates)
    resident(it, "a")
    replace_idle(it, "a", "b", 50.0)
    it.arrived("a", 100.0)
    assert it.decide(100.0) == [Action(Do.EXCHANGE, "a", 0, ("b",))]
    assert it.wait_s("a", 100.5) == pytest.approx(2.0 - 0.5)
    it.settled("b", 103.0, 3.0)
    it.settled("a", 103.0, 3.0)
    assert rates.both_bps == 20 * GIB
    # so it is known that a return alone takes longer, too, although none was measured
    assert rates.in_bps == pytest.approx(40 * GIB * 20 / 30)
    rates.observe(0, 40 * GIB, 2.0)
    rates.observe(40 * GIB, 40 * GIB, 1.0)
    assert rates.in_bps == 20 * GIB


def test_a_return_that_fails_finds_its_host_memory() -> None:
    """Host memory for one model. `a` is on its way back, so its contents are still there while b is evicted."""
    it = models(model("a", 40), model("b", 60), model("c", 60), gpus=2, host=60 * GIB)
    resident(it, "a", "b")
    assert (it.rows["a"].gpu, it.rows["b"].gpu) == (0, 1)
    it.arrived("c", 50.0)
    assert it.decide(50.0) == [Action(Do.EVICT, "a", 0)]
    it.settled("a", 50.5)
    it.decide(50.5)
    it.died("c", 51.0, again_s=60.0)
    it.arrived("a", 51.0)
    assert it.decide(51.0) == [Action(Do.BRING, "a", 0)]
    it.withdrawn("c", 51.1)
    it.arrived("c", 112.0)
    assert it.decide(112.0) == [Action(Do.STOP, "b", 1)]
    it.failed("a", 112.1, again_s=1.0)
    it.settled("b", 112.5)
    assert [it.rows[name].place for name in "ab"] == [Place.EVICTED, Place.COLD]


MOVES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["done", "done", "done", "fail", "wait", "die"]), st.booleans()),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(MOVES, st.integers(1, 3), st.sampled_from([30 * GIB, 60 * GIB, 100 * GIB]))
def test_host_memory_holds_what_was_evicted_and_has_not_returned(
    events: list[tuple[int, str, bool]], gpus: int, host: int
) -> None:
    """The oracle: contents are in host memory from the eviction's end to the end of a return that succeeds, or to the
    program's death. An eviction needs its host memory from its beginning."""
    it = models(*[model(f"m{i}", size) for i, size in enumerate((60, 50, 40, 30, 30, 20))], gpus=gpus, host=host)
    sizes = {name: row.facts.memory_bytes for name, row in it.rows.items()}
    held, moving, now = set[str](), dict[str, Do](), 0.0
    exchanges: dict[str, tuple[str, ...]] = {}
    for which, what, oldest in events:
        now += 20.0
        name = f"m{which}"
        if what == "die" and it.rows[name].place is not Place.COLD:
            moving.pop(name, None)
            held.discard(name)
            it.died(name, now)
        elif what in ("done", "fail") and moving:
            other = list(moving)[0 if oldest else -1]
            do = moving.pop(other)
            if what == "fail":
                it.failed(other, now, 1.0)
                for returning in [r for r, do in moving.items() if do is Do.EXCHANGE and other in exchanges[r]]:
                    del moving[returning]
                    it.failed(returning, now, 1.0)
            else:
                it.settled(other, now)
                (held.add if do is Do.EVICT else held.discard)(other)
        it.arrived(name, now)
        actions = it.decide(now)
        exchanges |= {action.model: action.instead_of for action in actions}
        moving |= {part.model: part.do for action in actions for part in parts(action)}
        for each, row in it.rows.items():
            while row.waiting and it.admits(each):
                it.began(each, now)
                it.ended(each, now)
        assert it._host_used == sum(sizes[each] for each in held)
        assert sum(sizes[each] for each in held | {e for e, do in moving.items() if do is Do.EVICT}) <= host
