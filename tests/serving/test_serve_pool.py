"""The live state under any order of events: arrivals, answers, deaths, new plans. Workers are stand-ins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_setup import PROFILE, plan

from cotenant.core.serving import Service
from cotenant.profiles.serving.latency_files import parse_profile
from cotenant.serving.dispatch.calls import Call, Outcome, Refusal, Unit
from cotenant.serving.dispatch.lets import Let
from cotenant.serving.dispatch.pool import Pool
from cotenant.serving.dispatch.stats import Stats
from cotenant.serving.protocol.oip import InferRequest
from cotenant.serving.protocol.tensors import Tensor
from cotenant.serving.worker import Job, Result, WorkerSpec

PROFILES = {"X": parse_profile(PROFILE, "made up")}
SERVICES = [
    Service("a", "a", 10.0, 10_000.0, max_queue=6), Service("b", "b", 10.0, 10_000.0, max_queue=50),
    Service("c", "c", 10.0, 10_000.0, latency_sensitive=False, max_queue=50),
]  # fmt: skip
PLANS = [
    plan({"a": 2, "b": 3}, {"c": 4}, gpus=2), plan({"a": 4}, {"b": 1, "c": 1}, {"a": 1}, gpus=2),
    plan({"a": 1, "b": 1, "c": 1}, gpus=2), plan({"a": 3, "c": 2}, {"b": 8}, {"b": 2}, {"c": 1}, gpus=2),
]  # fmt: skip


class Desk:
    """A pool with stand-in workers; keeps what every call was answered, and checks each batch as it is submitted."""

    def __init__(self) -> None:
        self.pool = Pool(SERVICES, PROFILES, Stats({s.name: s.slo_ms for s in SERVICES}), self.lost)
        self.workers: list[Stand] = []
        self.dead: list[Let] = []
        self.replies: dict[int, list[Any]] = {}
        self.asked: list[int] = []
        self.calls: list[Call] = []
        self.tried: dict[int, int] = {}
        self.put(PLANS[0], keep=False)

    def lost(self, let: Let, why: str) -> None:
        self.dead.append(let)

    def put(self, made: Any, keep: bool) -> None:
        lets = []
        free = [x for x in self.pool.lets if keep and x.worker is not None]
        for spec in made.gpulets:
            same = next((x for x in free if {s.service for s in spec.seats} <= x.seats), None)
            if same is not None:
                free.remove(same)
                lets.append(same)
            else:
                lets.append(Let(spec, self.worker()))
        self.dead = [let for let in self.dead if let in lets]
        self.pool.switch(made, lets)

    def worker(self) -> Stand:
        made = Stand(self)
        self.workers.append(made)
        return made

    def offer(self, name: str) -> None:
        number = len(self.asked)
        self.asked.append(number)
        self.replies[number] = []
        request = InferRequest(name, [], id=str(number))
        call = Call(request, name, "1", 1, self.replies[number].append)
        self.calls.append(call)
        self.pool.offer(call, [Tensor("INPUT", "FP32", (), str(number).encode())], 0, None)


class Stand:
    """A worker that answers when it is told to."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.spec = WorkerSpec("w", 0, "X", "50%", 0.5, "mps", ())
        self.pid = None
        self.job: Job | None = None
        self.alive = True
        self.most: dict[str, int] = {}

    def submit(self, job: Job) -> None:
        assert self.alive
        assert self.job is None, "a worker has one job at a time"
        let = self.desk.pool._of[self]  # type: ignore[index]
        # a part of a batch may still run after the plan that formed it has been replaced
        self.most |= {s.service: max(s.batch, self.most.get(s.service, 0)) for s in let.spec.seats}
        assert 1 <= len(job.units) <= self.most[job.service], "a batch is over its size"
        numbers = [int(unit[0].data) for unit in job.units]  # type: ignore[arg-type]
        fresh = [n for n in numbers if n not in self.desk.tried]
        assert fresh == sorted(fresh), "first come, first served"
        for n in numbers:
            self.desk.tried[n] = self.desk.tried.get(n, 0) + 1
            assert self.desk.tried[n] <= 2, "a request is tried again once"
            assert not self.desk.replies[n], "an answered request runs again"
        self.job = job

    def finish(self) -> None:
        job, self.job = self.job, None
        assert job is not None
        answers: list[Any] = [[Tensor("OUTPUT", "FP32", (), unit[0].data)] for unit in job.units]
        self.desk.pool.finished(self, job, Result(1.0, answers))  # type: ignore[arg-type]

    def die(self) -> None:
        self.alive, self.job = False, None
        self.desk.pool.died(self, "was ended by SIGKILL")  # type: ignore[arg-type]

    def kill(self) -> None:
        self.alive = False


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.sampled_from("abc")), st.tuples(st.just("finish"), st.integers(0, 7)),
        st.tuples(st.just("die"), st.integers(0, 7)), st.tuples(st.just("come"), st.integers(0, 7)),
        st.tuples(st.just("plan"), st.integers(0, 7)), st.tuples(st.just("tick"), st.none()),
        st.tuples(st.just("withdraw"), st.integers(0, 59)),
    ),
    max_size=60,
)  # fmt: skip


