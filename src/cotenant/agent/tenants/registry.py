"""The tenants of a node, and admission to its GPUs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import fields, replace
from typing import Any

from cotenant.abi.protocol import FailMode
from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.agent.mechanisms import registry as mechanism_list
from cotenant.agent.mechanisms.base import Mechanism
from cotenant.agent.mechanisms.slices import Slices
from cotenant.agent.mechanisms.time import Time
from cotenant.agent.tenants.host_memory import HostMemory
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError, TakenNameError
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu

MAX_TENANTS = 4096


class Registry:
    """All tenants of the node. Admission ensures that the shares and memory of all tenants of a GPU fit on it."""

    def __init__(
        self,
        gpus: Iterable[Gpu],
        mechanisms: dict[str, Mechanism],
        host: HostMemory | None = None,
        parked: Container[str] = (),
        slices_first: bool = True,
    ) -> None:
        """`parked`: names of the tenants that a user has parked (suspended, with their GPU memory in host memory) and
        not resumed yet. `slices_first`: whether tenants with the mechanism `auto` get hardware time slices where these
        are available.
        """
        self._slices_first = slices_first
        self._host = host or HostMemory(0)
        self.gpus = {g.uuid: g for g in gpus}
        self.mechanisms = mechanisms
        self.tenants: dict[str, Tenant] = {}
        self._by_token: dict[str, Tenant] = {}
        self._by_gpu: dict[str, dict[str, Tenant]] = {uuid: {} for uuid in self.gpus}
        self._parked = parked

    def by_token(self, token: str) -> Tenant | None:
        """Return the tenant to which this token belongs."""
        return self._by_token.get(token)

    def by_process(self, pids: Iterable[int]) -> Tenant | None:
        """The tenant whose program is one of these processes. `pids`: a process and its parents, nearest first."""
        roots = {t.root.pid: t for t in self.tenants.values() if t.root is not None}
        return next((roots[pid] for pid in pids if pid in roots), None)

    def by_connection(self, pid: int) -> Tenant | None:
        """The tenant of a process that is connected to the agent; None for other processes."""
        return next((t for t in self.tenants.values() if any(s.peer.pid == pid for s in t.sessions)), None)

    def gpu_named(self, text: str, field: str = "--gpu") -> Gpu:
        """The GPU with that UUID or index. Raises InputError if this agent has none."""
        gpu = self.gpus.get(text) or next((g for g in self.gpus.values() if str(g.index) == text), None)
        if gpu is None:
            raise InputError(f"this agent has no GPU {text!r}; it has {', '.join(self.gpus)}", field=field)
        return gpu

    def takes_turns(self, tenant: Tenant) -> bool:
        """Whether a tenant takes turns that the agent grants."""
        return self.mechanisms[tenant.spec.mechanism].capabilities.gated

    def gated(self, tenant: Tenant) -> bool:
        """Whether launches of a tenant wait for the agent: for a turn, or until the tenant's memory is on its GPU."""
        return self.takes_turns(tenant) or tenant.spec.oversubscribe != "none"

    def sliced(self, tenant: Tenant) -> bool:
        """Whether the agent sets a tenant's hardware time slices."""
        return self.mechanisms[tenant.spec.mechanism].capabilities.sliced

    def fail_mode(self, tenant: Tenant, said: str) -> FailMode:
        """Return what a tenant's processes do while no agent runs: what the setting `fail` says, except that under
        hardware time slices they always continue.
        """
        return FailMode.OPEN if self.sliced(tenant) else FailMode[said.upper()]

    def refuse_slices(self, uuid: str, why: str) -> list[Tenant]:
        """Record that a GPU's driver rejects control of time slices. Its tenants switch to turns, also those admitted
        later. Returns the tenants that were switched.
        """
        slices = self.mechanisms[Slices.name]
        assert isinstance(slices, Slices)
        slices.refused[uuid] = why
        changed = [tenant for tenant in self.on_gpu(uuid) if self.sliced(tenant)]
        for tenant in changed:
            tenant.spec = replace(tenant.spec, mechanism=Time.name)
            tenant.enforcement = self.mechanisms[Time.name].grant(tenant.spec, tenant.gpus)
        return changed

    def with_turns(self, spec: TenantSpec, tenant: Tenant | None) -> TenantSpec:
        """The spec of a present or new (None) tenant, with turns in place of hardware time slices if the driver of one
        of its GPUs, or of all GPUs that a new tenant could get, has rejected control of time slices.
        """
        slices = self.mechanisms.get(Slices.name)
        if spec.mechanism != Slices.name or not isinstance(slices, Slices):
            return spec
        if tenant is not None:
            rejected = any(gpu.uuid in slices.refused for gpu in tenant.gpus)
        else:
            rejected = all(uuid in slices.refused for uuid in self.gpus)
        return replace(spec, mechanism=Time.name) if rejected else spec

    def on_gpu(self, uuid: str, without: str = "") -> list[Tenant]:
        """Return the tenants of a GPU, without the tenant named `without`."""
        return [tenant for name, tenant in self._by_gpu[uuid].items() if name != without]

    def admit(self, spec: TenantSpec, uid: int, *, token: str | None = None, declared: bool = False) -> Tenant:
        """Admit a tenant to GPUs and let its mechanism grant the share. Raises InputError if no GPU has room for the
        tenant.
        """
        check_spec(spec)
        spec = self.resolved(spec)
        if spec.name in self.tenants:
            raise TakenNameError(f"a tenant named {spec.name} already exists", field="--name")
        if len(self.tenants) >= MAX_TENANTS:
            raise InputError(f"this agent already has {MAX_TENANTS} tenants")
        mechanism = self.mechanisms.get(spec.mechanism)
        if mechanism is None:
            raise InputError(
                f"unknown mechanism {spec.mechanism!r}; known: {', '.join(self.mechanisms)}", field="--mechanism"
            )
        gpus = self._place(spec)
        self._promise_host(spec, gpus)
        try:
            enforcement = mechanism.grant(spec, gpus)
        except BaseException:
            self._host.release(spec.name)
            raise
        tenant = Tenant(spec, gpus, token or secrets.token_hex(24), uid, enforcement, declared)
        for remark in enforcement.remarks:
            tenant.warn(remark)
        self.tenants[spec.name] = tenant
        self._by_token[tenant.token] = tenant
        for gpu in gpus:
            self._by_gpu[gpu.uuid][spec.name] = tenant
        return tenant

    def preparing(self, spec: TenantSpec) -> tuple[Mechanism, tuple[Gpu, ...]] | None:
        """The mechanism and GPUs that a tenant of this spec would get; None if `admit` would refuse the spec."""
        spec = self.resolved(spec)
        mechanism = self.mechanisms.get(spec.mechanism)
        if mechanism is None:
            return None
        try:
            check_spec(spec)
            return mechanism, self._place(spec)
        except InputError:
            return None

    def preparing_change(self, tenant: Tenant, spec: TenantSpec) -> Mechanism | None:
        """Return the mechanism that can prepare a tenant's changed share in advance; None if `resize` would refuse the
        change.
        """
        try:
            check_spec(spec)
            self._check_room(spec, tenant.gpus)
        except InputError:
            return None
        return self.mechanisms[spec.mechanism]

    def resolved(self, spec: TenantSpec) -> TenantSpec:
        """The spec with its mechanism `auto` replaced: by `slices` where the GPU offers hardware time slices and the
        tenant fits, otherwise by `time` (turns).
        """
        if spec.mechanism != mechanism_list.AUTO:
            return spec
        turns, sliced = replace(spec, mechanism=Time.name), replace(spec, mechanism=Slices.name)
        slices = self.mechanisms.get(Slices.name)
        if not self._slices_first or spec.oversubscribe != "none" or not isinstance(slices, Slices):
            return turns
        try:
            gpus = self._place(sliced)
        except InputError:
            return turns
        return sliced if all(slices.offers(gpu) for gpu in gpus) else turns

    def default_on(self, gpu: Gpu) -> str:
        """The mechanism that `auto` means on this GPU."""
        return self.resolved(TenantSpec("any", gpus=(gpu.uuid,))).mechanism

    def resize(self, tenant: Tenant, spec: TenantSpec) -> str:
        """Change a tenant's share and memory limit to those of `spec`. Returns in words when the change takes effect.
        Raises InputError if the GPUs or the host have no room for it.
        """
        check_spec(spec)
        self._check_room(spec, tenant.gpus)
        if spec.oversubscribe == "swap":
            self._host.resize(spec.name, spec.memory_bytes or tenant.gpus[0].memory_bytes)
        mechanism = self.mechanisms[spec.mechanism]
        tenant.enforcement = mechanism.grant(spec, tenant.gpus)
        tenant.spec = spec
        for remark in tenant.enforcement.remarks:
            tenant.warn(remark)
        return mechanism.resize(spec, tenant.gpus)

    def check_fits(self, spec: TenantSpec, gpus: Iterable[Gpu], without: Collection[str] = ()) -> None:
        """Raise InputError if one of the GPUs has no room for a tenant of this spec beside its other tenants, except
        those in `without`, which are being parked.
        """
        for gpu in gpus:
            self._fits(spec, gpu, without)

    def with_room(self, spec: TenantSpec) -> list[Gpu]:
        """The GPUs with room for a tenant of this spec; first the GPU whose tenants request least."""
        found = []
        for gpu in self.gpus.values():
            with contextlib.suppress(InputError):
                self._fits(spec, gpu)
                found.append(gpu)
        return sorted(found, key=lambda g: (sum(t.spec.request for t in self.on_gpu(g.uuid, spec.name)), g.index))

    def replace(self, tenant: Tenant, gpu: Gpu) -> None:
        """Move a tenant with one GPU to another GPU."""
        self._by_gpu[tenant.gpus[0].uuid].pop(tenant.name, None)
        tenant.gpus = (gpu,)
        self._by_gpu[gpu.uuid][tenant.name] = tenant

    def remove(self, tenant: Tenant) -> None:
        """Remove a tenant, its share and its host memory."""
        self.tenants.pop(tenant.name, None)
        self._by_token.pop(tenant.token, None)
        self._host.release(tenant.name)
        for gpu in tenant.gpus:
            self._by_gpu[gpu.uuid].pop(tenant.name, None)
        self.mechanisms[tenant.spec.mechanism].revoke(tenant.name, tenant.gpus)

    def _promise_host(self, spec: TenantSpec, gpus: tuple[Gpu, ...]) -> None:
        """Reserve host memory for all GPU memory of a swappable tenant, so that it can always be evicted."""
        if spec.oversubscribe == "swap":
            self._host.promise(spec.name, spec.memory_bytes or gpus[0].memory_bytes)

    def _place(self, spec: TenantSpec) -> tuple[Gpu, ...]:
        """Choose the GPUs of a new tenant. Raises InputError if the tenant does not fit on them."""
        gpus = self._choose(spec)
        self._check_room(spec, gpus)
        return gpus

    def _check_room(self, spec: TenantSpec, gpus: Iterable[Gpu]) -> None:
        """Raise InputError if a tenant does not fit. A parked tenant must fit only when it is resumed: its share and
        memory may have been given to others.
        """
        if spec.name not in self._parked:
            self.check_fits(spec, gpus)

    def _choose(self, spec: TenantSpec) -> tuple[Gpu, ...]:
        if spec.gpus:
            chosen = []
            for text in spec.gpus:
                gpu = self.gpu_named(text, "--gpus")
                if gpu in chosen:
                    raise InputError(f"the GPU {text!r} is named twice", field="--gpus")
                chosen.append(gpu)
            return tuple(chosen)
        if spec.gpu_count > len(self.gpus):
            raise InputError(f"{spec.gpu_count} GPUs asked for, this agent has {len(self.gpus)}", field="--gpus")

        def load(gpu: Gpu) -> tuple[bool, float, int, int]:
            others = self.on_gpu(gpu.uuid)
            promised = sum(t.spec.request for t in others)
            try:
                self._fits(spec, gpu)
                refused = False
            except InputError:
                refused = True
            return (refused, promised, len(others), gpu.index)

        return tuple(sorted(self.gpus.values(), key=load)[: spec.gpu_count])

    def _fits(self, spec: TenantSpec, gpu: Gpu, without: Collection[str] = ()) -> None:
        # a parked tenant is not counted, because its memory is reserved only when it is resumed
        others = [o for o in self.on_gpu(gpu.uuid, without=spec.name) if o.name not in self._parked]
        others = [other for other in others if other.name not in without]
        where = f"GPU {gpu.index} ({gpu.name})"
        mine = self.mechanisms[spec.mechanism].capabilities
        if mine.exclusive and spec.limit < 1.0:
            shared = " or ".join(name for name, kind in self.mechanisms.items() if not kind.capabilities.exclusive)
            raise InputError(f"{spec.mechanism} gives the whole GPU; a limit needs {shared}", field="--limit")
        for other in others:
            theirs = self.mechanisms[other.spec.mechanism].capabilities
            if mine.exclusive or theirs.exclusive:
                alone = spec.mechanism if mine.exclusive else other.spec.mechanism
                raise InputError(f"{where} already has {other.name}: {alone} cannot share it", field="--mechanism")
            if not mechanism_list.mix(spec.mechanism, other.spec.mechanism):
                raise InputError(
                    f"{where} is shared by {other.spec.mechanism} ({other.name}), which cannot be combined with "
                    f"{spec.mechanism}",
                    field="--mechanism",
                )
        promised = sum(t.spec.request for t in others)
        if promised + spec.request > 1.0 + 1e-9:
            raise InputError(
                f"{where} has {1 - promised:.0%} left to promise; {spec.name} asks for {spec.request:.0%}",
                field="--request",
            )
        self._memory_fits(spec, gpu, [t.spec for t in others], where)

    def _leaves(self, spec: TenantSpec) -> bool:
        """Whether a tenant's memory leaves the GPU for another tenant's turn. Without turns it leaves only by order."""
        return spec.oversubscribe != "none" and self.mechanisms[spec.mechanism].capabilities.gated

    def _memory_fits(self, spec: TenantSpec, gpu: Gpu, others: list[TenantSpec], where: str) -> None:
        """Check that a GPU's memory suffices for a new tenant. The memory limits of all tenants that stay on the GPU,
        and the largest limit of a tenant that can be swapped, must fit together.
        """
        mine = self.mechanisms[spec.mechanism].capabilities
        if spec.oversubscribe != "none" and not mine.gated and not (mine.sliced and spec.oversubscribe == "swap"):
            gated = " or ".join(name for name, kind in self.mechanisms.items() if kind.capabilities.gated)
            why = f"memory is swapped only between turns (--mechanism {gated})"
            if mine.sliced:
                why = f"without turns only swap is possible, and memory then moves when a tenant is parked; or {gated}"
            raise InputError(
                f"{spec.name} cannot have oversubscribe: {spec.oversubscribe} under {spec.mechanism}: {why}",
                field="--oversubscribe",
            )
        if spec.memory_bytes is not None:
            moved = [s.memory_bytes or 0 for s in others if self._leaves(s)]
            staying = sum(s.memory_bytes or 0 for s in others if not self._leaves(s))
            taken = staying if self._leaves(spec) else staying + max(moved, default=0)
            if taken + spec.memory_bytes > gpu.memory_bytes:
                left = max(0, gpu.memory_bytes - taken)
                raise InputError(
                    f"{where} has {left / 2**30:.2f} GiB of memory left to promise; {spec.name} asks for"
                    f" {spec.memory_bytes / 2**30:.2f} GiB",
                    field="--memory",
                )


