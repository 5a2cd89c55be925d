"""Channels that are taken off the GPU, against a driver that counts how often each was disabled."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_slices import Node, node
from waiting import wait_for

from cotenant.agent.slices.groups import OffChannels
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
