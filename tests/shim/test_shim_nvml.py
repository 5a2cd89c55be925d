"""What NVML says under the shims: one truth with the driver, whoever asks first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_agent import FakeAgent
from native_sources import NATIVE, exports, listed_exports
from shim_tenants import Tenants

from cotenant.native.environment import tenant_environment
from cotenant.native.libraries import NVML_SHIM, SOFT_NVML, library_path

Agents = Callable[..., FakeAgent]
MIB = 1 << 20
NVML = """
import ctypes, os
from ctypes import byref, c_uint, c_uint64, c_void_p
nvml = ctypes.CDLL(NAME)
assert nvml.nvmlInit_v2() == 0
device = c_void_p(); assert nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(device)) == 0
def memory():
    m = (c_uint64 * 3)(); assert nvml.nvmlDeviceGetMemoryInfo(device, m) == 0
    v2 = (c_uint64 * 5)(2 << 24 | 40); assert nvml.nvmlDeviceGetMemoryInfo_v2(device, v2) == 0
    assert (m[0], m[1], m[2]) == (v2[1], v2[3], v2[4])
    return [value >> 20 for value in m]
"""


@pytest.fixture(scope="module")
def soft_nvml(soft_library: Path) -> Path:
    return library_path(SOFT_NVML)


def start(tenants: Tenants, broker: FakeAgent, soft_nvml: Path, script: str) -> str:
    added = tenant_environment(broker.path, "token", tenants.driver, nvml=soft_nvml)
    return tenants.output(tenants.python(broker, script, **{k: added[k] for k in ("LD_PRELOAD", "COTENANT_NVML")}))


@pytest.mark.parametrize("name", ["libnvidia-ml.so.1", "libnvidia-ml.so", "/usr/lib/libnvidia-ml.so.1"])
def test_nvml_agrees_with_the_driver(tenants: Tenants, agent: Agents, soft_nvml: Path, name: str) -> None:
    """Cap 1000 MiB, context 100, 200 taken: both say total 1000, free 700 (HAMi-core#181: they must not differ)."""
    script = NVML.replace("NAME", repr(name)) + (
        "from cuda_calls import *\nstart(); p = c_uint64(); cu('cuMemAlloc_v2', byref(p), c_size_t(200 << 20))\n"
        "print([v >> 20 for v in mem_info()], memory())\n"
    )
    with agent(memory_limit=1000 * MIB, context_bytes=100 * MIB) as broker:
        assert start(tenants, broker, soft_nvml, script).strip() == "[700, 1000] [1000, 700, 300]"


def test_tool_that_only_asks_nvml_sees_the_tenants_card(tenants: Tenants, agent: Agents, soft_nvml: Path) -> None:
    """No CUDA call at all: as nvidia-smi in a tenant."""
    script = NVML.replace("NAME", "'libnvidia-ml.so.1'") + "print(memory())"
    with agent(memory_limit=1000 * MIB) as broker:
        assert start(tenants, broker, soft_nvml, script).strip() == "[1000, 1000, 0]"


def test_without_a_cap_nvml_is_left_alone(tenants: Tenants, agent: Agents, soft_nvml: Path) -> None:
    script = NVML.replace("NAME", "'libnvidia-ml.so.1'") + "print(memory(), nvml.nvmlDeviceGetFanSpeed(device, None))"
    with agent() as broker:
        # 13 is NVML_ERROR_FUNCTION_NOT_FOUND
        assert start(tenants, broker, soft_nvml, script).strip() == "[4096, 4096, 0] 13"


def test_nvml_shim_exports_whatever_the_library_exports(soft_nvml: Path) -> None:
    exported = exports(library_path(NVML_SHIM))
    known = listed_exports(NATIVE / "nvml" / "nvml_exports.inc")
    assert known <= exported
    assert {name for name in exports(soft_nvml) if name.startswith("nvml")} <= exported
    assert len(known) > 390
