"""The runner of one attempt to run a job, on one node: starts the attempt's processes, stops them on request or when
the attempt's lease ends, and records how they ended.

Run as `python -I -S runner.py FOLDER` (see `attempt.runner_command`). The runner has a session of its own and depends
on no other process: if the controller, a node's actor and Ray are killed, it still ends its job when the lease ends. If
the runner dies, its processes die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

# the runner is started as a file, so the folder of the package must be added to the module path
if __name__ == "__main__":
    sys.path[0:0] = [os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))]

from pathlib import Path
from typing import Any

from cotenant.fleet.noderuntime import limits
from cotenant.fleet.noderuntime.attempt import ENDED, LIMITS_FILE, ORDER_FILE, RUNNING, STOPPING, Page
from cotenant.fleet.noderuntime.pipelines import fed

WATCH_S = 1.0
READERS_S = 0.5
BESIDE_A_FAILED_S = 2.0  # after a rank of the job has failed, the other ranks may continue for this long
SIGNALS = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
SHELLS = ("ash", "bash", "busybox", "dash", "fish", "ksh", "mksh", "sh", "zsh")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Runner:
    """Runs the processes of a job on this node once, from their start until they have ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order: dict[str, Any] = json.loads((folder / ORDER_FILE).read_text())
        self.page = Page(folder)
        self.libc = ctypes.CDLL(None, use_errno=True)
        # pid -> rank; a rank has several pids if a wrapper script ended before its program
        self.ranks: dict[int, int] = {}
        self.sessions: dict[int, int] = {}  # rank -> session of its processes
        self.codes: dict[int, int] = {}  # rank -> exit code, 128 + N for signal N
        self.first_failed: int | None = None
        # why the attempt must stop: "stop" (the node requested it) or "lease" (the lease has ended); empty: it need not
        # stop
        self.asked = ""
        self.deadline_ns = 0  # time at which all remaining processes get SIGKILL
        self.shells: set[int] = set()  # pids of ranks that were shells when the job was asked to stop
        self.below: dict[int, int] = {}  # pid of each process behind a rank's first -> rank
        # pids of processes that read what others of the job print, and the time at which each gets SIGTERM (0: the
        # others have not ended)
        self.readers: dict[int, int] = {}
        self.piped: set[int] = set()  # ranks with such processes
        self.remind_ns = 0  # time at which SIGTERM is sent to the programs for which shells still wait (`remind`)
        self.oom = self.killed = False
        self.error, self.lost = "", False
        self.cpu_s, self.max_rss_bytes = 0.0, 0
        self.agent: Any = None
        self.cgroup: limits.Cgroup | None = None
        self.limits: dict[str, Any] = {}

    def run(self) -> None:
        """Run the attempt from start to end. Every error here is recorded as the attempt's end."""
        if not self.page.lock(wait=True) or self.page.get("phase") == ENDED:
            return  # the node has already counted this attempt as lost
        if os.fork():
            # the actor that started this process may end it, but not the forked child, which continues with the lock
            os._exit(0)
        # the node sends SIGUSR1 as soon as it knows the pid, and an unblocked one would end this process
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.page.set("runner_pid", os.getpid())
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self.start()
            self.serve()
        except OSError as error:
            self.error = self.error or f"{error.filename or 'the runner'}: {error.strerror or error}"
        except Exception as error:
            self.error = self.error or str(error)
        self.sweep()
        self.finish()

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register the job with the agent, set its limits, and start every rank; if one rank cannot be started, none is
        left running.
        """
        environment = dict(self.order["environment"])
        if self.order.get("agent"):
            from cotenant.fleet.noderuntime.tenancy import enter

            try:
                self.agent, environment = enter(self.order, environment)
            except Exception as error:
                # The job is not the cause: the agent is down, or the GPUs still belong to a job that is about to end.
                self.lost, self.error = True, f"the GPU agent: {error}"
                raise
        self.limits = json.loads((self.folder / LIMITS_FILE).read_text())
        if self.limits.get("memory_bytes"):
            self.cgroup = limits.make_cgroup(f"cotenant-{os.getpid()}")
            if self.cgroup is not None and not self.cgroup.set_memory(self.limits["memory_bytes"]):
                self.cgroup.remove()
                self.cgroup = None
        self.apply_limits()
        for rank in self.order["ranks"]:
            pid = self.spawn(rank, environment | rank["environment"])
            self.ranks[pid], self.sessions[rank["rank"]] = rank["rank"], pid
            self.page.set_groups(list(self.ranks))
            if self.agent is not None:
                self.agent.started(next(iter(self.ranks)))
        self.page.set("started_ns", time.monotonic_ns())
        self.page.set("phase", RUNNING)

    def spawn(self, rank: dict[str, Any], environment: dict[str, str]) -> int:
        """Start one rank; returns its pid. Raises OSError if its program cannot be started."""
        log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        told, tell = os.pipe2(os.O_CLOEXEC)
        parent, command = os.getpid(), self.order["command"]
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)
                os.dup2(null, 0), os.dup2(log, 1), os.dup2(log, 2)
                if self.limits.get("cores"):
                    os.sched_setaffinity(0, self.limits["cores"])
                if self.cgroup is not None:
                    self.cgroup.enter()
                os.chdir(self.order["workdir"])
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.execvpe(command[0], command, environment)
            except OSError as error:
                what = self.order["workdir"] if error.filename == self.order["workdir"] else command[0]
                os.write(tell, f"{error.errno} {what}".encode()[:200])
            finally:
                os._exit(127)
        for fd in (log, null, tell):
            os.close(fd)
        with open(told, "rb") as pipe:
            said = pipe.read().decode(errors="replace")
        if said:
            os.waitpid(pid, 0)
            number, _, what = said.partition(" ")
            self.error = f"{what}: cannot be started: {os.strerror(int(number)).lower()}"
            raise OSError(int(number), self.error)
        return pid

    def apply_limits(self) -> None:
        """Apply the current limits to all running processes."""
        if self.cgroup is not None and self.limits.get("cpus"):
            self.cgroup.set_cpus(self.limits["cpus"])
        if self.limits.get("cores") and self.ranks:
            limits.pin(limits.descendants(os.getpid()), self.limits["cores"])

    # -- running ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Monitor the ranks until every rank has ended."""
        # SIGNALS are blocked: a signal that arrives during the checks is kept, and `sigtimedwait` returns it at once
        while self.ranks:
            now_ns = time.monotonic_ns()
            if self.page.get("stop"):
                self.ask("stop")
            until_ns = self.page.get("until_ns")
            if until_ns and now_ns >= until_ns:
                self.ask("lease")
            if self.deadline_ns and now_ns >= self.deadline_ns:
                self.kill()
            if self.remind_ns and now_ns >= self.remind_ns:
                self.remind()
            self.watch_memory()
            self.ask_readers()
            told = signal.sigtimedwait(SIGNALS, self.patience_s())
            if told is not None and told.si_signo in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self.ask("stop")
            if told is not None and told.si_signo == signal.SIGUSR1:
                self.look()
            self.reap()

    def patience_s(self) -> float:
        """Time until the next deadline or the end of the lease, in seconds."""
        asked = (*self.readers.values(), self.deadline_ns, self.remind_ns)
        due = [ns for ns in (*asked, 0 if self.asked else self.page.get("until_ns")) if ns]
        wait_s = min((max(0.0, (ns - time.monotonic_ns()) / 1e9) for ns in due), default=3600.0)
        return min(wait_s + 0.001, WATCH_S) if self._watches() else wait_s + 0.001

    def look(self) -> None:
        """Read the job's limits on CPU and memory again, and apply those that have changed."""
        with contextlib.suppress(OSError, ValueError):
            new = json.loads((self.folder / LIMITS_FILE).read_text())
            if new != self.limits:
                self.limits = new
                if self.cgroup is not None and new.get("memory_bytes"):
                    self.cgroup.set_memory(new["memory_bytes"])
                self.apply_limits()

    def ask(self, why: str) -> None:
        """Ask the job to stop: SIGTERM only to each rank's first process, whose helpers must live until it has saved
        its state. After the grace time everything is killed.
        """
        if self.asked:
            return
        self.asked = why
        now_ns = time.monotonic_ns()
        self.page.set("stopping_ns", now_ns)
        self.page.set("phase", STOPPING)
        grace_ns = max(0, self.page.get("grace_ns"))
        self.deadline_ns = min(self.deadline_ns or now_ns + grace_ns, now_ns + grace_ns)
        if self.agent is not None:
            self.agent.wake()
        self.shells = {pid for pid in self.ranks if _is_shell(pid)}
        self.below = {pid: rank for first, rank in self.ranks.items() for pid in limits.descendants(first)}
        self.remind_ns = (now_ns + self.deadline_ns) // 2 if self.shells else 0
        for pid in self.ranks:
            _end(pid)

    def ask_behind(self, rank: int, pids: list[int]) -> None:
        """Send SIGTERM to programs behind a shell. Those that read what others print get it READERS_S after these have
        ended: most end by themselves then, and the others would lose what they print, or their lives.
        """
        family = limits.descendants(os.getpid())
        for pid in pids:
            if fed(pid, family):
                self.readers[pid] = 0
                self.piped.add(rank)
            else:
                _end(pid)

    def ask_readers(self) -> None:
        """Send SIGTERM to programs that still run although what they read has ended."""
        family = limits.descendants(os.getpid()) if self.readers else []
        for pid, due_ns in list(self.readers.items()):
            now_ns = time.monotonic_ns()
            if due_ns and due_ns <= now_ns:
                del self.readers[pid]
                _end(pid)
            elif not due_ns and not fed(pid, family):
                self.readers[pid] = now_ns + int(READERS_S * 1e9)

    def remind(self) -> None:
        """Send SIGTERM to the programs for which a rank's shell still waits after half of the grace time. A shell that
        catches SIGTERM does not pass it on, and runs its trap only after the program for which it waits has ended.
        """
        self.remind_ns = 0
        for shell in self.shells & self.ranks.keys():
            self.ask_behind(self.ranks[shell], limits.children(shell))

    def reap(self) -> None:
        """Collect the exit statuses of child processes that have ended."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.cpu_s += usage.ru_utime + usage.ru_stime
            self.max_rss_bytes = max(self.max_rss_bytes, usage.ru_maxrss * 1024)
            if pid not in self.ranks:
                continue
            rank = self.ranks.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
            if self.asked and code == 0 and rank in self.piped and pid in self.shells:
                code = 128 + signal.SIGTERM  # a shell's 0 is the exit status of the last program of its pipeline
            by_signal = code == 128 + signal.SIGTERM
            if self.asked and (by_signal or pid in self.shells) and self._pass_on(rank):
                # The shell's exit status counts as the rank's, unless a program that the shell left behind ends later
                # in another way than by SIGTERM.
                if not by_signal:
                    self.codes[rank] = code
                continue
            if self.readers.pop(pid, None) is not None:
                # it ended because what it read has ended: the exit status of the program that it read from counts
                self.codes.setdefault(rank, 128 + signal.SIGTERM)
                continue
            # If a rank has several processes, one that SIGTERM has ended does not replace the exit status of an earlier
            # one.
            if rank not in self.codes or not by_signal:
                self.codes[rank] = code
            # processes that the rank left in its process group are of no use without the rank
            _kill(-pid, signal.SIGTERM)
            if self.codes[rank] != 0 and self.first_failed is None:
                self.first_failed = rank
                if self.ranks and not self.asked:
                    soon = time.monotonic_ns() + int(BESIDE_A_FAILED_S * 1e9)
                    self.deadline_ns = min(self.deadline_ns or soon, soon)

    def _pass_on(self, rank: int) -> bool:
        """Send SIGTERM to the programs that a wrapper (`sh -c`) left when it ended. They count as the rank from now on
        and have what is left of the grace time; their own child processes get no signal. Returns whether the wrapper
        left any program.
        """
        left = []
        for pid in limits.children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                # a program may have a session of its own (setsid)
                mine = os.getsid(pid) == self.sessions[rank] or self.below.get(pid) == rank
                if pid not in self.ranks and mine:
                    self.ranks[pid] = rank
                    left.append(pid)
        self.ask_behind(rank, left)
        return rank in self.ranks.values()

    def _watches(self) -> bool:
        return bool(self.limits.get("memory_bytes")) and self.cgroup is None

    def watch_memory(self) -> None:
        """End a job that exceeds its memory limit. Only needed without a cgroup."""
        if self._watches() and limits.own_memory_bytes(limits.descendants(os.getpid())) > self.limits["memory_bytes"]:
            self.oom = True
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to every rank and its group."""
        self.killed = True
        for pid in self.ranks:
            _kill(-pid, signal.SIGKILL)
            _kill(pid, signal.SIGKILL)
        # SIGKILL is sent again after 1 s, because a killed shell may have left programs, which then count as its rank
        self.deadline_ns = time.monotonic_ns() + 1_000_000_000

    # -- ending ----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Kill everything that the job started and that became a child of the runner when its parent ended."""
        for pid in self.ranks:
            _kill(-pid, signal.SIGKILL)
        grace_ends = time.monotonic() + (0.0 if self.asked or self.error else 1.0)
        while True:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            if time.monotonic() >= grace_ends:
                for pid in limits.children(os.getpid()):
                    _kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def finish(self) -> None:
        """Record how the attempt to run the job ended."""
        if self.cgroup is not None:
            self.oom = self.oom or self.cgroup.oom_kills() > 0
            self.cgroup.remove()
        if self.agent is not None:
            self.agent.leave()
        code = self.codes.get(self.first_failed, 0) if self.first_failed is not None else 0
        self.page.end(
            {
                "code": 127 if self.error else code,
                "codes": {str(rank): c for rank, c in sorted(self.codes.items())},
                "asked": self.asked,
                "oom": self.oom and bool(code or self.error),
                "killed": self.killed,
                "error": self.error,
                "lost": self.lost,
                "started": bool(self.page.get("started_ns")),
                "cpu_s": round(self.cpu_s, 3),
                "max_rss_bytes": self.max_rss_bytes,
            },
            time.monotonic_ns(),
        )


def _is_shell(pid: int) -> bool:
    """Return whether the program that a process executes is a shell. A shell script is executed by a shell, too."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in SHELLS
    except OSError:
        return False


def _end(pid: int) -> None:
    """Ask a process to end, also one that is stopped."""
    _kill(pid, signal.SIGTERM)
    _kill(pid, signal.SIGCONT)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    Runner(Path(sys.argv[1])).run()
