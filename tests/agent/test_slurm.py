"""Slurm's prolog and epilog: the scripts as Slurm calls them, against an agent."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_shim import FakeShim
from held_agent import HeldAgent, uuid_of
from waiting import wait_for

from cotenant.abi.protocol import MessageType
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.owners import slurm, slurm_ended
from cotenant.agent.owners.owners import Owners
from cotenant.agent.owners.slurm import end, spec_of, start, task_lines
from cotenant.agent.owners.slurm_ended import EndedJobs
from cotenant.agent.tenants.places import Owner
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError, WorkError
from cotenant.core.strength import Strength
from cotenant.softgpu.cgroups import FolderCgroups

SCRIPTS = Path(__file__).resolve().parents[2] / "deploy" / "slurm"
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_GPUS": "0"}
ASKS = JOB | {"SLURM_JOB_COMMENT": "nightly cotenant:request=30%,limit=60%,memory=2GiB"}


@pytest.fixture
def agent() -> Iterator[HeldAgent]:
    found = HeldAgent(Path(tempfile.mkdtemp(prefix="cot-")), count=2)
    yield found
    found.close()


@pytest.fixture
def run(agent: HeldAgent, tmp_path: Path) -> Any:
    """Runs a script as Slurm does: no search path, only Slurm's variables; settings come from root's file."""
    tool = tmp_path / "cotenant"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m cotenant.cli.main "$@"\n')
    tool.chmod(0o755)
    source = str(Path(__file__).resolve().parents[2] / "src")

    settings = tmp_path / "slurm.env"
    settings.write_text(
        f"COTENANT_PATH={tmp_path}:/usr/bin:/bin\nCOTENANT_DIR={agent.folder}\n"
        f"export PYTHONPATH={source}\nCOTENANT_CACHE={tmp_path / 'cache'}\n"
    )

    def call(script: str, environment: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
        copy = tmp_path / script
        copy.write_text((SCRIPTS / script).read_text().replace("/etc/cotenant/slurm.env", str(settings)))
        return subprocess.run(
            ["/bin/sh", copy], env=environment | more, capture_output=True, text=True, timeout=60, check=False
        )

    return call


def tenant_of(name: str) -> Tenant:
    return Tenant(TenantSpec(name), (), "", 0, Enforcement())


def tenants(agent: HeldAgent) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in agent.call("list")["tenants"]}


def test_a_jobs_share_from_prolog_to_epilog(agent: HeldAgent, run: Any) -> None:
    done = run("prolog.sh", ASKS)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"cotenant slurm: slurm-4711 has 30% of {uuid_of(0)}\n"
    row = tenants(agent)["slurm-4711"]
    assert (row["request"], row["limit"], row["gpus"][0]["memory_limit_bytes"]) == (0.3, 0.6, 2 << 30)
    assert row["gpus"][0]["uuid"] == uuid_of(0)

    agent.put("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n")
    shim = FakeShim(agent.tenants)
    assert shim.answer["tenant"].rstrip(b"\0") == b"slurm-4711", "its processes are known by their cgroup"
    shim.close()

    assert run("epilog.sh", JOB).returncode == 0
    assert tenants(agent) == {}
    end(JOB, agent.folder)  # ending it a second time does no harm


def test_tasks_are_started_with_the_shim(agent: HeldAgent, run: Any) -> None:
    start(ASKS, agent.folder)
    done = run("task_prolog.sh", JOB, COTENANT_DIR="/nowhere", COTENANT_PATH="/nowhere")
    if done.returncode == 2 and "C compiler" in done.stderr:
        pytest.skip("the shim cannot be built here")
    assert done.returncode == 0, done.stderr
    lines = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    assert all(line.startswith("export ") for line in done.stdout.splitlines()), "as Slurm reads it"
    assert "libcotenant-shim.so" in lines["LD_PRELOAD"]
    assert lines["COTENANT_SOCKET"] == str(agent.tenants / "agent.sock")
    assert FakeShim(agent.tenants, lines["COTENANT_TOKEN"]).answer["tenant"].rstrip(b"\0") == b"slurm-4711"


def test_a_job_that_asks_for_nothing_is_left_alone_and_starts_no_python(
    agent: HeldAgent, run: Any, tmp_path: Path
) -> None:
    (tmp_path / "cotenant").write_text("#!/bin/sh\nexit 99\n")
    for comment in ("just a remark", "", "contact: ada", "cost=3"):
        remark = JOB | {"SLURM_JOB_COMMENT": comment}
        for script, environment in (("prolog.sh", remark), ("task_prolog.sh", JOB), ("epilog.sh", JOB)):
            if comment != "contact: ada":  # this comment looks like a request, so the script runs Python
                done = run(script, environment)
                assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert start(remark, agent.folder) == ""
        assert task_lines(JOB, agent.folder) == []
        end(JOB, agent.folder)
    assert tenants(agent) == {}


def test_prolog_and_epilog_are_idempotent(agent: HeldAgent) -> None:
    for _ in range(2):
        assert start(ASKS, agent.folder) == f"slurm-4711 has 30% of {uuid_of(0)}"
    start(ASKS | {"SLURM_JOB_COMMENT": "cotenant:request=40%"}, agent.folder)
    assert tenants(agent)["slurm-4711"]["request"] == 0.4
    for _ in range(2):
        end(JOB, agent.folder)
        assert tenants(agent) == {}
    assert not list(agent.folder.glob("*.job"))


def test_a_requeued_job_is_admitted_again_where_slurm_puts_it(agent: HeldAgent) -> None:
    """Its epilog never reached the agent, and the job comes back with its id: on the same GPU, another, or both."""
    start(ASKS, agent.folder)
    agent.kill()
    agent.start()
    assert tenants(agent)["slurm-4711"]["gpus"][0]["uuid"] == uuid_of(0)
    assert start(ASKS, agent.folder) == f"slurm-4711 has 30% of {uuid_of(0)}"
    assert start(ASKS | {"SLURM_JOB_GPUS": "1"}, agent.folder) == f"slurm-4711 has 30% of {uuid_of(1)}"
    both = start(ASKS | {"SLURM_JOB_GPUS": "0,1"}, agent.folder)
    assert both == f"slurm-4711 has 30% of {uuid_of(0)}, {uuid_of(1)}"
    assert start(ASKS | {"SLURM_JOB_GPUS": "1,0"}, agent.folder) == both
    agent.put("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n")
    shim = FakeShim(agent.tenants)
    assert "runs on" in start(ASKS, agent.folder)
    shim.close()
    assert "'7'; it has" in start(ASKS | {"SLURM_JOB_GPUS": "7"}, agent.folder)


def test_a_missed_epilog_is_made_good() -> None:
    agent = HeldAgent(Path(tempfile.mkdtemp(prefix="cot-")), count=2, patience_s=0.3)
    try:
        start(ASKS, agent.folder)
        start(ASKS | {"SLURM_JOB_ID": "4712"}, agent.folder)
        agent.kill()  # while the agent is down, 4711 ends and 4712 goes on; 4713 starts later
        agent.put("0::/system.slice/slurmstepd.scope/job_4712/step_extern/user/task_special\n")
        agent.start()
        start(ASKS | {"SLURM_JOB_ID": "4713", "SLURM_JOB_GPUS": "1"}, agent.folder)
        wait_for(lambda: set(tenants(agent)) == {"slurm-4712", "slurm-4713"})
        assert "slurm-4711 ended without its epilog" in (agent.folder / "agent.log").read_text()
        assert {path.name for path in agent.folder.glob("*.job")} == {"slurm-4712.job", "slurm-4713.job"}
        agent.put("0::/init.scope\n")  # the processes of 4712 have left its cgroup
        wait_for(lambda: set(tenants(agent)) == {"slurm-4713"})
    finally:
        agent.close()


def test_an_epilog_without_an_agent_counts_though_the_job_runs_again(agent: HeldAgent) -> None:
    """Requeued, but its comment asks for nothing any more: its processes are not those of the earlier run's share."""
    start(ASKS, agent.folder)
    start(ASKS | {"SLURM_JOB_ID": "4712", "SLURM_JOB_GPUS": "1"}, agent.folder)
    agent.kill()
    end(JOB, agent.folder)
    agent.put("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n")
    agent.start()
    wait_for(lambda: set(tenants(agent)) == {"slurm-4712"}, what="only the job whose epilog ran has ended")
    assert "the epilog of slurm-4711 ran while no agent answered" in (agent.folder / "agent.log").read_text()
    assert start(ASKS, agent.folder) == f"slurm-4711 has 30% of {uuid_of(0)}"


