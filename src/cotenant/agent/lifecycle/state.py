"""The state file, from which a restarted agent learns the tenants and their tokens. It is written completely or not at
all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.memory.swap_orders import MoveCount
from cotenant.agent.processes import ProcessKey, alive
from cotenant.agent.tenants.places import Owner
from cotenant.agent.tenants.registry import spec_from_dict, spec_to_dict
from cotenant.agent.tenants.tenant import ControlGroup, Tenant
from cotenant.core.errors import InputError

LOG = logging.getLogger(__name__)

SAVE_WITHIN_S = 0.05


class SavedTenant:
    """A tenant as it is saved in the agent's state file."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.spec: TenantSpec = spec_from_dict(data["spec"])
        self.token = str(data["token"])
        self.uid = int(data["uid"])
        self.timeout_s: float | None = data.get("timeout_s")
        owner = data.get("holder")
        self.owner = Owner(*map(str, owner)) if owner else None
        root = data.get("root")
        self.root = ProcessKey(int(root[0]), int(root[1])) if root else None
        held = data.get("held")
        self.held = ControlGroup(Path(held[0]), bool(held[1])) if held else None
        self.short_since = {str(uuid): int(ns) for uuid, ns in (data.get("short_since") or {}).items()}
        self.moves = MoveCount(**data.get("moves") or {})
        self.processes = [ProcessKey(int(pid), int(ticks)) for pid, ticks in data.get("processes", ())]

    @property
    def alive(self) -> bool:
        """Return whether the tenant's program or another process of the tenant still runs."""
        return self.root_alive or any(alive(key) for key in self.processes)

    @property
    def root_alive(self) -> bool:
        """Whether the program that the launcher started still runs."""
        return self.root is not None and alive(self.root)


class StateFile:
    """Writes the state file, which only the agent's user can read, since it contains tokens. If it cannot be written,
    the agent reports that once and continues.
    """

    def __init__(
        self,
        path: Path,
        tenants: Mapping[str, Tenant],
        parked: ParkedTable,
        moves: Mapping[str, MoveCount],
        closing: Callable[[], Iterable[ControlGroup]],
    ) -> None:
        """`closing` returns the control groups of ended tenants with a memory limit that is still set."""
        self.path = path
        self._tenants, self._parked, self._moves, self._closing = tenants, parked, moves, closing
        self._failed = False
        self._timer: asyncio.TimerHandle | None = None

    def save(self) -> None:
        """Write the state file within SAVE_WITHIN_S, so that several changes need only one write."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SAVE_WITHIN_S, self.save_now)

    def save_now(self) -> bool:
        """Write the state file now; returns whether that succeeded."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._write()
            self._failed = False
        except OSError as error:
            if not self._failed:
                LOG.error(f"{self.path} cannot be written ({error.strerror}): tenants would be lost on a restart")
            self._failed = True
        return not self._failed

    def _write(self) -> None:
        rows = [
            {
                "spec": spec_to_dict(tenant.spec) | {"gpus": [g.uuid for g in tenant.gpus]},
                "token": tenant.token,
                "uid": tenant.uid,
                "root": list(tenant.root) if tenant.root else None,
                "timeout_s": tenant.timeout_s,
                "declared": tenant.declared,
                "holder": list(tenant.owner) if tenant.owner else None,
                "held": [str(tenant.held.path), tenant.held.made] if tenant.held else None,
                "short_since": tenant.short_since,
                "moves": asdict(self._moves[name]) if name in self._moves else None,
                "processes": [*map(list, {session.process for session in tenant.sessions} | tenant.orphans)],
            }
            for name, tenant in self._tenants.items()
        ]
        temporary = self.path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                closing = [[str(group.path), group.made] for group in self._closing()]
                parked = self._parked.as_dicts()
                file.write(json.dumps({"version": 1, "tenants": rows, "parked": parked, "closing": closing}))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        os.replace(temporary, self.path)


def load_parked(path: Path) -> list[dict[str, Any]]:
    """Return a row for each tenant or program that the previous agent had parked (its name, GPUs, processes and more),
    from which `Parked.from_dict` makes an entry of the ParkedTable.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["parked"]
        return [row for row in rows if isinstance(row, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def load_closing(path: Path) -> list[ControlGroup]:
    """Control groups of ended tenants whose memory limits the previous agent had not cleared yet."""
    try:
        return [ControlGroup(Path(name), bool(made)) for name, made in json.loads(path.read_text())["closing"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def load(path: Path) -> list[SavedTenant]:
    """Tenants of the previous agent; empty if the file is missing or damaged. A tenant that this version cannot read,
    because a newer agent wrote it, is reported and left out.
    """
    try:
        rows = list(json.loads(path.read_text())["tenants"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    found = []
    for row in rows:
        try:
            found.append(SavedTenant(row))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, InputError) as error:
            LOG.warning(f"a tenant of the previous agent in {path} cannot be read ({error}): its processes are refused")
    return found
