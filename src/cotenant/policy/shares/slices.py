"""Hardware time slices of one GPU as a pure state machine: from measured usage to slices.

The GPU itself schedules channel groups: a group with work runs for its slice and is then preempted, even within a
kernel; a group without work is skipped. If all tenants always have work queued, their shares are the ratios of their
slices. But a program whose queue runs empty for a moment loses the rest of its slice, and a switch takes longer than a
short kernel. Then the tenants run one at a time by a *timetable*: each has a part of every period, in which the
channels of the others are disabled. The same applies to tenants of several GPUs (gangs), and to the tenants beside a
latency-sensitive one. A limit is kept in the same way: the tenant's channels are enabled for only a part of every
period. Periods begin at multiples of their length on the clock, so GPUs with the same tenants run the same one at any
time.

The caller passes times in nanoseconds; slices are in microseconds, the unit of the hardware.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cotenant.policy.shares.account import SECOND_NS, Share
from cotenant.policy.shares.slice_instructions import Go, SetSlice, SliceInstruction, Stop
from cotenant.policy.shares.slice_settings import BRIEF_US, TINY_US, SliceSettings
from cotenant.policy.shares.slice_tenant import IDLE_STEPS, Had, SliceTenant, Usage
from cotenant.policy.shares.timetable import compensate, divide, divide_by_request, turn_lengths

CLASSES = ("normal", "latency-sensitive", "best-effort")
TURNS_AGAIN_STEPS = 40


class GpuSlices:
    """The time slices of the tenants of one GPU. Event methods return instructions; `wake_ns` says when `advance` is
    due."""

    def __init__(self, gpu: str, settings: SliceSettings | None = None) -> None:
        self.gpu = gpu
        self.settings = settings or SliceSettings()
        self.tenants: dict[str, SliceTenant] = {}
        # whether tenants run one at a time, because the queue of one of them runs empty too often
        self.one_at_a_time = False
        # whether a tenant has just begun to work, so that it is not known yet whether its queue runs empty
        self._probing = False
        # whether a latency-sensitive tenant uses time that belongs to other tenants, so that it has no precedence now
        self.hogged = False
        self._turns_again = 0  # number of further correction steps in which tenants are not run one at a time
        self._next_step_ns = 0
        self._alike_ns = 0  # time since which the same tenants have had work and have behaved in the same way

    # -- events ----------------------------------------------------------------------------------------------------

    def join(self, name: str, share: Share, work_class: str, now_ns: int) -> list[SliceInstruction]:
        """Add a tenant to the GPU, or change its share or work class."""
        if work_class not in CLASSES:
            raise ValueError(f"{work_class!r} is not a class of work; known: {', '.join(CLASSES)}")
        known = self.tenants.get(name)
        if known is None:
            self.tenants[name] = SliceTenant(name, share, work_class)
        else:
            known.share, known.work_class, known.duty, known.debt_ns = share, work_class, 1.0, 0.0
        return self._changed(now_ns)

    def leave(self, name: str, now_ns: int) -> list[SliceInstruction]:
        """Remove a tenant from the GPU."""
        if self.tenants.pop(name, None) is None:
            return []
        return self._changed(now_ns)

    def groups(self, name: str, count: int, now_ns: int) -> list[SliceInstruction]:
        """Set the number of the tenant's groups on this GPU. All get their slice again: a new one has the driver's."""
        tenant = self.tenants[name]
        came = tenant.groups == 0 and count > 0
        tenant.groups, tenant.slice_us = count, 0
        # the tenant is stopped, so its new channel group is stopped, too
        off: list[SliceInstruction] = [] if tenant.on or not count else [Stop(self.gpu, name)]
        return off + (self._changed(now_ns) if came or not count else self._apply(now_ns))

    def brief(self, names: Collection[str], now_ns: int) -> list[SliceInstruction]:
        """Set which tenants hold back launches beside latency-sensitive work, so that little work is in flight."""
        for tenant in self.tenants.values():
            tenant.brief = tenant.name in names
        return self._apply(now_ns)

    def used(self, usage: Mapping[str, Usage], now_ns: int) -> list[SliceInstruction]:
        """Record the tenants' usage since they joined. The tenants' time slices are corrected every `step_ns`."""
        known = {name: total for name, total in usage.items() if name in self.tenants and self.tenants[name].groups}
        # a yield is counted when another tenant runs, perhaps long after the work has ended
        woken = [t for t in (self.tenants[n] for n in known) if not t.competes and known[t.name][:2] != t.total[:2]]
        for tenant in woken:
            tenant.wake()
        for name, total in known.items():
            self.tenants[name].begin(total, now_ns)
        if woken:
            self._limit_lone()
            self._probe(now_ns)
            return self._apply(now_ns)
        step_ns = self.settings.step_ns
        turns = self._turns()  # they are no longer than limits allow
        exceeding = any(self.tenants[n].exceeds(total, step_ns) for n, total in known.items() if n not in turns)
        if now_ns < self._next_step_ns and not exceeding:
            return self._switch(now_ns)
        # correction steps begin together with periods of the timetable, because a limit is judged over whole periods
        self._next_step_ns = ((now_ns + step_ns // 2) // step_ns + 1) * step_ns
        self._probing = False
        had = {name: self.tenants[name].had(now_ns, total, self.settings.window_ns) for name, total in known.items()}
        background = self.background()[0]
        first_ns = sum(step.usage.busy_ns for name, step in had.items() if self.tenants[name] not in background)
        for name, step in had.items():
            tenant = self.tenants[name]
            # runs count, too: tenants that alternate with the shortest slices may run too briefly to be measured
            works = bool(step.usage.busy_ns or step.usage.runs)
            if not works and step.on_ns <= first_ns:
                continue  # it could not run while it was on, so it may have work
            # a tenant that was idle is not compensated for the time that others used
            if works and tenant.idle_steps:
                self._begin(now_ns)
            tenant.idle_steps = 0 if works else tenant.idle_steps + 1
            if tenant.idle_steps == IDLE_STEPS:
                self._limit_lone()
        self._correct({name: step for name, step in had.items() if step.span_ns > 0}, now_ns)
        return self._apply(now_ns)

    def advance(self, now_ns: int) -> list[SliceInstruction]:
        """Enable and disable channels as the timetable says for the present time."""
        return self._switch(now_ns)

    def wake_ns(self, now_ns: int) -> int | None:
        """Return when `advance` is due: when the next part of the timetable begins or ends. None: no timetable."""
        plan, period_ns = self._plan(now_ns)
        edges = sorted({edge % period_ns for part in plan.values() for edge in part} | {0})
        if not plan:
            return None
        start_ns, phase = now_ns - now_ns % period_ns, now_ns % period_ns
        return next((start_ns + edge for edge in edges if edge > phase), start_ns + period_ns)

    def run_us(self, name: str) -> int:
        """Return the tenant's time slice in us if nothing else ends its runs while it always has work; otherwise 0."""
        background, guarded = self.background()
        turns = guarded or self._takes_turns(background, guarded) or len(self.present()) < 2
        return 0 if turns else self.tenants[name].slice_us

    # -- shares ----------------------------------------------------------------------------------------------------

    def present(self) -> list[SliceTenant]:
        """Return the tenants that have channel groups on this GPU."""
        return [tenant for tenant in self.tenants.values() if tenant.groups > 0]

    def shares(self, tenants: list[SliceTenant] | None = None) -> dict[str, float]:
        """Return the fraction of the GPU that each of `tenants` (None: all that compete) gets while all have work."""
        here = tenants if tenants is not None else [t for t in self.present() if t.competes]
        return divide_by_request({t.name: t.share.request for t in here}, {t.name: t.share.limit for t in here})

    def shortest_period_ns(self, shares: Mapping[str, float]) -> float:
        """Return the sum of all tenants' slices in ns: so long that switches cost little, but short enough that shares
        hold within a window and no slice exceeds `longest_ns`."""
        settings = self.settings
        if len(shares) < 2:
            return float(settings.longest_ns)
        period_ns = len(shares) * settings.switch_ns / settings.switching
        edge = max(share * (1.0 - share) for share in shares.values())
        if edge > 0:
            period_ns = min(period_ns, settings.edge * settings.window_ns / edge)
        return min(period_ns, settings.longest_ns / max(shares.values()))

    def _slices(self) -> dict[str, int]:
        """Return the time slice of each tenant that has channel groups, in microseconds."""
        here, settings = self.present(), self.settings
        background, guarded = self.background()
        longest_us = settings.longest_ns // 1000
        if guarded:
            yielding = {t.name: BRIEF_US if t.brief else TINY_US for t in background}
            return {t.name: yielding.get(t.name, longest_us) for t in here}
        if len(here) < 2 or self._takes_turns(background, guarded):
            return dict.fromkeys((t.name for t in here), longest_us)
        shares = self.shares(here)
        competing = {t.name: shares[t.name] for t in here if t.competes}
        period_ns = self.shortest_period_ns(competing if len(competing) > 1 else shares)
        if self._probing:
            period_ns = min(period_ns, settings.first_period_ns)
        out: dict[str, int] = {}
        for tenant in here:
            slice_ns = shares[tenant.name] * period_ns * tenant.correction / tenant.groups
            out[tenant.name] = round(max(settings.shortest_ns, min(slice_ns, settings.longest_ns)) / 1000)
        return out

    def background(self) -> tuple[list[SliceTenant], bool]:
        """Return the tenants that yield to latency-sensitive ones, and whether these have precedence now."""
        here = self.present()
        rest = [t for t in here if t.work_class != "latency-sensitive"]
        # where none yields, requests divide the time; without requests all have the longest slice
        alike = self.hogged or (not rest and any(t.share.request for t in here))
        return (here, False) if alike else (rest, len(rest) < len(here))

    # -- the schedule over a period --------------------------------------------------------------------------------

    def _takes_turns(self, background: list[SliceTenant], guarded: bool) -> bool:
        """Whether the tenants run one at a time, by a timetable."""
        competing = [t for t in background if t.competes]
        return len(competing) > 1 and (guarded or self.one_at_a_time or any(t.share.gang for t in competing))

    def _plan(self, now_ns: int) -> tuple[dict[str, tuple[int, int]], int]:
        """Return the timetable, and the length of its period. For each tenant that may not always run, the timetable
        has begin and end of the tenant's part of the period."""
        settings, period_ns = self.settings, self.settings.period_ns
        background, guarded = self.background()
        plan, begin = dict[str, tuple[int, int]](), 0
        # tenants that do not compete for the GPU are not in the timetable: they run whenever it is free
        parts = self._turns()
        if not parts:
            # limited tenants begin one after the other, so that none has to compete with all others for its time
            for tenant in (t for t in self.present() if t.duty < 1.0):
                plan[tenant.name] = (begin, begin + round(tenant.duty * period_ns))
                begin = plan[tenant.name][1] % period_ns
            return plan, period_ns
        wanted_ns = len(parts) * period_ns if guarded else max(period_ns, settings.turn_ns * len(parts))
        # the period is shortened so that a window has a whole number of periods
        period_ns = settings.window_ns // max(1, settings.window_ns // wanted_ns)
        for tenant in (t for t in self.present() if t not in background and t.duty < 1.0):
            plan[tenant.name] = (0, round(tenant.duty * period_ns))
        for name, turn_ns in turn_lengths(parts, period_ns, settings.turn_ns, now_ns // period_ns).items():
            plan[name] = (begin, begin + round(turn_ns * self.tenants[name].duty))
            begin += round(turn_ns)
        return plan, period_ns

    def _turns(self) -> dict[str, float]:
        """Return the fraction of a period in which each tenant that competes runs alone; empty: tenants take no turns.
        Tenants whose queues are empty at times are compensated, but not if a gang competes: a gang needs the same
        fraction on all its GPUs. A tenant has no more than the time in which it uses its limit, so the others have the
        rest."""
        background, guarded = self.background()
        if not self._takes_turns(background, guarded):
            return {}
        competing = sorted((t for t in self.present() if t.competes), key=lambda t: t.name)
        fixed = any(t.share.gang for t in competing) or len(background) < len(self.present())
        density = {t.name: 1.0 if fixed else t.density for t in competing}
        limits = {t.name: min(1.0, t.share.limit / density[t.name]) for t in competing}
        whole = divide_by_request(compensate({t.name: t.share.request for t in competing}, density), limits)
        return divide({t.name: whole[t.name] for t in competing if t in background}, limits)

    def _switch(self, now_ns: int) -> list[SliceInstruction]:
        """Enable and disable tenants as the timetable says. Some are enabled before others are disabled, so that the
        GPU always has work."""
        plan, period_ns = self._plan(now_ns)
        phase = now_ns % period_ns
        stops: list[SliceInstruction] = []
        goes: list[SliceInstruction] = []
        for tenant in self.present():
            begin, end = plan.get(tenant.name, (0, period_ns))
            on = (phase - begin) % period_ns < end - begin
            if on != tenant.on:
                tenant.put(on, now_ns)
                (goes if on else stops).append((Go if on else Stop)(self.gpu, tenant.name))
        return goes + stops

    def _apply(self, now_ns: int) -> list[SliceInstruction]:
        out: list[SliceInstruction] = []
        for name, slice_us in self._slices().items():
            tenant = self.tenants[name]
            if tenant.slice_us == 0 or abs(slice_us - tenant.slice_us) > 0.02 * tenant.slice_us:
                tenant.slice_us = slice_us
                out.append(SetSlice(self.gpu, name, slice_us))
        return out + self._switch(now_ns)

    def _changed(self, now_ns: int) -> list[SliceInstruction]:
        """Discard measurements of the tenants' usage, because a tenant joined, left or has another share."""
        self.hogged = False
        self._turns_again = 0
        self._probe(now_ns)
        guarded = self.background()[1]
        for tenant in self.tenants.values():
            tenant.forget(now_ns)
            if guarded:  # otherwise limits are kept by stops until tenants have turns
                tenant.duty = 1.0
        self._limit_lone()
        return self._apply(now_ns)

    def _limit_lone(self) -> None:
        """Limit the only tenant that competes, or is the next to begin, from its first moment: no other takes time."""
        competing = [t for t in self.present() if t.competes]
        for tenant in (competing or self.present()) if len(competing) < 2 else ():
            tenant.duty = min(tenant.duty, tenant.share.limit)

    def _begin_limits(self, kept: Collection[SliceTenant]) -> None:
        """Set how long tenants may run from now on. `kept`: tenants that turns or slices keep near their limits."""
        for tenant in self.present():
            tenant.duty = 1.0 if tenant in kept else tenant.share.limit

    # -- corrections -----------------------------------------------------------------------------------------------

    def _probe(self, now_ns: int) -> None:
        """Check early whether tenants' queues run empty, since a tenant has begun to work, or tenants or their shares
        have changed."""
        self._begin(now_ns)
        self._probing = True
        self._next_step_ns = now_ns + self.settings.first_step_ns
        competing = [t for t in self.present() if t.competes]
        self.one_at_a_time = len(competing) > 1 and any(t.needs_turns for t in competing)

    def _begin(self, now_ns: int) -> None:
        """Restart measurements, because the tenants now run in another way (by time slices or by a timetable)."""
        self._alike_ns = now_ns
        for tenant in self.tenants.values():
            tenant.correction = tenant.density = 1.0

    def _correct(self, steps: Mapping[str, Had], now_ns: int) -> None:
        turns = self._turns()
        here = [self.tenants[name] for name in steps if self.tenants[name].competes]
        for name, step in steps.items():
            self.tenants[name].correct_limit(step, turns.get(name, 1.0), len(here) > 1, self.settings)
        if len(here) < 2:
            return
        if self._hogs(here) != self.hogged:
            self.hogged = not self.hogged
            self._begin(now_ns)
            self._begin_limits(self.background()[0])
            return
        if self.background()[1]:
            return
        shares = self.shares()
        if self.one_at_a_time:
            for tenant in here:
                tenant.measure_density(self._alike_ns, self.settings.window_ns // 2)
            self._leave_turns(here, shares)
            return
        self._turns_again = max(0, self._turns_again - 1)
        # turns keep limits at no cost; beside tenants that use little of their turns, they are kept by stops
        unfit = self._lacking(steps, shares) + [t for t in here if t.duty < 1.0] if self._turns_again == 0 else []
        if unfit:
            for tenant in unfit:
                tenant.needs_turns = True
            self.one_at_a_time = True
            self._begin(now_ns)
            self._begin_limits(here)
            return
        self._correct_busy([t for t in here if not t.has_gaps() and t.window().usage.busy_ns > 0], shares)

    def _hogs(self, here: list[SliceTenant]) -> bool:
        """Whether a latency-sensitive tenant uses more than its share while a normal tenant gets less than its own. A
        latency-sensitive tenant then loses its precedence and gets its share. It regains its precedence when it has
        used less than its share of a window. The switches to it and back count as used by it."""
        first = [t for t in here if t.work_class == "latency-sensitive"]
        others = [t for t in here if t.work_class == "normal"]
        if not first or not others:
            return False
        if any(t.window().span_ns < 2 * self.settings.step_ns for t in here):
            return self.hogged
        shares, spared, switches_ns = self.shares(), 0.02 * self.hogged, 2 * self.settings.switch_ns
        used = {t.name: t.window().part + switches_ns * t.window().usage.runs / t.window().span_ns for t in first}
        short = self.hogged or any(t.window().part < shares[t.name] - 0.02 for t in others)
        return short and any(used[t.name] > shares[t.name] - spared for t in first)

    def _correct_busy(self, busy: list[SliceTenant], shares: Mapping[str, float]) -> None:
        """Correct the slices of tenants that always have work: one that got more than its share gets a shorter one."""
        lately = {t.name: t.since(self._alike_ns) for t in busy}
        had = {name: one.part for name, one in lately.items()}
        together, promised = sum(had.values()), sum(shares[t.name] for t in busy)
        known = all(one.span_ns >= self.settings.window_ns / 2 for one in lately.values())
        if len(busy) < 2 or not known or together <= 0 or promised <= 0 or any(t.duty < 1.0 for t in busy):
            return
        for tenant in busy:
            should, has = shares[tenant.name] / promised, had[tenant.name] / together
            if abs(should - has) > 0.005 and has > 0:
                factor = max(0.9, min((should / has) ** 0.1, 1.1))
                tenant.correction = max(0.5, min(tenant.correction * factor, 2.0))

    def _lacking(self, steps: Mapping[str, Had], shares: Mapping[str, float]) -> list[SliceTenant]:
        """Return tenants that use less than their share because their queues run empty.

        The tenant alternates between a run and a pause. If the pause is much longer than a round of the other tenants,
        the program itself causes it, and running tenants one at a time would not shorten it.
        """
        together = sum(step.part for step in steps.values())
        switching = sum(step.usage.runs * self.settings.switch_ns / step.span_ns for step in steps.values())
        # the time that the switches took is added to the tenants' usage, since the tenants would have it if there were
        # no switches
        together = min(1.0, together + (switching if switching > 0.1 else 0.0))
        lacking = list[SliceTenant]()
        for name, step in steps.items():
            usage = step.usage
            often = usage.yields * SECOND_NS > self.settings.yields_per_s * step.span_ns and usage.yields >= 3
            if name not in shares or not often or not usage.runs:
                continue
            others = (t for t in self.present() if t.name != name)
            round_ns = sum(t.slice_us * 1000.0 * t.groups + self.settings.switch_ns for t in others)
            rest_ns = (step.span_ns - usage.busy_ns) / usage.runs
            if step.part < shares[name] * together - 0.003 and rest_ns <= 1.5 * (round_ns + self.settings.switch_ns):
                lacking.append(self.tenants[name])
        return lacking

    def _leave_turns(self, here: list[SliceTenant], shares: Mapping[str, float]) -> None:
        """Return from the timetable to time slices for a while if a working tenant uses less than a quarter of its
        turns: with slices, the hardware skips it while it has no work. A tenant that has stopped is soon removed."""
        unused = list[SliceTenant]()
        for tenant in (t for t in here if not t.idle_steps):
            had = tenant.since(self._alike_ns)
            little = had.density < 0.25 and had.part < 0.5 * shares[tenant.name]
            if little and had.span_ns >= self.settings.window_ns / 2:
                tenant.needs_turns = False
                unused.append(tenant)
        if unused:
            self.one_at_a_time, self._turns_again = False, TURNS_AGAIN_STEPS
            rest = [t for t in here if t not in unused]
            self._begin_limits(rest if len(rest) > 1 else ())
