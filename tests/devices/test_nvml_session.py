# ruff: noqa: N802 - the names are those of the NVML functions that the driver's stand-in has
"""NVML stays open as long as the process runs, and is opened again after errors that last until then."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cotenant.devices import cards
from cotenant.devices.cards import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INSUFFICIENT_SIZE,
    NOT_FOUND,
    NOT_SUPPORTED,
    REOPEN_S,
    RESET_REQUIRED,
    UNINITIALIZED,
    Cards,
)
from cotenant.devices.nvidia import Nvidia

GPUS = ("GPU-a", "GPU-b")


class Driver:
    """Stands in for the NVML library. `running`: pids by GPU; `lost`: GPU -> the error of all calls for it."""

    def __init__(self) -> None:
        self.open, self.loaded, self.inits, self.calls = 0, True, 0, 0
        self.running = {"GPU-a": [11, 12], "GPU-b": [21]}
        self.mps: dict[str, list[int]] = {}
        self.mps_answer = NOT_SUPPORTED
        self.lost: dict[str, int] = {}
        self.stale: set[str] = set()  # GPUs that are back, which a session from before the loss does not notice

    def nvmlInit_v2(self) -> int:
        if not self.loaded:
            return DRIVER_NOT_LOADED
        self.inits += 1
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        if not self.open:
            return UNINITIALIZED
        self.open -= 1
        for uuid in self.stale:
            self.lost.pop(uuid)
        self.stale.clear()
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if not self.open:
            return UNINITIALIZED
        if uuid.decode() not in GPUS:
            return NOT_FOUND
        handle._obj.value = GPUS.index(uuid.decode()) + 1
        return self.lost.get(uuid.decode(), 0)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        self.calls += 1
        return self.fill(self.running[GPUS[handle.value - 1]], count, found)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        return self.mps_answer or self.fill(self.mps[GPUS[handle.value - 1]], count, found)

    @staticmethod
    def fill(pids: list[int], count: Any, found: Any) -> int:
        room, count._obj.value = count._obj.value, len(pids)
        for i, pid in enumerate(pids[:room]):
            found[i].pid = pid
        return INSUFFICIENT_SIZE if len(pids) > room else 0


class Clock:
    """The time that the module for NVML sees."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cards, "time", clock)
    return clock


@pytest.fixture
def driver(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: driver)
    cards._session_of.cache_clear()
    yield driver
    cards._session_of.cache_clear()


def test_many_looks_open_nvml_once(driver: Driver) -> None:
    device = Nvidia()
    assert [device.processes(GPUS) for _ in range(100)] == [{"GPU-a": [11, 12], "GPU-b": [21]}] * 100
    assert (driver.inits, driver.open, driver.calls) == (1, 1, 200)


def test_threads_at_once_open_nvml_once(driver: Driver) -> None:
    start = threading.Barrier(2)

    def look() -> dict[str, list[int]]:
        start.wait()
        return Nvidia().processes(GPUS)

    with ThreadPoolExecutor(2) as threads:
        looks = [each.result() for each in [threads.submit(look), threads.submit(look)]]
    assert looks == [driver.running, driver.running]
    assert driver.inits == 1


def test_clients_of_mps_servers_are_listed_once(driver: Driver) -> None:
    driver.mps_answer, driver.mps = 0, {"GPU-a": [12, 13], "GPU-b": []}
    assert Nvidia().processes(GPUS) == {"GPU-a": [11, 12, 13], "GPU-b": [21]}
    driver.mps_answer = FUNCTION_NOT_FOUND
    assert Nvidia().processes(["GPU-a"]) == {"GPU-a": [11, 12]}


def test_more_processes_than_the_first_call_has_room_for(driver: Driver) -> None:
    driver.running["GPU-a"] = list(range(1, 5000))
    assert Nvidia().processes(["GPU-a"]) == {"GPU-a": driver.running["GPU-a"]}


@pytest.mark.parametrize("error", [GPU_IS_LOST, RESET_REQUIRED, UNINITIALIZED])
def test_gpu_that_comes_back_is_seen_by_a_new_session(driver: Driver, clock: Clock, error: int) -> None:
    device = Nvidia()
    device.processes(GPUS)
    driver.lost["GPU-a"] = error
    # the other GPU is not affected, and NVML is not opened again at each look
    assert [device.processes(GPUS) for _ in range(20)] == [{"GPU-b": [21]}] * 20
    assert driver.inits == 1
    driver.stale.add("GPU-a")
    clock.now_s += REOPEN_S
    assert device.processes(GPUS) == driver.running
    clock.now_s += REOPEN_S
    device.processes(GPUS)
    assert (driver.inits, driver.open) == (2, 1)


def test_driver_that_is_away_for_a_while(driver: Driver, clock: Clock) -> None:
    device = Nvidia()
    device.processes(GPUS)
    driver.open, driver.loaded = 0, False
    assert device.processes(GPUS) == {}
    clock.now_s += REOPEN_S
    assert device.processes(GPUS) == {}
    driver.loaded = True
    assert device.processes(GPUS) == {}
    clock.now_s += REOPEN_S
    assert device.processes(GPUS) == driver.running
    assert driver.open == 1


def test_driver_that_is_loaded_after_the_first_look(driver: Driver) -> None:
    driver.loaded = False
    assert Nvidia().processes(GPUS) == {}
    driver.loaded = True
    assert Nvidia().processes(GPUS) == driver.running


@pytest.mark.parametrize("error", [NOT_FOUND, NOT_SUPPORTED])
def test_other_errors_leave_the_session_open(driver: Driver, clock: Clock, error: int) -> None:
    driver.lost["GPU-a"] = error
    for _ in range(3):
        assert Nvidia().processes(GPUS) == {"GPU-b": [21]}
        clock.now_s += REOPEN_S
    assert driver.inits == 1


def test_a_forked_process_does_not_use_the_session(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Cards(Nvidia().nvml()).card("GPU-a")
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(OSError, match="before this process was forked"):
        card.processes()
    assert Nvidia().processes(GPUS) == {}
    assert driver.calls == 0
