"""The jobs of one node. The class NodeJobs executes the controller's orders, and reports what the jobs do. All state is
in a folder; a later process that opens the folder finds the jobs. With the local executor, the controller's process has
a NodeJobs object for each node. With the Ray executor, each node has an actor with one such object. Uses the standard
library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.core.errors import WorkError
from cotenant.devices.registry import device
from cotenant.fleet.noderuntime.attempt import ENDED, LIMITS_FILE, NEW, ORDER_FILE, Page, runner_command, this_boot
from cotenant.fleet.nodes import PRETEND, NodeSpec
from cotenant.training.contract import Lease, lease_file, read_json, write_json, write_lease

if TYPE_CHECKING:
    from cotenant.fleet.noderuntime.mig_slices import MigSlices

Report = dict[str, Any]
FENCE_FILE = "fence.json"
# a runner locks its attempt's page within this time after its start; later, a page without a lock means that its runner
# is dead
RUNNER_PATIENCE_NS = 10_000_000_000
LOG_CHUNK = 1 << 18


class _Attempt:
    """One attempt to run a job, as the node runtime knows it: the order to start, limits and progress, read from the
    attempt's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order: dict[str, Any] = json.loads((folder / ORDER_FILE).read_text())
        self.limits: dict[str, Any] = read_json(folder / LIMITS_FILE) or {}
        self.page = Page(folder)
        self.starter: subprocess.Popen[bytes] | None = None
        self.progress: dict[str, Any] | None = None
        self.progress_seen = (0, 0)
        self.parked = bool((folder / "parked").exists())

    @property
    def job_dir(self) -> Path:
        return Path(self.order["job_dir"])


