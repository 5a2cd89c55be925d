"""What an agent takes over from the one before it: tenants whose programs still run, and what was parked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cotenant.agent.memory.moves import MoveCount
from cotenant.agent.owners import holding
from cotenant.agent.tenants import state
from cotenant.core.errors import InputError, WorkError

if TYPE_CHECKING:
    from cotenant.agent.daemon import Agent

RETURN_WITHIN_S = 30.0


def take_over(agent: Agent) -> None:
    """Tenants of the last agent whose programs still run, or that are declared, keep their tokens and places."""
    declared = {spec.name for spec in agent.config.tenants}
    file = agent.folder / "state.json"
    parked = state.load_parked(file)
    for saved in state.load(file):
        if not saved.alive and saved.spec.name not in declared and saved.holder is None:
            continue
        try:
            tenant = agent.add_tenant(saved.spec, saved.uid, token=saved.token)
        except (InputError, WorkError) as error:
            agent.log(f"tenant {saved.spec.name} of the last agent is not taken over: {error}")
            continue
        tenant.timeout_s = saved.timeout_s
        if saved.moves != MoveCount():
            agent.residency.counts[tenant.name] = saved.moves
        if saved.holder is not None:
            holding.keep(agent, tenant, saved.holder)
        if saved.root_alive and saved.root is not None:
            agent.set_root(tenant, saved.root)
        elif not tenant.declared and saved.holder is None:
            agent.heirs.watch(tenant, known=saved.processes)
        # a process whose program has ended must come back by then, or its tenant goes
        asyncio.get_running_loop().call_later(RETURN_WITHIN_S, agent.maybe_remove, tenant)
    agent.parking.take_over(parked)
