"""What a mechanism is: the way a share of a GPU is enforced, and what holds under it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.mechanisms.proof import Look, Sms
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu


class Use(enum.Enum):
    """Where a mechanism may be named."""

    TENANT = "tenant"  # tenants of a node's agent
    SERVICE = "service"  # workers of a server
    JOB = "job"  # parts of a GPU for jobs of the fleet
    PROFILE = "profile"  # `infer` and `profile service`


@dataclass(frozen=True)
class Capabilities:
    """What holds under a mechanism, in words for people and flags for programs."""

    compute: str
    memory: str
    resize: str
    isolation: str
    time_by: Strength = Strength.NOTHING  # what keeps a tenant to its part of the GPU's time
    sms_by: Strength = Strength.NOTHING  # what keeps a tenant to its part of the SMs
    memory_by: Strength = Strength.NOTHING
    faults_by: Strength = Strength.DRIVER  # what keeps a tenant's fault from the others
    needs_gpu: bool = True
    exclusive: bool = False  # no other tenant on the same GPU
    gated: bool = False  # takes turns through the broker
    sliced: bool = False  # the agent sets its tenants' time slices on the GPU
    concurrent: bool = False  # kernels of several tenants run at once
    live_resize: bool = False  # a changed share holds for programs that run already
    worker_parts: bool = True  # a worker may have part of a GPU
    worker_resizes: bool = False  # a worker's own process enforces its share and changes it between two batches
    instances: bool = False  # a share is a device of its own, with a UUID and a place on the GPU
    mixes_with: tuple[str, ...] = ()  # mechanisms whose tenants may be on the same GPU, beside its own
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Plain data for --json."""
        return asdict(self)


class ShareSpec(Protocol):
    """What a mechanism reads of a tenant."""

    @property
    def name(self) -> str: ...
    @property
    def request(self) -> float: ...
    @property
    def limit(self) -> float: ...
    @property
    def weight(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def memory_bytes(self) -> int | None: ...


@dataclass(frozen=True)
class WorkerShare:
    """A share of one GPU for a process that is no tenant of an agent. `partition`: its label in a profile."""

    name: str
    limit: float = 1.0
    partition: str = ""
    priority: int = 0
    request: float = 0.0
    weight: float = 0.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Enforcement:
    """What a grant gives the launcher and the broker: environment of the program, what of it is different for programs
    that run below others, flags of its page's slot. `sms`: what was really given of each GPU, by UUID, where that is
    known; `remarks`: what of the share is not made true, a sentence each."""

    environment: dict[str, str] = field(default_factory=dict)
    slot_flags: int = 0
    below: dict[str, str] = field(default_factory=dict)
    sms: dict[str, Sms] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class Mechanism:
    """One way to enforce shares. Methods raise WorkError when the machine cannot do it."""

    name: ClassVar[str]
    uses: ClassVar[frozenset[Use]]
    capabilities: ClassVar[Capabilities]

    def __init__(self, folder: Path, gpus: tuple[Gpu, ...] = ()) -> None:
        """`folder`: where its runtime files go. `gpus`: all that it may be asked for; empty where that is not known."""
        self.folder, self.gpus = folder, gpus

    def prepare(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """Do beforehand what takes long in `grant`; called in another thread."""

    def settle(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """A grant that was prepared did not come about: end what is not used."""

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """Prepare the GPUs for a tenant, or for its changed share."""
        return Enforcement(slot_flags=0 if self.capabilities.gated else SlotFlag.UNGATED)

    def resize(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> str:
        """Make a changed share true; returns from when on it holds."""
        return "at once"

    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        """The tenant has gone."""

    def taken_over(self) -> None:
        """The tenants that an agent before this one has left are granted again: remove all else that it left."""

    def look(self) -> Look | None:
        """Who is served where now; what was changed by others is set again. Called in another thread. None where
        there is nothing to look at."""
        return None

    def worker_environment(self, share: WorkerShare, gpu: Gpu) -> dict[str, str]:
        """Environment of a worker's process on its share."""
        return {"CUDA_VISIBLE_DEVICES": gpu.uuid} | self.grant(share, (gpu,)).environment

    def worker_gone(self, name: str) -> None:
        """A worker's process has ended."""

    async def watch(self, lost: Callable[[str, str], None]) -> None:
        """Call `lost` with a GPU's UUID and a sentence when its tenants have lost it; runs until it is cancelled, or
        returns where there is nothing to watch."""

    def close(self) -> None:
        """Stop what this mechanism started."""
