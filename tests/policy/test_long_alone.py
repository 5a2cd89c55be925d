"""A tenant that was alone for minutes, and whoever comes then: nobody waits for the other to make up for it."""

from __future__ import annotations

import pytest

from cotenant.policy.shares import (
    DISCIPLINES,
    ENDLESS_NS,
    MS_NS,
    SECOND_NS,
    Ended,
    GpuTurns,
    Grant,
    Move,
    QuotaSettings,
    Revoke,
    Share,
    Stuck,
)


class Gpu:
    """Tenants that always want more, on one GPU in virtual time; a turn is given back where it must be."""

    def __init__(self, discipline: str = "request-limit", **settings: int) -> None:
        self.turns = GpuTurns("0", QuotaSettings(discipline=discipline, exclusive_ns=SECOND_NS, **settings))
        self.now_ns = 0
        self.held_ns: dict[str, int] = {}
        self.stuck: list[str] = []
        self.hangs: set[str] = set()
        # tenant, epoch, and time at which the tenant gives its turn back
        self._ends: tuple[str, int, int] | None = None

    def come(self, name: str, share: Share | None = None) -> None:
        if name not in self.turns.accounts:
            self.turns.join(name, share or Share(), self.now_ns)
        self._obey(self.turns.request(name, self.now_ns))

    def go(self, name: str) -> None:
        """Without work from now on: gives back what it holds, or asks no more."""
        turn = self.turns.turn
        if turn is not None and turn.account.name == name:
            self._ends = None
            self._obey(self.turns.release(name, turn.epoch, self.now_ns, None, "idle", False))
        else:
            self._obey(self.turns.withdraw(name, self.now_ns))

    def run(self, seconds: float) -> dict[str, float]:
        """Part of the time that each tenant held the GPU."""
        began_ns, until_ns = self.now_ns, self.now_ns + int(seconds * SECOND_NS)
        before = {name: self._held(name) for name in self.turns.accounts}
        while self.now_ns < until_ns:
            wake_ns = self.turns.wake_ns()
            due = [until_ns, *([wake_ns] if wake_ns is not None else []), *([self._ends[2]] if self._ends else [])]
            self.now_ns = max(self.now_ns, min(due))
            if self._ends and self._ends[2] <= self.now_ns:
                (name, epoch, _), self._ends = self._ends, None
                self._obey(self.turns.release(name, epoch, self.now_ns, None, "released", True))
            elif wake_ns is not None and wake_ns <= self.now_ns:
                self._obey(self.turns.advance(self.now_ns))
        return {name: (self._held(name) - held) / (until_ns - began_ns) for name, held in before.items()}

    def _held(self, name: str) -> int:
        return self.turns.accounts[name].held_so_far_ns(self.now_ns)

    def _obey(self, steps: list) -> None:
        for step in steps:
            if isinstance(step, Grant | Move) and step.tenant not in self.hangs:
                never = step.deadline_ns == ENDLESS_NS
                self._ends = None if never else (step.tenant, step.epoch, step.deadline_ns)
            elif isinstance(step, Revoke) and step.tenant not in self.hangs:
                self._ends = (step.tenant, step.epoch, self.now_ns + MS_NS)
            elif isinstance(step, Stuck):
                self.stuck.append(step.tenant)
            elif isinstance(step, Ended) and self._ends and self._ends[:2] == (step.tenant, step.epoch):
                self._ends = None


EQUAL = [entry.name for entry in DISCIPLINES]


@pytest.mark.parametrize("discipline", EQUAL)
def test_both_share_at_once_after_minutes_alone(discipline: str) -> None:
    """Equal tenants: half each (to a turn of 1 s) of the 10 s after the second one has come."""
    gpu = Gpu(discipline)
    gpu.come("old")
    gpu.run(300)
    assert gpu.turns.turn is not None
    assert gpu.turns.turn.endless
    gpu.come("new")
    got = gpu.run(10)
    assert got["new"] == pytest.approx(0.5, abs=0.11)
    assert got["old"] == pytest.approx(0.5, abs=0.11)


@pytest.mark.parametrize("discipline", EQUAL)
def test_both_share_at_once_after_each_was_alone_for_minutes(discipline: str) -> None:
    """The one that comes back had the GPU for longer than the one that is there now."""
    gpu = Gpu(discipline)
    gpu.come("first")
    gpu.run(300)
    gpu.go("first")
    gpu.run(1)
    gpu.come("second")
    gpu.run(60)
    gpu.come("first")
    got = gpu.run(10)
    assert got["first"] == pytest.approx(0.5, abs=0.11)
    assert got["second"] == pytest.approx(0.5, abs=0.11)


def test_weights_hold_after_minutes_alone() -> None:
    gpu = Gpu("weighted-round-robin")
    gpu.come("old", Share(weight=1.0))
    gpu.run(300)
    gpu.come("new", Share(weight=3.0))
    assert gpu.run(20)["new"] == pytest.approx(0.75, abs=0.05)


def test_what_it_holds_is_counted_while_it_runs() -> None:
    """Also beyond the window, over which shares are reckoned."""
    gpu = Gpu()
    gpu.come("a")
    gpu.run(65)
    account = gpu.turns.accounts["a"]
    assert account.held_so_far_ns(gpu.now_ns) == 65 * SECOND_NS
    assert account.turn_ns(gpu.now_ns) == 10 * SECOND_NS
    gpu.go("a")
    assert account.held_so_far_ns(gpu.now_ns) == 65 * SECOND_NS


def test_a_holder_that_hangs_at_its_limit_does_not_keep_who_was_at_his() -> None:
    """`b` may run again while `a` is told to stop, and nothing else happens: `stuck_ns` later it has the GPU."""
    gpu = Gpu(stuck_ns=5 * SECOND_NS)
    gpu.come("b", Share(limit=0.3))
    gpu.run(3.5)
    gpu.hangs.add("a")
    gpu.come("a", Share(limit=0.05))
    while gpu.turns.turn is None or gpu.turns.turn.revoked_ns is None:
        gpu.run(0.01)
    assert gpu.turns.turn.account.name == "a"
    assert not gpu.turns.contended  # `b` may not run yet, so the turn of `a` stays without contention
    got = gpu.run(15)
    assert gpu.stuck == ["a"]
    assert got["b"] > 0.1


def test_two_that_hang_leave_the_broker_nothing_to_do() -> None:
    """One is passed over and asks again, the other is told to stop: no time is due that has gone by already."""
    gpu = Gpu(stuck_ns=SECOND_NS)
    gpu.hangs |= {"a", "b"}
    gpu.come("a")
    gpu.run(1)
    gpu.come("b", Share(limit=0.3))
    gpu.run(2)
    assert gpu.stuck == ["a"]
    gpu.come("a")  # another process of `a`
    for _ in range(40):
        gpu.now_ns += 250 * MS_NS
        gpu._obey(gpu.turns.advance(gpu.now_ns))
        wake_ns = gpu.turns.wake_ns()
        assert wake_ns is None or wake_ns > gpu.now_ns
    assert gpu.turns.turn is not None
    assert gpu.turns.turn.revoked_ns is not None
