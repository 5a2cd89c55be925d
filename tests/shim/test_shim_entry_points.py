"""How programs reach the shim: names, versions, flags, library names, and what they get when there is no agent."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_agent import FakeAgent
from native_sources import SHIM, compile_c, exports, listed_exports
from shim_tenants import Tenants

from cotenant.abi.protocol import MessageType
from cotenant.native.environment import tenant_environment

PRELUDE = "from cuda_calls import *\n"
Agents = Callable[..., FakeAgent]


@pytest.mark.parametrize("resolve", ["dlsym", "v1", "v2", "ptds"])
def test_every_launch_family_is_seen(tenants: Tenants, agent: Agents, resolve: str) -> None:
    """cuLaunchKernel, Ex, cooperative and one graph launch: 4 launches; two captured ones are not executed."""
    with agent() as broker:
        assert tenants.output(tenants.client_run(broker, resolve, "variants")).strip() == "variants nodes 2"
        client = broker.clients[0]
        assert client.slot().launches == 4  # all launches, including those of graphs
        assert client.slot().graph_launches == 1  # launches of graphs


def test_addresses_are_replaced_by_what_the_driver_returned(tenants: Tenants, agent: Agents) -> None:
    """The same name at two versions is two functions; wrapped ones lead into the shim, others to the driver."""
    script = PRELUDE + (
        "import ctypes, os\n"
        "driver = ctypes.CDLL(os.environ['COTENANT_DRIVER'])\n"
        "def ask(name, version, flags=0):\n"
        "    p, status = c_void_p(), c_int()\n"
        "    cu('cuGetProcAddress_v2', name, byref(p), version, c_uint64(flags), byref(status)); return p.value\n"
        "def ask_v1(name, version, flags=0):\n"
        "    p = c_void_p(); cu('cuGetProcAddress', name, byref(p), version, c_uint64(flags)); return p.value\n"
        "def of(lib, name): return ctypes.cast(getattr(lib, name), c_void_p).value\n"
        "for get in (ask, ask_v1):\n"
        "    assert get(b'cuLaunchKernel', 4000) == of(library, 'cuLaunchKernel') != of(driver, 'cuLaunchKernel')\n"
        "    assert get(b'cuLaunchKernel', 7000, 2) == of(library, 'cuLaunchKernel_ptsz')\n"
        "    assert get(b'cuMemAlloc', 3020) == of(library, 'cuMemAlloc_v2')\n"
        "    assert get(b'cuCtxCreate', 11040) == of(library, 'cuCtxCreate_v2')\n"
        "    assert get(b'cuCtxCreate', 12050) == of(library, 'cuCtxCreate_v4')\n"
        "    assert get(b'cuDeviceGetName', 2000) == of(driver, 'cuDeviceGetName')\n"
        "assert ask(b'cuGetProcAddress', 11030) == of(library, 'cuGetProcAddress')\n"
        "assert ask(b'cuGetProcAddress', 12000) == of(library, 'cuGetProcAddress_v2')\n"
        "p, status = c_void_p(7), c_int(-1)\n"
        "assert raw('cuGetProcAddress_v2', b'cuNoSuchThing', byref(p), 12000, c_uint64(0), byref(status)) == 0\n"
        "assert (p.value, status.value) == (None, 1)\n"
        "assert raw('cuGetProcAddress_v2', b'cuInit', byref(p), 99000, c_uint64(0), byref(status)) == 1\n"
        "print('good')\n"
    )
    with agent() as broker:
        assert tenants.output(tenants.python(broker, script)).strip() == "good"


@pytest.mark.parametrize("name", ["libcuda.so", "libcuda.so.1", "/usr/lib/libcuda.so.1", "/somewhere/libcuda.so.580.1"])
def test_other_names_of_the_driver_lead_to_the_shim(tenants: Tenants, agent: Agents, name: str) -> None:
    with agent() as broker:
        process = tenants.client_run(broker, "v2", "launches", "10", CLIENT_LIBRARY=name)
        assert tenants.output(process).startswith("launches 10")
        assert broker.clients[0].slot().launches == 10


def test_shim_exports_whatever_the_driver_exports(shim_library: Path, soft_library: Path) -> None:
    exported = exports(shim_library)
    assert {name for name in exports(soft_library) if name.startswith("cu")} <= exported
    ours = {"dlopen", "dlsym", "ioctl", "cotenant_memory_of", "cotenant_turn_left_ns"}
    known = listed_exports(SHIM / "driver_exports.inc")
    assert exported == known | ours
    assert len(known) > 700


def test_an_export_that_no_list_has_is_found_in_the_driver(tenants: Tenants, agent: Agents, tmp_path: Path) -> None:
    """A driver newer than the list: dlsym leads to it. What is in the list leads to the shim, as ever; and what is
    in neither is in neither."""
    source, driver = tmp_path / "new.c", tmp_path / "libcuda.so.999"
    source.write_text("int cuBrandNew(void) { return 77; }")
    old = ["-Wl,--no-as-needed", f"-Wl,-rpath={tenants.driver.parent}", tenants.driver]
    compile_c(["-shared", "-fPIC", source, "-o", driver, *old])
    script = PRELUDE + (
        "import ctypes\n"
        "def of(lib, name): return ctypes.cast(getattr(lib, name), ctypes.c_void_p).value\n"
        "start()\n"
        "assert library.cuBrandNew() == 77\n"
        "assert not hasattr(library, 'cuNotEvenThere') and not hasattr(library, 'strange')\n"
        "own = ctypes.CDLL(None)\n"
        "assert of(own, 'cuMemAlloc_v2') == of(library, 'cuMemAlloc_v2')\n"
        "assert not hasattr(own, 'cuBrandNew')\n"
        "print('good')\n"
    )
    with agent() as broker:
        assert tenants.output(tenants.python(broker, script, COTENANT_DRIVER=str(driver))).strip() == "good"


def test_function_the_driver_lacks_gives_an_error_not_a_crash(tenants: Tenants, agent: Agents) -> None:
    """The software GPU lacks cuMulticastCreate and cuMemcpy3DAsync_v2: CUDA_ERROR_NOT_FOUND from both kinds."""
    script = PRELUDE + "start(); print(raw('cuMulticastCreate', None, None), raw('cuMemcpy3DAsync_v2', None, None))"
    with agent() as broker:
        assert tenants.output(tenants.python(broker, script)).strip() == "500 500"


def test_without_an_agent_the_program_is_told_at_once(tenants: Tenants, agent: Agents, tmp_path: Path) -> None:
    """Refused by the agent, or no socket named at all: CUDA_ERROR_SYSTEM_NOT_READY (802) and a sentence."""
    script = PRELUDE + "print(raw('cuInit', 0))"
    with agent(refuse=math.inf) as broker:
        process = tenants.python(broker, script)
        out, err = process.communicate(timeout=60)
        assert out.strip() == "802"
        assert "the agent refused this program: unknown tenant" in err
    with agent() as broker:
        environment = tenant_environment("", "t", tenants.driver)
        del environment["COTENANT_SOCKET"]
        command = [sys.executable, "-c", script]
        process = tenants.start(None, command, **environment, PYTHONPATH=str(Path(__file__).parent))
        out, err = process.communicate(timeout=60)
        assert out.strip() == "802"
        assert "a tenant cannot run without it" in err


def test_process_without_a_token_may_become_known_a_little_later(tenants: Tenants, agent: Agents) -> None:
    """Its launcher tells the agent after it has started it; with a token there is nothing to wait for."""
    with agent(refuse=3) as broker:
        process = tenants.client_run(broker, "v2", "launches", "5", COTENANT_TOKEN="")
        out, err = process.communicate(timeout=60)
        assert out.startswith("launches 5")
        assert err == ""


def test_agent_that_starts_late_is_waited_for(tenants: Tenants, tmp_path: Path) -> None:
    """A tenant may be up before its agent (KubeShare#9)."""
    late: list[FakeAgent] = []
    path = tmp_path / "late.sock"

    target = SimpleNamespace(path=path)
    timer = threading.Timer(0.7, lambda: late.append(FakeAgent(path)))
    timer.start()
    try:
        process = tenants.client_run(target, "v2", "launches", "5")  # type: ignore[arg-type]
        assert tenants.output(process).startswith("launches 5")
    finally:
        timer.join()
        for each in late:
            each.close()


def test_children_that_do_not_use_cuda_pay_nothing(tenants: Tenants, agent: Agents, tmp_path: Path) -> None:
    """No connection, no driver: the software GPU's state file is not even made."""
    with agent() as broker:
        tenants.output(tenants.start(broker, ["/bin/sh", "-c", "echo hello; /bin/true"]))
        assert broker.clients == []
        assert not (tmp_path / "softgpu").exists()


def test_hello_and_attach_say_who_and_what(tenants: Tenants, agent: Agents) -> None:
    with agent() as broker:
        process = tenants.client_run(broker, "v2", "launches", "1")
        tenants.output(process)
        hello = broker.clients[0].of(MessageType.HELLO)[0]
        assert (hello["pid"], hello["driver_version"]) == (process.pid, 13000)
        assert hello.fields["token"].rstrip(b"\0") == b"token"
        assert hello.fields["program"].rstrip(b"\0") == b"client"
        attach = broker.clients[0].of(MessageType.GPU_ATTACH)[0]
        assert attach["total_bytes"] == 4 << 30
        assert attach.fields["name"].rstrip(b"\0") == b"Cotenant Software GPU"
