"""Registers jobs as tenants of a node's agent: shares and limits, parking and resuming. Standard library only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.core.errors import InputError, WorkError
from cotenant.fleet.nodes import NodeSpec

PARK_TIMEOUT_S = 120.0


def tenant_name(order: dict[str, Any]) -> str:
    """Return the tenant name of an attempt to run a job."""
    return f"job-{order['attempt']}"[:63]


class Tenancy:
    """A job's registration at the agent; the runner keeps it open while its processes run."""

    def __init__(self, client: ControlClient, name: str, folder: Path) -> None:
        self.client, self.name, self.folder = client, name, folder

    def started(self, pid: int) -> None:
        """Report that the job's first process has started."""
        # if the tenant has already ended, the agent need not know that its process had started
        with contextlib.suppress(WorkError):
            self.client.call("started", name=self.name, pid=pid)

    def wake(self) -> None:
        """Resume a parked job, so that it can handle a signal."""
        with contextlib.suppress(WorkError, InputError), ControlClient(self.folder, 30.0) as client:
            client.call("resume", name=self.name)

    def leave(self) -> None:
        """Close the registration of the job at the agent. The agent notices by itself when the job's processes have
        ended.
        """
        self.client.close()


def enter(order: dict[str, Any], environment: dict[str, str]) -> tuple[Tenancy, dict[str, str]]:
    """Register an attempt to run a job as a tenant; returns the registration and the environment of the job's
    processes. Raises WorkError or InputError if the agent refuses, and WorkError if it cannot be reached.
    """
    from cotenant.agent.tenants.launcher import environment_changes

    folder = Path(order["agent"])
    client = ControlClient(folder)
    try:
        shares = order["gpus"]
        fraction = min(float(share["fraction"]) for share in shares)
        whole = fraction >= 1
        limit = 1.0 if whole else float(shares[0].get("limit") or fraction)
        answer = client.call(
            "register",
            tenant={
                "name": tenant_name(order),
                "request": min(fraction, limit),
                "limit": limit,
                "gpus": [share["uuid"] for share in shares],
                "gpu_count": len(shares),
                "mechanism": mechanisms.EXCLUSIVE if whole else shares[0]["mechanism"],
            },
        )
        changes = environment_changes(answer)
    except BaseException:
        client.close()
        raise
    # the agent's variables, such as those for visible GPUs and the driver, replace the job's
    return Tenancy(client, answer["name"], folder), os.environ | environment | changes


def can_park(node: NodeSpec) -> bool:
    """Whether the node's agent can park jobs. It may still refuse to park some of them."""
    if node.agent is None:
        return False
    try:
        with ControlClient(Path(node.agent), 5.0) as client:
            client.call("parked")
    except (WorkError, InputError):
        return False
    return True


def park(order: dict[str, Any], agent: str | None) -> dict[str, Any]:
    """Have the agent move a job's memory off its GPUs and suspend it. Raises WorkError on failure."""
    return _call("park", order, agent)


def resume(order: dict[str, Any], agent: str | None) -> dict[str, Any]:
    """Have the agent resume a parked job."""
    return _call("resume", order, agent)


def _call(op: str, order: dict[str, Any], agent: str | None) -> dict[str, Any]:
    if agent is None:
        raise WorkError("this node has no GPU agent")
    with ControlClient(Path(agent), PARK_TIMEOUT_S) as client:
        return client.call(op, name=tenant_name(order))
