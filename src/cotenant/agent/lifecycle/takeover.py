"""Takes over running, declared, held and parked tenants from the previous agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

from cotenant.agent.lifecycle import state
from cotenant.agent.lifecycle.lives import Lives
from cotenant.agent.memory.parking import Parking
from cotenant.agent.memory.residents import Residents
from cotenant.agent.memory.swap_orders import MoveCount
from cotenant.agent.memory_limits.enforcer import MemoryLimits
from cotenant.agent.owners.owners import Owners
from cotenant.core.errors import InputError, WorkError

LOG = logging.getLogger(__name__)

RETURN_WITHIN_S = 30.0


def take_over(
    file: Path,
    declared: Collection[str],
    lives: Lives,
    owners: Owners,
    residents: Residents,
    parking: Parking,
    limits: MemoryLimits,
) -> None:
    """Admit the previous agent's tenants that still run or are just being started, are declared in the configuration,
    or are held for a pod or job. They keep their tokens and GPUs.
    """
    # all of the state file is read before the first tenant is taken over, because the file is then written again
    parked, closing = state.load_parked(file), state.load_closing(file)
    all_saved = state.load(file)
    # a checkpointed process holds no memory of a GPU, and may be unable to connect
    checkpointed = {row.get("name") for row in parked if row.get("method") == "checkpoint"}
    parking.expect(parked)
    for saved in all_saved:
        lasts = saved.alive or saved.starting or saved.owner is not None
        if not lasts and saved.spec.name not in declared:
            continue
        try:
            tenant = lives.add(saved.spec, saved.uid, token=saved.token)
        except (InputError, WorkError) as error:
            LOG.warning(f"tenant {saved.spec.name} of the previous agent is not taken over: {error}")
            continue
        tenant.timeout_s = saved.timeout_s
        if saved.spec.name in declared:
            tenant.by_hand = saved.by_hand
        if saved.spec.name not in checkpointed:
            residents.expect(tenant, saved.connected)
        if saved.alive:  # a tenant without processes wants no GPU time, so it does not get less than it wants
            tenant.short_since = saved.short_since
        if saved.moves != MoveCount():
            residents.counts[tenant.name] = saved.moves
        if saved.held is not None:
            limits.take_back(tenant, saved.held)
        if saved.owner is not None:
            owners.add(tenant, saved.owner)
        if saved.root_alive and saved.root is not None:
            lives.set_root(tenant, saved.root)
        elif saved.starting and saved.launcher is not None:
            lives.await_program(tenant, saved.launcher)
        elif saved.alive and saved.owner is None:
            lives.watch_orphans(tenant, saved.processes)
        # a tenant whose program has ended is removed, unless a process of it reconnects within this time
        asyncio.get_running_loop().call_later(RETURN_WITHIN_S, lives.maybe_remove, tenant)
    parking.take_over()
    limits.clean((*(saved.held for saved in all_saved if saved.held is not None), *closing))
