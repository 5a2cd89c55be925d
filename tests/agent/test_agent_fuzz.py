"""Messages that are well formed and mean nothing: whatever a process says, others keep their turns and their memory."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
from agent_harness import AgentProcess, gpu_uuid
from fake_shim import FakeShim, register
from waiting import wait_for

from cotenant.abi.protocol import NO_SLOT, PROTOCOL_MAGIC, PROTOCOL_VERSION, MessageType

GIB = 1 << 30
# values that are mostly wrong for counts, sizes and times
ODD = (0, 1, 2, 7, 8, 9, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62 - 1, 2**62, 2**63, 2**64 - 1)
SPOKEN = [t for t in MessageType if t not in (MessageType.HELLO, MessageType.GOODBYE)]


def odd_message(chance: random.Random) -> bytes:
    """A message with a right header and a body of odd numbers, or of noise."""
    words = [chance.choice(ODD) for _ in range(28)]
    body = struct.pack("=28Q", *words) if chance.random() < 0.7 else chance.randbytes(224)
    kind, slot = chance.choice(SPOKEN), chance.choice((0, 0, 0, 1, 15, 16, NO_SLOT))
    odd = (chance.choice(ODD), 0, slot, chance.choice(ODD))
    head = struct.pack("=IHHQIIQ", PROTOCOL_MAGIC, PROTOCOL_VERSION, kind, *odd)
    return head + body


@pytest.mark.parametrize(("seed", "mode"), [(1, "none"), (2, "swap"), (3, "managed"), (4, "swap")])
def test_odd_messages_hurt_nobody_else(agent: AgentProcess, seed: int, mode: str) -> None:
    """1200 of them by a tenant: none makes the agent fail, nothing of it is left when its processes have gone, and a
    neighbour has its turns, its memory and its answers all the while."""
    chance = random.Random(seed)
    with agent.client() as launcher:
        good = FakeShim(agent.folder, register(launcher, "good", memory_bytes=2 * GIB)["token"])
        good.attach(gpu_uuid(0))
        good.commit(good.reserve(GIB)["reservation"], GIB)
        token = register(launcher, "odd", memory_bytes=GIB // 2, oversubscribe=mode)["token"]
        odd = None
        for number in range(1200):
            if odd is None:
                odd = FakeShim(agent.folder, token)
                with contextlib.suppress(AssertionError):
                    odd.attach(gpu_uuid(0))
            odd.socket.setblocking(False)
            try:
                odd.socket.send(odd_message(chance))
                while number % 7 == 0 and odd.receive(0.0).get("type", 0):
                    pass
            except OSError:
                odd.close()
                odd = None
            if number % 300 == 299:
                if odd is not None:
                    odd.close()
                    odd = None
                good.release(good.take()["epoch"])
                assert good.reserve(0)["used_bytes"] == GIB
        wait_for(lambda: not agent.tenant("odd")["pids"])

        def left() -> tuple[int, bool]:
            share = agent.tenant("odd")["gpus"][0]
            return share["memory_used_bytes"], share["holding"]

        # a turn that waits for memory ends a moment after its processes
        wait_for(lambda: left() == (0, False))
        assert agent.tenant("good")["gpus"][0]["memory_used_bytes"] == GIB
        assert "failed on a message of the process" not in agent.said(), agent.said()[-2000:]
