"""Who stays on a GPU whose tenants need more memory than it has, whom to move and how long turns then are. Pure."""

from cotenant.policy.residency.gpu import GpuResidency, Occupant, ResidencySettings, Switch, Victim
from cotenant.policy.residency.rates import MoveRates

__all__ = ["GpuResidency", "MoveRates", "Occupant", "ResidencySettings", "Switch", "Victim"]
