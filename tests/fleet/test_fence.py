"""The node's fence file: which controller's orders are refused, also after a crash of the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cotenant.fleet.noderuntime.nodejobs import FENCE_FILE, NodeJobs
from cotenant.fleet.nodes import NodeSpec
from cotenant.training.contract import Progress, write_progress


def test_the_fence_is_on_disk_before_an_order_is_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of one exchange in their order: syncs with what they reach, the rename, the order."""
    jobs, events = NodeJobs(tmp_path, NodeSpec("n", 8.0, 64 << 30, ())), list[Any]()
    real_sync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append("the folder" if path == tmp_path else json.loads(path.read_text()))
        real_sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append(target.name)
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(NodeJobs, "_carry_out", lambda self, order: events.append(order))
    jobs.exchange(3, 7, [{"do": "port"}])
    assert events == [{"epoch": 3, "number": 7}, FENCE_FILE, "the folder", {"do": "port"}]


def test_what_is_soon_written_again_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("a progress report was synced"))
    write_progress(tmp_path, Progress(1, "running", 5, None, None, 0, None, None, 0.0))
