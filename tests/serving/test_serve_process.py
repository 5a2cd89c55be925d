"""`cotenant serve` as a process: its line of JSON, its end, kill -9, wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import command
from heard import heard
from ports import reserved_ports
from serve_setup import ask, deployment, infer, plan
from waiting import wait_for

from cotenant.core.errors import InputError
from cotenant.serving.dispatch.requestlog import CsvLog


def write(folder: Path, **more: Any) -> tuple[str, str]:
    """(services file, plan file)."""
    # free ports, because other programs on this machine may use the default ones
    doors = {"http": "127.0.0.1:0", "grpc": "none"}
    content = deployment([{"name": "a", "slo_ms": 60_000}], folder, listen=doors) | more
    (folder / "services.yaml").write_text(yaml.safe_dump(content))
    (folder / "plan.json").write_text(json.dumps(plan({"a": 4}).to_dict()))
    return str(folder / "services.yaml"), str(folder / "plan.json")


def start(folder: Path, port: int = 0, *more: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    services, held = write(folder)
    process = subprocess.Popen(
        command("serve", services, "--plan", held, "--http", f"127.0.0.1:{port}", "--grpc", "none", "--json", *more),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return process, json.loads(line)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_it_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    process, ready = start(tmp_path, 0, "--log", str(log))
    assert set(ready) == {"http", "grpc", "pid"}
    assert ready["pid"] == process.pid
    assert ready["grpc"] is None
    assert infer(ready["http"], "a", (1.0, 2.0, 3.0, 4.0), rows=2)[0] == 200
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    rows = log.read_text().splitlines()
    assert rows[0] == "service,received_s,queued_ms,batch,gpulet,executed_ms,outcome"
    assert len(rows) == 3  # one row for each item, after the header
    service, received, queued, batch, gpulet, executed, outcome = rows[1].split(",")
    assert (service, gpulet, outcome) == ("a", "0/50%/0", "ok")
    assert float(received) > 0 <= float(queued)
    assert int(batch) in (1, 2)
    assert float(executed) > 0  # measured in the worker


@pytest.fixture
def reserved() -> Iterator[list[int]]:
    with reserved_ports() as found:
        yield found


def test_kill_9_of_the_gateway_takes_its_workers_along_and_it_can_start_again(
    tmp_path: Path, reserved: list[int]
) -> None:
    (port,) = reserved
    process, ready = start(tmp_path, port)
    workers = [let["pid"] for let in ask(ready["http"], "/cotenant/status")[2]["gpulets"]]
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(alive(pid) for pid in workers), what="a worker outlived the gateway")
    again, ready = start(tmp_path, port)
    assert infer(ready["http"], "a")[0] == 200
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert again.returncode == 0


def test_a_signal_while_it_starts_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "a" / "1"
    folder.mkdir(parents=True)
    (folder / "timed.json").write_text('{"load_s": 600}')
    services, held = write(tmp_path)
    content = yaml.safe_load(Path(services).read_text())
    content["services"][0]["model"] = "models/a"
    Path(services).write_text(yaml.safe_dump(content))
    process = subprocess.Popen(
        command("serve", services, "--plan", held, "--http", "127.0.0.1:0", "--grpc", "none"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    # the server has started its first child process, but no worker yet
    wait_for(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({"lissten": {}}, (), "unknown setting 'lissten'; did you mean listen?"),
        ({"listen": {"http": "8000"}}, (), "line 6, field listen.http: '8000' is not an address HOST:PORT"),
        ({}, ("--http", "8000"), "cotenant: --http: '8000' is not an address HOST:PORT"),
        ({"partitions": ["35%"]}, (), "services.yaml, line 8, field partitions: the X profile has no partition 35%"),
        ({"listen": {"max_body": "1MiB", "drain": -1}}, (), "line 6, field listen.drain"),
        ({"listen": {"max_body": "lots"}}, (), "not a quantity"),
        ({"listen": {"tokens": "none.txt"}}, (), "none.txt: cannot be read"),
        ({"listen": {"tls_key": "k.pem"}}, (), "tls_key needs tls_certificate"),
        ({"backend": "tensorflow"}, (), "backend"),
        ({}, ("--http", "none", "--grpc", "none"), "needs an endpoint"),
        ({}, ("--planner", "best"), "unknown planner"),
        ({}, ("--plan", "nothing.json"), "nothing.json"),
        ({}, ("--log", "/nowhere/x.csv"), "nowhere"),
        ({"services": [{"name": "a", "slo_ms": 100, "priority": "high"}]}, (), "priority"),
        ({"services": [{"name": "a", "slo_ms": 100, "priority": 10**10}]}, (), "priority"),
        ({"services": [{"name": "a", "slo_ms": 1}]}, (), "an SLO of 1 ms is below"),
        ({"services": [{"name": "other", "slo_ms": 100}]}, (), "model 'other' is absent from the X profile"),
    ],
)
def test_wrong_input_is_one_sentence_and_2(
    tmp_path: Path, call: Any, more: dict[str, Any], options: tuple[str, ...], said: str
) -> None:
    services, _ = write(tmp_path, **more)
    code, out, err = call("serve", services, *options)
    assert (code, out) == (2, "")
    *before, sentence = err.splitlines()
    # such lines appear at the first start
    assert all("compiling the planner and the dispatcher" in line for line in before)
    assert said in sentence


def test_no_model_at_all_is_2(tmp_path: Path, call: Any) -> None:
    services, _ = write(tmp_path, backend="auto")
    code, _, err = call("serve", services)
    assert code == 2
    assert "no model named; give the folder NAME of a repository NAME/VERSION/FILE" in err.splitlines()[-1]


def test_a_port_that_is_taken_is_1(tmp_path: Path, call: Any) -> None:
    import socket

    services, held = write(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = call("serve", services, "--plan", held, "--http", f"127.0.0.1:{port}", "--grpc", "none")
    assert code == 1
    assert err == f"cotenant: cannot listen on 127.0.0.1:{port}: address already in use\n"


def test_a_port_whose_other_server_was_first_to_listen_is_1(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers may both bind a port before either listens."""
    import socket

    from cotenant.serving import server

    services, held = write(tmp_path)
    take = server.doors.take

    def take_and_be_overtaken(addresses: Any) -> Any:
        taken = take(addresses)
        other.listen()
        return taken

    monkeypatch.setattr(server.doors, "take", take_and_be_overtaken)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        code, _, err = call("serve", services, "--plan", held, "--http", f"127.0.0.1:{port}", "--grpc", "none")
    assert code == 1
    assert err.splitlines()[-1] == f"cotenant: cannot listen on 127.0.0.1:{port}: address already in use"