class NodeJobs:
    """Executes orders and returns reports. Orders of an older controller, or older than ones already seen, are
    refused.
    """

    def __init__(self, folder: Path, spec: NodeSpec, patience_s: float = 0.0) -> None:
        """Take the node's folder. Raises WorkError if another process holds it for longer than `patience_s`."""
        self.folder, self.spec = folder, spec
        (folder / "attempts").mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder / "node.lock", patience_s)
        fence = read_json(folder / FENCE_FILE) or {}
        self.epoch, self.number = int(fence.get("epoch", 0)), int(fence.get("number", 0))
        self.attempts: dict[str, _Attempt] = {}
        self.slices: MigSlices | None = None  # created for the first job that needs a MIG slice
        for path in sorted((folder / "attempts").iterdir()):
            self._adopt(path)

    def _adopt(self, path: Path) -> None:
        try:
            self.attempts[path.name] = _Attempt(path)
        except (OSError, ValueError):
            # the start of this attempt was interrupted before its runner began, so nothing of it runs
            shutil.rmtree(path, ignore_errors=True)

    # -- orders ---------------------------------------------------------------------------------------------------

    def exchange(self, epoch: int, number: int, orders: list[dict[str, Any]]) -> dict[str, Any]:
        """Execute orders of controller run `epoch` and report on every attempt.

        `number` increases with every call of one controller. An order that arrives after a newer one starts nothing.
        """
        if (epoch, number) <= (self.epoch, self.number):
            return {"refused": self.epoch, "now_ns": time.monotonic_ns(), "results": [], "reports": []}
        if orders or epoch != self.epoch:
            # stored before the orders are executed, so that an older order which arrives later is refused, also if this
            # machine has crashed meanwhile: jobs of a controller that was replaced could otherwise start again here
            self.epoch, self.number = epoch, number
            with contextlib.suppress(OSError):
                write_json(self.folder / FENCE_FILE, {"epoch": epoch, "number": number}, sync=True)
        self.epoch, self.number = epoch, number
        results = [self._carry_out(order) for order in orders]
        reports = [self._report(name, attempt) for name, attempt in list(self.attempts.items())]
        return {"refused": None, "now_ns": time.monotonic_ns(), "results": results, "reports": reports}

    def _carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            return getattr(self, f"_do_{order['do']}")(order) or {}
        except OSError as error:
            return {"error": f"{error.filename or self.folder}: {(error.strerror or str(error)).lower()}"}
        except Exception as error:  # an order that fails must not affect the other orders
            return {"error": str(error) or repr(error)}

    # -- orders ----------------------------------------------------------------------------------------------------

    def _do_start(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start an attempt to run a job, unless the attempt exists. Raises WorkError after the end of its lease: the
        order was delayed so long that the job may run elsewhere.
        """
        name = order["attempt"]
        if name in self.attempts:
            return {}
        if time.monotonic_ns() >= order["until_ns"]:
            raise WorkError("the order to start arrived after the end of the lease")
        folder = self.folder / "attempts" / name
        folder.mkdir()
        try:
            Path(order["job_dir"]).mkdir(parents=True, exist_ok=True)
            page = Page(folder, create=True)
            for field, value in (
                ("boot", this_boot()),
                ("created_ns", time.monotonic_ns()),
                ("until_ns", order["until_ns"]),
                ("grace_ns", int(order["grace_s"] * 1e9)),
                ("phase", NEW),
            ):
                page.set(field, value)
            page.close()
            limits = self._limits(order["cpus"], order["memory_bytes"])
            write_json(folder / LIMITS_FILE, limits)
            environment = self._environment(order) | self._slice(order)
            full = order | {"environment": environment, "agent": self.spec.agent}
            write_json(folder / ORDER_FILE, full)
            attempt = _Attempt(folder)
            self._lease(attempt, attempt.limits)
            attempt.starter = self._spawn(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.attempts[name] = attempt
        return {}

    def _spawn(self, folder: Path) -> subprocess.Popen[bytes]:
        with open(folder / "runner.err", "wb") as errors:
            return subprocess.Popen(
                runner_command(folder), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
            )

    def _do_stop(self, order: dict[str, Any]) -> None:
        attempt = self.attempts.get(order["attempt"])
        if attempt is None or attempt.page.get("phase") == ENDED:
            return
        if order.get("grace_s") is not None:
            attempt.page.set("grace_ns", int(order["grace_s"] * 1e9))
        if order.get("why") != "cancel":
            self._lease(attempt, attempt.limits, stop=True)
        attempt.page.set("stop", 1)
        _wake(attempt)

    def _do_extend(self, order: dict[str, Any]) -> None:
        for name in order["attempts"]:
            attempt = self.attempts.get(name)
            if attempt is not None and not attempt.page.get("stop") and attempt.page.get("phase") != ENDED:
                attempt.page.set("until_ns", order["until_ns"])
                self._lease(attempt, attempt.limits)

    def _do_resize(self, order: dict[str, Any]) -> None:
        attempt = self.attempts.get(order["attempt"])
        if attempt is None or attempt.page.get("phase") == ENDED:
            return
        attempt.limits = {}  # so that the attempt's own cores count as free when its new cores are chosen
        attempt.limits = self._limits(order["cpus"], order["memory_bytes"])
        write_json(attempt.folder / LIMITS_FILE, attempt.limits)
        self._lease(attempt, attempt.limits, stop=bool(attempt.page.get("stop")))
        _wake(attempt)

    def _do_park(self, order: dict[str, Any]) -> dict[str, Any]:
        from cotenant.fleet.noderuntime.tenancy import park

        attempt = self.attempts[order["attempt"]]
        answer = park(attempt.order, self.spec.agent)
        (attempt.folder / "parked").touch()
        attempt.parked = True
        return answer

    def _do_resume(self, order: dict[str, Any]) -> dict[str, Any]:
        from cotenant.fleet.noderuntime.tenancy import resume

        attempt = self.attempts[order["attempt"]]
        answer = resume(attempt.order, self.spec.agent)
        (attempt.folder / "parked").unlink(missing_ok=True)
        attempt.parked = False
        return answer

    def _do_forget(self, order: dict[str, Any]) -> None:
        """Delete the folders of attempts that have ended, after the controller has committed that they have ended."""
        for name in order["attempts"]:
            attempt = self.attempts.get(name)
            if attempt is not None and attempt.page.get("phase") == ENDED:
                if attempt.starter is not None:
                    attempt.starter.poll()
                del self.attempts[name]
                attempt.page.close()
                shutil.rmtree(attempt.folder, ignore_errors=True)

    def _do_port(self, order: dict[str, Any]) -> dict[str, Any]:
        """A free TCP port on this node, by which the ranks of a gang find each other."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return {"port": probe.getsockname()[1]}

    # -- parts of them ---------------------------------------------------------------------------------------------

    def _environment(self, order: dict[str, Any]) -> dict[str, str]:
        gpus, kinds = order["gpus"], {gpu.uuid: gpu.kind for gpu in self.spec.gpus}
        kind = kinds.get(gpus[0]["uuid"], PRETEND) if gpus else PRETEND  # all GPUs of a node are of the same kind
        visible = {"CUDA_VISIBLE_DEVICES": ""}
        if kind != PRETEND:
            visible = device(kind).environment(g["instance"] or g["uuid"] for g in gpus)
        own = {
            "COTENANT_JOB": order["job"],
            "COTENANT_JOB_DIR": order["job_dir"],
            "COTENANT_ATTEMPT": str(order["n"]),
            "COTENANT_CPUS": f"{order['cpus']:g}",
            "COTENANT_MEMORY_BYTES": str(order["memory_bytes"]),
            "COTENANT_GPUS": ",".join(g["uuid"] for g in gpus),
            "COTENANT_NODE": self.spec.name,
        }
        given: dict[str, str] = order["environment"]
        return dict(os.environ) | own | visible | given

    def _slice(self, order: dict[str, Any]) -> dict[str, str]:
        """Create the MIG slice that an order to start asks for; returns the environment of processes on that slice."""
        share = order["gpus"][0] if order["gpus"] else {}
        instances = bool(share) and mechanisms.find(share["mechanism"]).capabilities.instances
        if not instances or share.get("instance") is not None:
            return {}
        from cotenant.fleet.noderuntime.mig_slices import MigSlices

        self.slices = self.slices or MigSlices(self.folder / "mps")
        for name, attempt in self.attempts.items():  # attempts that have ended release their instances first
            if attempt.page.get("phase") == ENDED:
                self.slices.leave(name)
        return self.slices.environment(order["attempt"], share)

    def _limits(self, cpus: float, memory_bytes: int) -> dict[str, Any]:
        """Limits of an attempt on this node. It is pinned to free cores: `cpus` rounded down, but at least one."""
        limits: dict[str, Any] = {"cpus": cpus, "granted_bytes": memory_bytes}
        if self.spec.cores:
            taken = {core for attempt in self.attempts.values() for core in attempt.limits.get("cores", ())}
            free = [core for core in self.spec.cores if core not in taken]
            # a job with less than one core may share a core with other jobs
            limits["cores"] = (free or list(self.spec.cores))[: max(1, int(cpus + 1e-6))]
        if self.spec.enforce_memory and memory_bytes > 0:
            limits["memory_bytes"] = memory_bytes
        return limits

    def _lease(self, attempt: _Attempt, limits: dict[str, Any], *, stop: bool = False) -> None:
        order, until_ns = attempt.order, attempt.page.get("until_ns")
        ranks = order["ranks"]
        for rank in ranks:
            lease = Lease(
                cpus=limits["cpus"] / len(ranks),
                memory_bytes=int(limits["granted_bytes"] / len(ranks)),
                stop=stop,
                until_s=until_ns / 1e9 if until_ns else None,
                attempt=order["n"],
            )
            _write_lease(attempt.job_dir, rank["rank"], lease)

    # -- reports ---------------------------------------------------------------------------------------------------

    def _report(self, name: str, attempt: _Attempt) -> Report:
        page = attempt.page
        phase = page.get("phase")
        if phase != ENDED and self._runner_gone(attempt):
            phase = ENDED
        self._read_progress(attempt)
        return {
            "attempt": name,
            "phase": phase,
            "started_ns": page.get("started_ns"),
            "stopping_ns": page.get("stopping_ns"),
            "ended_ns": page.get("ended_ns"),
            "until_ns": page.get("until_ns"),
            "stop": page.get("stop"),
            "cpus": attempt.limits.get("cpus"),
            "memory_bytes": attempt.limits.get("granted_bytes"),
            "parked": attempt.parked,
            "exit": page.exit() if phase == ENDED else None,
            "progress": attempt.progress,
        }

    def _runner_gone(self, attempt: _Attempt) -> bool:
        """Whether the runner has died. If so, kill the processes that it left, and end the attempt as lost."""
        page = attempt.page
        if attempt.starter is not None:
            if attempt.starter.poll() is None:
                return False
        elif page.get("runner_pid") == 0 and 0 <= time.monotonic_ns() - page.get("created_ns") < RUNNER_PATIENCE_NS:
            return False  # the runner may be about to start; a creation time in the future dates from before a reboot
        if not page.lock(wait=False):
            return False
        try:
            if page.get("phase") != ENDED:
                for group in page.groups():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(group, signal.SIGKILL)
                error = "the job's runner was killed" if page.get("runner_pid") else "the job's runner did not start"
                page.end_lost(error, time.monotonic_ns())
        finally:
            page.unlock()
        return True

    def _read_progress(self, attempt: _Attempt) -> None:
        """Read the job's last progress report. Reports of other attempts are ignored."""
        if attempt.order["ranks"][0]["rank"] != 0:
            return
        path = attempt.job_dir / "progress.json"
        with contextlib.suppress(OSError):
            status = path.stat()
            # a second report within one tick of the file system's clock has the same time, but another inode
            seen = (status.st_ino, status.st_mtime_ns)
            if seen != attempt.progress_seen:
                found = read_json(path)
                if found is not None and found.get("attempt") == attempt.order["n"]:
                    attempt.progress = found
                attempt.progress_seen = seen

    def close(self) -> None:
        """Close the pages of all attempts; jobs continue."""
        for attempt in self.attempts.values():
            attempt.page.close()
        self.attempts = {}
        os.close(self._lock)


def _locked(path: Path, patience_s: float) -> int:
    """The lock of a node's folder. Only one process may manage the node's jobs, since two would not see each other's
    changes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise WorkError(f"{path.parent}: another process manages this node's jobs") from None
            time.sleep(0.05)
        else:
            return descriptor


def read_log(path: str, offset: int) -> tuple[bytes, int]:
    """Up to LOG_CHUNK bytes of a log from `offset` (negative: from the end), and the next offset."""
    try:
        with open(path, "rb") as file:
            if offset < 0:
                size = file.seek(0, os.SEEK_END)
                offset = max(0, size + offset)
            file.seek(offset)
            found = file.read(LOG_CHUNK)
    except OSError:
        return b"", max(0, offset)
    return found, offset + len(found)


def _wake(attempt: _Attempt) -> None:
    """Wake the runner of an attempt, so that it reads its page."""
    pid = attempt.page.get("runner_pid")
    # the runner with this pid holds the lock, so the pid cannot belong to another process by now
    if pid > 0 and attempt.page.runner_lives():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)


def _write_lease(folder: Path, rank: int, lease: Lease) -> None:
    """Write a rank's lease file. On a full disk, overwrite the old file in place, since its block is allocated."""
    try:
        write_lease(folder, rank, lease)
    except OSError:
        import dataclasses

        raw = json.dumps(dataclasses.asdict(lease)).encode()
        with contextlib.suppress(OSError), open(lease_file(folder, rank), "r+b") as file:
            file.write(raw)
            file.truncate()
