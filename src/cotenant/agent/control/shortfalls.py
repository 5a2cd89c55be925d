"""Checks every second which tenants get less of a GPU than their request although they want more."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from cotenant.agent.slices.enforcer import SliceEnforcer
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.broker import Broker
from cotenant.policy.shares.shortfall import Wanted, part_of, short_since

LOOK_EVERY_S = 1.0
MINUTE_NS = 60 * 10**9
MINUTES = 60

_Key = tuple[str, str]  # (tenant, GPU)


class Hour:
    """A tenant's due and received share of a GPU in the last hour. `minutes`: the mean of each whole minute as (due,
    received) in fractions of the GPU, oldest first; None for a minute without measurements."""

    __slots__ = ("_got", "_looks", "_minute", "_promised", "minutes")

    def __init__(self) -> None:
        self.minutes: list[tuple[float, float] | None] = []
        self._minute = -1
        self._looks, self._promised, self._got = 0, 0.0, 0.0

    def add(self, now_ns: int, window: Wanted | None, request: float) -> None:
        """Count one measurement of a tenant whose requested share is `request`. `window`: how much of the last window
        the tenant had the GPU, and how much it wanted it; None if that was not measured.
        """
        minute = now_ns // MINUTE_NS
        if minute != self._minute:
            if self._looks:
                self.minutes.append((round(self._promised / self._looks, 2), round(self._got / self._looks, 2)))
            elif self.minutes:
                self.minutes.append(None)
            if self.minutes:
                self.minutes += [None] * min(MINUTES, minute - self._minute - 1)
            del self.minutes[:-MINUTES]
            self._minute, self._looks, self._promised, self._got = minute, 0, 0.0, 0.0
        if window is not None:
            self._looks += 1
            self._promised += part_of(window, request)
            self._got += window.got


class Shortfalls:
    """Records since when each tenant has got less than its request, measured by turns or by hardware time slices."""

    def __init__(
        self, registry: Registry, broker: Broker, slices: SliceEnforcer, save: Callable[[], None] = lambda: None
    ) -> None:
        """`save` writes the state file, from which a restarted agent learns since when each tenant has got less than
        its request.
        """
        self._registry, self._broker, self._slices, self._save = registry, broker, slices, save
        self._measured: set[_Key] = set()
        self._hours: dict[_Key, Hour] = {}
        # the readings within the last window: (time of the reading, time with a turn so far, time waited so far) in ns
        self._counts: dict[_Key, deque[tuple[int, int, int]]] = {}

    async def run(self) -> None:
        """Check every second as long as the agent runs."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(time.monotonic_ns())

    def look(self, now_ns: int) -> None:
        """Measure all tenants' shares; update the shortfalls and the record of the last hour."""
        measured: set[_Key] = set()
        changed = False
        counts: dict[_Key, deque[tuple[int, int, int]]] = {}
        hours: dict[_Key, Hour] = {}
        for tenant in self._registry.tenants.values():
            short: dict[str, int] = {}
            for gpu in tenant.gpus:
                key = (tenant.name, gpu.uuid)
                window = self._sliced(tenant, gpu.uuid) or self._turns(key, counts, now_ns)
                hours[key] = self._hours.get(key) or Hour()
                hours[key].add(now_ns, window, tenant.spec.request)
                before = tenant.short_since.get(gpu.uuid)
                # until this agent has measured the tenant, the time that the previous agent saved is kept
                since = before if key not in self._measured else None
                if window is not None or key in self._measured:
                    measured.add(key)
                if window is not None:
                    since = short_since(before, now_ns, window, tenant.spec.request)
                if since is not None:
                    short[gpu.uuid] = since
            changed = changed or short.keys() != tenant.short_since.keys()
            tenant.short_since = short
        self._measured, self._counts, self._hours = measured, counts, hours
        if changed:
            self._save()

    def short_s(self, tenant: Tenant, uuid: str, now_ns: int) -> float:
        """Return for how many seconds a tenant has got less of a GPU than its request; 0 if it gets its request now."""
        since = tenant.short_since.get(uuid)
        return 0.0 if since is None else max(0.0, (now_ns - since) / 1e9)

    def hour(self, tenant: Tenant, uuid: str) -> list[tuple[float, float] | None]:
        """Return the fractions of a GPU that a tenant was due and received in each minute of the last hour; empty in
        the tenant's first minute.
        """
        known = self._hours.get((tenant.name, uuid))
        return [] if known is None else known.minutes

    def _sliced(self, tenant: Tenant, uuid: str) -> Wanted | None:
        return self._slices.wanted(tenant, uuid) if self._registry.sliced(tenant) else None

    def _turns(self, key: _Key, counts: dict[_Key, deque[tuple[int, int, int]]], now_ns: int) -> Wanted | None:
        """Return the fraction of the last window in which a tenant had a turn, and the fraction in which it wanted one;
        None until a window has passed.
        """
        account = self._broker.turns.gpus[key[1]].accounts.get(key[0])
        if account is None:
            return None
        seen = counts[key] = self._counts.get(key) or deque()
        seen.append((now_ns, account.held_so_far_ns(now_ns), account.waited_so_far_ns(now_ns)))
        window_ns = account.window.window_ns
        while len(seen) > 2 and seen[1][0] <= now_ns - window_ns:
            seen.popleft()
        (then_ns, held_ns, before_ns), (_, held_now_ns, waited_now_ns) = seen[0], seen[-1]
        span_ns = now_ns - then_ns
        if span_ns < window_ns:
            return None
        got = (held_now_ns - held_ns) / span_ns
        return Wanted(got, got + (waited_now_ns - before_ns) / span_ns)
