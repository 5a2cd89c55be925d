"""The registry of co-location schemes. A scheme says how latency-sensitive (LS) and best-effort (BE) processes share a
GPU's time and SMs, and when a BE process may launch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.abi.floor import LEAD_NS, STRETCH_PERMILLE, RuleKind, RunAhead, WorkClass
from cotenant.abi.rules import FloorRule
from cotenant.core.errors import InputError, unknown_name
from cotenant.policy.colocation.division import share_ns

RUN_AHEAD = tuple(way.name.lower() for way in RunAhead)


@dataclass(frozen=True)
class Scheme:
    """A way to let LS and BE processes share a GPU. `together`: they run concurrently (MPS); otherwise the driver
    switches between them by time slices.

    `ls_sms`, `be_sms`: fractions of the SMs that LS processes and BE processes may use. `be_below`: BE processes have
    the lower client priority of MPS. `in_flight_us`: default budget of BE work in flight.
    """

    name: str
    summary: str
    rule: RuleKind
    together: bool = True
    ls_sms: float = 1.0
    be_sms: float = 1.0
    be_below: bool = False
    in_flight_us: int = 100


SCHEMES: tuple[Scheme, ...] = (
    Scheme(
        "temporal",
        "BE launches one kernel at a time, and only while LS is idle",
        RuleKind.TEMPORAL,
        together=False,
    ),
    Scheme(
        "orion",
        "BE runs beside LS if kernel class and SMs permit, in batches of at most in_flight_us; LS has priority",
        RuleKind.ORION,
        be_below=True,
        in_flight_us=160,
    ),
    Scheme("mps-plus", "concurrent processes; fair queues schedule only copies between host and GPU", RuleKind.FREE),
    Scheme("static", "concurrent processes; LS and BE have separate SMs", RuleKind.FREE, ls_sms=0.25, be_sms=0.75),
    Scheme(
        "tidal",
        "BE has the whole GPU until LS work arrives, and returns it when its work in flight has ended",
        RuleKind.TIDAL,
        be_below=True,
    ),
)


@dataclass(frozen=True)
class ColocationSettings:
    """Settings that keep best-effort (BE) work from delaying latency-sensitive (LS) work on a GPU.

    `in_flight_us`: budget of BE work in flight (the DUR_THRESHOLD of orion). `overlap`: fraction of the time in which
    BE work may run together with LS work, chosen from a measured curve. `heartbeat_timeout_ms`: an LS-activity flag
    that is neither set again nor cleared for this long no longer counts. `sm_threshold`: SMs that BE kernels may fill
    beside LS work under orion; 0: all. `run_ahead`: which BE programs launch early, so that their work waits on the
    device (tidal). `duty_cycle`: fraction of the time without LS work in which tidal lets BE work keep the GPU busy; on
    a card at its power limit, idle time keeps the clock up for LS work. `clock`: the duty cycle applies only while the
    card's SM clock is below this fraction of its highest (0: always, also if the clock cannot be read).
    """

    scheme: str = "tidal"
    in_flight_us: int = 100
    overlap: float = 0.0
    heartbeat_timeout_ms: int = 500
    sm_threshold: int = 0
    run_ahead: str = "auto"
    duty_cycle: float = 1.0
    clock: float = 0.0

    def __post_init__(self) -> None:
        scheme_named(self.scheme)
        if not 1 <= self.in_flight_us <= 1_000_000:
            raise InputError("best-effort work in flight must be 1 to 1000000 us", field="in_flight_us")
        if not 0.0 <= self.overlap <= 1.0:
            raise InputError("the overlap with latency-sensitive work must be 0 % to 100 %", field="overlap")
        if not 1 <= self.heartbeat_timeout_ms <= 60_000:
            raise InputError("the heartbeat timeout must be 1 to 60000 ms", field="heartbeat_timeout_ms")
        if not 0 <= self.sm_threshold <= 1024:
            raise InputError("the SM threshold must be 0 (all SMs of the GPU) to 1024", field="sm_threshold")
        if self.run_ahead not in RUN_AHEAD:
            raise InputError(f"run_ahead must be {', '.join(RUN_AHEAD)}, not {self.run_ahead!r}", field="run_ahead")
        if not 0.1 <= self.duty_cycle <= 1.0:
            raise InputError("the duty cycle of best-effort work must be 10 % to 100 %", field="duty_cycle")
        if not 0.0 <= self.clock <= 1.0:
            raise InputError("the clock to keep must be 0 % to 100 % of the card's highest", field="clock")
        if self.clock and self.duty_cycle == 1.0:
            raise InputError(
                "a clock to keep needs a duty_cycle below 100 %: the agent keeps the clock by lowering the duty cycle, "
                "at most to that value",
                field="clock",
            )

    @property
    def first_duty_cycle(self) -> float:
        """Return the duty cycle (`duty_cycle`) with which BE work starts, until the card's clock frequency is known."""
        return 1.0 if self.clock else self.duty_cycle

    def rule(self, work_class: WorkClass = WorkClass.UNKNOWN, work_sms: int = 0, tenants: int = 1) -> FloorRule:
        """Return the rule for the launches of a BE process. `work_class`: class of its kernels; `work_sms`: number of
        SMs that they fill; `tenants`: the process gets one of this many equal parts of the budget (see
        division.next_parts)."""
        return FloorRule(
            scheme=scheme_named(self.scheme).rule,
            budget_ns=share_ns(self.in_flight_us * 1000, tenants),
            lead_ns=LEAD_NS,
            overlap_permille=round(self.overlap * 1000),
            sm_threshold=self.sm_threshold,
            work_class=work_class,
            work_sms=work_sms,
            stretch_permille=STRETCH_PERMILLE,
            duty_cycle_permille=round(self.first_duty_cycle * 1000),
        )


def scheme_named(name: str) -> Scheme:
    """Return the scheme of that name. The InputError for an unknown name lists all schemes."""
    for scheme in SCHEMES:
        if scheme.name == name:
            return scheme
    raise unknown_name("co-location scheme", name, [scheme.name for scheme in SCHEMES], "colocation")


def settings_for(name: str, **changes: object) -> ColocationSettings:
    """Return the default settings of a scheme, with some fields of ColocationSettings changed."""
    scheme = scheme_named(name)
    values: dict[str, object] = {"in_flight_us": scheme.in_flight_us} | changes
    return ColocationSettings(name, **values)  # type: ignore[arg-type]
