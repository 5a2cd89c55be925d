"""The table of tenants on terminals of any width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cotenant.cli.top import screen

GIB = 1 << 30


def answer(*names: str) -> dict[str, Any]:
    """An agent with one GPU and these tenants, each with 1.5 of 2 GiB."""
    share = {
        "index": 0, "got": 0.3, "holding": True, "waiting": False, "memory_used_bytes": 3 * GIB // 2,
        "memory_limit_bytes": 2 * GIB, "turns": 1234, "waited_s": 12.5,
    }  # fmt: skip
    tenants = [
        {
            "name": name, "state": "running", "request": 0.3, "limit": 0.6, "gpus": [share], "warnings": [],
            "pids": [4711], "launches": 98765, "graph_launches": 0, "gate_wait_s": 0.0,
        }
        for name in names
    ]  # fmt: skip
    gpu = {
        "index": 0, "name": "H100", "memory_charged_bytes": GIB, "memory_bytes": 80 * GIB, "promised": 0.6,
        "holder": names[0],
    }  # fmt: skip
    agent = {
        "pid": 7, "uptime_s": 60.0, "connections": 2, "turns": 9, "discipline": "window", "quota_ms": 30.0,
        "window_s": 10.0, "gpus": [gpu], "config_fault": None,
    }  # fmt: skip
    return {"agent": agent, "tenants": tenants}


def test_who_takes_no_turns_is_not_called_idle() -> None:
    look = answer("turns", "at-once")
    look["tenants"][0]["gpus"] = [look["tenants"][0]["gpus"][0] | {"holding": False}]
    look["tenants"][1]["gpus"] = [look["tenants"][1]["gpus"][0] | {"holding": False, "got": None}]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(screen(look, sort="", width=200))
    state = {row.split()[0]: row.split()[2] for row in console.export_text().splitlines() if "4711" in row}
    assert state == {"turns": "idle", "at-once": "running"}


def test_who_uses_the_gpu_without_turns_is_not_called_idle() -> None:
    look = answer("used", "unused")
    for tenant, got in zip(look["tenants"], (0.3, 0.0), strict=True):
        tenant["gpus"] = [tenant["gpus"][0] | {"holding": False, "turns": 0, "got": got}]
    rows = {line.split()[0]: line for line in drawn(look).splitlines() if "4711" in line}
    assert ["▶ runs" in rows["used"], " idle " in rows["unused"]] == [True, True]


def test_a_share_is_not_shown_before_a_window_has_passed() -> None:
    look = answer("new")
    look["tenants"][0]["gpus"] = [look["tenants"][0]["gpus"][0] | {"got": None, "measuring": True, "holding": False}]
    (row,) = (line for line in drawn(look).splitlines() if line.startswith("new"))
    assert row.split()[2:9] == ["idle", "30%", "60%", "-", "not", "a", "window"]


def test_a_share_that_is_not_enforced_is_the_state() -> None:
    look = answer("good", "sly")
    look["tenants"][1] |= {"state": "ShareNotEnforced", "not_enforced": [{"text": "it left", "for_s": 3.0}]}
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(screen(look, sort="", width=200))
    (row,) = (line for line in console.export_text().splitlines() if line.startswith("sly"))
    assert "✗ ShareNotEnforced" in row


def drawn(look: dict[str, Any]) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(screen(look, sort="", width=200))
    return console.export_text()


def test_a_share_that_is_short_says_promised_got_and_for_how_long() -> None:
    look = answer("good", "short")
    assert "short for" not in drawn(look)
    look["tenants"][1]["gpus"] = [look["tenants"][1]["gpus"][0] | {"got": 0.12, "short_s": 75.0}]
    assert "short: requests 30% of GPU 0, got 12% in the last window, short for 75 s" in drawn(look)


def test_a_share_that_has_reached_the_request_since_the_agent_looked_is_not_short() -> None:
    look = answer("short")
    look["tenants"][0]["gpus"][0] |= {"got": 0.296, "short_s": 0.5}
    assert "short for" not in drawn(look)
    assert "▼" not in drawn(look)


@pytest.mark.parametrize(
    ("reserved", "most", "seen", "text"),
    [
        (40, 40, 40, "40 SMs reserved"),
        (0, 54, 0, "at most 54 SMs"),
        (0, 54, 52, "at most 52 SMs"),
        (0, 13, 132, "at most 13 SMs"),
        (40, 81, 72, "40 to 72 SMs"),
        (0, 0, 0, "not gated"),
    ],
)
def test_a_tenant_without_turns_shows_its_sms(reserved: int, most: int, seen: int, text: str) -> None:
    look = answer("mps")
    sms = {"reserved": reserved, "at_most": most, "seen": seen}
    look["tenants"][0]["gpus"] = [look["tenants"][0]["gpus"][0] | {"got": None, "sms": sms}]
    assert text in drawn(look)


@pytest.mark.parametrize(("by", "text"), [("kernel", "GiB by kernel"), ("driver", "GiB by driver"), ("shim", "")])
def test_memory_that_kernel_or_driver_limit_says_so(by: str, text: str) -> None:
    look = answer("one")
    look["tenants"][0]["gpus"] = [look["tenants"][0]["gpus"][0] | {"memory_by": by}]
    assert text in drawn(look)
    assert (" by " in drawn(look)) is bool(text)


def test_a_gpu_without_a_turn_says_so() -> None:
    look = answer("one")
    assert "turn of one" in drawn(look)
    look["agent"]["gpus"][0]["holder"] = None
    assert "no turn" in drawn(look)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_names_of_tenants_and_figures_stay_whole(width: int) -> None:
    names = ("serving/recommendation-a", "serving/recommendation-b")
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    console.print(screen(answer(*names), sort="", width=width))
    text = console.export_text()
    rows = [line for line in text.partition("TENANT")[2].splitlines() if line.startswith("serving/")]
    assert [row.split()[0] for row in rows] == list(names)
    assert "…" not in text
    for row in rows:
        assert "30%" in row
    assert ("98,765" in text) == (width == 200)
    assert ("left out at" in text) == (width < 200)
