"""Models for tests of the policy that decides which of them are on a GPU of 80 GiB, and requests that end at once."""

from __future__ import annotations

from cotenant.policy.residency import Action, Do, ModelFacts, ModelResidency, ModelSettings, MoveRates, Place

GIB = 1 << 30
# Moving 40 GiB back takes 1 s, and a move has no fixed cost.
RATES = MoveRates(in_bps=40 * GIB, fixed_s=0.0)


def models(*facts: ModelFacts, gpus: int = 1, host: int | None = None) -> ModelResidency:
    return ModelResidency([80 * GIB] * gpus, facts, ModelSettings(), host, RATES)


def model(name: str, gib: int = 40, **facts: object) -> ModelFacts:
    return ModelFacts(name, gib * GIB, **facts)  # type: ignore[arg-type]


def serve(it: ModelResidency, name: str, now: float) -> None:
    """A request that comes, is given to the program and ends at once."""
    it.arrived(name, now)
    it.began(name, now)
    it.ended(name, now)


def resident(it: ModelResidency, *names: str, now: float = 0.0) -> None:
    for name in names:
        it.arrived(name, now)
        it.decide(now)
        it.settled(name, now)
        it.began(name, now)
        it.ended(name, now)
        assert it.rows[name].place is Place.RESIDENT


def serve_all(it: ModelResidency, name: str, now: float) -> None:
    while it.rows[name].waiting:
        it.began(name, now)
    while it.rows[name].open:
        it.ended(name, now)


def replace_idle(it: ModelResidency, old: str, new: str, now: float) -> None:
    """A request for `new`, for which the idle `old` is evicted; `new` starts or returns, and the request ends."""
    it.arrived(new, now)
    it.decide(now)
    it.settled(old, now)
    it.decide(now)
    it.settled(new, now)
    serve_all(it, new, now)


def parts(action: Action) -> list[Action]:
    """The moves of an action, each of one model; evictions first."""
    return [*(Action(Do.EVICT, name, action.gpu) for name in action.instead_of), action]