def play(events: list[tuple[str, Any]]) -> None:
    desk = Desk()
    for kind, what in events:
        busy = [w for w in desk.workers if w.job is not None]
        if kind == "offer":
            desk.offer(what)
        elif kind == "finish" and busy:
            busy[what % len(busy)].finish()
        elif kind == "die":
            living = [let.worker for let in desk.pool.lets if let.worker is not None]
            if living:
                living[what % len(living)].die()  # type: ignore[attr-defined]
        elif kind == "come" and desk.dead:
            let = desk.dead.pop(what % len(desk.dead))
            desk.pool.attach(let, desk.worker())  # type: ignore[arg-type]
        elif kind == "plan":
            desk.put(PLANS[what % len(PLANS)], keep=what < 4)
        elif kind == "tick":
            desk.pool.tick()
        elif kind == "withdraw" and desk.calls:
            call = desk.calls[what % len(desk.calls)]
            before = desk.pool.waiting(call.service)
            waits = any(unit.call is call for unit in desk.pool._waiting[call.service].values())
            desk.pool.withdraw(call)
            assert desk.pool.waiting(call.service) == desk.pool.desk.waiting(call.service) == before - waits
    while desk.dead:  # all workers are replaced, and all running batches end
        desk.pool.attach(desk.dead.pop(), desk.worker())  # type: ignore[arg-type]
    while any(w.job is not None for w in desk.workers):
        next(w for w in desk.workers if w.job is not None).finish()
    for number in desk.asked:
        assert len(desk.replies[number]) == 1, f"request {number} has {len(desk.replies[number])} answers"
        answer = desk.replies[number][0]
        if not isinstance(answer, Refusal):
            assert answer.outputs[0].data == str(number).encode(), "somebody else's answer"
    assert not any(desk.pool.in_flight.values())
    counted = sum(sum(own.outcomes.values()) for own in desk.pool.stats.services.values())
    assert counted == len(desk.asked), "every request is counted once"


@settings(max_examples=150, deadline=None)
@given(events=EVENTS)
def test_nothing_is_lost_or_answered_twice(events: list[tuple[str, Any]]) -> None:
    async def main() -> None:
        play(events)

    asyncio.run(main())


def test_a_deadline_that_passes_in_the_queue_is_answered_without_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        desk = Desk()
        now = [0.0]
        monkeypatch.setattr(desk.pool, "now_ms", lambda: now[0])
        for worker in list(desk.workers):
            worker.die()
        desk.offer("a")
        now[0] = 9_999.0
        desk.pool.tick()
        assert desk.replies[0] == []
        now[0] = 10_001.0
        desk.pool.tick()
        assert isinstance(desk.replies[0][0], Refusal)
        assert desk.pool.stats.services["a"].outcomes[Outcome.DROPPED] == 1

    asyncio.run(main())


