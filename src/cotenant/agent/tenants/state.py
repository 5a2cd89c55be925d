"""What an agent must know again after a restart: its tenants with their tokens. Written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.memory.moves import MoveCount
from cotenant.agent.owners.holders import Holder
from cotenant.agent.processes import ProcessKey, alive
from cotenant.agent.tenants.registry import Tenant, spec_from_dict, spec_to_dict
from cotenant.core.errors import InputError


class SavedTenant:
    """One tenant of the state file."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.spec: TenantSpec = spec_from_dict(data["spec"])
        self.token = str(data["token"])
        self.uid = int(data["uid"])
        self.timeout_s: float | None = data.get("timeout_s")
        holder = data.get("holder")
        self.holder = Holder(*map(str, holder)) if holder else None
        root = data.get("root")
        self.root = ProcessKey(int(root[0]), int(root[1])) if root else None
        self.moves = MoveCount(**data.get("moves") or {})
        self.processes = [ProcessKey(int(pid), int(ticks)) for pid, ticks in data.get("processes", ())]

    @property
    def alive(self) -> bool:
        """Whether its program, or a process that it left behind, still runs."""
        return self.root_alive or any(alive(key) for key in self.processes)

    @property
    def root_alive(self) -> bool:
        """Whether the program that the launcher started still runs."""
        return self.root is not None and alive(self.root)


def save(
    path: Path,
    tenants: Iterable[Tenant],
    parked: Iterable[dict[str, Any]] = (),
    moves: Mapping[str, MoveCount] | None = None,
) -> None:
    """Write the state file (readable by its owner only: it holds tokens). OSError when it cannot be written."""
    counted = moves or {}
    rows = [
        {
            "spec": spec_to_dict(tenant.spec) | {"gpus": [g.uuid for g in tenant.gpus]},
            "token": tenant.token,
            "uid": tenant.uid,
            "root": list(tenant.root) if tenant.root else None,
            "timeout_s": tenant.timeout_s,
            "declared": tenant.declared,
            "holder": list(tenant.holder) if tenant.holder else None,
            "moves": asdict(counted[tenant.name]) if tenant.name in counted else None,
            "processes": [*map(list, {session.process for session in tenant.sessions} | tenant.heirs)],
        }
        for tenant in tenants
    ]
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps({"version": 1, "tenants": rows, "parked": list(parked)}))
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def load_parked(path: Path) -> list[dict[str, Any]]:
    """What the last agent had parked, as `Parked.as_dict` wrote it; empty when nothing was."""
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["parked"]
        return [row for row in rows if isinstance(row, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def load(path: Path) -> list[SavedTenant]:
    """Tenants of the last agent; empty when there was none. A damaged file counts as none."""
    try:
        data = json.loads(path.read_text())
        return [SavedTenant(row) for row in data["tenants"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, IndexError, InputError):
        return []
