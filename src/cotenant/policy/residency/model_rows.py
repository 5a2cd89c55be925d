"""The models of a server as its policy sees them (models.py): facts, settings, states, actions."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(enum.Enum):
    """State of a model: whether its memory is on the GPU, and a start or move in progress."""

    COLD = "cold"
    STARTING = "starting"
    RESIDENT = "resident"
    LEAVING = "leaving"
    EVICTED = "evicted"
    RETURNING = "coming back"


AWAY = frozenset({Place.COLD, Place.EVICTED})
IN_HOST = frozenset({Place.EVICTED, Place.RETURNING})  # contents stay in host memory until a return has succeeded


class Do(enum.Enum):
    """The actions on a model's program that `decide` can return."""

    START = "start"
    EVICT = "evict"
    BRING = "bring"
    EXCHANGE = "exchange"  # restore the model, and concurrently evict others for it
    STOP = "stop"


class Action(NamedTuple):
    """One action on a model's program. The caller reports its end by `settled` or `failed`: of an exchange, that of
    each eviction (of the models in `instead_of`) and of the return. An exchange of which an eviction has failed has
    failed for the returning model, too.
    """

    do: Do
    model: str
    gpu: int
    instead_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model. `late_s`: how long its first request may wait; `start_s`: estimated time of a cold start,
    until one is measured. Models that are `kept` are started at once and never evicted."""

    name: str
    memory_bytes: int
    best_effort: bool = False
    priority: int = 0
    kept: bool = False
    late_s: float = 1.0
    start_s: float = 30.0

    @property
    def rank(self) -> tuple[bool, int]:
        """Return the model's rank (class, then priority); the model with the larger rank is served first."""
        return (not self.best_effort, self.priority)


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the rules above. `most_moving`: largest fraction of a busy model's time that moves may take, when
    models of equal rank alternate. `idle_s`: how long a model must be idle before it is evicted for one of lower rank.
    """

    most_moving: float = 0.2
    most_patience_s: float = 2.0
    idle_s: float = 10.0


@dataclass
class ModelRow:
    """The state of a model. `since_s`: time at which its place last changed; `used_s`: time at which it last got or
    ended a request.
    """

    facts: ModelFacts
    place: Place = Place.COLD
    gpu: int = -1
    waiting: int = 0
    open: int = 0
    first_s: float = math.inf  # arrival of the oldest waiting request for the model
    used_s: float = -math.inf
    since_s: float = -math.inf
    not_before_s: float = -math.inf  # time before which no action on the model is started, after one has failed
    draining: bool = False
    stopping: bool = False  # when the model's requests have ended, its program will be stopped instead of evicted
    against_bytes: int = 0  # memory of the models that leave the GPU while this one returns
    start_s: float = 0.0
    starts: int = 0

    @property
    def idle(self) -> bool:
        """Whether the model has neither waiting nor open requests."""
        return not self.open and not self.waiting

    @property
    def wanted(self) -> bool:
        """Whether the model should be on a GPU but is not."""
        return self.place in AWAY and (self.waiting > 0 or self.facts.kept)


@dataclass
class Plan:
    """How memory becomes free on a GPU: the models in `out` are evicted now, those in `drain` once their streams have
    ended. The memory stays reserved for the waiting model, so that smaller models cannot take it again and again.
    """

    gpu: int
    free_bytes: int
    fits: bool
    out: list[ModelRow] = field(default_factory=list)
    drain: list[ModelRow] = field(default_factory=list)
    cost: float = 0.0
    later: bool = False  # whether the memory will become free without further action

    def enough_now(self, needed_bytes: int) -> bool:
        """Whether the models that are evicted now free enough memory, without others that leave already."""
        return self.free_bytes + sum(other.facts.memory_bytes for other in self.out) >= needed_bytes

    @property
    def order(self) -> tuple[int, float]:
        return (3 if self.later else 0 if self.fits else 2 if self.drain else 1, self.cost)
