"""Channels that are taken off the GPU, against a driver that counts how often each was disabled."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_slices import Node, node, settled
from waiting import wait_for

from cotenant.agent.slices.groups import OffChannels
from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import ChannelControls, ChannelGroup
from cotenant.devices.meters import Held

__all__ = ["node"]


class CountingDriver:
    """Measured on an H200: enabling a channel that is on has no effect, and else undoes one disabling."""

    def __init__(self) -> None:
        self.disabled: Counter[int] = Counter()

    def disable(self, _: int, groups: list[ChannelGroup]) -> None:
        self.disabled.update(channel for group in groups for channel in group.channels)

    def enable(self, _: int, groups: list[ChannelGroup]) -> None:
        self.disabled -= Counter(channel for group in groups for channel in group.channels)


@given(steps=st.lists(st.sampled_from(["off", "off", "on", "more"]), max_size=40))
def test_a_group_that_grows_while_it_is_off_comes_back_whole(steps: list[str]) -> None:
    """On a card, a program that made a context while it was off never came back: its first channels were off twice."""
    driver, off = CountingDriver(), OffChannels()
    controls: Any = cast(ChannelControls, driver)
    held = Held(17, 7, ChannelGroup(1, 2, 3, 4, (100,)))
    stopped = False
    for step in steps:
        if step == "more":
            channels = (*held.group.channels, 100 + len(held.group.channels))
            held = held._replace(group=replace(held.group, channels=channels))
            step = "off" if stopped else "on"
        stopped = step == "off"
        (off.disable if stopped else off.enable)(controls, held)
        assert set(driver.disabled) == (set(held.group.channels) if stopped else set())
    off.enable(controls, held)
    assert not driver.disabled


class RefusingDriver(CountingDriver):
    """As above; it may refuse a call, also after it has carried out a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: set[str] = set()
        self.after = 0  # number of channels of a refused call that are disabled or enabled all the same

    def _part(self, what: str, groups: list[ChannelGroup]) -> list[ChannelGroup]:
        return [replace(g, channels=g.channels[: self.after]) for g in groups] if what in self.refuses else groups

    def disable(self, fd: int, groups: list[ChannelGroup]) -> None:
        super().disable(fd, self._part("disable", groups))
        if "disable" in self.refuses:
            raise WorkError("refused")

    def enable(self, fd: int, groups: list[ChannelGroup]) -> None:
        super().enable(fd, self._part("enable", groups))
        if "enable" in self.refuses:
            raise WorkError("refused")


STEPS = ["off", "on", "more", "disable", "enable", "neither", "after 0", "after 1"]


@given(steps=st.lists(st.sampled_from(STEPS), max_size=40))
def test_a_driver_that_refuses_leaves_nobody_off(steps: list[str]) -> None:
    """`disable` and `enable`: the driver refuses that from now on, `neither`: it refuses nothing any more."""
    driver, off = RefusingDriver(), OffChannels()
    controls: Any = cast(ChannelControls, driver)
    held = Held(17, 7, ChannelGroup(1, 2, 3, 4, (100, 101)))
    on = True
    for step in steps:
        if step == "more":
            channels = (*held.group.channels, 100 + len(held.group.channels))
            held = held._replace(group=replace(held.group, channels=channels))
        elif step in ("off", "on"):
            on = step == "on"
        elif step in ("disable", "enable"):
            driver.refuses.add(step)
        elif step == "neither":
            driver.refuses.clear()
        else:
            driver.after = int(step[-1])
        off.put_right(controls, [held], on=on)
        assert max(driver.disabled.values(), default=0) <= 1, "one enabling would not let it run again"
        if on and "enable" not in driver.refuses:
            assert not driver.disabled
    driver.refuses.clear()
    off.put_right(controls, [held], on=True)
    assert not driver.disabled
    off.put_right(controls, [held], on=False)
    assert set(driver.disabled) == set(held.group.channels)


def test_a_process_with_the_same_number_starts_with_its_channels_on() -> None:
    driver, off = CountingDriver(), OffChannels()
    controls: Any = cast(ChannelControls, driver)
    held = Held(17, 7, ChannelGroup(1, 2, 3, 4, (100,)))
    off.disable(controls, held)
    off.forget(17)
    driver.disabled.clear()
    off.disable(controls, held)
    assert driver.disabled == {100: 1}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
def test_a_tenant_that_is_off_when_agent_and_keeper_die_goes_on_with_the_next_agent(node: Node) -> None:
    """Both are killed at once where one control group has them. The driver has then counted a disabling."""
    tenant = node.add("limited", limit=0.02)  # its channels are disabled for nearly all of the time
    tenant.begin(4)
    (keeper,) = wait_for(node.keepers)
    time.sleep(1.5)
    assert node.agent is not None
    os.kill(keeper, signal.SIGSTOP)
    node.agent.kill()
    node.agent.wait()
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not node.keepers())
    node.restart()
    tenant.result()


class Refusals:
    """What the driver of the software GPU refuses."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "refuses"

    def refuse(self, *controls: str) -> None:
        self.file.write_text(" ".join(controls))

    def by(self, pid: int) -> list[str]:
        """The controls that were refused to a process."""
        log = self.file.with_name("refuses.log")
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split()[1] for line in lines if line.startswith(f"{pid} ")]


@pytest.fixture
def refusals(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Refusals:
    made = Refusals(short_folder)
    monkeypatch.setenv("COTENANT_SOFTGPU_REFUSES", str(made.file))
    return made


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
@pytest.mark.parametrize("control", ["enable", "disable", "slice"])
def test_a_tenant_goes_on_when_the_driver_accepts_again(refusals: Refusals, node: Node, control: str) -> None:
    tenant = node.add("limited", limit=0.3)
    tenant.begin(3)
    assert node.agent is not None
    agent = node.agent.pid
    wait_for(lambda: node.got()["limited"], what="it has run for a window")
    refusals.refuse(control)
    if control == "slice":
        node.add("other")  # the time slices of both change
    wait_for(lambda: refusals.by(agent).count(control) > 5, what="some refusals")
    refusals.refuse()
    tenant.result()
    assert not any("changes its time slice" in warning for warning in node.warnings("limited"))
    tenant.begin(4)
    assert 0.2 < (settled(node)["limited"] or 0) < 0.4, "its limit holds again"
    tenant.result()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_the_keeper_tries_again_where_the_driver_refuses(refusals: Refusals, node: Node, fate: signal.Signals) -> None:
    """The agent dies or hangs while the driver refuses to enable channels."""
    tenant = node.add("limited", limit=0.02)  # its channels are disabled for nearly all of the time
    tenant.begin(2)
    (keeper,) = wait_for(node.keepers)
    assert node.agent is not None
    agent = node.agent.pid
    wait_for(lambda: node.got()["limited"], what="it has run for a window")
    refusals.refuse("enable")
    wait_for(lambda: "enable" in refusals.by(agent), what="its channels stay disabled")
    node.agent.send_signal(fate)
    wait_for(lambda: len(refusals.by(keeper)) > 2, what="some attempts of the keeper")
    refusals.refuse()
    tenant.result()
    node.agent.send_signal(signal.SIGCONT)
