"""Language models on parts of GPUs: plans against a checker that shares no code with the planner, and by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.mig import Placement, geometry
from cotenant.core.serving import ServingPlan
from cotenant.policy.serving.packing.replan import Sizer
from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER, find_planner
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.llm.partitions import Engine, Traffic, as_services, divided
from cotenant.profiles.llm.profile import LlmProfile, StepTimes, roofline
from cotenant.sim.llm.divided import attainment, plan_divided, traffic_of
from cotenant.workloads.llm.drawn import draw_trace
from cotenant.workloads.llm.trace import TokenTrace

GIB = 1 << 30


def wrong(plan: ServingPlan, engines: list[Engine], gpu: str) -> list[str]:
    """What does not hold in a plan, computed from the profiles alone: whether parts exist together, memory, shares, the
    length of every cycle under TPOT and TTFT, and tokens per second."""
    card, by_name = find_gpu(gpu), {e.name: e for e in engines}
    geo = geometry(gpu, double_memory=True) if card.mig else None
    out, tokens = [], defaultdict(float)
    held: dict[tuple[int, str, int], list[tuple[float, int]]] = defaultdict(list)
    for let in plan.gpulets:
        kind, _, cut = let.partition.partition("/")
        share = float(cut.rstrip("%")) / 100 if cut else 1.0
        if kind.endswith("%"):
            share, kind = float(kind.rstrip("%")) / 100, ""
        sms, bandwidth = share, share
        if kind:
            assert geo is not None
            row = geo.profiles[kind]
            sms = share * (row.compute / geo.compute_slices if row.sms is None else row.sms / card.sms)
            bandwidth = share * row.memory_slots / geo.memory_slots
        steps = 0.0
        for seat in let.seats:
            e = by_name[seat.service]
            x, t = e.profile.times, e.traffic
            entering = seat.batch / t.decodes
            base = x.decode_base + min(1.0, entering) * max(0.0, x.prefill_base - x.decode_base)
            memory_s = base + seat.batch * t.context * x.per_context
            sm_s = entering * (t.prompt * x.per_token + t.pairs * x.per_pair)
            steps += 1e3 * (memory_s / bandwidth + sm_s / sms + seat.batch * x.per_sequence)
        for seat in let.seats:
            e = by_name[seat.service]
            x, p = e.profile.times, e.traffic.longest
            if steps > let.duty_ms * (1 + 1e-6) or let.duty_ms > e.tpot_ms * (1 + 1e-6):
                out.append(f"{let}: {steps} ms in {let.duty_ms} of {e.tpot_ms}")
            chunks = math.ceil(p / e.profile.step_tokens)
            alone = chunks * x.prefill_base / bandwidth + (p * x.per_token + p * (p + 1) / 2 * x.per_pair) / sms
            outside = e.profile.request_s
            if (1 + chunks) * let.duty_ms + 1e3 * (outside + alone) > e.ttft_ms * (1 + 1e-6):
                out.append(f"{let}: first token of {e.name} after {e.ttft_ms} ms")
            if seat.batch * (e.traffic.prompt + e.traffic.decodes) > e.profile.kv_tokens:
                out.append(f"{let}: cache of {e.name}")
            tokens[e.name] += seat.batch * 1e3 / let.duty_ms
        held[let.gpu, kind, let.instance].append((share, sum(by_name[s.service].memory_bytes for s in let.seats)))
    for g in {x[0] for x in held}:
        here = {(kind, start): parts for (gpu_, kind, start), parts in held.items() if gpu_ == g}
        kinds = [(kind, start) for kind, start in here if kind]
        if len(kinds) not in (0, len(here)) or (not kinds and len(here) > 1):
            out.append(f"GPU {g}: instances beside parts of the GPU")
        if geo is not None and kinds and not geo.fits(Placement(start, kind) for kind, start in kinds):
            out.append(f"GPU {g}: {kinds}")
        for (kind, _), parts in here.items():
            room = card.memory_bytes * (geo.profiles[kind].memory_slots / geo.memory_slots if kind and geo else 1)
            if sum(s for s, _ in parts) > 1 + 1e-9 or sum(m for _, m in parts) > room:
                out.append(f"GPU {g} {kind}: {parts}")
    left = {x.service: x.missing_rps for x in plan.left_out}
    for e in engines:
        need = e.traffic.rate_rps * e.traffic.decodes - left.get(e.name, 0.0)
        if tokens[e.name] < need * (1 - 1e-6):
            out.append(f"{e.name}: {tokens[e.name]} of {need} tokens/s")
    return out


def engine(name: str, size: float, rate: float, *, gib: float = 6, prompt: int = 400, decodes: int = 100,
           ttft: float = 1000, tpot: float = 60) -> Engine:  # fmt: skip
    pairs = prompt * (prompt + 1) / 2
    traffic = Traffic(rate, prompt, pairs, decodes, prompt + (decodes + 1) / 2, prompt)
    return Engine(name, roofline(name, size * 1e9, gib * GIB), int(gib * GIB), ttft, tpot, traffic)


def fewest(engines: list[Engine], gpu: str, most: int = 6) -> ServingPlan:
    profile, services = as_services(divided(gpu), engines)
    sizer = Sizer(find_planner(DEFAULT_PLANNER), Gpus.uniform(profile, most), services, 10.0)
    return sizer.fewest([s.rate_rps for s in services])


@st.composite
def drawn(draw: st.DrawFn) -> list[Engine]:
    found = []
    for i in range(draw(st.integers(1, 5))):
        size = draw(st.sampled_from((0.5, 1.0, 3.0)))
        found.append(
            engine(
                f"m{i}", size, draw(st.floats(0.1, 12.0)), gib=2 * size + draw(st.sampled_from((1.0, 4.0))),
                prompt=draw(st.sampled_from((50, 400, 3000))), decodes=draw(st.sampled_from((1, 30, 300))),
                ttft=draw(st.sampled_from((400.0, 2000.0))), tpot=draw(st.sampled_from((40.0, 120.0))),
            )
        )  # fmt: skip
    return found


@settings(max_examples=25, deadline=None)
@given(engines=drawn(), gpu=st.sampled_from(("H100-80GB", "A30", "L40S")))
def test_every_plan_holds_by_an_independent_checker(engines: list[Engine], gpu: str) -> None:
    try:
        plan = fewest(engines, gpu)
    except InputError:  # one of the engines meets its targets on no partition, even alone
        return
    assert wrong(plan, engines, gpu) == []


@settings(max_examples=10, deadline=None)
@given(engines=drawn())
def test_half_the_requests_need_no_more_gpus(engines: list[Engine]) -> None:
    halved = [replace(e, traffic=replace(e.traffic, rate_rps=e.traffic.rate_rps / 2)) for e in engines]
    try:
        whole, half = fewest(engines, "H100-80GB"), fewest(halved, "H100-80GB")
    except InputError:
        return
    if whole.feasible:
        assert half.feasible
        assert half.gpus_used <= whole.gpus_used


@pytest.mark.parametrize("rate", [1.0, 8.0, 20.0, 45.0])
def test_one_model_has_the_fewest_gpus_that_any_layout_gives(rate: float) -> None:
    """All layouts of an A30, with each instance whole or in halves, by enumeration."""
    one = engine("m", 1.0, rate, gib=5)
    base = divided("A30")
    best = {}
    for part in base.partitions:
        times, cap = one.times_on(part, base.slots), 0.0
        for b in range(1, one.most + 1):
            ms = one.step_ms(times, b)
            if ms <= one.longest_cycle_ms(times):
                cap = max(cap, b * 1e3 / ms)
        memory = base.planned_memory_bytes() * (part.slots / base.slots if part.slots else 1)
        best[part.label] = cap if one.memory_bytes <= memory * part.share else 0.0
    # two engines in one instance need the memory of both
    per = {kind: max(best.get(kind, 0), 2 * best.get(f"{kind}/50%", 0)) for kind in ("2g", "1g")}
    per["4g"] = max(best["100%"], 2 * best["50%"], best["40%"] + best["60%"])
    slots = {"4g": 4, "2g": 2, "1g": 1}
    layouts = [c for n in range(1, 5) for c in combinations_with_replacement(slots, n) if sum(slots[k] for k in c) <= 4]
    need = rate * one.traffic.decodes
    assert fewest([one], "A30", 12).gpus_used == math.ceil(need / max(sum(per[k] for k in c) for c in layouts) - 1e-6)


def test_measured_times_replace_the_estimate() -> None:
    one = engine("m", 1.0, 1.0)
    slow = StepTimes(*(100 * x for x in vars(one.profile.times).values()))
    base = divided("H100-80GB")
    measured = replace(one, measured={p.label: slow for p in base.partitions if p.slots})
    used = {let.partition for let in fewest([measured], "H100-80GB").gpulets}
    assert used <= {"40%", "50%", "60%", "100%"}


def test_a_model_that_no_part_serves_in_time_is_named() -> None:
    with pytest.raises(InputError, match=r"m cannot keep its SLOs \(1000 ms to the first token, 1 ms per token\)"):
        as_services(divided("H100-80GB"), [engine("m", 3.0, 1.0, gib=8, tpot=1)])


def test_simulated_steps_are_as_long_as_planned() -> None:
    """Equal requests at a constant rate, nine tenths of what the part gives: TPOT stays below the planned cycle."""
    gaps, prompt, output, n = 0.02, 100, 51, 3000
    profile = LlmProfile("m", StepTimes(0.004, 2e-5, 0.0, 0.004, 1e-4, 1e-8), 100_000, 8192, 64)
    times = np.arange(n) * gaps
    zero = np.zeros(n, np.int64)
    trace = TokenTrace("t", ("m",), times, zero.astype(np.int32), zero + prompt, zero + output, zero)
    one = Engine("m", profile, 10 * GIB, 1000.0, 30.0, traffic_of(trace, 0, n * gaps))
    found = plan_divided([one], divided("H100-80GB"), 2, 1.1, 0.99, trace)
    assert found.plan.feasible
    assert found.attainment["m"] >= 0.99
    assert wrong(found.plan, [one], "H100-80GB") == []


def test_verification_gives_a_bursty_model_more() -> None:
    names = ("a", "b")
    trace = draw_trace(names, [3.0, 3.0], "512~1", "64~0.7", 200.0, "bursts", 3)
    engines = [
        Engine(name, roofline(name, 1e9, 8 * GIB), 8 * GIB, 150.0, 12.0, traffic_of(trace, i, trace.span_s))
        for i, name in enumerate(names)
    ]
    found = plan_divided(engines, divided("H100-80GB"), 4, 1.0, 0.99, trace)
    assert found.plan.feasible
    assert found.holds(0.99, names)
    assert attainment(found.plan, found.profile, engines, trace, 99)["a"] > 0.97
