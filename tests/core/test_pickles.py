"""Pickled messages: whole or not at all."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys

import pytest

from cotenant.core import pickles


def test_messages_come_as_they_were_sent() -> None:
    sent: list[object] = [None, {"a": (1, 2)}, b"x" * 100_000]
    stream = io.BytesIO(b"".join(map(pickles.frame, sent)))
    assert [pickles.read(stream) for _ in sent] == sent
    with pytest.raises(EOFError):
        pickles.read(stream)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 12])
def test_a_sender_that_dies_is_an_end(length: int) -> None:
    with pytest.raises(EOFError):
        pickles.read(io.BytesIO(pickles.frame("message")[:length]))


def test_the_asynchronous_form_reads_the_same() -> None:
    async def both() -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(pickles.frame([1]))
        reader.feed_eof()
        found = await pickles.receive(reader)
        with pytest.raises(EOFError):
            await pickles.receive(reader)
        return found

    assert asyncio.run(both()) == [1]


def test_what_a_helper_prints_is_no_message() -> None:
    program = (
        "from cotenant.core import pickles\n"
        "source, write = pickles.take_streams()\n"
        "print('noise')\n"
        "write(pickles.read(source) + 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickles.frame(1), capture_output=True, check=True)
    assert pickles.read(io.BytesIO(done.stdout)) == 2
    assert done.stderr == b"noise\n"
