"""The token engine on kernels: worked cases of what kernels do to each other, and the ranking of schemes."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.abi.floor import WorkClass
from cotenant.core.errors import InputError
from cotenant.policy.colocation import SCHEMES, scheme_named, settings_for
from cotenant.profiles.kernels.contention import grants, rates, read_table
from cotenant.profiles.kernels.profile import (
    CLASS_NAMES,
    KernelWork,
    read_kernels,
    read_orion,
)
from cotenant.sim.colocation import ColocationEngine, ColocationResult, Job, alone

US, MS = 1_000, 1_000_000
TABLE = read_table()
LAUNCH, NOTICE = TABLE.launch_ns, TABLE.notice_ns


def run(job: Job, name: str, **changes: object) -> ColocationResult:
    return ColocationEngine(job, scheme_named(name), settings_for(name, **changes)).run()


def kernel(duration_ns: int, sms: int = 132, work_class: int = WorkClass.COMPUTE) -> KernelWork:
    return KernelWork("k", duration_ns, sms, work_class)


def job(ls: Sequence[KernelWork], be: Sequence[KernelWork], arrivals: Sequence[int], end_ns: int) -> Job:
    return Job(ls, be, arrivals, end_ns, 132)


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[round(part * (len(ordered) - 1))]


@pytest.mark.parametrize("length_us", [26, 190, 1600])
def test_a_duty_leaves_the_rest_of_the_time_idle(length_us: int) -> None:
    work = job([], [kernel(length_us * US)], [], 100 * MS)
    assert run(work, "tidal", duty_cycle=0.8).be_work_ns / work.end_ns == pytest.approx(0.8, abs=0.02)


# -- what kernels do to each other -------------------------------------------------------------------------------------


def test_an_older_kernel_keeps_its_sms() -> None:
    assert grants([1.0, 0.5]) == [1.0, 0.0]
    assert grants([0.25, 1.0]) == [0.25, 0.75]


def test_a_small_memory_bound_kernel_beside_a_large_one_is_slowed_as_on_the_card() -> None:
    # A kernel on 32 of 132 SMs runs beside copies on the other 100. On the card this took 3.2 times as long as alone,
    # and the copies lost little.
    ours, copies = rates(TABLE, [32 / 132, 100 / 132], [WorkClass.UNKNOWN, WorkClass.MEMORY])
    assert 1 / ours == pytest.approx(3.2, abs=0.3)
    assert copies == pytest.approx(1.0, abs=0.04)


def test_beside_products_it_is_hardly_slowed() -> None:
    ours, _ = rates(TABLE, [32 / 132, 100 / 132], [WorkClass.UNKNOWN, WorkClass.COMPUTE])
    assert 1 / ours == pytest.approx(1.0, abs=0.1)


def test_two_equal_memory_bound_kernels_share_the_bandwidth() -> None:
    first, second = rates(TABLE, [0.5, 0.5], [WorkClass.MEMORY, WorkClass.MEMORY])
    assert first == second == pytest.approx(0.5 / TABLE.demand[WorkClass.MEMORY])


# -- worked runs -------------------------------------------------------------------------------------------------------


def test_alone_a_request_takes_its_kernels_and_the_host() -> None:
    found = run(job([kernel(100 * US), kernel(50 * US)], [], [MS], 5 * MS), "tidal")
    assert found.latency_ns == [pytest.approx(150 * US + LAUNCH + NOTICE)]
    assert found.active_ns == pytest.approx(found.latency_ns[0])


def test_two_arrivals_at_once_are_served_one_after_the_other() -> None:
    found = run(job([kernel(100 * US)], [], [MS, MS], 5 * MS), "tidal")
    one = 100 * US + LAUNCH + NOTICE
    assert found.latency_ns == [pytest.approx(one), pytest.approx(2 * one)]


def test_without_a_gate_every_ls_kernel_waits_for_a_be_kernel() -> None:
    # BE kernels of 1 ms run one after the other from LAUNCH on, and nothing stops them. The first LS kernel arrives at
    # 0.5 ms and runs from 1 ms + LAUNCH. The BE kernel after it was launched before the second LS kernel, and so on.
    ls = [kernel(100 * US)] * 3
    found = run(job(ls, [kernel(MS)], [500 * US - LAUNCH], 20 * MS), "mps-plus")
    assert found.latency_ns == [pytest.approx(3 * 1100 * US - 500 * US + 2 * LAUNCH + NOTICE)]


def test_tidal_waits_for_what_is_in_flight_only() -> None:
    ls = [kernel(100 * US)] * 3
    found = run(job(ls, [kernel(MS)], [500 * US - LAUNCH], 20 * MS), "tidal")
    assert found.latency_ns == [pytest.approx(500 * US + 300 * US + 2 * LAUNCH + TABLE.event_ns + NOTICE)]


def test_be_goes_on_as_soon_as_ls_is_done() -> None:
    found = run(job([kernel(100 * US)], [kernel(50 * US)], [MS], 2 * MS), "tidal")
    left = 2 * MS - found.active_ns
    assert found.be_work_ns >= 0.97 * left


def test_orion_lets_the_other_class_run_beside_ls_and_not_the_same() -> None:
    ls = [kernel(MS, 66, WorkClass.COMPUTE)]
    arrivals = [100 * US]
    same = run(job(ls, [kernel(20 * US, 33, WorkClass.COMPUTE)], arrivals, 2 * MS), "orion")
    other = run(job(ls, [kernel(20 * US, 33, WorkClass.MEMORY)], arrivals, 2 * MS), "orion")
    assert same.be_work_ns <= 2 * MS - same.active_ns + 180 * US  # one batch may be in flight when LS work arrives
    assert other.be_work_ns > 1.5 * MS


def test_temporal_has_no_be_kernel_beside_ls() -> None:
    found = run(job([kernel(MS, 10)], [kernel(20 * US, 10)], [100 * US], 2 * MS), "temporal")
    assert found.latency_ns == [pytest.approx(MS + TABLE.switch_ns, rel=0.03)]
    assert found.be_work_ns < 1.0 * MS


def test_static_parts_slow_ls_to_its_part_of_the_sms() -> None:
    found = run(job([kernel(MS)], [], [0], 10 * MS), "static")
    assert found.latency_ns == [pytest.approx(4 * MS + LAUNCH + NOTICE)]
    assert run(job([kernel(MS)], [kernel(MS)], [], 100 * MS), "static").be_work_ns == pytest.approx(75 * MS, rel=0.02)


# -- properties --------------------------------------------------------------------------------------------------------

KERNELS = st.lists(
    st.builds(kernel, st.integers(5 * US, 800 * US), st.integers(1, 400), st.sampled_from(list(WorkClass)[1:])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(KERNELS, KERNELS, st.lists(st.integers(0, 8 * MS), max_size=5), st.sampled_from([s.name for s in SCHEMES]))
def test_every_request_is_served_and_no_gpu_time_is_invented(
    ls: list[KernelWork], be: list[KernelWork], arrivals: list[int], name: str
) -> None:
    work = job(ls, be, sorted(arrivals), 8 * MS)
    found = run(work, name)
    assert len(found.latency_ns) == len(arrivals)
    least = sum(k.duration_ns for k in ls)
    assert all(latency >= least + LAUNCH + NOTICE - 1 for latency in found.latency_ns)
    assert found.be_work_ns <= 8 * MS + 1
    again = run(work, name)
    assert again.latency_ns == found.latency_ns


@settings(max_examples=60, deadline=None)
@given(KERNELS, st.integers(30, 300), st.lists(st.integers(0, 8 * MS), max_size=5))
def test_tidal_bounds_what_is_in_flight(be: list[KernelWork], in_flight_us: int, arrivals: list[int]) -> None:
    found = run(job([kernel(100 * US)], be, sorted(arrivals), 8 * MS), "tidal", in_flight_us=in_flight_us)
    longest = max(k.duration_ns for k in be)
    assert found.longest_in_flight_ns <= max(in_flight_us * US, longest) + longest


# -- Orion's profiles --------------------------------------------------------------------------------------------------


def poisson(rate_rps: float, end_ns: int) -> list[int]:
    draw, at, times = random.Random(0), 0.0, []
    while (at := at + draw.expovariate(rate_rps) * 1e9) < end_ns:
        times.append(int(at))
    return times


def test_orion_profiles_keep_their_facts(shared: Path) -> None:
    kernels = read_orion(shared / "data/profiles/orion/resnet50_4_fwd")
    assert len(kernels) == 175
    assert sum(k.duration_ns for k in kernels) == pytest.approx(6.50e6, rel=0.001)
    assert max(k.duration_ns for k in kernels) == pytest.approx(380e3, rel=0.01)
    assert [sum(k.work_class == c for k in kernels) for c in list(WorkClass)[1:]] == [41, 80, 54]


@pytest.mark.parametrize("be", ["resnet50_32_fb1"])
def test_the_ranking_on_orion_profiles(shared: Path, be: str) -> None:
    """A gate keeps LS within 1.2x; concurrency and static parts do not, however the copies are scheduled."""
    folder = shared / "data/profiles/orion"
    ls = read_orion(folder / "resnet50_4_fwd")
    end_ns = 2_000 * MS
    work = Job(ls, read_orion(folder / be), poisson(16, end_ns), end_ns, 80)
    base = alone(work, scheme_named("tidal"), settings_for("tidal"))
    left = 1 - base.active_ns / end_ns
    p99, kept = {}, {}
    for scheme in SCHEMES:
        found = run(work, scheme.name)
        p99[scheme.name] = quantile(found.latency_ns, 0.99) / quantile(base.latency_ns, 0.99)
        kept[scheme.name] = found.be_work_ns / end_ns / left
    assert p99["tidal"] < 1.2
    assert p99["orion"] < 1.3
    assert min(p99["mps-plus"], p99["static"]) > 2.5 * max(p99["tidal"], p99["orion"], p99["temporal"])
    assert kept["tidal"] > 0.97
    assert kept["tidal"] > kept["orion"] > kept["temporal"]


def test_a_written_profile_is_read(tmp_path: Path) -> None:
    kernels = [KernelWork("a<int, float>", 1000, 12, WorkClass.MEMORY), KernelWork("b", 2, 1, WorkClass.UNKNOWN)]
    rows = [dataclasses.asdict(k) | {"work_class": CLASS_NAMES[k.work_class]} for k in kernels]
    (tmp_path / "k.json").write_text(json.dumps({"gpu": "Test", "kernels": rows}))
    assert read_kernels(tmp_path / "k.json") == kernels


@pytest.mark.parametrize(
    ("text", "line"), [("Name\n", 1), ("Name,Profile,Memory_footprint,SM_usage,Duration\nx,7,0,1,1\n", 2)]
)
def test_a_wrong_orion_profile_names_its_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "profile"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_orion(path)
    assert caught.value.line == line
