"""An agent as a real process that reads the cgroups of processes from a file: pid -> contents of /proc/PID/cgroup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import wait_for

from cotenant.agent.ipc.client import ControlClient

SCRIPT = """
import asyncio, json, sys
from pathlib import Path
from cotenant.agent.__main__ import serve
from cotenant.agent.daemon import AgentOptions
from cotenant.devices.base import Gpu, uuid_text
from cotenant.agent.tenants.places import place_in, place_of
from cotenant.agent.owners import slurm_ended

slurm_ended.LOOK_EVERY_S, slurm_ended.PATIENCE_S = 0.1, float(sys.argv[4])
folder, count, memory = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
gpus = tuple(Gpu(uuid_text(bytes([i + 1]) * 16), "Test GPU", memory << 30, i, kind="soft") for i in range(count))

def locate(pid):
    try:
        return place_in(json.loads((folder / "cgroups.json").read_text()).get(str(pid), ""))
    except FileNotFoundError:
        return None

real = sys.argv[5] == "True"
sys.argv = sys.argv[:1]
asyncio.run(serve(AgentOptions(folder, gpus=gpus, tenant_socket=folder / "tenants" / "agent.sock",
    overrides={"gpus": ("soft",)}, socket_mode=0o666 if real else 0o600, locate=place_of if real else locate)))
"""


def uuid_of(index: int) -> str:
    """UUID of the agent's GPU with that index, as text."""
    digits = f"{index + 1:02x}" * 16
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def pod_cgroup(uid: str, container_id: str = "") -> str:
    """Contents of /proc/PID/cgroup of a process in a pod, as systemd and containerd make it."""
    scope = f"/cri-containerd-{container_id}.scope" if container_id else ""
    return f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid.replace('-', '_')}.slice{scope}\n"


class HeldAgent:
    """Agent with `count` GPUs of `memory_gib` GiB, or with the software GPU itself if that is 0; `tenants` is the
    folder a container would have mounted.

    `patience_s`: how long a Slurm job that has ended is held without its epilog. `real_cgroups`: pods and jobs are
    those of this machine, and every user may call.
    """

    def __init__(
        self, folder: Path, count: int = 1, memory_gib: int = 8, patience_s: float = 1e9, *, real_cgroups: bool = False
    ) -> None:
        self.folder, self.tenants = folder, folder / "tenants"
        self.arguments = [str(folder), str(count), str(memory_gib), str(patience_s), str(real_cgroups)]
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        self.log = open(self.folder / "agent.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *self.arguments], stdout=self.log, stderr=self.log, start_new_session=True
        )
        wait_for(self.up, what="the agent listens")

    def up(self) -> bool:
        """Whether the agent answers. AssertionError: it has ended."""
        assert self.process.poll() is None, (self.folder / "agent.log").read_text()
        try:
            self.call("status")
        except Exception:
            return False
        return True

    def call(self, op: str, **order: Any) -> dict[str, Any]:
        with ControlClient(self.folder, timeout_s=60) as client:
            return client.call(op, **order)

    def held(self) -> dict[str, dict[str, Any]]:
        """Held pods by tenant name."""
        return {row["name"]: row for row in self.call("held", kind="pod")["held"]}

    def put(self, text: str, pid: int | None = None) -> None:
        """Make the agent see the process (default: this one) in that cgroup from now on."""
        path = self.folder / "cgroups.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(known | {str(pid or os.getpid()): text}))
        fresh.rename(path)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.log.close()