def test_the_gpu_of_a_job_whose_epilog_ran_without_an_agent_is_free_at_its_start(agent: HeldAgent) -> None:
    whole = ASKS | {"SLURM_JOB_COMMENT": "cotenant:request=100%"}
    start(whole, agent.folder), agent.kill()
    end(JOB, agent.folder), agent.start()
    assert start(whole | {"SLURM_JOB_ID": "4712"}, agent.folder) == f"slurm-4712 has 100% of {uuid_of(0)}"


def test_stop_releases_a_job_that_is_over_and_says_why_it_does_not(agent: HeldAgent) -> None:
    start(ASKS, agent.folder)
    agent.put("0::/system.slice/slurmstepd.scope/job_4711/step_extern/user/task_special\n")
    answer = agent.call("stop", name="slurm-4711", grace_s=0)
    assert answer["held"] == "the share is held for Slurm job 4711, which runs; `scancel 4711` ends the job"
    assert "slurm-4711" in tenants(agent)
    agent.put("0::/init.scope\n")
    assert agent.call("stop", name="slurm-4711", grace_s=0)["held"] == ""
    assert tenants(agent) == {}
    agent.call("hold", kind="pod", id="uid-1", tenant={"name": "pod-a"})
    assert "pod uid-1 until the pod is deleted" in agent.call("stop", name="pod-a", grace_s=0)["held"]


