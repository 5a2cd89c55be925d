"""What holds a tenant to its memory: the ladder, and why a rung is not the one above."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.core.strength import Strength
from cotenant.policy.memory_limits import Detected, GroupLimit, prospect

BEST = Detected("615.71.09", call=True, cgroup=2, dmem=True, root=True)


def test_kernel_where_all_is_there():
    found = prospect(BEST)
    assert (found.by, found.obstacles) == (Strength.KERNEL, ())


def test_driver_where_the_kernel_does_not_count():
    found = prospect(replace(BEST, dmem=False))
    assert found.by is Strength.DRIVER
    (obstacle,) = found.obstacles
    assert obstacle.startswith(
        "the kernel does not count this GPU's memory (that needs the dmem controller, Linux 6.14): "
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"call": False, "release": "580.159.04"}, "driver 580.159.04 has no memory limits, which need"),
        ({"cgroup": 1}, "control groups here are of version 1"),
        ({"cgroup": 0}, "this system has no control groups"),
        ({"mig": True}, "MIG is on"),
        ({"root": False}, "only root may set the driver's limits"),
        ({"trial": "NVML error 999"}, "a trial limit did not take effect: NVML error 999"),
    ],
)
def test_shim_says_what_is_missing(changed, why):
    found = prospect(replace(BEST, **changed))
    assert found.by is Strength.SHIM
    assert why in found.why
    assert len(found.obstacles) == 1


def test_everything_that_is_missing_is_listed():
    found = prospect(Detected("580", cgroup=1))
    assert [text.split()[0] for text in found.obstacles] == ["driver", "control"]


def test_contents_that_move_are_the_shims():
    assert prospect(BEST, swaps=True).by is Strength.SHIM


def test_another_program_that_limits_groups_is_named_and_changes_nothing():
    found = prospect(replace(BEST, foreign=(GroupLimit(Path("/sys/fs/cgroup/user.slice"), 4 << 30),)))
    assert found.by is Strength.KERNEL
    assert "/sys/fs/cgroup/user.slice: 4.0 GiB" in found.obstacles[0]
