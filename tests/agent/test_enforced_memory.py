"""A tenant that demands how strongly its memory is limited, and is refused where nothing is so strong."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from agent_harness import AgentProcess, declare
from command import cotenant
from fake_shim import register
from waiting import wait_for

from cotenant.agent.config.files import Choices, TenantSpec, check_spec
from cotenant.agent.config.schema import parse_config
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.memory_limits.enforcer import MemoryLimits
from cotenant.agent.tenants.registry import Registry, spec_from_dict, spec_to_dict
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError
from cotenant.core.strength import Strength
from cotenant.devices.base import Gpu
from cotenant.policy.memory_limits import Detected

GIB = 1 << 30
GPU = Gpu("GPU-00000000-2222-3333-4444-555555555555", "soft", 16 * GIB, 3, kind="soft")
BEST = Detected("615.71.09", call=True, cgroup=2, dmem=True, root=True)
DRIVER = Detected("615.71.09", call=True, cgroup=2, root=True)
OLD = Detected("580.126.20", cgroup=2, root=True)


def limits(folder: Path, found: Detected) -> tuple[MemoryLimits, list[str]]:
    said: list[str] = []
    return MemoryLimits(folder, Registry((GPU,), {}), lambda _, text: said.append(text), find=lambda _: found), said


def tenant(enforce: str, **more: Any) -> Tenant:
    spec = TenantSpec("a", memory_bytes=8 * GIB, enforce_memory=Strength(enforce), **more)
    return Tenant(spec, (GPU,), "token", 0, Enforcement())


@pytest.mark.parametrize(
    ("found", "enforce", "refused"),
    [
        (BEST, "kernel", ""),
        (BEST, "driver", ""),  # both enforce the limit; the kernel would be the stronger of them
        (DRIVER, "driver", ""),
        (DRIVER, "kernel", "limited by the kernel, which is not possible: memory on GPU 3 is limited by the driver"),
        (OLD, "shim", ""),
        (OLD, "driver", "memory on GPU 3 is limited by the shim: .*driver 580.126.20 has no memory limits"),
    ],
)
def test_a_demand_holds_or_is_refused_with_the_reason(
    tmp_path: Path, found: Detected, enforce: str, refused: str
) -> None:
    mine, _ = limits(tmp_path, found)
    if not refused:
        mine.check(tenant(enforce))
        return
    with pytest.raises(InputError, match=refused):
        mine.check(tenant(enforce))


def test_contents_that_move_are_the_shims_so_the_demand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="as its contents move"):
        limits(tmp_path, BEST)[0].check(tenant("driver", oversubscribe="swap"))


def test_a_group_that_cannot_be_limited_refuses_the_program_or_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COTENANT_SOFTGPU_CGROUPS", raising=False)
    mine, said = limits(tmp_path, BEST)
    with pytest.raises(InputError, match="which is not possible: the driver of GPU 3 has no limits for control groups"):
        asyncio.run(mine.begin(tenant("driver"), os.getpid()))
    assert said == []
    asyncio.run(mine.begin(tenant("shim"), os.getpid()))
    assert said == [
        "the tenant's memory is limited only by the shim in its processes, because the driver of GPU 3 has no limits "
        "for control groups"
    ]


def test_the_file_s_form() -> None:
    def spec_of(memory: Any) -> TenantSpec:
        return parse_config({"tenants": [{"name": "a", "memory": memory}]}, Path("agent.yaml")).tenants[0]

    spec = spec_of({"bytes": "8GiB", "enforce": "driver"})
    assert (spec.memory_bytes, spec.enforce_memory) == (8 * GIB, Strength.DRIVER)
    assert spec_from_dict(spec_to_dict(spec)).enforce_memory is Strength.DRIVER
    assert spec_of("8GiB").enforce_memory is Strength.NOTHING
    spec = spec_of({"bytes": "1GiB..2GiB", "enforce": "kernel"})
    assert (spec.memory_bytes, spec.choices) == (GIB, Choices(memory_bytes=(GIB, 2 * GIB)))
    for memory, said in (
        ({"bytes": "8GiB", "enforce": "luck"}, "'luck' is not one of kernel, driver, hardware, server, shim"),
        ({"bytes": "8", "enforce": "driver"}, "'8' has no unit"),
        ({"bytes": "8GiB"}, "enforce"),
        ({"bytes": "8GiB", "enforce": "driver", "hard": 1}, "unknown setting 'hard'"),
    ):
        with pytest.raises(InputError, match=said):
            spec_of(memory)
    with pytest.raises(InputError, match="a demands enforcement of a memory limit"):
        check_spec(TenantSpec("a", enforce_memory=Strength.SHIM))


def test_an_agent_refuses_and_keeps_nothing(short_folder: Path) -> None:
    text = "tenants:\n  - {name: ada, memory: {bytes: 1GiB, enforce: shim}}\n"
    agent = AgentProcess(short_folder, config=declare(short_folder, text))
    try:
        with agent.client() as launcher:
            with pytest.raises(InputError, match="must be limited by the driver"):
                register(launcher, "bea", limit=None, memory_bytes=GIB, enforce_memory="driver")
            assert [row["name"] for row in launcher.call("list")["tenants"]] == ["ada"]
            register(launcher, "bea", limit=None, memory_bytes=GIB, enforce_memory="shim")
            register(launcher, "ada", limit=None, enforce_memory="shim")
            with pytest.raises(InputError, match="set there how its memory is enforced"):
                register(launcher, "ada", limit=None, enforce_memory="kernel")
    finally:
        agent.close()


def test_a_demand_that_a_new_file_makes_is_refused_where_it_cannot_hold(short_folder: Path) -> None:
    text = "tenants:\n  - {name: ada, memory: {bytes: 1GiB, enforce: shim}}\n"
    agent = AgentProcess(short_folder, config=declare(short_folder, text))
    try:
        with agent.client() as client:
            declare(short_folder, text.replace("shim", "driver"))
            wait_for(lambda: "must be limited by the driver" in client.call("status")["config_fault"], 60)
            assert client.call("status")["config_fault"].endswith("the tenant keeps the share that it has")
            declare(short_folder, text.replace("1GiB", "2GiB"))
            wait_for(lambda: client.call("list")["tenants"][0]["gpus"][0]["memory_limit_bytes"] == 2 * GIB, 60)
            assert client.call("status")["config_fault"] == ""
    finally:
        agent.close()


@pytest.mark.parametrize("memory", ["8", True, 1.5, float("inf"), float("nan"), [1]])
def test_an_order_with_a_wrong_type_of_memory_is_refused(memory: Any) -> None:
    with pytest.raises(InputError, match="which is not a whole number"):
        spec_from_dict({"name": "a", "memory_bytes": memory})
    with pytest.raises(InputError, match="cannot be read"):
        spec_from_dict({"name": "a", "priority": float("inf")})


def test_the_command_names_slips() -> None:
    assert "'1e300' has no unit; write it like 8GiB or 500MB" in cotenant("run", "--memory", "1e300", "--", "true").err
    assert "'luck' is not one of kernel, driver" in cotenant("run", "--enforce-memory", "luck", "--", "true").err
    assert "of a memory limit" in cotenant("run", "--enforce-memory", "shim", "--", "true").err
