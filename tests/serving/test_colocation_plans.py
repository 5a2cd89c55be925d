"""Plans that a server with best-effort services makes itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve_setup import deployment
from server_thread import running
from waiting import wait_for

from cotenant.bench.harness import Bench
from cotenant.core.serving import ServingPlan
from cotenant.serving.planning.crew import Crew


@pytest.mark.parametrize("scheme", ["tidal", None])
def test_plans_of_a_server_keep_classes_apart(
    tmp_path: Path, scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan and the next, where the same services share a worker if no scheme is in force."""
    entries = [{"name": "a", "slo_ms": 60_000}, {"name": "b", "slo_ms": 60_000, "class": "best-effort"}]
    services = deployment(entries, tmp_path)
    applied: list[ServingPlan] = []
    apply = Crew.apply

    async def noted(crew: Crew, made: ServingPlan) -> None:
        await apply(crew, made)
        applied.append(made)

    monkeypatch.setattr(Crew, "apply", noted)
    with Bench("soft", {}) as bench, running(services, colocation=scheme, agent=bench.folder) as server:
        server.call(server.server.replanner.wanted.set)
        wait_for(lambda: len(applied) >= 2, 200)
    for made in applied:
        seats = sorted(sorted(seat.service for seat in let.seats) for let in made.gpulets)
        assert seats == ([["a", "b"]] if scheme is None else [["a"], ["b"]])
