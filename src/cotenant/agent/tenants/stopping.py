"""Ends a tenant's processes: its program, its processes that use the GPU, and their descendants."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from cotenant.agent import processes
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.background import spawn

_FINISHING: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to tasks


async def kill(tenant: Tenant, grace_s: float, more: frozenset[ProcessKey] = frozenset()) -> set[ProcessKey]:
    """Send SIGTERM to all processes of a tenant, and after `grace_s` SIGKILL to those left. Returns the processes.

    Threads read the list of all processes, because the event loop also switches tenants.
    """
    keys = {s.process for s in tenant.sessions if s.process.start_ticks}
    if tenant.root is not None:
        keys.add(tenant.root)
    keys |= tenant.orphans | more
    keys |= await asyncio.to_thread(processes.descendants, keys)
    # the program is signalled first, because it might exit with code 0 by itself if its children ended before it
    for key in sorted(keys, key=lambda key: key != tenant.root):
        _signal(key, signal.SIGTERM, group=key == tenant.root)
    if tenant.group is not None:
        _signal_group(tenant.group, signal.SIGTERM)

    async def finish() -> None:
        await asyncio.sleep(grace_s)
        for key in keys | await asyncio.to_thread(processes.descendants, keys):
            _signal(key, signal.SIGKILL, group=key == tenant.root)
        if tenant.group is not None:
            _signal_group(tenant.group, signal.SIGKILL)

    spawn(_FINISHING, finish())
    return keys


def _signal_group(group: int, number: int) -> None:
    """Send a signal to what is left of the process group of a tenant's program that has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _signal(key: ProcessKey, number: int, *, group: bool) -> None:
    """Signal a process if it still runs; with `group`, its whole process group if it leads one."""
    if not processes.alive(key):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group and os.getpgid(key.pid) == key.pid:
            os.killpg(key.pid, number)
        else:
            os.kill(key.pid, number)
