"""The real Slurm on this machine: one node on loopback, from Debian's slurm-wlm and munge, as root."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from command import python_for_all
from held_agent import HeldAgent
from ports import reserved_ports
from waiting import wait_for

LONG_S = 240.0  # seconds until a wait is given up; long, because Slurm is slow on a machine that does other work
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
SCRIPTS = Path(__file__).resolve().parents[2] / "deploy" / "slurm"

CONF = """
ClusterName=loop
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=20
BatchStartTimeout=240
MessageTimeout=90
TCPTimeout=60
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
PrologFlags=Alloc,Contain
Prolog={folder}/prolog.sh
Epilog={folder}/epilog.sh
TaskProlog={folder}/task_prolog.sh
ReturnToService=2
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 Gres=gpu:2 State=UNKNOWN
PartitionName=p Nodes=localhost Default=YES OverSubscribe=FORCE:4 State=UP
"""


def missing() -> str:
    """Why Slurm cannot run on this machine; empty if it can."""
    absent = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"{', '.join(absent)} of Slurm and munge are not installed"
    if os.geteuid() != 0:
        return "only root can run a node of Slurm"
    return "" if os.access("/sys/fs/cgroup", os.W_OK) else "cgroups cannot be made here"


class SlurmNode:
    """Slurm's daemons, and an agent with two GPUs that finds jobs by their cgroups in the kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        agent = folder / "agent"
        agent.mkdir(mode=0o755)
        self.agent = HeldAgent(agent, count=2, patience_s=1.0, real_cgroups=True)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] += ":/usr/sbin"
        self.environment.pop("PYTHONPATH", None)
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._reserved = contextlib.ExitStack()
        try:
            self._write(self._reserved.enter_context(reserved_ports(2)))
            self._start()
        except BaseException:
            self.close()
            raise

    def _write(self, ports: list[int]) -> None:
        folder = self.folder
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=ports))
        for name in ("state", "spool", "output"):
            (folder / name).mkdir()
        (folder / "output").chmod(0o777)  # jobs of other users also write there
        for index in range(2):
            os.mknod(folder / f"gpu{index}", 0o020666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"NodeName=localhost Name=gpu File={folder}/gpu[0-1]\n")
        version = "v1" if Path("/sys/fs/cgroup/freezer").is_dir() else "v2"
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/{version}\nCgroupMountpoint=/sys/fs/cgroup\n")
        tool = folder / "cotenant"
        python, self.for_all_users = python_for_all()
        tool.write_text(f'#!/bin/sh\n{python} -m cotenant.cli.main "$@"\n')
        tool.chmod(0o755)
        settings = folder / "slurm.env"
        settings.write_text(f"COTENANT_PATH={folder}:/usr/bin:/bin\nCOTENANT_DIR={self.agent.folder}\n")
        for script in SCRIPTS.glob("*.sh"):
            copy = folder / script.name
            copy.write_text(script.read_text().replace("/etc/cotenant/slurm.env", str(settings)))
            copy.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def _start(self) -> None:
        where = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log",
                 "seed-file": "munge.seed"}  # fmt: skip
        options = [f"--{option}={self.folder / name}" for option, name in where.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        wait_for((self.folder / "munge.sock").exists)
        self._daemon("slurmctld", "-D")
        self.slurmd = self._daemon("slurmd", "-D", "-N", "localhost")
        wait_for(lambda: self.state() == "idle", LONG_S, "the node is idle")

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{command[0]}.out", "ab") as out:
            started = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)
        self._daemons.append(started)
        return started

    def restart_slurmd(self) -> None:
        """Restart slurmd; jobs continue."""
        self.slurmd.terminate()
        self.slurmd.wait(60)
        self.slurmd = self._daemon("slurmd", "-D", "-N", "localhost")

    def call(self, *command: str, check: bool = True) -> str:
        """Run a command of Slurm; returns its output."""
        done = self._run(*command)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=LONG_S, check=False
        )

    def state(self) -> str:
        """The node's state."""
        return self.call("sinfo", "-h", "-o", "%T", check=False).strip()

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch job with one GPU; returns its id. Its output is in `output(id)`."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        said = self.call("sbatch", "--gres=gpu:1", "-o", str(self.folder / "output" / "%j"), *options, str(path))
        found = re.search(r"job (\d+)", said)
        assert found is not None, said
        return found.group(1)

    def run(self, script: str, *options: str) -> str:
        """Run a batch job to its end; returns its output."""
        job = self.submit(script, *options)
        self.ended(job)
        return self.output(job)

    def ended(self, job: str) -> None:
        """Wait for a job's end. A controller that does not answer in time says nothing about the job."""

        def over() -> bool:
            done = self._run("squeue", "-h", "-j", job)
            return "Invalid job id" in done.stderr or (done.returncode == 0 and not done.stdout.strip())

        wait_for(over, LONG_S, f"job {job} ended")

    def held_back(self, job: str) -> bool:
        """Whether a job waits until it is released: its priority is 0."""
        found = self.call("squeue", "-h", "-j", job, "-o", "%T %Q %r", check=False).split(maxsplit=2)
        return found[:1] == ["PENDING"] and (found[1] == "0" or "held" in found[-1].lower())

    def output(self, job: str) -> str:
        """Output of a job."""
        path = self.folder / "output" / job
        return path.read_text() if path.exists() else ""

    def held(self) -> set[str]:
        """Names of the tenants of jobs."""
        return {row["name"] for row in self.agent.call("held", kind="slurm")["held"]}

    def close(self) -> None:
        self.call("scancel", "-u", "root", check=False)
        for daemon in reversed(self._daemons):
            if daemon.poll() is None:
                daemon.terminate()
                daemon.wait(60)
        self.agent.close()
        self._reserved.close()