@pytest.mark.parametrize("planned", [True, False])
def test_a_port_that_is_taken_is_said_before_anything_is_loaded_or_measured(
    tmp_path: Path, call: Any, planned: bool
) -> None:
    import socket

    services, held = write(tmp_path, load_timeout="30s")
    folder = tmp_path / "models" / "a" / "1"
    folder.mkdir(parents=True)
    (folder / "timed.json").write_text('{"load_s": 600}')
    content = yaml.safe_load(Path(services).read_text())
    content["services"][0]["model"] = "models/a"
    if not planned:  # without a profile the server would measure the model first
        del content["profile"]
        content |= {"gpus": {"count": 1, "model": "cpu"}, "mechanism": "cores"}
    Path(services).write_text(yaml.safe_dump(content))
    plan_given = ("--plan", held) if planned else ()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        doors = ("--http", "127.0.0.1:0", "--grpc", f"127.0.0.1:{port}")
        code, _, err = call("serve", services, *plan_given, *doors)
    assert code == 1
    assert err == f"cotenant: cannot listen on 127.0.0.1:{port}: address already in use\n"


def test_a_first_start_says_that_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cotenant.policy import compiled
    from cotenant.serving.wiring import is_compiled

    monkeypatch.setattr(compiled, "CACHED", True)
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    assert not is_compiled(plans=False)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "dispatch_kernel.offer-46.py311.1.nbc").touch()
    assert is_compiled(plans=False)
    assert not is_compiled(plans=True)
    (tmp_path / "policy" / "adjust.widen-9.py311.1.nbc").touch()
    assert is_compiled(plans=True)


def test_a_host_that_does_not_exist_is_1(tmp_path: Path, call: Any) -> None:
    services, held = write(tmp_path)
    code, _, err = call("serve", services, "--plan", held, "--http", "nowhere.invalid:0", "--grpc", "none")
    assert code == 1
    assert err == "cotenant: cannot listen on nowhere.invalid:0: there is no such host\n"


def test_a_second_server_leaves_the_log_of_the_first(tmp_path: Path, call: Any) -> None:
    services, held = write(tmp_path)
    log = tmp_path / "log.csv"
    first = CsvLog(log, "a,b\n")
    first.add("1,2\n")
    first.flush()
    code, _, err = call("serve", services, "--plan", held, "--http", "127.0.0.1:0", "--grpc", "none", "--log", log)
    assert code == 2
    assert "log.csv: another running server writes this log" in err.splitlines()[-1]
    assert log.read_text() == "a,b\n1,2\n"
    first.close()
    CsvLog(log, "a,b\n").close()  # no other process writes to the file any more
    assert log.read_text() == "a,b\n"


def test_a_log_on_a_full_disk_says_so_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no space left on device"):
        CsvLog(Path("/dev/full"), "a,b\n")
    log = CsvLog(tmp_path / "log.csv", "a,b\n")
    log._file = Path("/dev/full").open("w")  # noqa: SIM115
    with heard() as said:
        for _ in range(3):
            log.add("1,2\n")
            log.flush()
        log.close()
    assert said == [f"{tmp_path / 'log.csv'}: no space left on device; no more rows are written"]