@pytest.mark.parametrize(
    ("comment", "sentence"),
    [
        ("cotenant:request=70%,limit=60%", "slurm-4711 asks for 70%, over its own limit of 60%"),
        ("cotenant:request=lots", "'lots' is not a quantity"),
        ("cotenant:requets=30%", "'requets' is unknown; did you mean request?"),
        ("cotenant:request=30%,request=40%", "'request' is given twice"),
        ("cotenant:request", "'request' is not KEY=VALUE"),
        ("cotenant:request=1% cotenant:request=2%", "cotenant: is given twice"),
        ("cotenant:priority=high", "priority 'high' is not a whole number"),
        ("cotenant: request=30%", "'cotenant:' ends at a space"),
        ("cotenant:request=30%, limit=60%", "'cotenant:request=30%,' ends at a space"),
        ("cotenant:request=30% limit=60%", "'cotenant:request=30%' ends at a space"),
        ("cotenant:request=30% ,limit=60%", "'cotenant:request=30%' ends at a space"),
        ("cotenant:memory=8", "'8' has no unit; write 8GiB"),
        ("Cotenant:request=30%", "'Cotenant:request=30%' does not begin with cotenant:"),
        ("cotennat:request=30%", "does not begin with cotenant:"),
        ("cotenant=request=30%", "does not begin with cotenant:"),
        ("co-tenant:request=30%", "does not begin with cotenant:"),
        ("ctenant:request=30%", "does not begin with cotenant:"),
        ("nightly,cotenant:request=30%", "'nightly,cotenant:request=30%' does not begin with cotenant:"),
        ("nightly,cotenant:30%", "does not begin with cotenant:"),
        ("cotenant\uff1arequest=30%", "does not begin with cotenant:"),
        ("cotenant-request=30%", "does not begin with cotenant:"),
        ("limit=60% cotenant:request=30%", "'cotenant:request=30%' ends at a space"),
        ("cotenant:memory=1e300GiB", "'1e300GiB' is not a finite number"),
        ("cotenant:memory=64GiB", "--comment memory=: GPU 0 (Test GPU) has 8.00 GiB of memory left to promise"),
        ("cotenant:memory=1GiB,enforce-memory=driver", "--comment enforce-memory=: the memory of slurm-4711 must be"),
    ],
)
def test_a_wrong_request_ends_the_jobs_tasks_and_not_the_node(agent: HeldAgent, comment: str, sentence: str) -> None:
    job = JOB | {"SLURM_JOB_COMMENT": comment}
    assert sentence in start(job, agent.folder), "said, and no error: that would drain the node"
    with pytest.raises(InputError) as refused:
        task_lines(JOB, agent.folder)  # a task prolog's environment does not contain the job's comment
    assert sentence in str(refused.value)
    end(JOB, agent.folder)
    assert not list(agent.folder.glob("*.job"))


