"""Mechanism cores: CPU cores stand in for a GPU's SMs; each worker of a server is pinned to its share of the cores."""

from __future__ import annotations

from cotenant.agent.mechanisms.base import Capabilities, Mechanism, Use, WorkerShare
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu


class Cores(Mechanism):
    """Workers pinned to whole CPU cores, for machines without a GPU."""

    name = "cores"
    uses = frozenset({Use.SERVICE, Use.PROFILE})
    capabilities = Capabilities(
        compute="whole CPU cores; two workers share a core only when there are fewer cores than they need",
        memory="not enforced",
        resize="needs a new process",
        isolation="processes of the operating system",
        sms_by=Strength.KERNEL,
        needs_gpu=False,
        concurrent=True,
    )

    def worker_environment(self, share: WorkerShare, gpu: Gpu) -> dict[str, str]:
        return {}
