"""A promise that is not kept: what counts as short, since when, and where it is shown."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.control.live import _share
from cotenant.agent.control.shortfalls import MINUTE_NS, Hour, Shortfalls
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.tenants.tenant import Tenant
from cotenant.cli.tenant_table import short_line
from cotenant.devices.base import Gpu
from cotenant.policy.shares.account import Account, Crowd, Share, Window
from cotenant.policy.shares.shortfall import Wanted, part_of, short_since

S = 1_000_000_000
GPU = Gpu("GPU-1", "H100", 80 << 30, 3)


@pytest.mark.parametrize(
    ("got", "wanted", "short"),
    [
        (0.50, 1.0, False),
        (0.49, 1.0, False),  # below the request, but within the margin
        (0.33, 1.0, True),
        (0.33, 0.6, False),  # promised 0.3, half of the 0.6 that it wanted
        (0.20, 0.6, True),
        (0.0, 0.0, False),  # the tenant did not want the GPU
        (0.0, 0.03, False),
        (0.0, 1.0, True),
    ],
)
def test_what_is_short_of_a_request_of_half(got: float, wanted: float, short: bool) -> None:
    assert (short_since(None, 7, Wanted(got, wanted), 0.5) == 7) is short


@pytest.mark.parametrize(("got", "short"), [(0.0, True), (0.009, True), (0.011, False)])
def test_a_small_request_is_short_below_half_of_it(got: float, short: bool) -> None:
    assert (short_since(None, 7, Wanted(got, 1.0), 0.02) == 7) is short


def test_since_when_is_kept_until_it_is_made_good() -> None:
    bad, good = Wanted(0.3, 1.0), Wanted(0.5, 1.0)
    since = short_since(None, 10, bad, 0.5)
    since = short_since(since, 20, bad, 0.5)
    assert since == 10
    assert short_since(since, 30, good, 0.5) is None
    assert short_since(None, 40, bad, 0.5) == 40
    # the fractions may add up to more than 1, because a turn and the wait for the next one may overlap
    assert part_of(Wanted(0.9, 1.1), 0.5) == 0.5
    assert short_since(None, 5, Wanted(0.0, 1.0), 0.0) is None  # a tenant without a request was promised nothing


def world(request: float) -> tuple[Shortfalls, Tenant, Account]:
    """A tenant under turns with a window of 10 s."""
    account = Account("a", Share(request), Window(10 * S), Crowd())
    tenant = Tenant(TenantSpec("a", request=request, mechanism="time"), (GPU,), "token", 0, Enforcement())
    registry: Any = SimpleNamespace(tenants={"a": tenant}, sliced=lambda _: False)
    broker: Any = SimpleNamespace(turns=SimpleNamespace(gpus={GPU.uuid: SimpleNamespace(accounts={"a": account})}))
    return Shortfalls(registry, broker, slices=None), tenant, account  # type: ignore[arg-type]


def test_a_tenant_under_turns_is_short_after_a_whole_window_and_not_once_it_gets_its_part() -> None:
    looks, tenant, account = world(0.5)
    for second in range(31):  # the tenant holds the GPU a third of the time and waits the rest
        account.held_ns, account.waited_ns = second * S // 3, second * S * 2 // 3
        looks.look(second * S)
        assert (looks.short_s(tenant, GPU.uuid, second * S) > 0) is (second > 10)
    assert looks.short_s(tenant, GPU.uuid, 30 * S) == 20.0
    for second in range(31, 45):  # afterwards it holds the GPU two thirds of the time
        account.held_ns += S * 2 // 3
        account.waited_ns += S // 3
        looks.look(second * S)
    assert looks.short_s(tenant, GPU.uuid, 44 * S) == 0.0


def test_a_tenant_that_rests_is_not_short() -> None:
    looks, tenant, account = world(0.5)
    for second in range(30):
        account.held_ns = second * S // 10  # holds the GPU a tenth of the time and never waits
        looks.look(second * S)
    assert looks.short_s(tenant, GPU.uuid, 29 * S) == 0.0


def test_the_last_hour_is_kept_by_whole_minutes() -> None:
    looks, tenant, account = world(0.5)
    # For 50 minutes the tenant holds the GPU a third of the time and waits the rest. Afterwards it gets the tenth that
    # it wants.
    for second in range(75 * 60):
        account.held_ns += S // 3 if second < 3000 else S // 10
        account.waited_ns += S - S // 3 if second < 3000 else 0
        looks.look(second * S)
        if second == 59:
            assert looks.hour(tenant, GPU.uuid) == []
        if second == 60:
            assert looks.hour(tenant, GPU.uuid) == [(0.5, 0.33)]
    minutes = looks.hour(tenant, GPU.uuid)
    assert len(minutes) == 60
    assert minutes[:36] == [(0.5, 0.33)] * 36  # minutes 14 to 49
    assert minutes[37:] == [(0.05, 0.1)] * 23  # the tenant wanted a tenth of the time, of which half is promised
    looks._registry.tenants.clear()
    looks.look(75 * 60 * S)
    assert looks.hour(tenant, GPU.uuid) == []


def test_minutes_without_a_look_are_gaps() -> None:
    hour = Hour()
    hour.add(0, None, 0.5)
    hour.add(MINUTE_NS, Wanted(0.2, 1.0), 0.5)
    hour.add(5 * MINUTE_NS, Wanted(0.4, 1.0), 0.5)
    hour.add(6 * MINUTE_NS, None, 0.5)
    hour.add(7 * MINUTE_NS, None, 0.5)
    assert hour.minutes == [(0.5, 0.2), None, None, None, (0.5, 0.4), None]
    hour.add(500 * MINUTE_NS, None, 0.5)
    assert hour.minutes == [None] * 60


def test_a_wait_that_goes_on_counts() -> None:
    looks, tenant, account = world(0.5)
    account.waiting, account.requested_ns = True, 0
    for second in range(16):
        looks.look(second * S)
    assert looks.short_s(tenant, GPU.uuid, 15 * S) == 5.0


def test_a_shortfall_is_kept_over_a_restart_of_the_agent() -> None:
    looks, tenant, account = world(0.5)
    saved: list[dict[str, int]] = []
    looks._save = lambda: saved.append(dict(tenant.short_since))  # type: ignore[method-assign]
    account.waiting, account.requested_ns = True, 0
    for second in range(16):
        looks.look(second * S)
    assert saved == [{GPU.uuid: 10 * S}], "written when it begins"
    looks, tenant, account = world(0.5)  # the next agent
    tenant.short_since = dict(saved[0])
    account.waiting, account.requested_ns = True, 20 * S
    for second in range(20, 40):
        looks.look(second * S)
        assert looks.short_s(tenant, GPU.uuid, second * S) == second - 10
    account.waiting, account.held_ns = False, 60 * S
    looks.look(41 * S)
    assert looks.short_s(tenant, GPU.uuid, 41 * S) == 0.0


def test_slices_are_asked_where_they_share_the_gpu() -> None:
    looks, tenant, _ = world(0.5)
    looks._registry.sliced = lambda _: True  # type: ignore[method-assign]
    looks._slices = SimpleNamespace(wanted=lambda *_: Wanted(0.2, 1.0))  # type: ignore[assignment]
    looks.look(S)
    assert looks.short_s(tenant, GPU.uuid, 4 * S) == 3.0


def test_ps_top_and_page_say_it() -> None:
    share = {"index": 3, "uuid": GPU.uuid, "got": 0.33, "short_s": 75.4}
    line = short_line({"name": "train", "request": 0.5}, share)
    assert line == "train: requests 50% of GPU 3, got 33% in the last window, short for 75.4 s"
    assert short_line({"name": "train", "request": 0.5}, share | {"short_s": 0.0}) == ""

    from test_tenant_table import answer

    from cotenant.cli.top import screen

    look = answer("train")
    look["tenants"][0]["gpus"][0] |= {"short_s": 75.4, "got": 0.2}
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(screen(look, sort="", width=200))
    assert "▼ 20%" in console.export_text()

    row = {"name": "train", "mechanism": "time", "request": 0.5, "limit": 1.0, "state": "running", "class": "normal"}
    rest = {"memory_used_bytes": 0, "memory_limit_bytes": None, "holding": False, "waiting": False, "floor": None}
    shown = _share(row, share | rest | {"waited_s": 1.0, "turns": 1, "sms": None})
    assert (shown["granted"], shown["got"], shown["short_s"]) == (0.5, 0.33, 75)
