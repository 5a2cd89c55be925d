"""Decides about swapping on GPUs whose tenants need more memory than the GPU has: which tenants are resident, which are
evicted, and how long turns (time slices of a GPU) last. Pure functions and state machines.
"""

from cotenant.policy.residency.gpu import GpuResidency, Occupant, ResidencySettings, Switch, Victim
from cotenant.policy.residency.model_rows import Action, Do, ModelFacts, ModelRow, ModelSettings, Place
from cotenant.policy.residency.models import ModelResidency
from cotenant.policy.residency.rates import MoveRates

__all__ = [
    "Action",
    "Do",
    "GpuResidency",
    "ModelFacts",
    "ModelResidency",
    "ModelRow",
    "ModelSettings",
    "MoveRates",
    "Occupant",
    "Place",
    "ResidencySettings",
    "Switch",
    "Victim",
]
