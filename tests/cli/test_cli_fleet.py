"""The fleet by its commands, as a user has it: a controller of its own, real jobs, kill -9, a second controller."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.agent.processes import is_zombie
from cotenant.fleet.session import Fleet, FleetOptions

Call = Callable[..., tuple[int, str, str]]


class Commands:
    """The command line against one fleet folder."""

    def __init__(self, call: Call, folder: Path) -> None:
        self.call, self.folder = call, folder
        self.pids: list[int] = []

    def up(self, *more: object) -> dict[str, Any]:
        answer = self.json("fleet", "up", "--executor", "local", "--nodes", 2, "--lease", "1s", "--grace", "2s", *more)
        self.pids.append(answer["pid"])
        return answer

    def json(self, *words: object) -> dict[str, Any]:
        at = words.index("--") if "--" in words else len(words)
        code, out, err = self.call(*words[:at], "--json", *words[at:])
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def ok(self, *words: object) -> str:
        code, out, err = self.call(*words)
        assert code == 0, err
        return out

    def fails(self, code: int, *words: object) -> str:
        got, out, err = self.call(*words)
        assert (got, out) == (code, ""), err
        # a slow machine prints this line first
        said = [line for line in err.splitlines() if "still starting" not in line]
        assert len(said) == 1
        return err

    def job(self, job_id: str) -> dict[str, Any]:
        return next(job for job in self.json("queue", "--all")["jobs"] if job["id"] == job_id)

    def until(self, job_id: str, state: str) -> dict[str, Any]:

        def there() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] == state else None

        found: dict[str, Any] = wait_for(there, what=f"{job_id} is {state}")
        return found


@pytest.fixture
def fleet(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    folder = tmp_path / "f"
    monkeypatch.setenv("COTENANT_FLEET", str(folder))
    commands = Commands(call, folder)
    yield commands
    call("fleet", "down", "--within", "1s")
    for pid in commands.pids:
        if not is_zombie(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_day_with_a_fleet(fleet: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up = fleet.up()
    assert [node["gpus"] for node in up["nodes"]] == [2, 2]
    (tmp_path / "job.yaml").write_text("name: file\ncommand: [sh, -c, 'echo $GREETING $PWD']\nenv: {GREETING: hi}\n")
    assert fleet.ok("submit", tmp_path / "job.yaml") == "file\n"
    first = fleet.json("submit", "--name", "ticks", "--gpus", 2, "--cpus", 3, "--memory", "8GiB", "--",
                       "sh", "-c", "for i in 1 2 3; do echo tick $i; sleep 0.2; done; exit 3")["id"]  # fmt: skip
    long = fleet.json("submit", "--share", "30%", "--name", "long", "--", "sleep", "600")["id"]
    assert fleet.ok("logs", "-f", first) == "tick 1\ntick 2\ntick 3\n"
    failed = fleet.until(first, "failed")
    assert (failed["exit_code"], failed["error"], failed["attempts"]) == (3, "exit code 3", 1)
    assert fleet.ok("logs", "file") == f"hi {tmp_path}\n"
    running = fleet.until(long, "running")
    assert (running["gpus"], running["cpus"], running["nodes"][0]["gpus"]) == (0.3, 0.9, 0.3)
    assert "running" in fleet.ok("queue")
    assert "fifo + tune" in fleet.ok("fleet", "status")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ticks").touch()  # a file of the same name as the job lies in the current folder
    story = fleet.ok("explain", "ticks")
    assert "slowdown" not in fleet.ok("explain", "file")  # the job stated no duration
    assert "the job's processes failed" in story
    assert "started on 2 GPUs" in story
    # a job that has ended does not prevent cancelling the other one
    code, out, err = fleet.call("cancel", "file", long)
    assert (code, out, err) == (2, "long: stopping\n", "cotenant: ID: job 'file' is finished already\n")
    assert fleet.until(long, "cancelled")["exit_code"] == 143
    record = fleet.json("fleet", "record", "--out", tmp_path / "run")
    assert record["jobs"] == 3
    assert "cancelled" in fleet.ok("explain", tmp_path / "run", "long")
    assert fleet.json("fleet", "down") == {"ended": True, "open_jobs": 0}
    assert "no fleet answers" in fleet.fails(1, "queue")


def test_killed_controllers_lose_no_job_and_two_at_once_do_not_run(fleet: Commands, tmp_path: Path) -> None:
    pid = fleet.up()["pid"]
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    script = f"echo run >> {tmp_path}/runs; {wait}; echo end >> {tmp_path}/runs"
    fleet.ok("submit", "--name", "job", "--", "sh", "-c", script)
    fleet.ok("submit", "--name", "later", "--gpus", 4, "--", "true")
    fleet.until("job", "running")
    err = fleet.fails(1, "fleet", "up", "--executor", "local", "--nodes", 2)
    # on a slow machine, an earlier line says that the controller is still starting
    assert err.splitlines()[-1] == f"cotenant: a controller (pid {pid}) already runs in {fleet.folder}"
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: is_zombie(pid))
    # the listening socket may close a moment after the process has ended
    assert str(fleet.folder) in fleet.fails(1, "queue")
    again = fleet.up()
    assert again["epoch"] == 2
    assert again["jobs"]["running"] + again["jobs"]["queued"] == 2
    (tmp_path / "go").touch()
    job = fleet.until("job", "finished")
    assert job["attempts"] == 1
    assert (tmp_path / "runs").read_text() == "run\nend\n"
    assert fleet.until("later", "finished")["attempts"] == 1


def test_down_saves_jobs_and_up_takes_them_on(fleet: Commands) -> None:
    fleet.up()
    fleet.ok("submit", "--name", "job", "--", "sh", "-c", "sleep 600")
    fleet.until("job", "running")
    said = fleet.ok("fleet", "down", "--within", "60s")
    assert said == "the fleet is down; 1 job will continue when it is started again\n"
    jobs = fleet.up()["jobs"]
    assert jobs["running"] + jobs["queued"] == 1
    assert fleet.until("job", "running")["attempts"] == 2
    assert "the fleet was taken down" in fleet.ok("explain", "job")


def test_wrong_input_is_one_sentence(fleet: Commands, tmp_path: Path) -> None:
    assert "start one with cotenant fleet up, or" in fleet.fails(1, "submit", "--", "true")
    fleet.folder.mkdir(exist_ok=True)
    # as a controller writes it that waits to become the leader
    (fleet.folder / "store").write_text("postgresql://db/fleet")
    assert "may be on another machine: run this command there" in fleet.fails(1, "queue")
    (fleet.folder / "store").unlink()
    for words, said in (
        (("--nodes", 0), "--nodes: 0 is not between"),
        (("--lease", "soon"), "--lease: 'soon' is not a quantity"),
        (("--ordering", "best"), "--ordering: unknown ordering 'best'"),
        (("--gpu", "X1"), "--gpu: unknown GPU model 'X1'"),
        (("--executor", "slurm"), "--executor: must be auto, ray or local, not 'slurm'"),
        (("--cluster", "4by2"), "--cluster: '4by2' is not a cluster"),
        (("--policy", "best"), "--policy: a fleet has no policy 'best'"),
        (("--profiles", tmp_path / "none.json"), "cannot be read"),
    ):
        options = ["--executor", "local"] if "--executor" not in words else []
        err = fleet.fails(2, "fleet", "up", *options, *words)
        assert said in err
    assert not (fleet.folder / "fleet.sock").exists()
    fleet.up()
    for words, field in ((("--gpus", 5), "gpus"), (("--slice", "2g"), "slice"), (("--model", "nope"), "model"),
                         (("--memory", "lots"), "memory"), (("--env", "A"), "env")):  # fmt: skip
        assert f"--{field}: " in fleet.fails(2, "submit", *words, "--", "true")
    assert "there is no job 'nobody'" in fleet.fails(2, "cancel", "nobody")
    assert "there is no job 'nobody'" in fleet.fails(2, "logs", "nobody")
    assert "follows a job file" in fleet.fails(2, "submit", "job.yaml", "more")
    assert "neither a run's folder nor a job" in fleet.fails(2, "explain", "nobody")
    assert fleet.json("queue", "--all") == {"jobs": []}


def test_loopback_asks_for_the_token(fleet: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    port = fleet.up("--port", 0)["port"]
    token = (fleet.folder / "token").read_text().strip()
    assert (fleet.folder / "token").stat().st_mode & 0o777 == 0o600
    assert (fleet.folder / "fleet.sock").stat().st_mode & 0o777 == 0o600
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert probe.getsockname()[1] != port
    monkeypatch.setenv("COTENANT_FLEET_TOKEN", "guess")
    assert "the token is wrong" in fleet.fails(2, "queue", "--fleet", f"127.0.0.1:{port}")
    monkeypatch.setenv("COTENANT_FLEET_TOKEN", token)
    assert fleet.ok("submit", "--fleet", f"127.0.0.1:{port}", "--name", "over-tcp", "--", "true") == "over-tcp\n"
    assert fleet.until("over-tcp", "finished")["exit_code"] == 0


def test_nonsense_at_the_door_hurts_nobody(fleet: Commands) -> None:
    fleet.up()
    for said in (b"nonsense\n", b"[]\n", b'{"op": 1}\n', b'{"op": "__init__"}\n', b'{"op": "submit", "jobs": [1]}\n',
                 b'{"op": "submit", "jobs": [{"name": "a", "command": ["x"], "gpus": "y"}]}\n',
                 b'{"op": "log", "id": "a", "rank": -1}\n', b"\xff\xfe\n", b"{" * 5000 + b"\n"):  # fmt: skip
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(60)
            door.connect(str(fleet.folder / "fleet.sock"))
            door.sendall(said)
            answer = json.loads(door.makefile("rb").readline())
        assert answer["kind"] == "input", said
    assert fleet.json("fleet", "status")["jobs"]["queued"] == 0


def test_strangers_at_the_port_do_not_lock_the_owner_out(fleet: Commands) -> None:
    port = fleet.up("--port", 0)["port"]
    strangers = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(300)]
    try:
        assert fleet.json("queue") == {"jobs": []}
    finally:
        for stranger in strangers:
            stranger.close()


def test_who_drips_his_token_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.fleet.controller.server.TOKEN_S", 0.3)
    options = FleetOptions(folder=tmp_path, nodes=1, executor="local", port=0)
    with Fleet(options) as fleet:
        assert fleet.listener is not None
        with socket.create_connection(("127.0.0.1", fleet.listener.port or 0), 60) as stranger:
            stranger.sendall(b"x")
            answer = json.loads(stranger.makefile("rb").readline())
        assert answer["field"] == "token"


def test_a_fleet_under_an_elastic_policy_takes_jobs_with_elastic_profiles(fleet: Commands, tmp_path: Path) -> None:
    own = tmp_path / "speeds.json"
    own.write_text(json.dumps({"models": {"mine": {"rate": {"A100-40GB": {"1": 1.0, "2": 1.9, "4": 3.5}}}}}))
    assert "packs two jobs on a GPU" in fleet.fails(2, "fleet", "up", "--nodes", 2, "--policy", "tesserae")
    assert fleet.up("--policy", "sia")["policy"]["label"] == "sia"
    assert "elastic profile" in fleet.fails(2, "submit", "--model", "unheard-of", "--", "true")
    job = fleet.json("submit", "--profile", own, "--", "sh", "-c", "echo $WORLD_SIZE")["id"]
    assert fleet.until(job, "finished")["gpus"] == 1
