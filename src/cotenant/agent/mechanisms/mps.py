"""mps: tenants run at once under NVIDIA's Multi-Process Service, each with part of the SMs. Owns a daemon per GPU."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.mechanisms.base import By, Capabilities, Enforcement, Mechanism, ShareSpec, Use
from cotenant.core.errors import WorkError
from cotenant.devices.base import Gpu
from cotenant.devices.registry import device_of

PATIENCE_S = 20
CLIENT_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"  # 0 normal, 1 below: a hint to the server, without preemption


@dataclass
class _Daemon:
    pipe: Path
    log: Path
    tenants: set[str]


class Mps(Mechanism):
    """An MPS control daemon per GPU, started with the first tenant there and quit after the last."""

    name = "mps"
    uses = frozenset({Use.TENANT, Use.SERVICE, Use.JOB, Use.PROFILE})
    capabilities = Capabilities(
        compute="at most limit percent of the SMs; the request is not enforced, and memory bandwidth and caches are"
        " shared by all",
        memory="capped by the shim per tenant; MPS's own pinned limit backs it per process",
        resize="an SM percentage is fixed once a process has connected: a new one is for processes started later",
        isolation="address spaces are apart, faults are not: a client killed inside a kernel or a fatal GPU error"
        " can take every client of the server with it; one server serves one user",
        sms_by=By.DRIVER,
        memory_by=By.SHIM,
        faults_by=By.NOTHING,
        concurrent=True,
        notes=(
            "the percentage travels in the environment: a tenant that changes it before its first CUDA call has"
            " what it sets, up to the server's default",
            "needs nvidia-cuda-mps-control; on the software GPU tenants run at once without it",
        ),
    )

    def __init__(self, folder: Path, command: str = "nvidia-cuda-mps-control") -> None:
        super().__init__(folder)
        self._command = command
        self._daemons: dict[str, _Daemon] = {}
        self._ending: dict[str, threading.Thread] = {}  # UUID -> whoever waits for its daemon's end
        self._starting = threading.Lock()

    def prepare(self, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism: the start of a daemon takes from 10 ms to PATIENCE_S."""
        if len(gpus) == 1 and device_of(gpus[0]).mps:
            self._daemon_of(gpus[0])

    def settle(self, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
        for gpu in gpus:
            daemon = self._daemons.get(gpu.uuid)
            if daemon is not None and not daemon.tenants:
                self._quit(gpu.uuid)

    def _daemon_of(self, gpu: Gpu) -> _Daemon:
        with self._starting:
            return self._daemons.get(gpu.uuid) or self._start(gpu)

    def grant(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> Enforcement:
        """See Mechanism."""
        if len(gpus) != 1:
            raise WorkError("mps gives a tenant one GPU; start one tenant per GPU")
        gpu = gpus[0]
        if not device_of(gpu).mps:  # processes run at once without a daemon; the memory limit is the shim's alone
            return Enforcement({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{spec.limit * 100:g}"}, SlotFlag.UNGATED)
        daemon = self._daemon_of(gpu)
        daemon.tenants.add(spec.name)
        environment = {
            # the daemon shows its one GPU as number 0; frameworks that count GPUs through NVML would see all there are
            "CUDA_VISIBLE_DEVICES": "0",
            "CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(daemon.log),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{spec.limit * 100:g}",
            CLIENT_PRIORITY: "0" if spec.priority >= 0 else "1",
        }
        if spec.memory_bytes is not None:
            environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, spec.memory_bytes >> 20)}M"
        return Enforcement(environment, SlotFlag.UNGATED, below={CLIENT_PRIORITY: "1"})

    def resize(self, spec: ShareSpec, gpus: tuple[Gpu, ...]) -> str:
        """See Mechanism."""
        return "memory at once, the SM percentage for processes started from now on"

    def revoke(self, name: str, gpus: tuple[Gpu, ...]) -> None:
        """See Mechanism."""
        for gpu in gpus:
            daemon = self._daemons.get(gpu.uuid)
            if daemon is None:
                continue
            daemon.tenants.discard(name)
            if not daemon.tenants:
                self._quit(gpu.uuid)

    async def watch(self, lost: Callable[[str, str], None]) -> None:
        """See Mechanism: the clients of a server that dies end with an error."""
        from cotenant.agent.mechanisms.mps_watch import MpsWatch  # not for commands that only list mechanisms

        def died(uuid: str) -> None:
            text = f"the MPS server of GPU {uuid} has died: programs on it have lost their GPU and must start again"
            lost(uuid, text)

        await MpsWatch(self, died).run()

    def close(self) -> None:
        """Quit every daemon, and wait for their ends."""
        for uuid in list(self._daemons):
            self._quit(uuid)
        for uuid in list(self._ending):
            self.await_end(uuid)

    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that have a daemon now."""
        return tuple(self._daemons)

    def ask(self, uuid: str, order: str) -> str:
        """What the daemon of a GPU answers. WorkError when there is none, or it does not."""
        daemon = self._daemons.get(uuid)
        if daemon is None:
            raise WorkError(f"GPU {uuid} has no MPS daemon of this agent")
        return self._tell(daemon, order)

    def _answers(self, daemon: _Daemon) -> bool:
        try:
            self._tell(daemon, "get_server_list")
        except WorkError:
            return False
        return True

    def _environment(self, daemon: _Daemon, uuid: str) -> dict[str, str]:
        return os.environ | {
            "CUDA_VISIBLE_DEVICES": uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(daemon.log),
        }

    def _start(self, gpu: Gpu) -> _Daemon:
        self.await_end(gpu.uuid)
        # a socket path may hold about 100 bytes, and the daemon adds its own names
        folder = self.folder / f"mps-{gpu.uuid[-12:]}"
        daemon = _Daemon(folder / "pipe", folder / "log", set())
        left_behind = daemon.pipe.exists()
        for path in (daemon.pipe, daemon.log):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if left_behind and self._answers(daemon):
            # the daemon of an agent that was killed serves its tenants still: take it over
            self._daemons[gpu.uuid] = daemon
            return daemon
        try:
            done = subprocess.run(
                [self._command, "-d"],
                env=self._environment(daemon, gpu.uuid),
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except FileNotFoundError:
            raise WorkError(f"mps: {self._command} is not installed on this machine") from None
        except subprocess.TimeoutExpired:
            raise WorkError(f"mps: {self._command} -d did not return within {PATIENCE_S} s") from None
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise WorkError(f"mps: the control daemon did not start: {said[-1] if said else done.returncode}")
        self._daemons[gpu.uuid] = daemon
        try:
            self._tell(daemon, "get_server_list")
        except WorkError:
            self._quit(gpu.uuid)
            raise
        return daemon

    def _tell(self, daemon: _Daemon, order: str) -> str:
        environment = os.environ | {
            "CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(daemon.log),
        }
        try:
            done = subprocess.run(
                [self._command],
                input=order + "\n",
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WorkError(f"mps: the control daemon does not answer {order!r}: {error}") from None
        if done.returncode != 0:
            raise WorkError(f"mps: the control daemon refused {order!r}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def _quit(self, uuid: str) -> None:
        """End a daemon, in a thread: a server that does not end takes seconds, and others wait for their turns."""
        thread = threading.Thread(target=self._end, args=(self._daemons.pop(uuid),), name="mps-quit", daemon=True)
        self._ending[uuid] = thread
        thread.start()

    def _end(self, daemon: _Daemon) -> None:
        for order in ("quit -t 5", "quit"):
            try:
                self._tell(daemon, order)
                return
            except WorkError:
                continue  # after the second: it has died by itself, which is what was wanted

    def await_end(self, uuid: str) -> None:
        """Return once the daemon of a GPU that was told to quit has ended."""
        ending = self._ending.pop(uuid, None)
        if ending is not None:
            ending.join()
