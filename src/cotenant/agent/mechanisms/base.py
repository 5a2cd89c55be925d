"""What every mechanism offers: grant, resize, revoke, and an honest account of what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from cotenant.agent.config.files import TenantSpec
    from cotenant.devices.gpus import Gpu


@dataclass(frozen=True)
class Capabilities:
    """What holds under a mechanism, in words for people and flags for programs."""

    compute: str
    memory: str
    resize: str
    isolation: str
    exclusive: bool  # no other tenant on the same GPU
    gated: bool  # takes turns through the broker
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Plain data for --json."""
        return asdict(self)


@dataclass(frozen=True)
class Enforcement:
    """What a grant gives the launcher and the broker: environment of the program, flags of its page's slot."""

    environment: dict[str, str] = field(default_factory=dict)
    slot_flags: int = 0


class Mechanism(ABC):
    """One way to enforce shares. Methods raise WorkError when the machine cannot do it."""

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What holds and what does not."""

    def prepare(self, gpus: tuple[Gpu, ...]) -> None:  # noqa: B027 most mechanisms need nothing
        """Whatever takes long before a `grant` there; called in another thread, while the agent's own gives turns."""

    def settle(self, gpus: tuple[Gpu, ...]) -> None:  # noqa: B027
        """A grant that was prepared did not come about: end what nobody uses."""

    @abstractmethod
    def grant(self, spec: TenantSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """Prepare the GPUs for a tenant."""

    @abstractmethod
    def resize(self, spec: TenantSpec, gpus: tuple[Gpu, ...]) -> str:
        """Make a changed share true; says from when on it holds."""

    @abstractmethod
    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        """The tenant has gone."""

    def close(self) -> None:  # noqa: B027 most mechanisms own nothing
        """Stop whatever this mechanism started."""
