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

from cotenant.agent.config.by_hand import SETTABLE
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.memory.parked import ParkedTable
from cotenant.agent.memory.swap_orders import MoveCount
from cotenant.agent.processes import ProcessKey, alive
from cotenant.agent.tenants.host_memory import HostMemory
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
        self.root = _key(data.get("root"))
        self.launcher = _key(data.get("launcher"))
        held = data.get("held")
        self.held = ControlGroup(Path(held[0]), bool(held[1])) if held else None
        self.short_since = {str(uuid): int(ns) for uuid, ns in (data.get("short_since") or {}).items()}
        by_hand = data.get("by_hand") or {}
        self.by_hand = {name: by_hand[name] for name in SETTABLE if name in by_hand}
        self.moves = MoveCount(**data.get("moves") or {})
        self.processes = [ProcessKey(int(pid), int(ticks)) for pid, ticks in data.get("processes", ())]
        # those of the processes that were connected to the agent, and so may hold memory of a GPU
        self.connected = [ProcessKey(int(pid), int(ticks)) for pid, ticks in data.get("connected", ())]

    @property
    def alive(self) -> bool:
        """Return whether the tenant's program or another process of the tenant still runs."""
        return self.root_alive or any(alive(key) for key in self.processes)

    @property
    def root_alive(self) -> bool:
        """Whether the program that the launcher started still runs."""
        return self.root is not None and alive(self.root)

    @property
    def starting(self) -> bool:
        """Whether the tenant's launcher still runs, and has not reported the program that it starts."""
        return self.launcher is not None and not self.processes and alive(self.launcher)


def _key(value: Any) -> ProcessKey | None:
    return ProcessKey(int(value[0]), int(value[1])) if value else None


class StateFile:
    """Writes the state file, which only the agent's user can read, since it contains tokens. If it cannot be written,
    the agent reports that once and continues.

    The file outlives a killed agent. It is not synchronized to the disk, because a power cut also ends every tenant.
    """

    def __init__(
        self,
        path: Path,
        tenants: Mapping[str, Tenant],
        parked: ParkedTable,
        moves: Mapping[str, MoveCount],
        host: HostMemory,
        closing: Callable[[], Iterable[ControlGroup]],
    ) -> None:
        """`closing` returns the control groups of ended tenants with a memory limit that is still set."""
        self.path = path
        self._tenants, self._parked, self._moves, self._closing = tenants, parked, moves, closing
        self._host = host
        self._failed = False
        self._timer: asyncio.TimerHandle | None = None
        # name -> the values of a tenant that were written last, and their text: making the texts of a thousand tenants
        # would take longer than a registration may
        self._texts: dict[str, tuple[tuple[object, ...], str]] = {}

    def save(self) -> None:
        """Write the state file within SAVE_WITHIN_S, so that several changes need only one write."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SAVE_WITHIN_S, self.save_now)

    def settle(self) -> None:
        """Write the state file now if changes are not written yet."""
        if self._timer is not None:
            self.save_now()

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
        self._texts = {name: self._text(tenant) for name, tenant in self._tenants.items()}
        tenants = ", ".join(text for _, text in self._texts.values())
        temporary = self.path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                closing = [[str(group.path), group.made] for group in self._closing()]
                parked = self._parked.as_dicts()
                budget = self._host.budget_bytes
                rest = json.dumps({"parked": parked, "closing": closing, "swap_budget": budget})
                file.write(f'{{"version": 1, "tenants": [{tenants}], {rest[1:]}')
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        os.replace(temporary, self.path)

    def _text(self, tenant: Tenant) -> tuple[tuple[object, ...], str]:
        """Return the values of a tenant that are saved, and the row of the state file in which they are."""
        spec, gpus, held, moves = tenant.spec, tenant.gpus, tenant.held, self._moves.get(tenant.name)
        connected = {session.process for session in tenant.sessions} | tenant.returning
        # all but `spec` and `gpus`, which are never changed in place, are copied
        small = {
            "token": tenant.token,
            "uid": tenant.uid,
            "root": tenant.root,
            "launcher": tenant.launcher,
            "timeout_s": tenant.timeout_s,
            "declared": tenant.declared,
            "by_hand": dict(tenant.by_hand),
            "holder": tenant.owner,
            "held": (str(held.path), held.made) if held else None,
            "short_since": dict(tenant.short_since),
            "moves": asdict(moves) if moves is not None else None,
            "processes": sorted(connected | tenant.orphans),
            "connected": sorted(connected),
        }
        values = (spec, gpus, small)
        known = self._texts.get(tenant.name)
        if known is not None and known[0] == values:
            return known
        return values, json.dumps({"spec": spec_to_dict(spec) | {"gpus": [g.uuid for g in gpus]}} | small)


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


def load_swap_budget(path: Path) -> int | None:
    """The previous agent's budget of host memory in bytes, if a tenant of it still runs; otherwise None."""
    try:
        budget = int(json.loads(path.read_text())["swap_budget"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return budget if any(saved.alive or saved.starting for saved in load(path)) else None


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
