"""Finds processes that still run after their tenant's program has ended: they are in the program's process group, or
have the tenant's token in their environment.

The token also finds daemons, which leave their parent, group and session and may use the GPU only much later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cotenant.agent.processes import ProcessKey, alive, each_process, environment, in_group, is_zombie, key_of
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.background import spawn

FIRST_LOOK_S = 0.01
LAST_LOOK_S = 0.5
NOBODY: frozenset[ProcessKey] = frozenset()


def by_token(tokens: Collection[str], proc: Path = Path("/proc")) -> dict[str, frozenset[ProcessKey]]:
    """For each token, the living processes that have it in their environment. Those of other users are not visible."""
    marks = {f"COTENANT_TOKEN={token}".encode(): token for token in tokens}
    found: dict[str, set[ProcessKey]] = {}
    loading: set[int] = set()  # processes that are loading their programs
    for pid in each_process(proc, loading):
        try:
            variables = environment(pid, proc)
        except TimeoutError:
            loading.add(pid)
            continue
        except OSError:
            continue
        for variable in variables:
            if token := marks.get(variable):
                found.setdefault(token, set()).add(key_of(pid))
    return {token: frozenset(key for key in keys if not is_zombie(key.pid)) for token, keys in found.items()}


class Orphans:
    """Watches tenants whose programs have ended. Calls `gone` with a tenant when its last process has ended, and
    `changed` when its known processes have changed, so that the state file is written.
    """

    def __init__(
        self, tenants: Mapping[str, Tenant], gone: Callable[[Tenant], None], changed: Callable[[], None]
    ) -> None:
        self._tenants = tenants
        self._gone = gone
        self._changed = changed
        self._wanted: set[str] = set()
        self._found: dict[str, frozenset[ProcessKey]] = {}
        self._looking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, tenant: Tenant, group: int | None = None, known: Collection[ProcessKey] = ()) -> None:
        """Watch a tenant whose program has ended, until no process of the process group `group`, and no process with
        the tenant's token, is left. `known`: processes of these two kinds that are already known.
        """
        tenant.group = group
        tenant.orphans = frozenset(known)
        tenant.left_behind = True
        spawn(self._tasks, self._watch(tenant))

    def close(self) -> None:
        """Stop watching all tenants whose programs have ended."""
        for task in self._tasks:
            task.cancel()

    async def _watch(self, tenant: Tenant) -> None:
        wait_s = FIRST_LOOK_S
        tenant.orphans |= await self._look(tenant.token)
        self._changed()
        while self._tenants.get(tenant.name) is tenant:
            if tenant.group is not None and not await asyncio.to_thread(in_group, tenant.group):
                tenant.group = None
            if tenant.group is None and not any(alive(key) for key in tenant.orphans):
                # processes that have ended may have left child processes
                tenant.orphans = await self._look(tenant.token)
                if not tenant.orphans:
                    break
                self._changed()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_LOOK_S)
        tenant.left_behind = False
        self._gone(tenant)

    async def _look(self, token: str) -> frozenset[ProcessKey]:
        """Find the processes with a token. One scan of all processes serves all requests that were made before it."""
        self._wanted.add(token)
        async with self._looking:
            if token in self._wanted:
                wanted, self._wanted = self._wanted, set()
                self._found |= await asyncio.to_thread(by_token, wanted)
        return self._found.pop(token, NOBODY)
