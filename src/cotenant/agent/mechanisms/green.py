"""Mechanism green: a server's worker creates green contexts on a part of the SMs, and changes the part between batches.
"""

from __future__ import annotations

import dataclasses

from cotenant.agent.mechanisms.base import Capabilities, Use, WorkerShare
from cotenant.agent.mechanisms.mps import Mps
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu


class Green(Mps):
    """Green contexts of several processes run concurrently only under MPS, so each worker is an MPS client with all SMs
    and limits itself by its contexts.
    """

    name = "green"
    uses = frozenset({Use.SERVICE, Use.PROFILE})
    capabilities = Capabilities(
        compute="the SMs of the worker's green context and no others; memory bandwidth and caches are shared by all",
        memory="not enforced",
        resize="between two batches, by the worker itself",
        isolation=Mps.capabilities.isolation,
        # as weak as enforcement by the shim: the worker's own process creates the contexts, and could exceed its share
        sms_by=Strength.SHIM,
        concurrent=True,
        live_resize=True,
        worker_resizes=True,
        notes=("needs a backend that supports green contexts, and CUDA 12.4 or newer",),
    )

    def worker_environment(self, share: WorkerShare, gpu: Gpu) -> dict[str, str]:
        return super().worker_environment(dataclasses.replace(share, limit=1.0), gpu)
