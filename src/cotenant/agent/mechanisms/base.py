"""Base class of mechanisms, and the description of what each enforces."""

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
    """Where a mechanism may be used."""

    TENANT = "tenant"  # tenants of a node's agent
    SERVICE = "service"  # workers of a server
    JOB = "job"  # fractions of a GPU for jobs of the fleet
    PROFILE = "profile"  # `infer` and `profile service`


@dataclass(frozen=True)
class Capabilities:
    """Properties of a mechanism, as text for users and flags for programs."""

    compute: str
    memory: str
    resize: str
    isolation: str
    time_by: Strength = Strength.NOTHING  # what enforces a tenant's share of GPU time
    sms_by: Strength = Strength.NOTHING  # what enforces a tenant's share of the SMs
    memory_by: Strength = Strength.NOTHING
    faults_by: Strength = Strength.DRIVER  # what protects other tenants from a tenant's fault
    needs_gpu: bool = True
    exclusive: bool = False  # no other tenant on the same GPU
    gated: bool = False  # takes turns by the broker
    sliced: bool = False  # the agent sets its tenants' time slices on the GPU
    concurrent: bool = False  # kernels of several tenants run at once
    live_resize: bool = False  # a changed share applies to running programs
    worker_parts: bool = True  # a worker may have a fraction of a GPU
    worker_resizes: bool = False  # a worker's own process enforces its share and changes it between batches
    instances: bool = False  # a share is a device of its own, with a UUID and a placement on the GPU
    mixes_with: tuple[str, ...] = ()  # other mechanisms whose tenants may share a GPU with its own
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Plain data for --json."""
        return asdict(self)


class ShareSpec(Protocol):
    """The fields of a tenant that a mechanism reads."""

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
    """A share of one GPU for a process that is not a tenant. `partition`: its label in a profile."""

    name: str
    limit: float = 1.0
    partition: str = ""
    priority: int = 0
    request: float = 0.0
    weight: float = 0.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Enforcement:
    """Result of a grant for launcher and broker: the program's environment, the variables that differ for its child
    programs, the flags of its page's slot. `sms`: SMs actually given, by UUID, where known; `remarks`: which parts of
    the share are not enforced, one sentence each.
    """

    environment: dict[str, str] = field(default_factory=dict)
    slot_flags: int = 0
    below: dict[str, str] = field(default_factory=dict)
    sms: dict[str, Sms] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class Mechanism:
    """A way to enforce shares. Methods raise WorkError if the machine cannot do it."""

    name: ClassVar[str]
    uses: ClassVar[frozenset[Use]]
    capabilities: ClassVar[Capabilities]

    def __init__(self, folder: Path, gpus: tuple[Gpu, ...] = ()) -> None:
        """`folder`: for runtime files. `gpus`: all that tenants may get; empty if unknown."""
        self.folder, self.gpus = folder, gpus

    def prepare(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """Do the slow part of `grant` in advance; called in another thread."""

    def settle(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """Discard a prepared grant that is not used."""

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """Prepare the GPUs for a tenant, or for its changed share."""
        return Enforcement(slot_flags=0 if self.capabilities.gated else SlotFlag.UNGATED)

    def resize(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> str:
        """Apply a changed share. Returns the time from which on it applies."""
        return "at once"

    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        """The tenant was removed."""

    def taken_over(self) -> None:
        """Called when the previous agent's tenants have been granted again: remove everything else that it left."""

    def look(self) -> Look | None:
        """List the served processes, and restore what others changed. Called in another thread. None if there is
        nothing to check.
        """
        return None

    def worker_environment(self, share: WorkerShare, gpu: Gpu) -> dict[str, str]:
        """Environment of a worker's process on its share."""
        return {"CUDA_VISIBLE_DEVICES": gpu.uuid} | self.grant(share, (gpu,)).environment

    def worker_gone(self, name: str) -> None:
        """A worker's process has ended."""

    async def watch(self, lost: Callable[[str, str], None]) -> None:
        """Call `lost` with a GPU's UUID and a sentence when its tenants lost it; runs until cancelled, or returns if
        there is nothing to watch.
        """

    def close(self) -> None:
        """Stop what this mechanism started."""
