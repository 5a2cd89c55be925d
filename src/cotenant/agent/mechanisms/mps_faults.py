"""What the agent does when an MPS server dies: its clients end with an error, so their tenants are told why."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cotenant.agent.mechanisms.mps import Mps
from cotenant.agent.mechanisms.mps_watch import MpsWatch

if TYPE_CHECKING:
    from cotenant.agent.daemon import Agent


async def watch_mps(agent: Agent) -> None:
    """Watch the MPS servers of the agent's GPUs until it stops."""

    def died(uuid: str) -> None:
        text = f"the MPS server of GPU {uuid} has died: programs on it have lost their GPU and must start again"
        agent.log(text)
        for tenant in agent.registry.on_gpu(uuid):
            tenant.warn(text)

    await MpsWatch(cast(Mps, agent.mechanisms["mps"]), died).run()
