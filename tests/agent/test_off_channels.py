"""Channels that are taken off the GPU, against a driver that counts how often each was disabled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from cotenant.agent.slices.groups import OffChannels
from cotenant.devices.channel_groups import ChannelControls, ChannelGroup
from cotenant.devices.meters import Held


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
