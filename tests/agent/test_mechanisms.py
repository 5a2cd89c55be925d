"""Mechanisms: what each grants, what each says about itself, and the MPS daemon's life against a stand-in command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.mechanisms.mps import Mps
from cotenant.agent.mechanisms.mps_control import Control
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError, WorkError
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu
from cotenant.softgpu import mps as mps_standin

REAL = Gpu("GPU-11111111-2222-3333-4444-555555555555", "H100", 80 << 30, 0)
SOFT = Gpu("GPU-00000000-2222-3333-4444-555555555555", "soft", 8 << 30, 0, kind="soft")


@pytest.fixture
def mps(tmp_path: Path) -> Iterator[Mps]:
    made = Mps(tmp_path, command=str(mps_standin.install(tmp_path)))
    yield made
    made.close()


def calls(environment: dict[str, str]) -> list[str]:
    return (Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) / "calls").read_text().splitlines()


def answers(mps: Mps) -> bool:
    """Whether there is a daemon for the GPU, and it answers."""
    folder = mps.folder / f"mps-{REAL.uuid[-12:]}"
    assert mps.command is not None
    return REAL.uuid in mps.watched() and Control(mps.command, folder / "pipe", folder / "log", 2).answers()


def test_one_daemon_per_gpu_lives_from_the_first_tenant_to_the_last(mps: Mps) -> None:
    first = mps.grant(TenantSpec("a", limit=0.25, memory_bytes=2 << 30), (REAL,))
    second = mps.grant(TenantSpec("b", limit=0.5, priority=-1), (REAL,))
    assert first.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert first.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert first.environment["CUDA_MPS_CLIENT_PRIORITY"] == "0"
    assert second.environment["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert first.slot_flags == SlotFlag.UNGATED
    assert calls(first.environment) == [f"start {REAL.uuid}", "get_server_list"]
    assert answers(mps)
    mps.revoke("a", (REAL,))
    assert answers(mps)
    mps.revoke("b", (REAL,))
    mps.close()
    assert calls(first.environment)[-1] == "quit -t 5"
    assert not answers(mps)


def test_what_an_older_mps_cannot_enforce_is_said(mps: Mps) -> None:
    assert mps.grant(TenantSpec("a", limit=0.5, memory_bytes=2 << 30), (REAL,)).remarks == ()
    assert mps.grant(TenantSpec("b", request=0.3, weight=2), (REAL,)).remarks == (
        "the tenant's request of 30% is not enforced: MPS reserves SMs from driver release 615 on",
        "the tenant's weight of 2 has no effect: MPS has weights from driver release 620 on",
    )


def test_a_daemon_that_is_slow_to_end_holds_up_nobody_but_the_next_one(mps: Mps) -> None:
    """The agent's one thread gives turns meanwhile; a new daemon on that GPU starts after the old one has ended."""
    environment = mps.grant(TenantSpec("a"), (REAL,)).environment
    pipe = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(pipe / "control"))
        daemon, _ = mps_standin.peer_of(connection)
    (pipe / "slow").touch()
    os.kill(daemon, signal.SIGSTOP)
    mps.revoke("a", (REAL,))
    waiting, called = [thread.name for thread in threading.enumerate()], calls(environment)
    os.kill(daemon, signal.SIGCONT)
    assert ("mps-quit" in waiting, called[2:]) == (True, []), "no caller waits for it"
    mps.grant(TenantSpec("b"), (REAL,))
    assert calls(environment)[2:] == ["quit -t 5", "ended", f"start {REAL.uuid}", "get_server_list"]
    assert answers(mps)


