"""Applies the configuration: admits its tenants, and applies new versions of the file while the agent runs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path

from cotenant.abi.protocol import MessageType
from cotenant.agent.config.by_hand import kept_by_hand
from cotenant.agent.config.choices import keep_choice
from cotenant.agent.config.file_watch import FileWatch
from cotenant.agent.config.files import AgentConfig, InForce, TenantSpec
from cotenant.agent.copies.links import Copies
from cotenant.agent.gate.floor import Floors
from cotenant.agent.ipc import wire
from cotenant.agent.lifecycle.lives import Lives
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import work_kind
from cotenant.agent.turns.broker import Broker
from cotenant.core.errors import InputError, WorkError
from cotenant.core.units import counted

LOG = logging.getLogger(__name__)

WATCH_S = 0.25
AT_START = ("gpus", "gpu_memory_bytes", "swap_memory_bytes")  # settings that are read only when the agent starts


class Reconfigure:
    """Applies the configuration. `load` reads its newest version; `source` is the file's path."""

    def __init__(
        self,
        load: Callable[[], AgentConfig],
        source: Path | None,
        in_force: InForce,
        registry: Registry,
        lives: Lives,
        broker: Broker,
        floors: Floors,
        copies: Copies,
        save: Callable[[], None],
    ) -> None:
        self._load, self._source, self._in_force, self._registry, self._lives = load, source, in_force, registry, lives
        self._broker, self._floors, self._copies, self._save = broker, floors, copies, save

    def admit_declared(self) -> None:
        """Admit or change the tenants of the configuration. A tenant that does not fit on the GPUs is left out and
        reported, and the remaining tenants are admitted, since the machine may have lost a GPU after the file was
        written.
        """
        left_out: dict[str, str] = {}
        faults = []
        for spec in self._in_force.config.tenants:
            try:
                self._declare(spec, os.geteuid() if spec.uid is None else spec.uid)
            except (InputError, WorkError) as error:
                why = error.message if isinstance(error, InputError) else str(error)
                outcome = "the tenant keeps the share that it has"
                if spec.name not in self._registry.tenants:
                    left_out[spec.name], outcome = why, "the tenant is left out"
                fault = InputError(f"{why}; {outcome}", file=self._source, field=f"tenant {spec.name}")
                LOG.warning(str(fault))
                faults.append(str(fault))
        self._in_force.left_out, self._in_force.fault = left_out, "; ".join(faults)
        self._save()

    def _declare(self, spec: TenantSpec, uid: int) -> None:
        tenant = self._registry.tenants.get(spec.name)
        spec = self._registry.with_turns(spec, tenant)
        if tenant is None:
            self._lives.add(spec, uid, declared=True)
            return
        tenant.declared, tenant.uid = True, uid
        spec, tenant.by_hand, replaced = kept_by_hand(spec, tenant.spec, tenant.by_hand)
        for sentence in replaced:
            LOG.warning(sentence)
        if spec.mechanism == mechanisms.AUTO:
            spec = dataclasses.replace(spec, mechanism=tenant.spec.mechanism)
        if spec.choices is not None and not self._lives.idle(tenant):
            spec = keep_choice(spec, tenant.spec)
        if dataclasses.replace(spec, gpus=tenant.spec.gpus) == tenant.spec:
            return
        # a process learns only when it starts whether it waits for turns, and whether it moves its memory
        changed = [each for each in ("mechanism", "oversubscribe") if getattr(spec, each) != getattr(tenant.spec, each)]
        if changed and not self._lives.idle(tenant):
            raise InputError(
                f"{' and '.join(changed)} cannot be changed while programs of the tenant run; "
                "write the file again when they have ended"
            )
        before = work_kind(tenant.spec)
        self._lives.change(tenant, dataclasses.replace(spec, gpus=tenant.spec.gpus))
        if tenant.sessions and work_kind(spec) != before:
            # a process learns its class (latency-sensitive, best-effort or neither) only once, when it starts to use a
            # GPU
            tenant.warn(f"the tenant is {work_kind(spec)} from its next start on: its running processes stay {before}")

    async def follow(self, watch: FileWatch) -> None:
        """Apply each new version of the file, and report that the file is gone. Does not return."""
        gone = False
        while True:
            await asyncio.sleep(WATCH_S)
            if watch.changed():
                try:
                    await self.reload()
                except Exception as error:  # must not end this loop, since a later version of the file may be valid
                    self._in_force.fault = f"{watch.path}: cannot be used: {error!r}"
                    LOG.exception("the new configuration was rejected")
            elif watch.gone and not gone:
                fault = f"{watch.path}: the file is gone; its settings stay in force until the agent ends"
                self._in_force.fault = fault
                LOG.warning(fault)
            gone = watch.gone

    def _reject(self, why: str) -> None:
        self._in_force.fault = f"{why}; the whole file was refused, and the previous settings stay in force"
        LOG.error(f"the new configuration was rejected: {self._in_force.fault}")

    async def reload(self) -> None:
        """Apply the config file's new contents, which a thread reads. An invalid file is reported and changes nothing.
        """
        try:
            config = await asyncio.to_thread(self._load)
            self._check_requests(config)
        except (InputError, WorkError) as error:
            self._reject(str(error))
            return
        if later := [name for name in AT_START if getattr(config, name) != getattr(self._in_force.config, name)]:
            names = ", ".join(name.removesuffix("_bytes") for name in later)
            LOG.warning(f"from the next start of the agent on, the file's new values of these settings hold: {names}")
        self._in_force.config = config
        self._floors.configure(config.colocation)
        self._copies.configure(config.copies)
        self._broker.configure(config.quota, config.inflight_ns)
        for tenant in list(self._registry.tenants.values()):
            for session in list(tenant.sessions):
                session.page.layout.fail_mode = self._registry.fail_mode(session.tenant, config.fail)
                session.send(wire.pack(MessageType.PAGE_UPDATE))
        listed = {spec.name for spec in config.tenants}
        for tenant in list(self._registry.tenants.values()):
            if tenant.declared and tenant.name not in listed:
                tenant.declared, tenant.by_hand = False, {}
                self._lives.give_up(tenant)
                if tenant.name in self._registry.tenants:
                    LOG.warning(f"{tenant.name} is no longer in the file: its programs go on without a request")
        self.admit_declared()
        LOG.info(f"configuration applied: {len(config.tenants) - len(self._in_force.left_out)} tenants")

    def _check_requests(self, config: AgentConfig) -> None:
        listed = {spec.name for spec in config.tenants}
        tenants, gpus = self._registry.tenants.values(), len(self._registry.gpus)
        others = sum(t.spec.request for t in tenants if not t.declared and t.name not in listed)
        total = sum(spec.request for spec in config.tenants) + others
        if total > gpus + 1e-9:
            raise InputError(f"the requests add up to {total:.0%} of {counted(gpus, 'GPU')}")
