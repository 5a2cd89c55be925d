"""Any sequence of events, sensible or not, keeps the broker's invariants: nothing that a client sends can break it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.policy.shares import (
    DISCIPLINES,
    ENDLESS_NS,
    MS_NS,
    SECOND_NS,
    Claim,
    Ended,
    Grant,
    Move,
    NodeTurns,
    QuotaSettings,
    Revoke,
    Share,
    Stuck,
)

GPUS = ("0", "1")
NAMES = ("a", "b", "c", "gang")

RARE = ("join", "leave", "wrong", "withdraw", "advance", "resize", "conf")
KINDS = RARE + ("request",) * 6 + ("release",) * 4 + ("wake",) * 6
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(NAMES),
        st.sampled_from(GPUS),
        st.sampled_from([0, 1, 5 * MS_NS, 40 * MS_NS, 300 * MS_NS, 7000 * MS_NS]),
        st.booleans(),
    ),
    max_size=80,
)


class World:
    """Follows the instructions and checks each against what was said before."""

    def __init__(self, discipline: str, alone_ns: int) -> None:
        self.settings = QuotaSettings(discipline=discipline, stuck_ns=100 * MS_NS, alone_ns=alone_ns)
        self.node = NodeTurns(GPUS, self.settings)
        self.now = 0
        self.holders: dict[str, tuple[str, int]] = {}
        self.late: set[tuple[str, str, int]] = set()
        self.last_epoch: dict[str, int] = dict.fromkeys(GPUS, 0)

    def obey(self, steps: list) -> None:
        for step in steps:
            assert not isinstance(step, Claim), "only NodeTurns carries out what a gang claims"
            if isinstance(step, Grant):
                current = self.holders.get(step.gpu)
                if current == (step.tenant, step.epoch):
                    continue  # the tenant asked again while it held the GPU
                assert current is None, f"{step.gpu} granted to {step.tenant} while {current} holds it"
                assert step.epoch > self.last_epoch[step.gpu]
                assert step.deadline_ns > self.now
                self.last_epoch[step.gpu] = step.epoch
                self.holders[step.gpu] = (step.tenant, step.epoch)
            elif isinstance(step, Move | Revoke):
                assert self.holders.get(step.gpu) == (step.tenant, step.epoch)
            elif isinstance(step, Stuck):
                assert self.holders.pop(step.gpu) == (step.tenant, step.epoch)
                self.late.add((step.gpu, step.tenant, step.epoch))
            elif isinstance(step, Ended):
                assert step.end_ns >= step.start_ns
                if (step.gpu, step.tenant, step.epoch) in self.late:
                    self.late.remove((step.gpu, step.tenant, step.epoch))
                else:
                    assert self.holders.pop(step.gpu) == (step.tenant, step.epoch)

    def configure(self, discipline: str, window_ns: int) -> None:
        self.settings = replace(self.settings, discipline=discipline, window_ns=window_ns)
        self.obey(self.node.configure(self.settings, self.now))

    def check(self) -> None:
        machines = list(self.node.gpus.values())
        free = all(m.turn is None and m.claim is None and not m.overrun for m in machines)
        overdue = any(m.wake_ns() is not None and m.wake_ns() <= self.now for m in machines)
        gang = [m.accounts["gang"] for m in machines if "gang" in m.accounts]
        if free and not overdue and len(gang) == len(GPUS) and all(a.waiting for a in gang):
            # a gang never waits while all its GPUs are free and its limit allows it to run
            assert any(a.eligible_at_ns(self.now) > self.now for a in gang)
        assert self.node.holders() == {gpu: name for gpu, (name, _) in self.holders.items()}
        for gpu, machine in self.node.gpus.items():
            wake = machine.wake_ns()
            waiting = [a for a in machine.accounts.values() if a.waiting and a.name not in machine.overrun]
            overdue = wake is not None and wake <= self.now  # time has passed, but the machine has not been called yet
            if machine.turn is None and machine.claim is None and not overdue:
                # A tenant that may run never waits while the GPU is free: only limits and gangs hold tenants back.
                for account in waiting:
                    assert account.share.gang or account.eligible_at_ns(self.now) > self.now
                    assert account.share.gang or wake is not None
            for account in machine.accounts.values():
                account.window.trim(self.now)
                assert all(total >= 0 for total in account.window.sums)
                assert account.window.held_ns <= machine.window_ns
            assert machine.crowd.active >= 0
            turn = machine.turn
            if turn is not None and turn.deadline_ns == ENDLESS_NS:
                # a turn has no end only while no other tenant wants the GPU, and never for a tenant with a limit below
                # 1
                assert turn.account.share.limit == 1.0
                assert not turn.account.share.gang
                assert machine.claim is None
                assert not any(a.waiting for a in machine.accounts.values() if a is not turn.account)
                assert not machine.overrun
                assert wake is None
            if machine.claim is not None:
                assert machine.claim in machine.accounts, f"{gpu} is claimed by a tenant that has gone"


def share(name: str, flag: bool) -> Share:
    return Share(request=0.2, limit=0.3 if flag else 1.0, gang=GPUS if name == "gang" else ())


@settings(max_examples=300, deadline=None)
@given(
    events=EVENTS,
    discipline=st.sampled_from([d.name for d in DISCIPLINES]),
    alone_ns=st.sampled_from([0, 2000 * MS_NS]),
)
def test_no_sequence_of_events_breaks_an_invariant(events: list, discipline: str, alone_ns: int) -> None:
    world = World(discipline, alone_ns)
    node = world.node
    for name in NAMES:
        for gpu in GPUS:
            world.obey(node.join(gpu, name, share(name, False), 0))
    for event, name, gpu, step_ns, flag in events:
        world.now += step_ns
        now = world.now
        machine = node.gpus[gpu]
        known = name in machine.accounts
        if event == "join":
            for target in GPUS if name == "gang" else (gpu,):
                if name not in node.gpus[target].accounts:
                    world.obey(node.join(target, name, share(name, flag), now))
        elif event == "leave" and known:
            world.obey(node.leave(gpu, name, now))
            world.late = {entry for entry in world.late if not (entry[1] == name and entry[0] == gpu)}
        elif event == "request" and known:
            world.obey(node.request(gpu, name, now, 20 * MS_NS if flag else 0))
        elif event == "release" and known:
            turn = machine.overrun.get(name) or machine.turn
            if turn is not None and turn.account.name == name:
                world.obey(node.release(gpu, name, turn.epoch, now, now - step_ns, again=flag))
        elif event == "wrong" and known:
            world.obey(node.release(gpu, name, 10**9, now, now))
        elif event == "withdraw" and known:
            world.obey(node.withdraw(gpu, name, now))
        elif event == "advance":
            world.obey(node.advance(gpu, now))
        elif event == "wake":
            wake = machine.wake_ns()
            if wake is not None:
                world.now = max(world.now, wake)
                world.obey(node.advance(gpu, world.now))
        elif event == "resize" and known:
            for target in GPUS if name == "gang" else (gpu,):
                world.obey(node.join(target, name, share(name, flag), now))
        elif event == "conf":
            world.configure(DISCIPLINES[step_ns // MS_NS % len(DISCIPLINES)].name, (1 if flag else 10) * SECOND_NS)
        world.check()
    # when all tenants have left, no GPU is held, claimed or waited for
    for target in GPUS:
        for name in list(node.gpus[target].accounts):
            world.obey(node.leave(target, name, world.now))
    assert not node.holders()
    assert all(m.claim is None and not m.overrun and m.wake_ns() is None for m in node.gpus.values())
    assert all(m.crowd.active == 0 for m in node.gpus.values())
