"""The channel probe's reasoning, on made-up cards whose slices are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from cotenant.bench.channels import LINE, PAGE, Slices, interleave, is_linear, other_pages, span_of_all


class MadeUp(Slices):
    """A card whose slice of an address is given by a function; noise of a few percent that repeats."""

    def __init__(self, slice_of: Callable[[int], int]) -> None:
        self.slice_of = slice_of
        self.threshold = self.separation = 0.0
        self.tests = 0

    def times(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        self.tests += len(pairs)
        found = []
        for a, b in pairs:
            noise = (a * 31 + b * 17) % 97
            found.append((2000 if self.slice_of(a) == self.slice_of(b) else 1000) + noise)
        return found


def parity(value: int, mask: int) -> int:
    return (value & mask).bit_count() & 1


def xor_hash(address: int) -> int:
    """16 slices of 1 KiB stretches, linear over bits."""
    masks = (0x2490C00, 0x9243400, 0x4921000, 0x1249800)
    return sum(parity(address, mask) << n for n, mask in enumerate(masks))


def modulo_hash(address: int) -> int:
    """20 slices, by a remainder: carries make it non-linear."""
    return address // 512 % 20


def test_calibration_tells_one_slice_from_two() -> None:
    card = MadeUp(xor_hash)
    found = card.calibrate()
    assert found["separation"] == pytest.approx(2.0, rel=0.06)
    assert 1100 < card.threshold < 2000


def test_nothing_visible_is_seen_as_such() -> None:
    card = MadeUp(lambda address: 0)
    assert card.calibrate()["separation"] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("slice_of", "stretch"), [(xor_hash, 1024), (modulo_hash, 512)])
def test_the_stretch_in_one_slice(slice_of: Callable[[int], int], stretch: int) -> None:
    card = MadeUp(slice_of)
    card.calibrate()
    assert interleave(card) == stretch


def groups_of(slice_of: Callable[[int], int], step: int) -> tuple[MadeUp, list[list[int]]]:
    card = MadeUp(slice_of)
    card.calibrate()
    groups, left = card.groups(range(0, PAGE, step), time.monotonic() + 30)
    assert left == 0
    return card, groups


def test_groups_are_the_slices() -> None:
    _, groups = groups_of(xor_hash, 1024)
    assert len(groups) == 16
    assert {len(group) for group in groups} == {PAGE // 1024 // 16}
    for group in groups:
        assert len({xor_hash(offset) for offset in group}) == 1
    assert span_of_all(groups) <= 64 << 10


def test_a_linear_hash_is_told_from_one_with_carries() -> None:
    _, linear = groups_of(xor_hash, 1024)
    assert is_linear(linear, 1024) == 1.0
    _, carries = groups_of(modulo_hash, 512)
    assert len(carries) == 20
    assert is_linear(carries, 512) < 0.5


def test_other_pages_of_a_linear_hash_have_the_same_groups_under_other_names() -> None:
    card, groups = groups_of(xor_hash, 1024)
    found = other_pages(card, groups, [1, 2, 5])
    assert found["same_here_share_a_slice_there"] == 1.0
    assert found["apart_here_share_a_slice_there"] == 0.0
    assert 0.0 <= found["same_offset_shares_a_slice"] < 1.0


def test_when_time_is_over_the_rest_is_reported() -> None:
    card = MadeUp(xor_hash)
    card.calibrate()
    groups, left = card.groups(range(0, PAGE, LINE), time.monotonic() - 1)
    assert groups == []
    assert left == PAGE // LINE
