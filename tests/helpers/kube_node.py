"""A node for tests of the device plugin: an agent, stand-ins for kubelet and API server, and the plugin as a
process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from api_standin import ApiServer
from held_agent import HeldAgent
from kubelet_standin import Kubelet
from pods import Pod, patched
from waiting import wait_for

from cotenant.kube.admission.mutate import mutate


class Node:
    """All components of a node that a pod needs, except containers."""

    def __init__(self, folder: Path, gpus: int = 2, memory_gib: int = 8) -> None:
        self.folder = folder
        agent = folder / "agent"
        agent.mkdir()
        self.agent = HeldAgent(agent, gpus, memory_gib)
        self.kubelet = Kubelet(folder / "kubelet")
        self.api = ApiServer()
        self.plugin: subprocess.Popen[bytes] | None = None
        self._log = open(folder / "plugin.log", "ab")  # noqa: SIM115

    def start_plugin(self, *options: str) -> None:
        """Start the plugin as a process of its own."""
        arguments = [
            "kube", "plugin", "--node=node-a", f"--agent-dir={self.agent.folder}",
            f"--device-plugins={self.kubelet.plugins}",
            f"--pod-resources={self.kubelet.resources / 'kubelet.sock'}", f"--api-server={self.api.url}",
            "--refresh=300ms", "--one-gpu=false", *options,
        ]  # fmt: skip
        code = "import sys; from cotenant.cli.main import main; sys.argv = ['cotenant', *sys.argv[1:]]; main()"
        self.plugin = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=self._log, stdout=self._log)

    def said(self) -> str:
        return (self.folder / "plugin.log").read_text()

    def ready(self, *resources: str, count: int = 1) -> None:
        """Wait until these resources are registered with the kubelet, `count` times each."""
        wanted = resources or ("cotenant.dev/share", "cotenant.dev/memory")

        def there() -> bool:
            assert self.plugin is None or self.plugin.poll() is None, self.said()
            times = all(self.kubelet.registered.count(name) >= count for name in wanted)
            return times and all(self.kubelet.healthy(name) for name in wanted)

        wait_for(there, what=f"{wanted} registered; the plugin said: {self.said()}")

    def schedule(self, pod: Pod, *, webhook: bool = True) -> Pod:
        """Give the kubelet a pod as the scheduler and the webhook would leave it; returns the pod."""
        thing = patched(pod, mutate(pod)) if webhook else pod
        thing["status"] = {"phase": "Pending"}
        self.api.put_pod(thing)
        self.kubelet.admit(thing)
        return thing

    def finish(self, pod: Pod, phase: str = "Succeeded") -> None:
        """End the pod's containers."""
        self.kubelet.remove(pod)
        self.api.put_pod(pod | {"status": {"phase": phase}})

    def held(self) -> dict[str, dict[str, Any]]:
        return self.agent.held()

    def close(self) -> None:
        if self.plugin is not None and self.plugin.poll() is None:
            self.plugin.terminate()
            try:
                self.plugin.wait(10)
            except subprocess.TimeoutExpired:
                self.plugin.kill()
        self.kubelet.stop()
        self.api.close()
        self.agent.close()
        self._log.close()
