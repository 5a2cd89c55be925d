"""Python interface of plans for inference services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cotenant.api.arguments import checked
from cotenant.api.tables import html_table, text_table
from cotenant.core.errors import InputError
from cotenant.core.serving import ServingPlan
from cotenant.serving.config.planning import build_problem, what_if
from cotenant.serving.config.services import read_services
from cotenant.serving.planning.decide import decide


@dataclass(frozen=True)
class Planned:
    """A plan that divides GPUs among services. A notebook shows it as a table of gpulets, the parts of GPUs that it
    assigns to services.
    """

    plan: ServingPlan
    #: SLO attainment by service in the simulation that verified the plan; empty without verification
    attainment: dict[str, float]
    #: whether every service reaches the target attainment in the simulation; None without verification
    holds: bool | None
    decision_ms: float

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [str(let.gpu), f"{let.percent:g} %", seat.service, str(seat.batch), f"{let.duty_ms:.1f} ms"]
            for let in self.plan.gpulets
            for seat in let.seats
        ]
        return ["GPU", "piece", "service", "batch", "duty cycle"], rows

    def _repr_html_(self) -> str:
        return html_table(*self._texts(), caption=f"{self.plan.gpus_used} of {self.plan.gpus} GPUs")

    def __repr__(self) -> str:
        return text_table(*self._texts())


@checked
def plan(
    services: str | Path,
    *,
    planner: str | None = None,
    gpus: int | None = None,
    min_gpus: bool = False,
    changes: Sequence[str] = (),
    headroom: float | None = None,
    attainment: float | None = 0.99,
    profile: str | None = None,
    seed: int = 0,
    time_limit_s: float = 30.0,
) -> Planned:
    """Make a plan that divides GPUs among the services of a services.yaml.

    `planner`: temporal, greedy, gpulet, gpulet-interference (default) or exact. `gpus`: number of GPUs, instead of the
    file's; `min_gpus`: use the smallest number that suffices. `changes`: as `cotenant plan --what-if`: "rate=x1.5",
    "slo=x0.8". `headroom`: factor on the rates to plan for, 1 to 100. `attainment`: fraction of simulated requests that
    must be in time, above 0 to 1; None: no simulation. InputError names what is wrong.
    """
    if headroom is not None and not 1 <= headroom <= 100:
        raise InputError(f"a headroom of {headroom:g} is not between 1 and 100", field="headroom")
    if attainment is not None and not 0 < attainment <= 1:
        raise InputError(f"{attainment:g} is not above 0 and at most 1", field="attainment")
    problem = build_problem(what_if(read_services(str(services)), list(changes)), profile, gpus)
    found = decide(
        problem, problem.planner(planner), headroom or problem.headroom, target=attainment, min_gpus=min_gpus,
        seed=seed, time_limit_s=time_limit_s,
    )  # fmt: skip
    checked = found.verified
    return Planned(
        found.plan,
        dict(checked.attainment) if checked is not None else {},
        checked.holds(attainment) if checked is not None and attainment is not None else None,
        found.decision_ms,
    )
