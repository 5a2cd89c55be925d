"""What one more mechanism costs: its file (tests/helpers/told_mechanism.py) and its line in the registry.

With these two it is in every list, runs a tenant on the software GPU, and a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from told_mechanism import Told
from waiting import wait_for

from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.mechanisms import registry
from cotenant.agent.mechanisms.base import Use
from cotenant.core.errors import InputError, WorkError
from cotenant.devices.base import Gpu
from cotenant.fleet.jobs import JobSpec, check_spec
from cotenant.serving.config.services import parse_services
from cotenant.serving.worker import WorkerSpec
from cotenant.serving.workers.devices import Devices

HELPERS = Path(__file__).parent.parent / "helpers"
ROW = (
    f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n"
    + """
from cotenant.agent.mechanisms import registry
from told_mechanism import Told
registry.MECHANISMS[Told.name] = Told
"""
)
AGENT = ROW + "import runpy; runpy.run_module('cotenant.agent', run_name='__main__')"
COMMAND = ROW + "from cotenant.cli.main import main; main()"
PROGRAM = """
import ctypes, json, os
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory, name = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(96)
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0), cuda.cuDeviceGetName(name, 96, device),
         cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context),
         cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20))]
print(json.dumps([codes, name.value.decode(), os.environ["TOLD_LIMIT"]]))
"""


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line in the registry."""
    monkeypatch.setitem(registry.MECHANISMS, Told.name, Told)


@pytest.fixture
def folder(short_folder: Path) -> Iterator[Path]:
    """The folder of an agent on a software GPU of its own whose registry has the line."""
    environment = os.environ | {"COTENANT_SOFTGPU_STATE": str(short_folder / "gpu")}
    command = [sys.executable, "-c", AGENT, "--dir", str(short_folder), "--gpus", "soft"]
    agent = subprocess.Popen(command, env=environment)

    def answers() -> bool:
        try:
            ControlClient(short_folder).close()
        except WorkError:
            return False
        return True

    wait_for(answers)
    yield short_folder
    agent.terminate()
    agent.wait(60)


def cotenant(*arguments: str, **variables: str) -> str:
    """Output of the command line with the line in its registry."""
    command = [sys.executable, "-c", COMMAND, *arguments]
    environment = os.environ | {"COLUMNS": "200"} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tenant_runs_under_it(folder: Path) -> None:
    where, state = ("--dir", str(folder)), str(folder / "gpu")
    options = ("--mechanism", "told", "--limit", "40%", "--name", "t")
    out = cotenant("run", *where, *options, "--", sys.executable, "-c", PROGRAM, COTENANT_SOFTGPU_STATE=state)
    assert json.loads(out) == [[0] * 6, "Cotenant Software GPU", "0.4"]
    listed = json.loads(cotenant("ps", "--mechanisms", "--json", *where))["mechanisms"]
    assert listed["told"]["compute"] == "what the programs do"


@pytest.mark.parametrize("command", [("run",), ("infer",), ("profile", "service")])
def test_it_is_in_the_help_of_commands(command: tuple[str, ...]) -> None:
    assert "|told" in cotenant(*command, "--help")


@pytest.mark.usefixtures("row")
def test_it_is_in_every_list(tmp_path: Path) -> None:
    assert all(registry.names(use)[-1] == "told" for use in Use)
    assert "told" in registry.make(tmp_path, Use.TENANT)
    check_spec(JobSpec("j", ("true",), 0.5, mechanism="told"))
    service = {"name": "a", "rate_rps": 1, "slo_ms": 100}
    content = {"gpus": {"count": 1, "model": "H100-80GB"}, "mechanism": "told", "services": [service]}
    assert parse_services(content).mechanism == "told"
    made = Devices("told", 1, lambda: (Gpu("GPU-a", "X", 1, 0),))
    worker = WorkerSpec("w", 0, "X", "25%", 0.25, "told", ())
    assert made.environment(worker) == {"CUDA_VISIBLE_DEVICES": "GPU-a", "TOLD_LIMIT": "0.25"}
    made.close()


def test_without_the_line_it_is_in_none() -> None:
    with pytest.raises(InputError, match="'told' is not one of time, mps"):
        check_spec(JobSpec("j", ("true",), 0.5, mechanism="told"))
