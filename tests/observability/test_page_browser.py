"""The live page in a real browser: it follows changes, holds a thousand tenants, says when the link is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from page_stage import Stage, browser, complaints, stage, tenant_rows, text, until

from cotenant.observability.feed import Row

__all__ = ["browser", "stage"]  # fixtures


def test_the_page_of_a_real_agent_follows_a_change(browser: Any, live_agent: Callable[..., Any]) -> None:
    agent = live_agent(tenants=[{"name": "notebooks", "request": 0.2, "limit": 0.5, "memory": "2GiB"}])
    browser.get(agent.url)
    until(lambda: "notebooks" in text(browser, "#shares"))
    assert text(browser, "#link") == "live"
    assert "50 %" in text(browser, "#shares")
    for limit in (80, 70):
        assert agent.cotenant("set", "notebooks", "--limit", f"{limit}%").returncode == 0
        until(lambda: f"{limit} %" in text(browser, "#shares"))  # noqa: B023
    assert "notebooks changed" in text(browser, "#decisions")
    assert not complaints(browser)


def test_of_a_thousand_tenants_the_first_two_hundred_are_rows(browser: Any, stage: Stage) -> None:
    stage.rows = tenant_rows(1000)
    browser.get(stage.server.url)
    until(lambda: "1,000" in text(browser, "#totals"))
    stage.rows = tenant_rows(1000, 0.31)
    until(lambda: "31 %" in text(browser, "#shares tbody tr"))
    assert len(browser.find_elements("css selector", "#shares tbody tr")) == 200
    assert not complaints(browser)


def test_tenants_keep_their_places_while_what_they_got_changes(browser: Any, stage: Stage) -> None:
    def rows(first_got: float) -> list[Row]:
        found: list[Row] = [("sources", "a", {"name": "n", "kind": "agent", "ok": True})]
        found.append(("gpus", "g", {"node": "n", "index": 0, "model": "H100"}))
        for name, granted, got in (("a", 0.3, first_got), ("b", 0.3, 0.3), ("late", 0.4, 0.1)):
            share = {"gpu": "g", "tenant": name, "kind": "tenant", "granted": granted, "got": got, "state": "running"}
            found.append(("shares", name, share | {"limit": 1.0}))
        return found

    def places() -> tuple[list[str], list[str]]:
        cells, names = "#shares tbody td:first-child", ".gpu .legend li"
        first, second = (
            [each.text.strip() for each in browser.find_elements("css selector", where)] for where in (cells, names)
        )
        return first, second

    browser.get(stage.server.url)
    for got in (0.29, 0.31):
        stage.rows = rows(got)
        until(lambda: f"{got:.0%}".replace("%", " %") in text(browser, "#shares"))  # noqa: B023
        assert places() == (["late", "a", "b"], ["late", "a", "b"])
    assert not complaints(browser)


def test_ten_tenants_have_ten_colours_and_keep_them(browser: Any, stage: Stage) -> None:
    """On GPUs of their own, where nothing else would keep two of one colour apart."""

    def rows(names: list[str]) -> list[Row]:
        found: list[Row] = [("sources", "a", {"name": "n", "kind": "fleet", "ok": True})]
        for n, name in enumerate(names):
            found.append(("gpus", f"g{n}", {"node": "n", "index": n, "model": "H100"}))
            share = {"gpu": f"g{n}", "tenant": name, "kind": "job", "granted": 1.0, "limit": 1.0, "state": "running"}
            found.append(("shares", name, share))
        return found

    def colours() -> dict[str, str]:
        found: dict[str, str] = browser.execute_script(
            "return Object.fromEntries([...document.querySelectorAll('.gpu .legend li')].map((item) =>"
            " [item.innerText, item.querySelector('i').style.getPropertyValue('--c')]))"
        )
        return found

    names = [f"job-{n}" for n in range(10)]
    stage.rows = rows(names)
    browser.get(stage.server.url)
    until(lambda: len(colours()) == 10)
    before = colours()
    assert len(set(before.values())) == 10
    stage.rows = rows([*names[3:], "late-1", "late-2"])  # three rows have gone and two are new
    until(lambda: "late-2" in colours())
    after = colours()
    assert {name: after[name] for name in names[3:]} == {name: before[name] for name in names[3:]}
    assert len(set(after.values())) == 9


def test_models_that_are_on_a_gpu_have_its_memory(browser: Any, stage: Stage) -> None:
    gpu = {"node": "n", "index": 0, "model": "H100", "memory_bytes": 512, "memory_used_bytes": 512, "granted": False}
    here, away = ({"state": "resident", "gpu": "g", "memory_bytes": 256}, {"state": "evicted", "memory_bytes": 0})
    stage.rows = [("sources", "models", {"name": "n", "kind": "models", "ok": True}), ("gpus", "g", gpu)]
    stage.rows += [("models", name, here if name != "c" else away) for name in "abc"]
    browser.get(stage.server.url)
    until(lambda: "100 %" in text(browser, "#totals"))
    assert text(browser, ".gpu .legend").split() == ["a", "b"]
    assert "free" not in text(browser, "#gpus")
    assert "granted" not in text(browser, "#gpus")
    assert "given away" not in text(browser, "#totals")
    assert not complaints(browser)


def test_a_gpu_that_two_tenants_have_at_once_is_in_use_once(browser: Any, stage: Stage) -> None:
    """After a kernel has hung for `stuck_after`, others run beside it, and each has the GPU for the whole window."""
    stage.rows = [(s, key, fields | ({"got": 1.0} if s == "shares" else {})) for s, key, fields in tenant_rows(2)]
    browser.get(stage.server.url)
    until(lambda: "100 %" in text(browser, "#totals"))
    assert "200 %" not in text(browser, "body")
    assert not complaints(browser)


def test_a_share_that_is_not_enforced_stands_out_with_its_sms_and_memory(browser: Any, stage: Stage) -> None:
    rows = tenant_rows(2)
    more = {
        "t0": {"state": "ShareNotEnforced", "floor": "holds", "sms": "at most 13 SMs"},
        "t1": {"sms": "40 SMs reserved", "memory_limit_bytes": 2 << 30, "memory_by": "kernel"},
    }
    stage.rows = [(section, key, fields | more.get(fields.get("tenant", ""), {})) for section, key, fields in rows]
    browser.get(stage.server.url)
    until(lambda: "ShareNotEnforced" in text(browser, "#shares"))
    (pill,) = (each for each in browser.find_elements("css selector", "#shares .pill") if "Not" in each.text)
    assert "bad" in pill.get_attribute("class"), "it is red whatever else the tenant does"
    for words in ("at most 13 SMs", "40 SMs reserved", "limited by the kernel"):
        assert words in text(browser, "#shares")
    assert not complaints(browser)


def test_best_effort_work_that_is_held_off_is_told_from_what_runs(browser: Any, stage: Stage) -> None:
    *head, train, web, plain = tenant_rows(3)
    train[2].update({"class": "best-effort", "floor": "held off", "waited_s": 12.5})
    web[2].update({"class": "latency-sensitive", "floor": "holds"})
    stage.rows = [*head, train, web, plain]
    browser.get(stage.server.url)
    until(lambda: text(browser, "#shares tbody").count("\n") >= 2)
    lines = browser.find_elements("css selector", "#shares tbody tr")
    told = {line.text.split()[0]: line.text for line in lines}
    assert "best-effort" in told["t0"]
    assert "held off" in told["t0"]
    assert "latency-sensitive" in told["t1"]
    assert "holds off" in told["t1"]
    assert "running" in told["t2"]
    assert not complaints(browser)


def test_the_last_hour_is_a_chart_of_promised_beside_got(browser: Any, stage: Stage) -> None:
    *head, short, good, young = tenant_rows(3)
    hours: list[Row] = [
        ("hours", short[1], {"minutes": [[0.5, 0.5]] * 30 + [None] * 5 + [[0.5, 0.33]] * 25}),
        ("hours", good[1], {"minutes": [[0.2, 0.7]] * 12}),
    ]
    stage.rows = [*head, short, good, young, *hours]
    browser.get(stage.server.url)
    until(lambda: len(browser.find_elements("css selector", "svg.hour")) == 2)
    said = {chart.get_attribute("aria-label") for chart in browser.find_elements("css selector", "svg.hour")}
    assert said == {
        "last 60 min: promised 50 %, got 42 % in the mean, short in 25 min",
        "last 12 min: promised 20 %, got 70 % in the mean, short in 0 min",
    }
    browser.find_element("xpath", "//th/button[text()='last hour']").click()
    until(lambda: text(browser, "#shares tbody tr").strip().startswith("t0"))
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('svg.hour .short')].map((path) => path.getAttribute('d'))"
    )
    assert [path.count("M") for path in drawn] == [25, 0]
    stage.rows = [*head, short, good, young]
    until(lambda: "last hour" not in text(browser, "#shares thead"))
    assert not complaints(browser)


def test_minutes_of_a_small_share_are_short_by_the_agents_rule(browser: Any, stage: Stage) -> None:
    """A request of 2 % that gets nothing is as short as one of 50 % that gets a third."""
    *head, small = tenant_rows(1)
    small[2]["granted"] = 0.02
    stage.rows = [*head, small, ("hours", small[1], {"minutes": [[0.02, 0.0]] * 3 + [[0.02, 0.02]] * 2})]
    browser.get(stage.server.url)
    until(lambda: browser.find_elements("css selector", "svg.hour"))
    (chart,) = browser.find_elements("css selector", "svg.hour")
    assert chart.get_attribute("aria-label").endswith("short in 3 min")
    assert not complaints(browser)


def test_find_sort_and_theme_by_keyboard(browser: Any, stage: Stage) -> None:
    from selenium.webdriver.common.keys import Keys

    stage.rows = tenant_rows(30)
    browser.get(stage.server.url)
    until(lambda: "t29" in text(browser, "#shares"))
    browser.find_element("tag name", "body").send_keys("/")
    browser.switch_to.active_element.send_keys("t29")
    until(lambda: text(browser, "#shares tbody").strip().startswith("t29"))
    assert len(browser.find_elements("css selector", "#shares tbody tr")) == 1
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    until(lambda: len(browser.find_elements("css selector", "#shares tbody tr")) == 30)
    browser.find_element("xpath", "//th/button[text()='turns']").send_keys(Keys.ENTER)
    until(lambda: text(browser, "#shares tbody tr").strip().startswith("t29"))
    before = browser.find_element("tag name", "html").get_attribute("data-theme")
    browser.find_element("id", "theme").send_keys(Keys.ENTER)
    assert browser.find_element("tag name", "html").get_attribute("data-theme") != before
    assert not complaints(browser)


def test_names_are_text_and_a_phone_does_not_scroll_sideways(browser: Any, stage: Stage) -> None:
    evil = "<img src=x onerror=alert(1)>"
    stage.rows = [
        *tenant_rows(2),
        ("jobs", "j1", {"name": evil, "state": "waiting", "reason": "no node has 8 GPUs free " * 5}),
        ("services", "resnet", {"rate_rps": 12.5, "p99_ms": 120, "slo_ms": 100, "attainment": 0.95, "places": evil}),
        ("models", "chat-8b", {"state": "coming back", "ttft_p99_ms": 250, "ttft_slo_ms": 200, "fault": evil}),
        ("decisions", "1", {"time_s": time.time(), "source": "n", "text": evil * 5}),
        ("warnings", "1", {"source": "n", "about": "t0", "text": "a" * 300}),
    ]
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        browser.get(stage.server.url)
        until(lambda: evil in text(browser, "#jobs"))
        assert not browser.find_elements("css selector", "main img")
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        assert "95.00 %" in text(browser, "#services")
        assert "coming back" in text(browser, "#models")
        assert "250 ms / 200 ms" in text(browser, "#models")
        assert not complaints(browser)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_lost_link_is_said(browser: Any, stage: Stage) -> None:
    stage.rows = tenant_rows(1)
    browser.get(stage.server.url)
    until(lambda: "t0" in text(browser, "#shares"))
    stage.close()
    until(lambda: "not connected" in text(browser, "#link"))
    assert "t0" in text(browser, "#shares")
    browser.get_log("browser")


def test_columns_that_nobody_fills_are_left_out_and_states_are_words(browser: Any, stage: Stage) -> None:
    """A fleet measures no GPU time and no memory; a tenant whose memory was moved says so, whatever it runs."""
    share = {"gpu": "g0", "granted": 1.0, "limit": 1.0, "mechanism": "whole", "state": "running"}
    stage.rows = [
        ("sources", "a", {"name": "n", "kind": "fleet", "ok": True}),
        ("gpus", "g0", {"node": "n", "index": 0, "model": "H100"}),
        ("shares", "1", share | {"tenant": "train", "kind": "job"}),
    ]
    browser.get(stage.server.url)
    until(lambda: "train" in text(browser, "#shares"))
    assert text(browser, "#shares thead").split() == ["who", "GPU", "state", "granted", "limit", "by"]
    assert text(browser, "#empty") == "No jobs yet: cotenant submit -- python train.py"
    assert browser.find_element("id", "gpus").get_attribute("class") == "slim"
    stage.rows = [*stage.rows[:2], ("shares", "1", share | {"tenant": "train", "kind": "job", "got": 0.5})]
    until(lambda: browser.find_element("id", "gpus").get_attribute("class") == "")
    stage.rows = [
        *stage.rows[:2],
        ("shares", "1", share | {"tenant": "train", "kind": "job", "residency": "moved off", "memory_bytes": 3 << 30}),
        ("jobs", "j", {"name": "train", "state": "waiting", "reason": "earlier jobs hold all GPUs"}),
        ("services", "s", {"slo_ms": 50, "state": "the plan does not include it: there are not enough GPUs"}),
    ]
    until(lambda: "moved off" in text(browser, "#shares"))
    assert "3.0 GiB" in text(browser, "#shares")
    assert text(browser, "#empty") == ""
    assert "earlier jobs hold all GPUs" in text(browser, "#jobs")
    assert "does not include it" in text(browser, "#services")
    assert not complaints(browser)
