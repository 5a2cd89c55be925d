"""Runs the live page in headless Chromium with rows that a test sets."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from waiting import WITHIN_S

from cotenant.observability.feed import Feed, Row
from cotenant.observability.http import LiveServer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium. The test is skipped if Chromium or its driver is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and its driver are not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,1000"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(WITHIN_S)
    yield driver
    driver.quit()


def until(condition: Callable[[], Any], within_s: float = WITHIN_S) -> float:
    """Wait until the condition is true; returns the seconds that this took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "waited in vain"
        time.sleep(0.02)
    return time.monotonic() - began


class Stage:
    """A port with a live page whose rows a test sets."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.loop = asyncio.new_event_loop()

        async def build() -> AsyncIterator[Row]:
            for row in list(self.rows):
                yield row

        async def metrics() -> str:
            return ""

        self.server = LiveServer("127.0.0.1", 0, Feed(build), metrics)
        self.loop.run_until_complete(self.server.start())
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)
        self.loop.close()


@pytest.fixture
def stage(browser: Any) -> Iterator[Stage]:
    # The page of the test before may still look for its server, which it complains about.
    browser.get("about:blank")
    browser.get_log("browser")
    made = Stage()
    yield made
    if not made.loop.is_closed():
        made.close()


def tenant_rows(count: int, got: float = 0.0) -> list[Row]:
    gpu = {"node": "n", "index": 0, "model": "H100", "memory_bytes": 80 << 30, "memory_used_bytes": 1 << 30}
    share = {
        "gpu": "g0",
        "mechanism": "time",
        "granted": 0.0,
        "limit": 1.0,
        "memory_bytes": 1 << 20,
        "state": "running",
    }
    rows: list[Row] = [("sources", "a", {"name": "n", "kind": "agent", "ok": True}), ("gpus", "g0", gpu)]
    return rows + [
        ("shares", f"t{n} g0", share | {"tenant": f"t{n}", "got": got if n == 0 else 0.5 / count, "turns": n})
        for n in range(count)
    ]


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))


def complaints(browser: Any) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