@pytest.mark.parametrize(("waited", "runs"), [(9_500.0, True), (9_700.0, False)])
def test_what_batches_take_beyond_the_profile_is_kept_free(
    monkeypatch: pytest.MonkeyPatch, waited: float, runs: bool
) -> None:
    async def main() -> None:
        desk = Desk()
        now = [0.0]
        monkeypatch.setattr(desk.pool, "now_ms", lambda: now[0])
        for _ in range(30):
            desk.offer("b")
            worker = next(w for w in desk.workers if w.job is not None)
            assert worker.job is not None
            now[0] += worker.job.expected_ms + 400.0
            worker.finish()
        desk.offer("b")  # occupies the gpulet
        # By the profile, this request meets its SLO of 10 s after either wait. With the 400 ms more that batches took,
        # it meets it only after the shorter one.
        desk.offer("b")
        now[0] += waited
        next(w for w in desk.workers if w.job is not None).finish()
        assert any(w.job is not None for w in desk.workers) is runs
        assert desk.pool.stats.services["b"].outcomes[Outcome.DROPPED] == (0 if runs else 1)

    asyncio.run(main())


def test_a_hung_worker_is_killed_once_and_its_request_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        desk = Desk()
        now = [0.0]
        monkeypatch.setattr(desk.pool, "now_ms", lambda: now[0])
        desk.offer("b")
        first = next(w for w in desk.workers if w.job is not None)
        while now[0] < 19_900.0:  # a batch may take twice the SLO
            now[0] += 10.0
            desk.pool.tick()
        assert first.alive
        now[0] = 25_000.0  # time in which this process did not run does not count
        desk.pool.tick()
        assert first.alive
        for _ in range(12):
            now[0] += 10.0
            desk.pool.tick()
        assert not first.alive
        # The request's deadline (the SLO) has passed meanwhile, so it is dropped and not run again.
        desk.pool.tick()
        assert isinstance(desk.replies[0][0], Refusal)
        assert len(desk.dead) == 1

    asyncio.run(main())


def test_a_best_effort_batch_may_be_held_off_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker waits where latency-sensitive work holds the floor: it was killed after two SLOs, twice, and the
    request failed."""

    async def main() -> None:
        desk = Desk()
        now = [0.0]
        monkeypatch.setattr(desk.pool, "now_ms", lambda: now[0])
        desk.offer("c")
        first = next(w for w in desk.workers if w.job is not None)
        while now[0] < 61_000.0:
            assert first.alive is (now[0] <= 60_000.0)
            now[0] += 10.0
            desk.pool.tick()
        assert not first.alive

    asyncio.run(main())


def test_a_worker_that_dies_before_it_is_attached_is_lost() -> None:
    async def main() -> None:
        desk = Desk()
        desk.workers[0].die()
        dead = desk.worker()
        desk.pool.died(dead, "was ended by SIGKILL")  # type: ignore[arg-type]
        let = desk.dead.pop()
        desk.pool.attach(let, dead)  # type: ignore[arg-type]
        assert desk.dead == [let]
        assert let.worker is None

    asyncio.run(main())


def test_suspects_of_a_death_run_alone() -> None:
    async def main() -> None:
        desk = Desk()
        for _ in range(4):
            desk.offer("b")  # one request runs and three wait
        running = next(w for w in desk.workers if w.job is not None)
        running.finish()
        assert running.job is not None
        assert len(running.job.units) == 3
        running.die()
        desk.pool.attach(desk.dead.pop(), desk.worker())  # type: ignore[arg-type]
        sizes = []
        while any(w.job is not None for w in desk.workers):
            worker = next(w for w in desk.workers if w.job is not None)
            assert worker.job is not None
            sizes.append(len(worker.job.units))
            worker.finish()
        assert sizes == [1, 1, 1]

    asyncio.run(main())


def test_units_say_what_they_are() -> None:
    unit = Unit(Call(InferRequest("a", []), "a", "1", 1, lambda x: None), 0, [], 1.0, 2.0)
    assert (unit.tries, unit.alone) == (0, False)
