"""The agent ends each turn in time, although its own work takes time. In virtual time, on a stand-in for the driver."""

from __future__ import annotations

import asyncio
import ctypes
import random
import struct
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_loop import VirtualLoop

from cotenant.agent.slices import enforcer
from cotenant.agent.slices.enforcer import SliceEnforcer
from cotenant.agent.slices.groups import SessionGroups
from cotenant.agent.slices.lateness import Lateness
from cotenant.devices.channel_groups import (
    DISABLE_CHANNELS,
    GET_SLICE,
    SET_SLICE,
    SOFT_USAGE,
    ChannelControls,
    ChannelGroup,
)
from cotenant.devices.meters import ControlMeter
from cotenant.policy.shares import Share

UUID = "GPU-0"
PERIOD_S = 0.1
# the agent's own work and the calls that one wake-up makes: two stops, two goes and a reading take less
LATEST_S = 0.006


class Card:
    """Two tenants that always have work, and what the driver was told, at which time. Each call takes a drawn time."""

    def __init__(self, loop: VirtualLoop, draw: random.Random) -> None:
        self.loop, self.draw = loop, draw
        self.slices: dict[int, int] = {}
        self.off: dict[int, bool] = {}
        self.switched: list[tuple[float, int, bool]] = []  # time in s, channel, whether it was disabled
        self.busy_ns: dict[int, int] = {}
        self._read_s = 0.0

    def now_ns(self) -> int:
        """The agent's clock: between two readings of it, the agent has worked."""
        self.loop.now_s += self.draw.uniform(0, 200e-6)
        return round(self.loop.now_s * 1e9)

    def ioctl(self, fd: int, request: int, order: bytearray) -> int:
        self.loop.now_s += self.draw.uniform(100e-6, 800e-6)
        _, target, command, _, address, size, _ = struct.unpack("=IIIIQII", order)
        data = (ctypes.c_char * size).from_address(address)
        if command == SET_SLICE:
            self.slices[target] = int.from_bytes(data.raw, "little")
        elif command == GET_SLICE:
            data[:] = self.slices.get(target, 2048).to_bytes(8, "little")
        elif command == SOFT_USAGE:
            self._account()
            data[:] = struct.pack("=QQQ", self.busy_ns.get(target, 0), 0, 0)
        elif command == DISABLE_CHANNELS:
            self._account()
            channel = struct.unpack_from("=I", data.raw, len(data.raw) - 4 * 64)[0]
            self.off[channel] = bool(data.raw[0])
            self.switched.append((self.loop.now_s, channel, self.off[channel]))
        else:
            raise AssertionError(f"{command:#x}")
        return 0

    def _account(self) -> None:
        """The channels that are on share the time since the last call; group and channel have the same number."""
        took_ns = round((self.loop.now_s - self._read_s) * 1e9)
        self._read_s = self.loop.now_s
        on = [number for number in (1, 2) if not self.off.get(number)]
        for number in on:
            self.busy_ns[number] = self.busy_ns.get(number, 0) + took_ns // len(on)


class Node:
    """Two tenants with 30 % and 70 % of one GPU under the agent's enforcement, in virtual time."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = random.Random(seed)
        self.loop = VirtualLoop(late=lambda: draw.uniform(0, 1e-3))
        self.card = Card(self.loop, draw)
        controls = ChannelControls("software", self.card.ioctl)
        device = SimpleNamespace(channel_controls=lambda: controls, meter=lambda uuid, controls: ControlMeter(controls))
        monkeypatch.setattr(enforcer, "device_of", lambda gpu: device)
        monkeypatch.setattr(enforcer, "_now", self.card.now_ns)
        self.gpu = SimpleNamespace(uuid=UUID)
        self.registry: Any = SimpleNamespace(gpus={UUID: self.gpu}, tenants={})
        self.slices = SliceEnforcer(self.registry, lambda tenant, text: None, lambda gpu, why: pytest.fail(why))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Let the tenants work until `work` has ended."""
        try:
            self.loop.run_until_complete(self._run(work))
        finally:
            self.loop.close()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        spec = SimpleNamespace(best_effort=False, latency_sensitive=False)
        for number, request in ((1, 0.3), (2, 0.7)):  # tenants of several GPUs always run one at a time
            session: Any = object()
            key = (number, number)
            group = ChannelGroup(number, 0, 0, number, (number,))
            mine = SessionGroups(number, {number: number}, {key: group}, {key: UUID})
            self.slices._groups.sessions[session] = mine
            share = Share(request, gang=(UUID, "GPU-1"))
            tenant: Any = SimpleNamespace(
                name=f"t{number}", gpus=(self.gpu,), spec=spec, sessions=[session], share=lambda share=share: share
            )
            self.registry.tenants[tenant.name] = tenant
            self.slices.join(tenant)
        await work


@pytest.mark.parametrize("seed", range(3))
def test_turns_end_in_time_whatever_the_agent_does_when_they_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings of the GPU time fall on all phases of a period within these two minutes, so also on ends of turns."""
    node = Node(seed, monkeypatch)
    node.run(asyncio.sleep(120))
    switched = node.card.switched
    settled = [(at_s % PERIOD_S, at_s) for at_s, channel, off in switched if at_s > 1 and channel == 1 and off]
    assert len(settled) > 1100
    late = {round(at_s, 3): round(phase - 0.03, 4) for phase, at_s in settled if not 0 <= phase - 0.03 < LATEST_S}
    assert late == {}


def test_work_that_holds_up_the_loop_is_measured_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(0, monkeypatch)
    delays = node.slices.lateness.delays(UUID)

    async def work() -> None:
        await asyncio.sleep(20)
        assert delays.sum / sum(delays.counts) < LATEST_S
        assert not caplog.records
        for _ in range(4):
            # 60 ms after the start of a period the second tenant runs until the period's end
            await asyncio.sleep(2 * PERIOD_S - (node.loop.now_s + 0.04) % PERIOD_S)
            node.loop.now_s += 0.09
        await asyncio.sleep(12)
        node.loop.now_s += 0.2
        await asyncio.sleep(1)

    node.run(work())
    counts = dict(zip((*delays.bounds, float("inf")), delays.counts, strict=True))
    assert sum(count for bound, count in counts.items() if bound > 0.03) == 5
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("GPU GPU-0: tenants were stopped or resumed up to 5")
    assert "delays of 20 ms or more: 1;" in first
    assert "delays of 20 ms or more: 4;" in second


def test_delays_are_logged_at_most_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    lateness, ms = Lateness(), 1_000_000
    for second in range(25):
        lateness.acted("GPU-a", second * 1000 * ms, (second * 1000 + 30 + second) * ms)
        lateness.acted("GPU-b", second * 1000 * ms, (second * 1000 + 19) * ms)
        lateness.acted("GPU-b", None, second * 1000 * ms)
        lateness.acted("GPU-b", (second + 1) * 1000 * ms, second * 1000 * ms)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in said] == ["GPU GPU-a"] * 3
    for text, (worst, times) in zip(said, ((30, 1), (40, 10), (50, 10)), strict=True):
        assert f"up to {worst} ms late; delays of 20 ms or more: {times};" in text
    assert (sum(lateness.delays("GPU-a").counts), sum(lateness.delays("GPU-b").counts)) == (25, 25)
