"""How a share is enforced on a GPU. A new mechanism is one file here and one line in MECHANISMS."""

from __future__ import annotations

from pathlib import Path

from cotenant.agent.mechanisms.base import Capabilities, Enforcement, Mechanism
from cotenant.agent.mechanisms.mps import Mps
from cotenant.agent.mechanisms.time import Time
from cotenant.agent.mechanisms.whole import Whole

MECHANISMS: tuple[type[Mechanism], ...] = (Whole, Time, Mps)


def make_mechanisms(folder: Path) -> dict[str, Mechanism]:
    """One of each, with its runtime files under `folder`."""
    return {kind.name: kind(folder) for kind in MECHANISMS}


__all__ = ["MECHANISMS", "Capabilities", "Enforcement", "Mechanism", "make_mechanisms"]