def test_a_job_that_cannot_be_limited_as_it_demands_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it can is known only when its first process comes: here it is in no group of its job."""
    FolderCgroups.make(tmp_path / "cgroup", dmem=False, memory_bytes=8 << 30)
    monkeypatch.setenv("COTENANT_SOFTGPU_CGROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    agent = HeldAgent(Path(tempfile.mkdtemp(prefix="cot-")), count=0)
    try:
        comment = "cotenant:memory=1GiB,enforce-memory=driver"
        assert "has 0%" in start(JOB | {"SLURM_JOB_COMMENT": comment}, agent.folder)
        agent.put("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n")
        shim = FakeShim(agent.tenants)
        said = shim.receive()
        assert said["type"] == MessageType.ERROR
        assert said["text"].startswith("the memory of slurm-4711 must be limited by the driver"), said
        shim.close()
    finally:
        agent.close()


def test_a_refusal_names_no_option_where_slurm_made_the_choice(agent: HeldAgent) -> None:
    said = start(ASKS | {"SLURM_JOB_GPUS": "7"}, agent.folder)
    assert said.startswith("slurm-4711 gets no share: this agent has no GPU '7'"), said


@pytest.mark.parametrize(
    "comment",
    ["project=cosmos tenant=physics", "container=pytorch:24.10", "content: x=1", "image=registry/cotenant:1.2",
     "out=/scratch/cotenant/x", "covenant: rev=2", "limit=60%"],
)  # fmt: skip
def test_a_remark_is_not_taken_for_a_request(comment: str) -> None:
    assert spec_of(JOB | {"SLURM_JOB_COMMENT": comment}) is None


@pytest.mark.parametrize("comment", ["ctenant:request=30%", "octenant:request=1%", "kotenant:limit=1%"])
def test_what_is_nearly_a_request_is_looked_at(agent: HeldAgent, run: Any, comment: str) -> None:
    assert run("prolog.sh", JOB | {"SLURM_JOB_COMMENT": comment}).returncode == 0
    assert "does not begin with cotenant:" in (agent.folder / "slurm-4711.job").read_text()


def test_a_prolog_that_is_killed_leaves_nothing_that_its_epilog_does_not_find(
    agent: HeldAgent, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent holds the share, and the prolog dies before it can say so."""
    call = slurm.ControlClient.call

    def killed(*given: Any, **more: Any) -> Any:
        call(*given, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slurm.ControlClient, "call", killed)
        with pytest.raises(KeyboardInterrupt):
            start(ASKS, agent.folder)
    assert set(tenants(agent)) == {"slurm-4711"}
    with pytest.raises(InputError, match="has not finished"):
        task_lines(JOB, agent.folder)
    assert run("epilog.sh", JOB).returncode == 0
    assert tenants(agent) == {}


