"""Controls on channel groups against a stand-in for the driver: layouts byte by byte, and what refusals become."""

from __future__ import annotations

import ctypes
import struct

import pytest

from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import ChannelControls, ChannelGroup, refusal

GROUP = ChannelGroup(0xC1D00020, 0x5C000002, 0x5C000003, 0x5C000015, (0x5C00001C, 0x5C000022))


class FakeDriver:
    """Knows one client on one file; keeps what was set."""

    def __init__(self) -> None:
        self.slices = {GROUP.group: 2048}
        self.number = 6
        self.disabled: set[int] = set()
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, fd: int, request: int, order: bytearray) -> int:
        assert request == 0xC020462A  # _IOWR('F', 0x2A, 32 bytes)
        client, target, command, flags, address, size, _ = struct.unpack("=IIIIQII", order)
        assert flags == 0
        if fd != 7:
            raise OSError(9, "Bad file descriptor")
        params = (ctypes.c_char * size).from_address(address)
        self.sizes.append((command, size))
        status = 0x23 if client != GROUP.client else self.control(target, command, params)
        struct.pack_into("=I", order, 28, status)
        return 0

    def control(self, target: int, command: int, params: ctypes.Array[ctypes.c_char]) -> int:
        if command == 0x2080110B:
            assert target == GROUP.subdevice
            disable, count, only, rewind, event = struct.unpack_from("=B3xIBB6xQ", params)
            assert (only, rewind, event) == (0, 0, 0)
            clients = struct.unpack_from("=64I", params, 24)[:count]
            channels = struct.unpack_from("=64I", params, 24 + 256)[:count]
            assert set(clients) == {GROUP.client}
            self.disabled = self.disabled | set(channels) if disable else self.disabled - set(channels)
            return 0
        if command == 0x2080014A:
            assert target == GROUP.subdevice
            text = b"GPU-01010101-0101-0101-0101-010101010101"
            struct.pack_into("=III256s", params, 0, 0, 0, len(text) + 1, text)
            return 0
        if target not in self.slices:
            return 0x57
        if command == 0xA06C0106:
            struct.pack_into("=I", params, 0, self.number)
        elif command == 0xA06C0104:
            struct.pack_into("=Q", params, 0, self.slices[target])
        elif command == 0xA06C0103:
            (self.slices[target],) = struct.unpack_from("=Q", params)
        else:
            return 0x56
        return 0


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def test_a_slice_is_read_and_set(driver: FakeDriver) -> None:
    controls = ChannelControls("580.159.04", driver)
    assert controls.check(7, GROUP) == ""
    assert controls.slice_us(7, GROUP) == 2048
    controls.set_slice(7, GROUP, 30_000)
    assert driver.slices == {GROUP.group: 30_000}
    assert dict(driver.sizes) == {0xA06C0106: 4, 0xA06C0104: 8, 0xA06C0103: 8}


def test_channels_are_taken_off_and_put_on(driver: FakeDriver) -> None:
    controls = ChannelControls("595.45.04", driver)
    controls.disable(7, [GROUP])
    assert driver.disabled == set(GROUP.channels)
    assert driver.sizes == [(0x2080110B, 536)]
    controls.enable(7, [GROUP])
    assert driver.disabled == set()


def test_more_channels_than_one_call_takes(driver: FakeDriver) -> None:
    many = ChannelGroup(GROUP.client, GROUP.device, GROUP.subdevice, GROUP.group, tuple(range(1, 151)))
    ChannelControls("580.1", driver).disable(7, [many])
    assert driver.disabled == set(range(1, 151))
    assert len(driver.sizes) == 3


def test_the_gpu_of_a_group_is_known_by_its_uuid(driver: FakeDriver) -> None:
    assert ChannelControls("580.1", driver).gpu_uuid(7, GROUP) == "GPU-01010101-0101-0101-0101-010101010101"


def test_a_program_that_has_gone_is_a_sentence(driver: FakeDriver) -> None:
    controls = ChannelControls("580.1", driver)
    with pytest.raises(WorkError, match=r"0xa06c0104.*Bad file descriptor"):
        controls.slice_us(8, GROUP)
    with pytest.raises(WorkError, match="status 0x23"):
        controls.slice_us(7, ChannelGroup(1, 2, 3, 4, (5,)))


def test_answers_of_another_layout_are_noticed(driver: FakeDriver) -> None:
    controls = ChannelControls("580.1", driver)
    driver.slices[GROUP.group] = 2048 << 32
    assert "cannot interpret" in controls.check(7, GROUP)
    driver.slices[GROUP.group], driver.number = 2048, 0xFFFFFFFF
    assert "cannot interpret" in controls.check(7, GROUP)
    driver.slices.clear()
    assert "status 0x57" in controls.check(7, GROUP)


@pytest.mark.parametrize("release", ["", "535.54.03", "610.1", "unknown"])
def test_a_release_that_is_not_known_is_refused(release: str) -> None:
    assert "550 to 595" in refusal(release)
    with pytest.raises(WorkError, match="550 to 595"):
        ChannelControls(release)


@pytest.mark.parametrize("release", ["550.120", "580.159.04", "595.45.04", "software"])
def test_known_releases(release: str) -> None:
    assert refusal(release) == ""
