"""The turn trace: whole lines, and a disk that is full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotenant.agent.turns.trace import TurnTrace
from cotenant.core.errors import InputError
from cotenant.policy.shares import Ended


def turn(number: int) -> Ended:
    return Ended("GPU-1", "a", number, 100, 200, 250, 7, "released")


def test_every_turn_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    trace = TurnTrace(path)
    trace.turn(turn(1))
    assert trace.flush() == ""
    trace.turn(turn(2))
    trace.close()
    head, first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert head["cotenant_turns"] == 1
    assert first == {
        "gpu": "GPU-1", "tenant": "a", "epoch": 1, "start_ns": 100, "end_ns": 200,
        "quota_ns": 250, "waited_ns": 7, "reason": "released",
    }  # fmt: skip
    assert second["epoch"] == 2


def test_a_file_that_ends_within_a_line_is_gone_on_with_on_the_next(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    for there in ('{"gpu":"GPU-', '{"gpu":"GPU-1"}\n'):
        path.write_text(there)
        trace = TurnTrace(path)
        trace.turn(turn(1))
        trace.close()
        first, *rest = path.read_text().splitlines()
        assert first == there.strip()
        assert [next(iter(json.loads(line))) for line in rest] == ["cotenant_turns", "gpu"]


def test_a_full_disk_is_said_once_and_counted() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    trace = TurnTrace(full)
    trace.turn(turn(1))
    assert "No space left on device" in trace.flush()
    trace._retry_at = 0.0
    trace.turn(turn(2))
    assert trace.flush() == ""  # the same fault is not reported twice
    assert trace.dropped == 2
    trace.close()


def test_the_head_is_written_once_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    trace = TurnTrace(path)
    room = trace._file
    with open("/dev/full", "ab", buffering=0) as trace._file:
        trace.turn(turn(1))
        assert "No space left on device" in trace.flush()
    trace._file, trace._retry_at = room, 0.0
    trace.turn(turn(2))
    trace.close()
    head, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (head["cotenant_turns"], second["epoch"]) == (1, 2)


def test_a_trace_that_cannot_be_opened_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: Is a directory"):
        TurnTrace(tmp_path)
