"""What ps and top say of a tenant's residency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotenant.agent.memory.moves import MoveCount

if TYPE_CHECKING:
    from cotenant.agent.memory.residency import Residency
    from cotenant.agent.tenants.registry import Tenant


def residency_row(residency: Residency, tenant: Tenant, gpu: str) -> dict[str, Any]:
    """Residency and moves of a tenant on a GPU, for ps and top."""
    occupant = residency.refresh(gpu).occupants.get(tenant.name)
    plan = residency.switching.get(gpu)
    moving = plan is not None and tenant.name in {plan.tenant, *(victim.tenant for victim in plan.out)}
    count = residency.counts.get(tenant.name, MoveCount())
    return {
        "movable_bytes": occupant.movable_bytes if occupant else 0,
        "resident_bytes": occupant.resident_bytes if occupant else 0,
        "pinned_bytes": max((state.pinned for _, _, state in residency.states(tenant, gpu)), default=0),
        "can_leave": bool(occupant and occupant.can_leave),
        "moving": moving,
        "moves_out": count.moves_out,
        "moves_in": count.moves_in,
        "moved_out_bytes": count.out_bytes,
        "moved_in_bytes": count.in_bytes,
        "moving_s": count.seconds,
        "handed_over_bytes": count.handed_bytes,
    }