def test_what_is_prepared_is_granted_at_once_and_ended_if_nobody_comes(mps: Mps, tmp_path: Path) -> None:
    """A slow start happens in `prepare`, for which the agent has another thread; two who prepare start one daemon."""
    pipe = tmp_path / f"mps-{REAL.uuid[-12:]}" / "pipe"
    pipe.mkdir(parents=True)
    (pipe / "slow").touch()
    both = [threading.Thread(target=mps.prepare, args=(TenantSpec("a"), (REAL,))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    (pipe / "slow").unlink()
    environment = mps.grant(TenantSpec("a"), (REAL,)).environment
    assert [call for call in calls(environment) if call.startswith("start")] == [f"start {REAL.uuid}"]
    mps.settle(TenantSpec("a"), (REAL,))
    assert answers(mps), "somebody has come"
    mps.revoke("a", (REAL,))
    mps.prepare(TenantSpec("c"), (REAL,))
    mps.settle(TenantSpec("c"), (REAL,))
    mps.close()
    assert not answers(mps)


def test_a_daemon_that_starts_and_does_not_answer_is_ended(mps: Mps, tmp_path: Path) -> None:
    pipe = tmp_path / f"mps-{REAL.uuid[-12:]}" / "pipe"
    pipe.mkdir(parents=True)
    (pipe / "mute").touch()
    with pytest.raises(WorkError, match="refused 'get_server_list'"):
        mps.grant(TenantSpec("a"), (REAL,))
    mps.close()
    assert (pipe / "calls").read_text().splitlines()[-1] == "quit -t 5"


def test_a_daemon_that_died_is_not_healthy_and_close_does_not_mind(mps: Mps) -> None:
    environment = mps.grant(TenantSpec("a"), (REAL,)).environment
    subprocess.run([str(mps.command)], env=os.environ | environment, input="quit\n", text=True, check=True)
    wait_for(lambda: not (Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) / "control").exists())
    assert not answers(mps)
    mps.close()


def test_the_daemon_of_a_killed_agent_is_taken_over(mps: Mps, tmp_path: Path) -> None:
    environment = mps.grant(TenantSpec("a"), (REAL,)).environment
    after = Mps(tmp_path, command=mps.command)
    after.grant(TenantSpec("a"), (REAL,))
    assert calls(environment).count(f"start {REAL.uuid}") == 1
    after.revoke("a", (REAL,))
    after.close()
    assert calls(environment)[-1] == "quit -t 5"


def test_mps_on_the_software_gpu_needs_no_daemon(mps: Mps) -> None:
    given = mps.grant(TenantSpec("a", limit=0.25), (SOFT,))
    assert given.slot_flags == SlotFlag.UNGATED
    assert given.environment == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    mps.revoke("a", (SOFT,))


def test_mps_says_why_it_cannot(mps: Mps, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="one GPU"):
        mps.grant(TenantSpec("a"), (REAL, SOFT))
    with pytest.raises(WorkError, match="is not installed"):
        Mps(tmp_path, command="/no/such/mps").grant(TenantSpec("a"), (REAL,))
    pipe = tmp_path / f"mps-{REAL.uuid[-12:]}" / "pipe"
    pipe.mkdir(parents=True, exist_ok=True)
    (pipe / "refuse").touch()
    with pytest.raises(WorkError, match="already running"):
        mps.grant(TenantSpec("a"), (REAL,))


def test_capabilities_are_honest(tmp_path: Path) -> None:
    told = {name: kind.capabilities for name, kind in mechanisms.MECHANISMS.items()}
    assert told["whole"].exclusive
    assert told["time"].gated
    assert not told["mps"].gated
    assert (told["time"].time_by, told["time"].sms_by) == (Strength.SHIM, Strength.NOTHING)
    assert (told["mps"].time_by, told["mps"].sms_by) == (Strength.NOTHING, Strength.SHIM)
    assert (told["mig"].sms_by, told["mig"].memory_by) == (Strength.HARDWARE, Strength.HARDWARE)
    assert {name for name, row in told.items() if row.live_resize} == {"whole", "time", "slices", "green"}
    assert "fixed when" in told["mps"].resize
    assert "one server serves one user" in told["mps"].isolation
    assert "killed inside a kernel" in told["mps"].isolation
    assert "cannot be stopped" in told["time"].isolation
    assert Mps(tmp_path).resize(TenantSpec("a"), (REAL,)).startswith("memory at once")


@pytest.mark.parametrize(
    ("kind", "below", "priority"),
    [
        ({"best_effort": True}, True, "1"),
        ({"best_effort": True}, False, "0"),
        ({"best_effort": True, "priority": 1}, True, "0"),
        ({"best_effort": True, "priority": -1}, False, "1"),
        ({"latency_sensitive": True}, True, "0"),
        ({}, True, "0"),
    ],
)
def test_a_scheme_puts_best_effort_clients_of_mps_below_others(
    tmp_path: Path, mps: Mps, kind: dict[str, Any], below: bool, priority: str
) -> None:
    registry = Registry([REAL], mechanisms.make(tmp_path, Use.TENANT) | {"mps": mps})
    tenant = registry.admit(TenantSpec("a", mechanism="mps", **kind), 0)
    assert tenant.environment(below=below)["CUDA_MPS_CLIENT_PRIORITY"] == priority
    assert "CUDA_MPS_CLIENT_PRIORITY" not in registry_of_time(tmp_path).environment(below=True)


def registry_of_time(folder: Path) -> Tenant:
    return Registry([REAL], mechanisms.make(folder, Use.TENANT)).admit(TenantSpec("t", best_effort=True), 0)


def test_mechanisms_do_not_mix_on_one_gpu(tmp_path: Path, mps: Mps) -> None:
    registry = Registry([REAL], mechanisms.make(tmp_path, Use.TENANT) | {"mps": mps})
    registry.admit(TenantSpec("a", request=0.2), 0)
    with pytest.raises(InputError, match="shared by time"):
        registry.admit(TenantSpec("b", mechanism="mps"), 0)
    with pytest.raises(InputError, match="unknown mechanism 'magic'; known: time, slices, whole, mps"):
        registry.admit(TenantSpec("b", mechanism="magic"), 0)
    with pytest.raises(InputError, match="a limit needs time or slices or mps"):
        Registry([REAL], mechanisms.make(tmp_path, Use.TENANT)).admit(TenantSpec("c", limit=0.5, mechanism="whole"), 0)


@pytest.mark.parametrize(
    ("use", "document", "written"),
    [
        (Use.TENANT, "commands.md", "--mechanism {}"),
        (Use.PROFILE, "commands.md", "--mechanism {}"),
        (Use.JOB, "commands.md", "mechanism: {}"),
        (Use.SERVICE, "howto/serving.md", "# {}"),
        (Use.SERVICE, "howto/serving-plans.md", "# {}"),
    ],
)
def test_documents_name_the_mechanisms_of_the_list(use: Use, document: str, written: str) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / document).read_text().replace("\\|", "|").replace(" | ", "|")
    assert written.format("|".join(mechanisms.names(use))) in text
