"""A configuration made true: its tenants admitted, and a new version of the file taken while everything runs."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from cotenant.abi.protocol import MessageType
from cotenant.agent.config.files import AgentConfig, TenantSpec, config_path
from cotenant.agent.ipc import wire
from cotenant.agent.operations import work_kind
from cotenant.core.errors import InputError, WorkError

if TYPE_CHECKING:
    from cotenant.agent.daemon import Agent


def admit_declared(agent: Agent, specs: tuple[TenantSpec, ...]) -> None:
    """Admit the tenants of the configuration, or change those that are here already. InputError names the tenant."""
    for spec in specs:
        existing = agent.registry.tenants.get(spec.name)
        try:
            if existing is None:
                agent.add_tenant(spec, _owner(spec), declared=True)
            else:
                existing.declared = True
                existing.uid = _owner(spec)
                if existing.spec != spec:
                    before = work_kind(existing.spec)
                    agent.change_tenant(existing, dataclasses.replace(spec, gpus=existing.spec.gpus))
                    if existing.sessions and work_kind(spec) != before:
                        # a process asks once, when it comes to a GPU, how it stands to the floor
                        existing.warn(f"it is {work_kind(spec)} from its next start on: what runs now stays {before}")
        except InputError as error:
            source = config_path(agent.options.source) if agent.options.source else None
            raise InputError(error.message, file=source, field=f"tenant {spec.name}") from None
    agent.save()


def _owner(spec: TenantSpec) -> int:
    return os.geteuid() if spec.uid is None else spec.uid


def reload(agent: Agent) -> None:
    """Take the config file's new contents; a wrong file changes nothing and is reported."""
    try:
        config = agent.load_config()
        _check_requests(agent, config)
    except (InputError, WorkError) as error:
        agent.config_fault = str(error)
        agent.log(f"the new configuration is not taken: {error}")
        return
    agent.config_fault = ""
    agent.config = agent.server.config = config
    agent.broker.inflight_ns = config.inflight_ns
    agent.floors.configure(config.colocation)
    agent.server.copies.configure(config.copies)
    agent.broker.configure(config.quota)
    for session in agent.server.sessions:
        if session.welcome:
            session.page.layout.fail_mode = agent.server.fail_mode
            session.send(wire.pack(MessageType.PAGE_UPDATE))
    _retire_unlisted(agent, {spec.name for spec in config.tenants})
    try:
        admit_declared(agent, config.tenants)
    except InputError as error:
        agent.config_fault = str(error)
        agent.log(f"the new configuration is taken in part: {error}")
        return
    agent.log(f"configuration taken: {len(config.tenants)} tenants")


def _retire_unlisted(agent: Agent, listed: set[str]) -> None:
    for tenant in list(agent.registry.tenants.values()):
        if tenant.declared and tenant.name not in listed:
            tenant.declared = False
            agent.maybe_remove(tenant)
            if tenant.name in agent.registry.tenants:  # still running: it keeps its limit and loses its claim
                agent.change_tenant(tenant, dataclasses.replace(tenant.spec, request=0.0))


def _check_requests(agent: Agent, config: AgentConfig) -> None:
    listed = {spec.name for spec in config.tenants}
    others = sum(t.spec.request for t in agent.registry.tenants.values() if not t.declared and t.name not in listed)
    total = sum(spec.request for spec in config.tenants) + others
    if total > len(agent.gpus) + 1e-9:
        raise InputError(f"the requests add up to {total:.0%} of {len(agent.gpus)} GPU(s)")