def test_on_a_full_disk_no_word_is_not_taken_for_a_share(agent: HeldAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "UNFINISHED", "x" * 100)
    full = Path(tempfile.mkdtemp(prefix="cot-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(full)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (full / "control.sock").symlink_to(agent.folder / "control.sock")
        (full / "ballast").write_bytes(b"x" * 4096)
        with pytest.raises(WorkError, match="cannot be written: No space left"):
            start(ASKS, full)
        assert task_lines(JOB, full) == []
        assert tenants(agent) == {}
        assert not list(full.glob("*.part"))
    finally:
        subprocess.run(["umount", full], check=True)


def test_a_users_own_python_does_not_get_into_the_task_prolog(agent: HeldAgent, run: Any, tmp_path: Path) -> None:
    start(ASKS | {"SLURM_JOB_COMMENT": "cotenant:memory=64GiB"}, agent.folder)
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "typer.py").write_text("raise SystemExit(99)\n")
    theirs = {"PYTHONPATH": str(tmp_path / "users"), "PYTHONHOME": "/nowhere", "PYTHONSTARTUP": "/nowhere"}
    done = run("task_prolog.sh", JOB, **theirs)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("print cotenant: --comment memory=: GPU 0")


def test_a_job_that_never_ran_is_let_go_in_the_end(tmp_path: Path) -> None:
    """Its prolog was killed, and no epilog came."""
    owners = Owners(lambda pid: None)
    never, seen = tenant_of("never"), tenant_of("seen")
    owners.add(never, Owner("slurm", "1"))
    owners.add(seen, Owner("slurm", "2"))
    ended = EndedJobs(owners, tmp_path)
    assert ended.over({"2"}, 0.0) == []
    assert ended.over((), 10.0) == []
    assert ended.over((), 10.0 + slurm_ended.PATIENCE_S) == [seen]
    owners.remove(seen)
    assert ended.over((), slurm_ended.PROLOG_S - 1.0) == []
    assert ended.over(("1",), slurm_ended.PROLOG_S) == [], "other prologs took so long"
    assert ended.over((), 9999.0) == []
    assert ended.over((), 9999.0 + slurm_ended.PATIENCE_S) == [never]
    fresh = tenant_of("fresh")
    owners.remove(never)
    owners.add(fresh, Owner("slurm", "3"))
    assert ended.over((), 0.0) == []
    assert ended.over((), slurm_ended.PROLOG_S) == [fresh]


def test_a_refusal_is_in_the_jobs_output(agent: HeldAgent, run: Any) -> None:
    assert run("prolog.sh", JOB | {"SLURM_JOB_COMMENT": "Cotennat:request=30%"}).returncode == 0
    done = run("task_prolog.sh", JOB)
    assert done.returncode == 2
    assert done.stdout.startswith("print cotenant: --comment: 'Cotennat:request=30%' does not begin with")
    assert done.stdout.count("\n") == 1
    start(ASKS, agent.folder)  # requeue the job with a correct comment
    assert "held" not in run("task_prolog.sh", JOB).stdout
    agent.call("let_go", kind="slurm", id="4711")
    done = run("task_prolog.sh", JOB)
    assert (done.returncode, done.stdout[:45]) == (2, "print cotenant: the share of slurm-4711 is no")
    agent.kill()
    done = run("task_prolog.sh", JOB)
    assert (done.returncode, done.stdout[:32]) == (1, "print cotenant: no agent answers")


def test_a_wrong_path_reaches_the_job_too(agent: HeldAgent, run: Any, tmp_path: Path) -> None:
    start(ASKS, agent.folder)
    (tmp_path / "cotenant").unlink()
    done = run("task_prolog.sh", JOB)
    assert done.returncode == 127
    assert "is COTENANT_PATH right?" in done.stdout


def test_an_agent_that_is_away_is_the_nodes_affair(agent: HeldAgent, run: Any) -> None:
    agent.kill()
    done = run("prolog.sh", ASKS)
    assert done.returncode == 1
    assert "no agent answers" in done.stderr
    end(JOB, agent.folder)
    with pytest.raises(WorkError, match="this command must be run by Slurm as Prolog, TaskProlog or Epilog"):
        start({}, agent.folder)


def test_gpus_are_those_that_slurm_gave() -> None:
    spec = spec_of(ASKS | {"SLURM_JOB_GPUS": "0,1"})
    assert spec is not None
    assert (spec.gpus, spec.gpu_count, spec.request, spec.limit) == (("0", "1"), 2, 0.3, 0.6)
    assert spec_of(JOB) is None
    demand = spec_of(JOB | {"SLURM_JOB_COMMENT": "cotenant:memory=8GiB,enforce-memory=driver"})
    assert demand is not None
    assert demand.enforce_memory is Strength.DRIVER
    with pytest.raises(InputError, match="demands enforcement of a memory limit but has none"):
        spec_of(JOB | {"SLURM_JOB_COMMENT": "cotenant:enforce-memory=driver"})
    with pytest.raises(InputError, match="over 100%"):
        spec_of(JOB | {"SLURM_JOB_COMMENT": "cotenant:request=300%"})