# type of a field of TenantSpec -> function that converts the field's JSON value
_OF_JSON: dict[str, Callable[[Any], Any]] = {
    "str": str, "int": int, "float": float, "bool": bool, "int | None": int, "float | None": float,
    "tuple[str, ...]": lambda names: tuple(str(name) for name in names), "Strength": Strength,
}  # fmt: skip
_LOCAL = ("uid", "choices")  # fields of declared tenants, which only the configuration file sets


def spec_to_dict(spec: TenantSpec) -> dict[str, Any]:
    """A spec in JSON types, for the state file and the control socket."""
    values = {name: value for name, value in vars(spec).items() if name not in _LOCAL}
    return values | {"gpus": list(spec.gpus)}


def spec_from_dict(data: dict[str, Any]) -> TenantSpec:
    """Convert a JSON object of the control socket or the state file to a spec. Raises InputError for wrong types."""
    try:
        memory = data.get("memory_bytes")
        whole = isinstance(memory, int) or (isinstance(memory, float) and memory.is_integer())
        if memory is not None and (isinstance(memory, bool) or not whole):
            raise InputError(f"memory_bytes is {str(memory)[:40]!r}, which is not a whole number", field="memory_bytes")
        values = {
            field.name: _OF_JSON[str(field.type)](data[field.name])
            for field in fields(TenantSpec)
            if field.name not in _LOCAL and data.get(field.name) not in (None, "")
        }
        return TenantSpec(**{"name": str(data["name"])} | values)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"the description of the tenant cannot be read: {error}") from None
