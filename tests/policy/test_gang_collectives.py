"""Gangs whose ranks wait for each other on their GPUs, as collectives do, in virtual time: every program that would end
by itself ends under turns, whatever the moment at which a turn ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cotenant.policy.shares import (
    DISCIPLINES,
    MS_NS,
    Ended,
    Grant,
    Instruction,
    Move,
    NodeTurns,
    QuotaSettings,
    Revoke,
    Share,
)
from cotenant.policy.shares.turn import GANG_DRAIN_NS, UNDRAINED

STEPS = 30
STEP_MS = 8  # GPU time of one step of a rank; each step ends with a collective
SETTINGS = {"quota_ns": 50 * MS_NS, "min_quota_ns": 20 * MS_NS, "max_quota_ns": 100 * MS_NS}


@dataclass(eq=False)
class Rank:
    """One process on one GPU: its host launches steps while the gate is open, its GPU works them off in order and
    waits at the end of each until all ranks are there."""

    gpu: str
    ahead: int  # number of steps that the host launches before it waits for the first
    late_ms: int  # time for which the host does something else before every other step
    launched: int = 0
    begun: int = 0  # number of collectives at which this GPU has arrived
    done: int = 0  # number of completed steps
    left_ms: int = STEP_MS  # GPU time that is left of the oldest step
    busy_host_ms: int = 0
    epoch: int = 0
    deadline_ns: int = 0
    closing: bool = False

    @property
    def wants(self) -> bool:
        return self.launched < STEPS and self.launched < self.done + self.ahead and self.busy_host_ms == 0


@dataclass(eq=False)
class Program:
    name: str
    ranks: list[Rank]
    share: Share
    # time at which the first rank vanishes; the other ranks then wait for it until the end
    killed_ms: int | None = None
    ended_ms: int | None = None
    idle_ms: dict[str, int] = field(default_factory=dict)


class Node:
    """What the agent and the shims do, in steps of 1 ms: gates, drains, releases, and the wish of an undrained gang."""

    def __init__(self, gpus: int, programs: list[Program], discipline: str) -> None:
        self.now_ms = 0
        self.turns = NodeTurns([str(g) for g in range(gpus)], QuotaSettings(discipline=discipline, **SETTINGS))
        self.programs = {program.name: program for program in programs}
        self.ranks = {(p.name, rank.gpu): rank for p in programs for rank in p.ranks}
        for program in programs:
            for rank in program.ranks:
                self.obey(self.turns.join(rank.gpu, program.name, program.share, 0))

    @property
    def now_ns(self) -> int:
        return self.now_ms * MS_NS

    def obey(self, instructions: list[Instruction]) -> None:
        for step in instructions:
            rank = self.ranks[step.tenant, step.gpu]
            if isinstance(step, Grant):
                rank.epoch, rank.deadline_ns, rank.closing = step.epoch, step.deadline_ns, False
            elif isinstance(step, Move) and rank.epoch == step.epoch:
                rank.deadline_ns = step.deadline_ns
            elif isinstance(step, Revoke) and rank.epoch == step.epoch:
                rank.closing = True
            elif isinstance(step, Ended) and step.reason == UNDRAINED:
                self.obey(self.turns.request(step.gpu, step.tenant, self.now_ns))

    def tick(self) -> None:
        self.now_ms += 1
        for gpu, machine in self.turns.gpus.items():
            wake_ns = machine.wake_ns()
            if wake_ns is not None and wake_ns <= self.now_ns:
                self.obey(self.turns.advance(gpu, self.now_ns))
        for program in list(self.programs.values()):
            self.work(program)
            if all(rank.done == STEPS for rank in program.ranks):
                program.ended_ms = self.now_ms
                del self.programs[program.name]
                for rank in program.ranks:
                    if program.name in self.turns.gpus[rank.gpu].accounts:
                        self.obey(self.turns.leave(rank.gpu, program.name, self.now_ns))

    def work(self, program: Program) -> None:
        for rank in program.ranks:
            if program.killed_ms is not None and self.now_ms >= program.killed_ms and rank is program.ranks[0]:
                if rank.epoch:
                    epoch, rank.epoch, rank.closing = rank.epoch, 0, False
                    self.obey(self.turns.release(rank.gpu, program.name, epoch, self.now_ns, self.now_ns, "gone"))
                continue
            # the part of the GPU
            if rank.launched > rank.done:
                rank.left_ms = max(0, rank.left_ms - 1)
                if rank.left_ms == 0:
                    rank.begun = rank.done + 1
                    if all(other.begun >= rank.begun for other in program.ranks):
                        rank.done, rank.left_ms = rank.begun, STEP_MS
                        rank.busy_host_ms = rank.late_ms * (rank.done % 2)
            elif rank.busy_host_ms:
                rank.busy_host_ms -= 1
            # the part of the shim, which holds launches back outside a turn
            if rank.epoch and self.now_ns >= rank.deadline_ns:
                rank.closing = True
            if rank.closing and rank.launched == rank.done:
                epoch, rank.epoch, rank.closing = rank.epoch, 0, False
                self.obey(self.turns.release(rank.gpu, program.name, epoch, self.now_ns, self.now_ns, again=rank.wants))
            # the part of the program on the host
            if rank.wants and rank.epoch and not rank.closing:
                rank.launched += 1
            elif rank.wants and not rank.epoch:
                self.obey(self.turns.request(rank.gpu, program.name, self.now_ns))

    def run(self, until_ms: int) -> None:
        while self.programs and self.now_ms < until_ms:
            self.tick()


def gang(name: str, gpus: tuple[int, ...], ahead: int = 2, late_ms: int = 0, request: float = 0.25) -> Program:
    """The last rank is the late one."""
    names = tuple(str(g) for g in gpus)
    ranks = [Rank(g, ahead, late_ms if g == names[-1] else 0) for g in names]
    return Program(name, ranks, Share(request, gang=names if len(names) > 1 else ()))


@st.composite
def nodes(draw: st.DrawFn) -> tuple[int, list[Program]]:
    """2 to 8 GPUs; one to three gangs anywhere on them, crossing or not; perhaps tenants of one GPU."""
    gpus = draw(st.integers(2, 8))
    programs = []
    for number in range(draw(st.integers(1, 3))):
        where = draw(st.lists(st.integers(0, gpus - 1), min_size=2, max_size=gpus, unique=True))
        ahead, late_ms = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([0, 3, 15, 60]))
        programs.append(gang(f"gang{number}", tuple(where), ahead, late_ms))
    for gpu in draw(st.lists(st.integers(0, gpus - 1), max_size=2, unique=True)):
        programs.append(gang(f"one{gpu}", (gpu,)))
    return gpus, programs


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(node=nodes(), discipline=st.sampled_from([d.name for d in DISCIPLINES if d.name != "exclusive-turns"]))
@example(node=(2, [gang("a", (0, 1)), gang("b", (0, 1), 4, 15)]), discipline="request-limit")
@example(node=(3, [gang("a", (0, 1)), gang("b", (1, 2)), gang("c", (2, 0))]), discipline="request-limit")
def test_every_gang_ends(node: tuple[int, list[Program]], discipline: str) -> None:
    """Natively the longest takes STEPS * (STEP_MS + 60 / 2) = 1.2 s. One after the other, with every turn of 50 ms
    followed by a whole drain, each takes twice that."""
    gpus, programs = node
    world = Node(gpus, programs, discipline)
    world.run(2 * len(programs) * STEPS * (STEP_MS + 30))
    assert not world.programs, [(p.name, [r.done for r in p.ranks]) for p in world.programs.values()]


def test_a_gang_alone_is_as_fast_as_natively() -> None:
    """Its turns end, and nobody else wants them: the ranks go on at once, though their GPUs have not drained."""
    world = Node(2, [gang("a", (0, 1), 2)], "request-limit")
    world.run(10_000)
    ended_ms = world.now_ms
    assert STEPS * STEP_MS <= ended_ms <= 1.1 * STEPS * STEP_MS


@FUZZ
@given(killed_ms=st.integers(1, 200), ahead=st.sampled_from([1, 2, 4]))
def test_a_gang_that_waits_for_a_dead_rank_stops_nobody(killed_ms: int, ahead: int) -> None:
    """Its other ranks wait for ever. A tenant of one of its GPUs waits for a turn and its drain, again and again."""
    lost, other = gang("lost", (0, 1), ahead, request=0.5), gang("other", (1,), request=0.5)
    lost.killed_ms = killed_ms
    world = Node(2, [lost, other], "request-limit")
    world.run(STEPS * STEP_MS * 5 + 500)
    assert other.ended_ms is not None
    assert GANG_DRAIN_NS == 50 * MS_NS
