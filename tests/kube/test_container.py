"""A program in what a container is made of, under the real agent: a pod's cgroup and mounts, the webhook's variables.

A mount namespace stands for the container's file system, a real cgroup for the kubelet's. The GPU is the software GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pods import patched, pod, share
from waiting import wait_for

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import InputError, WorkError
from cotenant.kube import names
from cotenant.kube.admission.mutate import mutate
from cotenant.kube.install import install

SOURCE = Path(__file__).resolve().parents[2] / "src"
ENTER = """
mount -t tmpfs none /opt && mkdir -p /opt/cotenant/lib /opt/cotenant/run &&
mount -o bind,ro "$LIB" /opt/cotenant/lib && mount -o bind,ro "$RUN" /opt/cotenant/run &&
echo $$ > "$GROUP/cgroup.procs" && unset LIB RUN GROUP && exec "$@"
"""


def cgroup(uid: str) -> Path:
    """A pod's cgroup with one container, as the kubelet makes it; skips where none can be made."""
    base = Path("/sys/fs/cgroup/pids" if Path("/sys/fs/cgroup/pids").is_dir() else "/sys/fs/cgroup")
    folder = base / f"cotenant-test-{os.getpid()}" / "kubepods" / "burstable" / f"pod{uid}" / ("ab" * 32)
    try:
        folder.mkdir(parents=True)
    except OSError:
        pytest.skip("cgroups cannot be made here")
    return folder


def remove(folder: Path) -> None:
    for path in (folder, *list(folder.parents)[:4]):
        for _ in range(100):
            try:
                path.rmdir()
                break
            except OSError:
                time.sleep(0.02)


class Host:
    """An agent with the software GPU, and the shim installed as on a node."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cotc-"))
        self.library, self.sockets = self.folder / "lib", self.folder / "tenants"
        install(self.library)
        self.state = self.folder / "gpu"
        self.environment = os.environ | {"PYTHONPATH": str(SOURCE), "COTENANT_SOFTGPU_STATE": str(self.state)}
        arguments = ["--gpus", "soft", "--dir", str(self.folder / "agent")]
        arguments += ["--tenant-socket", str(self.sockets / "agent.sock")]
        (self.folder / "agent").mkdir()
        self.log = open(self.folder / "log", "wb")  # noqa: SIM115
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "cotenant.agent", *arguments], env=self.environment, stderr=self.log, stdout=self.log
        )
        wait_for(lambda: (self.folder / "agent" / "control.sock").exists() and (self.sockets / "agent.sock").exists())

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        with ControlClient(self.folder / "agent") as client:
            return client.call(op, **order)

    def run(self, container: dict[str, Any], group: Path, *command: str, **more: str) -> subprocess.Popen[str]:
        """A process of a container: its variables, its mounts, its cgroup."""
        own = {entry["name"]: entry["value"] for entry in container["env"]}
        own["COTENANT_DRIVER"] += f":{os.environ['TEST_DRIVER']}"  # a place where containers do not have their driver
        base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "COTENANT_SOFTGPU_STATE": str(self.state)}
        base |= {"LIB": str(self.library), "RUN": str(self.sockets), "GROUP": str(group)}
        preload = own.pop("LD_PRELOAD")
        inside = ["env", f"LD_PRELOAD={preload}", *command]  # the shim libraries exist only inside the container
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", ENTER, "sh", *inside], env=base | own | more, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        self.agent.terminate()
        self.agent.wait(60)
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces cannot be made here")
    try:
        from cotenant.native.libraries import SOFT_DRIVER, library_path

        monkeypatch.setenv("TEST_DRIVER", str(library_path(SOFT_DRIVER)))
        found = Host()
    except (InputError, WorkError) as error:
        pytest.skip(f"the shim cannot be built here: {error}")
    yield found
    found.close()


@pytest.mark.slow
def test_a_container_gets_its_pods_share_and_no_other(host: Host) -> None:
    before = pod("train", annotations=share("30%", limit="60%", memory="1Gi"))
    container = patched(before, mutate(before))["spec"]["containers"][0]
    uid = before["metadata"]["uid"]
    gpu = host.call("status")["gpus"][0]["uuid"]
    tenant = {"name": "team/train/main", "request": 0.3, "limit": 0.6, "memory_bytes": 1 << 30, "gpus": [gpu]}
    host.call("hold", kind="pod", id=uid, container="main", tenant=tenant)
    group, stranger = cgroup(uid), cgroup(str(uuid.uuid4()))
    workload = [sys.executable, "-m", "cotenant.bench.workload", "busy"]
    try:
        program = host.run(container, group, *workload)
        out, err = program.communicate("run 3\n", timeout=60)
        assert program.returncode == 0, err
        done = json.loads(out.splitlines()[1])
        share_got = done["busy_ns"] / (done["end_ns"] - done["begin_ns"])
        assert 0.4 < share_got < 0.75, "alone it gets its limit of 60 %, not more"
        row = next(row for row in host.call("list")["tenants"] if row["name"] == "team/train/main")
        assert row["holder"]["id"] == uid
        assert row["launches"] > 0, "its launches went through the shim"

        # another pod with the same variables must not become a tenant
        host.call("expect", kind="pod")
        other = host.run(container, stranger, *workload)
        out, err = other.communicate("run 1\n", timeout=60)
        assert other.returncode != 0
        assert "has no share for this container on this node" in err

        # without the token variable, a process of the pod still belongs to the pod's tenant
        bare = host.run(container, group, *workload, COTENANT_TOKEN="")
        out, err = bare.communicate("run 1\n", timeout=60)
        assert bare.returncode == 0, err
    finally:
        remove(group)
        remove(stranger)


def test_a_container_cannot_write_where_its_shim_lies(host: Host) -> None:
    before = pod("train", annotations=share())
    container = patched(before, mutate(before))["spec"]["containers"][0]
    group = cgroup(before["metadata"]["uid"])
    inside = f"{names.LIBRARIES}/x"
    try:
        program = host.run(container, group, "sh", "-c", f"touch {inside} || rm -f {names.SOCKETS}/agent.sock")
        _, err = program.communicate(timeout=60)
        assert "Read-only file system" in err
        assert (host.sockets / "agent.sock").exists()
    finally:
        remove(group)
