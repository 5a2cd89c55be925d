"""Base class of mechanisms, which enforce tenants' shares of a GPU, and the description of what each enforces."""

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
    """The purposes for which a mechanism may be used."""

    TENANT = "tenant"  # shares of tenants of a node's agent
    SERVICE = "service"  # shares of a server's worker processes
    JOB = "job"  # training jobs that `cotenant fleet` runs on a fraction of a GPU
    PROFILE = "profile"  # measurements by `infer` and `profile service`


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
    # what protects other tenants from faults of a tenant, such as an illegal memory access
    faults_by: Strength = Strength.DRIVER
    needs_gpu: bool = True
    exclusive: bool = False  # a tenant has its GPU for itself
    gated: bool = False  # tenants take turns that the agent grants
    sliced: bool = False  # the agent sets its tenants' hardware time slices
    concurrent: bool = False  # kernels of several tenants run at once
    live_resize: bool = False  # a changed share also applies to programs that run already
    worker_parts: bool = True  # a server's worker may use a fraction of a GPU
    # a server's worker enforces the limit itself, in its own process, and can change it between two batches
    worker_resizes: bool = False
    instances: bool = False  # a share is a device of its own, with a UUID and a place on the GPU
    mixes_with: tuple[str, ...] = ()  # other mechanisms whose tenants may use the same GPU at the same time
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """The capabilities of a mechanism in JSON types, for --json."""
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
    """A share of one GPU for a server's worker, which is not a tenant. `partition`: name of the share in the serving
    profile, for example "1g.18gb" for a MIG instance of that size.
    """

    name: str
    limit: float = 1.0
    partition: str = ""
    priority: int = 0
    request: float = 0.0
    weight: float = 0.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Enforcement:
    """How a granted share is enforced. `environment`: variables for the tenant's program; `below`: variables that give
    a best-effort program lower priority; `slot_flags`: flags in the shared page of each process; `sms`: SMs that the
    tenant has, by the GPU's UUID, if known; `remarks`: a sentence for each part of the share that is not enforced.
    """

    environment: dict[str, str] = field(default_factory=dict)
    slot_flags: int = 0
    below: dict[str, str] = field(default_factory=dict)
    sms: dict[str, Sms] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class Mechanism:
    """A way to enforce shares. Methods raise WorkError if the machine cannot enforce them this way."""

    name: ClassVar[str]
    uses: ClassVar[frozenset[Use]]
    capabilities: ClassVar[Capabilities]

    def __init__(self, folder: Path, gpus: tuple[Gpu, ...] = ()) -> None:
        """`folder`: folder for the mechanism's runtime files. `gpus`: all GPUs that tenants may get; empty if they are
        not known.
        """
        self.folder, self.gpus = folder, gpus

    def prepare(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """Do the slow part of granting a share in advance, such as starting a daemon. Called in a thread of its own."""

    def settle(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> None:
        """Undo `prepare` for a share that is not granted after all."""

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """Grant a share: prepare the GPUs for a tenant, or for its changed share."""
        return Enforcement(slot_flags=0 if self.capabilities.gated else SlotFlag.UNGATED)

    def resize(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> str:
        """Apply a tenant's changed share. Returns in words when the change takes effect."""
        return "at once"

    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        """Free what the mechanism had prepared on the GPUs for a tenant that is removed."""

    def taken_over(self) -> None:
        """Remove what the previous agent's mechanism left on the machine, such as MPS daemons. Called after the tenants
        of that agent got their shares again.
        """

    def look(self) -> Look | None:
        """List the clients of this mechanism's MPS servers. If another program has changed the limits of a client, set
        them again. Returns None if the mechanism has no MPS servers. Called in a thread of its own.
        """
        return None

    def worker_environment(self, share: WorkerShare, gpu: Gpu) -> dict[str, str]:
        """Return the variables that give a server's worker its share of a GPU."""
        return {"CUDA_VISIBLE_DEVICES": gpu.uuid} | self.grant(share, (gpu,)).environment

    def worker_gone(self, name: str) -> None:
        """Free the share of a server's worker that has ended."""

    async def watch(self, lost: Callable[[str, str], None]) -> None:
        """Call `lost` with a GPU's UUID and a sentence when tenants lose that GPU. Runs until cancelled. If tenants of
        this mechanism cannot lose a GPU, it returns.
        """

    def close(self) -> None:
        """Stop the daemons, such as those of MPS, that this mechanism started."""
