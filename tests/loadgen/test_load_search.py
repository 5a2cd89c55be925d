"""The search for the largest load, on made-up servers whose limit is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.loadgen.result import ROW, LoadResult, mark_late, merge
from cotenant.loadgen.schedule import LoadService, Schedule, build_schedule, parse_service
from cotenant.loadgen.search import find_max
from cotenant.workloads.requests.arrivals import Arrivals, parse_arrivals

SERVICE = LoadService("a", (100.0,), Arrivals("constant"), slo_ms=50.0)


def result(share_in_time: float, factor: float = 1.0) -> LoadResult:
    rows = np.zeros(1000, ROW)
    rows["scheduled"] = np.arange(1000) / 100.0
    rows["finished"] = rows["scheduled"] + np.where(np.arange(1000) < share_in_time * 1000, 0.01, 0.06)
    rows["sent"], rows["outcome"] = rows["scheduled"], 1
    return LoadResult((SERVICE.scaled(factor),), mark_late(rows, [SERVICE]), 10.0, 0)


@pytest.mark.parametrize("limit", [0.07, 0.9, 1.0, 1.7, 40.0])
def test_it_finds_the_limit_from_either_side(limit: float) -> None:
    found = find_max(lambda f, n: result(1.0 if f <= limit else 0.5), tolerance=0.05)
    assert found.factor <= limit < found.factor * 1.05 * 1.001
    assert any(p.factor == found.factor and p.held for p in found.probes)
    assert not found.open_ended
    assert len(found.probes) <= 20


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 13, 200])
def test_clients_are_tried_in_whole_numbers(limit: int) -> None:
    found = find_max(lambda f, n: result(1.0 if round(8 * f) <= limit else 0.5), tolerance=0.001, step=1 / 8)
    assert [8 * p.factor for p in found.probes] == pytest.approx([round(8 * p.factor) for p in found.probes])
    assert len({p.factor for p in found.probes}) == len(found.probes)
    assert round(8 * found.factor) == limit
    assert not found.open_ended


def test_fewer_clients_are_confirmed_one_by_one() -> None:
    found = find_max(
        lambda f, n: result(1.0 if f <= 1 else 0.5),
        confirm=lambda f, n: result(1.0 if 8 * f < 6.5 else 0.9),
        step=1 / 8,
    )
    assert (round(8 * found.factor), found.confirmed) == (6, True)
    nothing = find_max(lambda f, n: result(1.0 if f <= 1 else 0.5), confirm=lambda f, n: result(0.5), step=1.0)
    assert nothing.factor == 0.0


def test_a_factor_that_fails_the_second_time_is_not_reported() -> None:
    """A lucky probe: 1.5 holds once, the longer run shows that only 1.2 does."""
    found = find_max(
        lambda f, n: result(1.0 if f <= 1.5 else 0.5), confirm=lambda f, n: result(1.0 if f <= 1.2 else 0.9)
    )
    assert found.confirmed
    assert found.factor <= 1.2
    assert found.final is not None
    assert found.final.attainment == 1.0


def test_a_server_without_a_limit_ends_the_search() -> None:
    found = find_max(lambda f, n: result(1.0))
    assert found.open_ended
    assert found.factor > 100


def test_a_server_that_never_keeps_it_gives_zero() -> None:
    assert find_max(lambda f, n: result(0.2)).factor == 0.0


def test_the_target_counts_every_service() -> None:
    good, bad = result(1.0), result(0.98)
    both = replace(
        good,
        services=(SERVICE, replace(SERVICE, name="b")),
        rows=np.concatenate([good.rows, np.array([(1, *list(r)[1:]) for r in bad.rows.tolist()], ROW)]),
    )
    assert both.attainment == pytest.approx(0.98)


def test_merged_parts_are_the_whole() -> None:
    whole = result(0.7)
    parts = [replace(whole, rows=whole.rows[i::3], reasons={"x": 1}) for i in range(3)]
    merged = merge(parts)
    assert np.array_equal(merged.rows, whole.rows)
    assert merged.reasons == {"x": 3}


def test_parts_of_a_schedule_are_disjoint_and_whole() -> None:
    whole = build_schedule([SERVICE, LoadService("b", (), Arrivals("closed", clients=5))], 3.0, 0)
    parts = [whole.part(i, 3) for i in range(3)]
    assert sorted(t for p in parts for t in p.times_s) == whole.times_s.tolist()
    assert sum(len(p.clients) for p in parts) == 5
    assert isinstance(parts[0], Schedule)


def test_a_service_more_leaves_the_others_as_they_were() -> None:
    poisson = parse_arrivals("poisson")
    one = build_schedule([parse_service("a=50", poisson)], 5.0, 3)
    two = build_schedule([parse_service("a=50", poisson), parse_service("b=70", poisson)], 5.0, 3)
    assert np.array_equal(two.times_s[two.svc == 0], one.times_s)


@pytest.mark.parametrize("text", ["a", "=5", "a=", "a=-1", "a=nan", "a=0", "a=1,x", "a=inf"])
def test_what_is_no_service_is_said(text: str) -> None:
    with pytest.raises(InputError, match="service"):
        parse_service(text, parse_arrivals("poisson"))
