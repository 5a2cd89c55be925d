"""Certificates by clocks that differ, and the task that renews them."""

from __future__ import annotations

import asyncio
import datetime

from cotenant.kube.admission import certificates
from cotenant.kube.admission.webhook import LiveContext, keep_fresh

NAMES = certificates.server_names("webhook", "ns")
NOW = datetime.datetime.now(datetime.UTC)


def test_certificates_of_a_clock_that_was_ahead_are_replaced() -> None:
    """The API server, whose clock is right, would refuse them for months, and every pod that asks for a share."""
    ahead = certificates.make(NAMES, NOW + datetime.timedelta(days=90))
    assert certificates.fault(ahead, NAMES, NOW).startswith("the certificates are not valid before")
    for minutes in (-4, 4):  # the clocks of a cluster's machines differ
        near = certificates.make(NAMES, NOW + datetime.timedelta(minutes=minutes))
        assert certificates.fault(near, NAMES, NOW) == ""


def test_the_task_that_renews_outlives_a_full_disk() -> None:
    done = asyncio.Event()
    faults = [OSError(28, "No space left on device"), ValueError("not what was expected")]

    def refresh(_: LiveContext) -> bool:
        if faults:
            raise faults.pop()
        done.set()
        return True

    async def play() -> None:
        task = asyncio.create_task(keep_fresh(refresh, LiveContext(), 0.0))
        wait = asyncio.create_task(done.wait())
        await asyncio.wait({task, wait}, timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        wait.cancel()

    asyncio.run(play())
    assert done.is_set()
