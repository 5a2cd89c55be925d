"""The state file of an earlier agent, as it may be found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cotenant.agent.lifecycle.state import load


@pytest.mark.parametrize(
    "change",
    [{"spec": {"name": "b", "enforce_memory": "by-magic"}}, {"spec": {"name": "b", "priority": float("inf")}},
     {"token": None, "processes": [[1]]}, {"moves": {"unknown": 1}}, {"holder": ["pod"]}, {"root": "x"}],
)  # fmt: skip
def test_a_tenant_that_cannot_be_read_takes_no_other_with_it(tmp_path: Path, change: dict[str, Any]) -> None:
    """Left by an agent of another version."""
    good: dict[str, Any] = {"spec": {"name": "a"}, "token": "t", "uid": 1, "root": None, "processes": []}
    file = tmp_path / "state.json"
    file.write_text(json.dumps({"version": 1, "tenants": [good | change, good, 7, None]}))
    assert [saved.spec.name for saved in load(file)] == ["a"]


def test_a_file_that_is_none_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for text in ("", "{", "[]", "7", '{"tenants": 7}', '{"version": 1}'):
        file.write_text(text)
        assert load(file) == []
    assert load(tmp_path / "nowhere") == []
