"""The one list of co-location schemes: what each does with processes, SMs and best-effort launches."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.abi.floor import RuleKind, WorkClass
from cotenant.core.errors import InputError
from cotenant.policy.colocation.division import share_ns
from cotenant.policy.colocation.gate import Rule


@dataclass(frozen=True)
class Scheme:
    """One way to let LS and BE share a GPU. `together`: processes run at once (MPS); else the driver slices time.

    `ls_sms`, `be_sms`: the part of the SMs that each may use. `be_below`: BE has the lower client priority.
    """

    name: str
    summary: str
    rule: RuleKind
    together: bool = True
    ls_sms: float = 1.0
    be_sms: float = 1.0
    be_below: bool = False
    interval_ns: int = 100_000
    lead_ns: int = 0


SCHEMES: tuple[Scheme, ...] = (
    Scheme(
        "temporal",
        "one at a time: a BE kernel only while LS is idle, none beside it, none queued",
        RuleKind.TEMPORAL,
        together=False,
    ),
    Scheme(
        "orion",
        "beside LS by class and SMs; BE in batches of DUR_THRESHOLD, each drained; LS has priority",
        RuleKind.ORION,
        be_below=True,
        interval_ns=160_000,
    ),
    Scheme("mps-plus", "all at once, copies in fair queues", RuleKind.FREE),
    Scheme("static", "all at once, each on its own part of the SMs", RuleKind.FREE, ls_sms=0.25, be_sms=0.75),
    Scheme(
        "tidal",
        "BE has the whole GPU until LS work arrives, and gives it back within its time in flight",
        RuleKind.TIDAL,
        be_below=True,
        lead_ns=10_000,
    ),
)


@dataclass(frozen=True)
class ColocationSettings:
    """How a GPU's floor is kept. Times in nanoseconds.

    `interval_ns`: BE work in flight (orion: DUR_THRESHOLD). `lead_ns`: how long before the end of one BE kernel the
    next may be queued. `beside`: part of the time BE may work beside LS, from a measured budget. `hold_limit_ns`:
    an LS process that neither raises again nor lowers for so long is no longer believed. `sm_threshold`: orion's,
    0: all of the GPU. `stretch`: how far tidal's interval may grow for a program that leaves the GPU dry (1: not at
    all). `check_ns`: BE work between two events, by the clock meanwhile (tidal; 0: each piece has an event).
    `ahead_ns`: BE work that a program may launch before its time (tidal; 0: none): it is held on the device, by waits
    of its streams before each `interval_ns` of it, so that LS finds no more than that. `ahead_below`: for programs
    whose launches wait for less than that part of the time (1: for all).
    `duty`: part of the time that tidal lets BE keep the GPU busy while LS is idle; on a card at its power limit the
    rest keeps the clock up for LS. `clock`: only as long as the card's SM clock is below that part of its highest
    (0: always, and where none is read).
    """

    scheme: str = "tidal"
    interval_ns: int = 100_000
    lead_ns: int = 10_000
    beside: float = 0.0
    hold_limit_ns: int = 500_000_000
    sm_threshold: int = 0
    stretch: float = 4.0
    check_ns: int = 150_000
    ahead_ns: int = 20_000_000
    ahead_below: float = 0.45
    duty: float = 1.0
    clock: float = 0.0

    def __post_init__(self) -> None:
        scheme_named(self.scheme)
        if not 1_000 <= self.interval_ns <= 1_000_000_000:
            raise InputError("best-effort work in flight is 1 us to 1 s", field="interval")
        if not 0 <= self.lead_ns <= 10_000_000:
            raise InputError("the lead is 0 s to 10 ms", field="lead")
        if not 0.0 <= self.beside <= 1.0:
            raise InputError("the part of the time beside latency-sensitive work is 0 % to 100 %", field="beside")
        if not 1_000_000 <= self.hold_limit_ns <= 60_000_000_000:
            raise InputError("a holder is believed for 1 ms to 60 s", field="hold_limit")
        if not 0 <= self.sm_threshold <= 1024:
            raise InputError("the SM threshold is 0 (as many as the GPU has) to 1024", field="sm_threshold")
        if not 1.0 <= self.stretch <= 100.0:
            raise InputError("the time in flight may grow 1 to 100 times", field="stretch")
        if not 0 <= self.check_ns <= 1_000_000_000:
            raise InputError("best-effort work between two events is 0 s to 1 s", field="check")
        if not 0 <= self.ahead_ns <= 1_000_000_000:
            raise InputError("best-effort work launched before its time is 0 s to 1 s", field="ahead")
        if not 0.0 <= self.ahead_below <= 1.0:
            raise InputError("the part of the time that launches wait is 0 % to 100 %", field="ahead_below")
        if not 0.1 <= self.duty <= 1.0:
            raise InputError("best-effort work may keep the GPU busy for 10 % to 100 % of the time", field="duty")
        if not 0.0 <= self.clock <= 1.0:
            raise InputError("the clock to keep is 0 % to 100 % of the card's highest", field="clock")
        if self.clock and self.duty == 1.0:
            raise InputError("a clock to keep needs a duty below 100 %, down to which it may go", field="clock")

    @property
    def first_duty(self) -> float:
        """The duty in force while nothing is known of the card's clock."""
        return 1.0 if self.clock else self.duty

    def rule(self, work_class: WorkClass = WorkClass.UNKNOWN, work_sms: int = 0, tenants: int = 1) -> Rule:
        """The rule of a BE process that has one of `tenants` parts of the interval (division.next_parts), and whose
        kernels are of that class and fill that many SMs."""
        return Rule(
            scheme_named(self.scheme).rule,
            share_ns(self.interval_ns, tenants),
            self.lead_ns,
            round(self.beside * 1000),
            self.sm_threshold,
            work_class,
            work_sms,
            round(self.stretch * 1000),
            round(self.first_duty * 1000),
        )


def scheme_named(name: str) -> Scheme:
    """The scheme of that name. InputError lists them all."""
    for scheme in SCHEMES:
        if scheme.name == name:
            return scheme
    known = ", ".join(scheme.name for scheme in SCHEMES)
    raise InputError(f"unknown co-location scheme {name!r}; known: {known}", field="colocation")


def settings_for(name: str, **changes: object) -> ColocationSettings:
    """The scheme's own settings; `changes` are fields of ColocationSettings."""
    scheme = scheme_named(name)
    values: dict[str, object] = {"interval_ns": scheme.interval_ns, "lead_ns": scheme.lead_ns} | changes
    return ColocationSettings(name, **values)  # type: ignore[arg-type]
