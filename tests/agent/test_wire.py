"""Messages as they are packed and read."""

from __future__ import annotations

from cotenant.abi.protocol import MESSAGE_BYTES, MessageType
from cotenant.agent.ipc import wire


def test_packing_round_trips() -> None:
    data = wire.pack(MessageType.HELLO, {"pid": 7, "token": b"t", "program": b"p" * 63}, sequence=3, slot=2)
    assert len(data) == MESSAGE_BYTES
    head = wire.parse_head(data)
    assert (head.type, head.sequence, head.slot) == (MessageType.HELLO, 3, 2)
    assert wire.fields("hello", data)["pid"] == 7
    grant = wire.fields("token_grant", wire.pack_grant(1, 0, 5, 9, 100, 2))
    assert grant == {"epoch": 9, "deadline_ns": 100, "inflight_allowed_ns": 2}
    reply = wire.pack_memory_reply(1, 0, 5, 1, 2, 3, 4, 6)
    assert wire.fields("memory", reply) == {
        "family": 1, "reservation": 2, "bytes": 3, "used_bytes": 4, "limit_bytes": 6,
    }  # fmt: skip
    assert wire.parse_head(reply).status == 5


def test_a_long_sentence_is_cut_to_fit() -> None:
    data = wire.pack_text(MessageType.ERROR, 1, "ä" * 400)
    text = wire.text_of(wire.fields("text", data)["text"])
    assert text == "ä" * 107
