"""Which models are on a GPU that has not room for all: worked out by hand, and invariants under random events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_residency import GIB, model, models, parts, resident, serve, serve_all

from cotenant.policy.residency import Action, Do, Place


def test_started_at_the_first_request_and_kept_ones_at_once() -> None:
    it = models(model("a"), model("b", kept=True))
    assert it.decide(0.0) == [Action(Do.START, "b", 0)]
    assert it.decide(0.0) == []
    it.settled("b", 3.0, 3.0)
    assert it.decide(3.0) == []
    it.arrived("a", 5.0)
    assert not it.admits("a")
    assert it.decide(5.0) == [Action(Do.START, "a", 0)]
    it.settled("a", 7.0, 2.0)
    assert it.admits("a")
    assert it.rows["a"].start_s == 2.0


def test_the_cheapest_idle_one_leaves_once_waiting_costs_as_much_as_the_move() -> None:
    """80 GiB: a and b of 40 are there. c comes at 10.0; a was used at 0, b at 9.5; 1 s brings either back."""
    it = models(model("a"), model("b"), model("c"))
    resident(it, "a", "b")
    serve(it, "b", 9.5)
    it.arrived("c", 10.0)
    assert it.decide(10.0) == [Action(Do.EVICT, "a", 0)]
    assert it.decide(10.1) == []  # `a` is being moved out
    it.settled("a", 10.5)
    assert it.rows["a"].place is Place.EVICTED
    assert it.decide(10.5) == [Action(Do.START, "c", 0)]
    it.settled("c", 11.0)
    serve_all(it, "c", 11.0)
    # When `a` comes back, both other models were used less than a second ago: b at 11.2, c at 11.0.
    serve(it, "b", 11.2)
    it.arrived("a", 11.3)
    assert it.decide(11.3) == []
    assert it.wake_s == 12.0
    assert it.decide(12.0) == [Action(Do.EXCHANGE, "a", 0, ("c",))]
    assert [it.rows[name].place for name in "ac"] == [Place.RETURNING, Place.LEAVING]
    assert it.decide(12.1) == []
    it.settled("c", 12.3)
    it.settled("a", 12.3)
    assert it.decide(12.3) == []
    assert [it.rows[name].place for name in "ac"] == [Place.RESIDENT, Place.EVICTED]


def test_an_open_stream_keeps_a_model_until_its_stay_is_over() -> None:
    """Bringing a model back takes 1.5 s, so its stay is 1.5 (1 - 0.2) / 0.2 = 6 s; then it gets no more requests."""
    it = models(model("a", 60), model("b", 60))
    it.arrived("a", 0.0)
    it.decide(0.0)
    it.settled("a", 0.0)
    it.began("a", 0.0)
    it.arrived("b", 1.0)
    assert it.decide(1.0) == []
    assert it.wake_s == pytest.approx(6.0)
    assert it.admits("a")
    assert it.decide(6.01) == []
    assert not it.admits("a")
    it.arrived("a", 6.5)
    it.ended("a", 7.0)
    assert it.decide(7.0) == [Action(Do.EVICT, "a", 0)]
    it.settled("a", 7.2)
    assert it.decide(7.2) == [Action(Do.START, "b", 0)]
    # The model that waited has gone meanwhile, so the busy model is not moved out.
    it.settled("b", 8.0)
    it.began("b", 8.0)
    assert it.decide(14.0) == []
    assert not it.admits("b")
    it.withdrawn("a", 14.1)
    assert it.decide(14.1) == []
    assert it.admits("b")


def test_rank_goes_before_lateness_and_best_effort_never_drains_others() -> None:
    it = models(model("chat", 60), model("night", 60, best_effort=True))
    resident(it, "night")
    it.arrived("night", 0.0)
    it.began("night", 0.0)
    it.arrived("chat", 0.0)
    assert it.decide(0.1) == []
    assert not it.admits("night")  # a model that is not admitted is told at once
    it.ended("night", 0.5)
    assert it.decide(0.5) == [Action(Do.EVICT, "night", 0)]
    it.settled("night", 1.0)
    assert it.decide(1.0) == [Action(Do.START, "chat", 0)]
    it.settled("chat", 2.0)
    serve_all(it, "chat", 2.0)
    it.arrived("night", 2.0)
    # only after chat was idle for 10 s
    assert it.decide(11.9) == []
    assert it.wake_s == 12.0
    assert it.decide(12.0) == [Action(Do.EXCHANGE, "night", 0, ("chat",))]


def test_kept_models_stay_and_failures_wait() -> None:
    it = models(model("kept", 60, kept=True), model("b", 60))
    it.decide(0.0)
    it.settled("kept", 1.0)
    it.arrived("b", 2.0)
    assert it.decide(1e6) == []
    it.died("kept", 1e6, again_s=2.0)
    # Its place goes to b, for which a request waits, and no longer to the model that was kept.
    assert it.decide(1e6) == [Action(Do.START, "b", 0)]
    it.failed("b", 1e6 + 1, again_s=5.0)
    assert it.decide(1e6 + 2) == [Action(Do.START, "kept", 0)]


def test_evicted_models_come_back_to_their_gpu_and_cold_ones_go_where_there_is_room() -> None:
    it = models(model("a", 60), model("b", 60), model("c", 60), gpus=2)
    resident(it, "a", "b")
    assert (it.rows["a"].gpu, it.rows["b"].gpu) == (0, 1)
    serve(it, "b", 5.0)
    it.arrived("c", 10.0)
    assert it.decide(10.0) == [Action(Do.EVICT, "a", 0)]
    it.settled("a", 10.5)
    assert it.decide(10.5) == [Action(Do.START, "c", 0)]
    it.settled("c", 11.0)
    it.arrived("a", 20.0)
    serve_all(it, "c", 19.0)
    # c leaves although b has been idle for longer, because only c is on GPU 0, which a needs
    assert it.decide(20.5) == [Action(Do.EXCHANGE, "a", 0, ("c",))]


def test_without_host_memory_programs_are_stopped() -> None:
    it = models(model("a", 60), model("b", 60), model("c", 30), host=60 * GIB)
    resident(it, "a")
    it.arrived("b", 50.0)
    assert it.decide(50.0) == [Action(Do.EVICT, "a", 0)]
    it.settled("a", 50.5)
    it.decide(50.5)
    it.settled("b", 51.0)
    serve_all(it, "b", 51.0)
    it.arrived("c", 150.0)
    assert it.decide(150.0) == [Action(Do.STOP, "b", 0)]
    it.settled("b", 151.0)
    assert it.rows["b"].place is Place.COLD
    assert it.rows["b"].gpu == -1


def test_small_models_do_not_keep_a_large_one_out() -> None:
    """Two busy ones of 30: large (70) is promised the room, so that the third small one does not come before it."""
    it = models(model("s1", 30), model("s2", 30), model("s3", 20), model("large", 70))
    for name in ("s1", "s2"):
        it.arrived(name, 0.0)
        it.decide(0.0)
        it.settled(name, 0.0)
        it.began(name, 0.0)
    it.arrived("large", 1.0)
    assert it.decide(1.0) == []
    it.arrived("s3", 2.0)
    assert it.decide(2.0) == []
    assert it.decide(3.5) == []  # 0.75 s * 4 = 3 s of minimum stay are over
    assert not it.admits("s1")
    it.ended("s1", 4.0)
    it.ended("s2", 4.0)
    assert {action.model for action in it.decide(4.0)} == {"s1", "s2"}


EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.floats(0.0, 5.0)), max_size=120)


@settings(deadline=None, max_examples=40)
@given(EVENTS, st.integers(1, 2), st.sampled_from([None, 0, 60 * GIB]))
def test_no_gpu_is_overfilled_no_stream_is_cut_and_everybody_is_served(
    events: list[tuple[int, int, float]], gpus: int, host: int | None
) -> None:
    sizes = (70, 50, 40, 30, 20, 10)
    facts = [model(f"m{i}", size, priority=i % 2, best_effort=i == 5) for i, size in enumerate(sizes)]
    it = models(*facts, gpus=gpus, host=host)
    now = 0.0
    under_way: list[Action] = []

    def check() -> None:
        for gpu in range(gpus):
            on = [r for r in it.rows.values() if r.gpu == gpu and r.place not in (Place.COLD, Place.EVICTED)]
            # a model that returns by an exchange takes only what others have left
            later = {a.model for a in under_way if a.do is Do.EXCHANGE}
            assert sum(r.facts.memory_bytes for r in on if r.facts.name not in later) <= 80 * GIB
            assert sum(r.facts.memory_bytes for r in on if r.place is not Place.LEAVING) <= 80 * GIB
        evicted = sum(r.facts.memory_bytes for r in it.rows.values() if r.place is Place.EVICTED)
        assert host is None or evicted <= host

    def act() -> None:
        for action in it.decide(now):
            for part in parts(action):
                if part.do in (Do.EVICT, Do.STOP):
                    assert it.rows[part.model].open == 0
                under_way.append(part)
        check()

    def end(part: Action, well: bool) -> None:
        """End a move. A return by an exchange ends after the evictions, and fails if one of them fails."""
        under_way.remove(part)
        before = [other for other in under_way if other.model in part.instead_of and other.do is Do.EVICT]
        after = [other for other in under_way if part.model in other.instead_of]
        for other in before if well else () if part.do is Do.EXCHANGE else after:
            end(other, well)
        if well:
            it.settled(part.model, now, passed)
        else:
            it.failed(part.model, now, 1.0)

    for which, what, passed in events:
        now += passed
        name = f"m{which}"
        row = it.rows[name]
        if what <= 2:
            it.arrived(name, now)
        elif what == 3 and row.waiting and it.admits(name):
            it.began(name, now)
        elif what == 4 and row.open:
            it.ended(name, now)
        elif what == 5 and row.waiting:
            it.withdrawn(name, now)
        elif what == 6 and row.place is not Place.COLD:
            for _ in range(row.open):
                it.ended(name, now)
            under_way = [action for action in under_way if action.model != name]
            it.died(name, now)
        elif what == 7 and under_way:
            end(under_way[0 if passed < 2.5 else -1], passed <= 4.0)
        act()
    # From here on no operation fails, so every waiting request must be served within a bounded time.
    for _ in range(400):
        now = min(now + 5.0, max(it.wake_s, now + 0.01))
        for action in under_way:
            it.settled(action.model, now)
        under_way.clear()
        for row in it.rows.values():
            for _ in range(row.open):
                it.ended(row.facts.name, now)
            while row.waiting and it.admits(row.facts.name):
                it.began(row.facts.name, now)
        act()
    assert not any(row.waiting or row.open for row in it.rows.values())
