"""Detects Slurm jobs that have ended but whose epilog did not reach the agent, and releases their shares.

A job runs as long as its cgroup has a process. With `PrologFlags=Contain` the cgroup has one from the prolog to the
epilog. So the share of a job without a process is released after PATIENCE_S; but if no process of the job has been seen
yet, its prolog may still run, and the share is released only after PROLOG_S.

The epilog removes the job's file. So a job has ended if its share is held and its file is missing. A new run of the job
by the same id cannot be taken for an ended one: its prolog writes the file before it requests the share.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cotenant.agent.owners.owners import Owners
from cotenant.agent.tenants.places import Place
from cotenant.agent.tenants.tenant import Tenant

LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 5.0
# a job has ended if for this long it had no process; the processes need time to connect again after the agent was
# restarted, and until then the job may seem to have none
PATIENCE_S = 30.0
PROLOG_S = 1800.0  # a job that never ran within this time has ended; slow prologs may run before a job starts
KIND = "slurm"


def job_file(folder: Path, name: str) -> Path:
    """Path of the file in which the prolog tells a job's tasks whether the job has its share. `name`: name of the job's
    tenant.
    """
    return folder / f"{name}.job"


def running_jobs(locate: Callable[[int], Place | None], proc: Path = Path("/proc")) -> set[str]:
    """Ids of Slurm jobs that have a process on this node."""
    places = (locate(int(entry)) for entry in os.listdir(proc) if entry.isdigit())
    return {place.id for place in places if place is not None and place.kind == KIND}


class EndedJobs:
    """Finds jobs that have ended but still have a share. `folder`: where prologs write the files of jobs."""

    def __init__(self, owners: Owners, folder: Path) -> None:
        self._owners = owners
        self._folder = folder
        self._seen: set[Tenant] = set()
        self._missing_since_s: dict[Tenant, float] = {}

    def taken_over(self, drop: Callable[[Tenant], None]) -> None:
        """Call `drop` with the tenants of jobs whose epilog ran while no agent answered: the next job needs their GPUs.
        Count all other jobs with a share as seen: they had it under the previous agent, so their prologs have ended.
        """
        self._drop_with_epilog(drop)
        self._seen.update(self._owners.owned(KIND))

    async def run(self, locate: Callable[[int], Place | None], drop: Callable[[Tenant], None]) -> None:
        """Call `drop` with tenants whose jobs have ended, as long as the agent runs."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._drop_with_epilog(drop)
            if not self._owners.owned(KIND):
                continue
            running = await asyncio.to_thread(running_jobs, locate)
            for tenant in self.over(running, time.monotonic()):
                LOG.warning(f"the job of {tenant.name} ended without its epilog: its share is released")
                drop(tenant)

    def _drop_with_epilog(self, drop: Callable[[Tenant], None]) -> None:
        for tenant in self.with_epilog():
            LOG.warning(f"the epilog of {tenant.name} ran while no agent answered: its share is released")
            drop(tenant)

    def with_epilog(self) -> list[Tenant]:
        """Tenants whose jobs had an epilog that did not reach the agent."""
        return [t for t in self._owners.owned(KIND) if not job_file(self._folder, t.name).exists()]

    def over(self, running: Iterable[str], now_s: float) -> list[Tenant]:
        """Return the tenants whose jobs have ended, judged by the jobs that have processes now."""
        jobs, held = set(running), self._owners.owned(KIND)
        self._seen.intersection_update(held)
        self._missing_since_s = {t: since for t, since in self._missing_since_s.items() if t in held}
        for tenant in held:
            if tenant.sessions or (tenant.owner is not None and tenant.owner.id in jobs):
                self._seen.add(tenant)
                self._missing_since_s.pop(tenant, None)
            else:
                self._missing_since_s.setdefault(tenant, now_s)
        return [
            tenant for tenant, since in self._missing_since_s.items()
            if now_s - since >= (PATIENCE_S if tenant in self._seen else PROLOG_S)
        ]  # fmt: skip


async def why_held(tenant: Tenant, locate: Callable[[int], Place | None]) -> str:
    """Why a tenant's share remains after its processes were stopped; empty if it may be removed."""
    owner = tenant.owner
    if owner is None:
        return ""
    if owner.kind != KIND:
        return f"the share is held for {owner.kind} {owner.id} until the {owner.kind} is deleted"
    running = await asyncio.to_thread(running_jobs, locate)
    if tenant.sessions or owner.id in running:
        return f"the share is held for Slurm job {owner.id}, which runs; `scancel {owner.id}` ends the job"
    return ""
