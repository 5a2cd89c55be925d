"""Load on the models endpoint while programs, agent and clients are killed at random.

Every answer names its model and its prompt, so one of a wrong model shows. Each request must end with an answer or with
one sentence, unless its own client hung up.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from models_door import STANDIN, until

from cotenant.workloads.llm.text import digest

MARK = "COTENANT_SOAK_MARK"
ANSWER_WITHIN_S = 300.0
MODELS = 5


@dataclass
class Soak:
    """Results. `lost`: requests that ended without an answer or an error sentence; `wrong`: answers of another model or
    to another prompt."""

    counts: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    status: dict[str, Any] = field(default_factory=dict)
    files_before: int = 0
    files_after: int = 0
    memory_mb: list[float] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


def models_file(folder: Path, *, soft: bool, mechanism: str) -> Path:
    """Five models with room for three (soft: tenants of the software GPU, evicted and brought back)."""
    gpus = {"count": 1, "model": "soft" if soft else "cpu", "memory": "192MiB"}
    gpus |= {"mechanism": mechanism} if soft else {}
    rows = []
    for i in range(MODELS):
        if soft:
            engine = f"{sys.executable} -m cotenant.cli.main timed-llm --model m{i} --port {{port}} --speed 20"
            command = f"{engine} --device cuda --memory 48MiB"
        else:
            command = f"{sys.executable} -I -S {STANDIN} --port {{port}} --model m{i} --gap 0.02"
        rows.append({"name": f"m{i}", "command": command, "memory": "64MiB", "keep": int(i == 0), "ttft_ms": 500})
    rows[-1]["class"] = "best-effort"
    content = {
        "gpus": gpus, "models": rows,
        "listen": {"http": "127.0.0.1:0"}, "idle": "1s",
    }  # fmt: skip
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def soak(
    folder: Path,
    seconds: float,
    *,
    soft: bool,
    mechanism: str = "auto",
    clients: int = 8,
    seed: int = 1,
    kill_every_s: float = 3.0,
) -> Soak:
    """Run the load. `soft`: programs are tenants of an agent, which is killed as well; `mechanism` shares the GPU."""
    found, mark = Soak(), uuid.uuid4().hex
    path = models_file(folder, soft=soft, mechanism=mechanism)
    command = [sys.executable, "-m", "cotenant.cli.main", "serve", str(path), "--json"]
    command += ["--program-logs", str(folder / "programs")]
    environment = os.environ | {MARK: mark, "COTENANT_DIR": str(folder / "no-agent")}
    log = (folder / "serve.log").open("wb")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert server.stdout is not None
        facts = json.loads(server.stdout.readline())
        port, pid = int(facts["http"].rpartition(":")[2]), int(facts["pid"])
        until(lambda: status(port)["models"][0]["state"], lambda state: state == "resident")
        found.files_before = files(pid)
        stop = threading.Event()
        threads = [threading.Thread(target=_client, args=(port, stop, found, seed * 1000 + i)) for i in range(clients)]
        threads.append(threading.Thread(target=_killer, args=(port, stop, found, mark, pid, seed, kill_every_s)))
        for thread in threads:
            thread.start()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(min(5.0, max(0.0, ends - time.monotonic())))
            found.memory_mb.append(memory_mb(pid))
        stop.set()
        for thread in threads:
            thread.join(ANSWER_WITHIN_S)
            assert not thread.is_alive(), "a client waits for ever"
        found.status = until(lambda: status(port), lambda now: now["in_flight"] == 0)
        found.files_after = until(lambda: files(pid), lambda count: count <= found.files_before + 4 * MODELS)
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
    finally:
        server.kill()
        server.wait()
        log.close()
    deadline = time.monotonic() + 30
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found.left = left
    for each in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return found


def check(found: Soak) -> None:
    """Assert that no answer was wrong, no request was lost, no process or open request is left, and some requests were
    answered."""
    assert not found.wrong, found.wrong[:5]
    assert not found.lost, found.lost[:5]
    assert not found.left, f"processes are left: {found.left}"
    assert found.counts["ok"] > 0
    assert all(row["open"] == 0 and row["waiting"] == 0 for row in found.status["models"])


def status(port: int) -> dict[str, Any]:
    """Status of the server."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/cotenant/status")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found


def files(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    text = Path(f"/proc/{pid}/statm").read_text().split()
    return int(text[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def marked(mark: str) -> list[int]:
    """Processes of this run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _killer(port: int, stop: threading.Event, found: Soak, mark: str, server: int, seed: int, every_s: float) -> None:
    """Kill programs, and sometimes the agent, with SIGKILL."""
    draw = random.Random(seed)
    while not stop.wait(draw.uniform(0.3, 1.7) * every_s):
        if draw.random() < 0.25 and (agents := _agents(mark)):
            os.kill(agents[0], signal.SIGKILL)
            found.kills["agent"] += 1
            continue
        pids = [row["pid"] for row in status(port)["models"] if row["pid"]]
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(pids), signal.SIGKILL)
                found.kills["program"] += 1


def _agents(mark: str) -> list[int]:
    def is_agent(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return b"cotenant.agent\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    return [pid for pid in marked(mark) if is_agent(pid)]


def _client(port: int, stop: threading.Event, found: Soak, seed: int) -> None:
    draw = random.Random(seed)
    number = 0
    while not stop.is_set():
        number += 1
        model, prompt = f"m{draw.randrange(MODELS)}", f"c{seed}-{number}"
        body = {
            "model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": draw.randint(1, 40),
            "stream": draw.random() < 0.7,
        }  # fmt: skip
        hang_up = draw.random() < 0.15
        try:
            _one(port, body, model, prompt, hang_up, found)
        except (OSError, http.client.HTTPException) as error:
            found.lost.append(f"{model} {prompt}: {error!r}")
        stop.wait(draw.uniform(0.0, 0.2))


def _one(port: int, body: dict[str, Any], model: str, prompt: str, hang_up: bool, found: Soak) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_WITHIN_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        got = connection.getresponse()
        if hang_up and body["stream"]:
            got.readline()
            found.counts["hung up"] += 1
            return
        text = got.read().decode()
    if body["stream"] and got.status == 200:
        parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
        if parts[-1] != "[DONE]":
            last = json.loads(parts[-1])
            _sentence(last["error"]["message"], "cut", found) if "error" in last else found.lost.append(text[-200:])
            return
        found.counts["ok"] += 1
        _belongs(text, model, prompt, found)
    elif got.status == 200:
        found.counts["ok"] += 1
        _belongs(text, model, prompt, found)
    else:
        _sentence(json.loads(text)["error"]["message"], str(got.status), found)


def _sentence(message: str, kind: str, found: Soak) -> None:
    assert message
    found.counts[kind] += 1
    found.sentences[message[:80]] += 1


def _belongs(text: str, model: str, prompt: str, found: Soak) -> None:
    """Check that an answer names the model and the prompt. One engine repeats the prompt, the other one its digest."""
    whole = f'"model": "{model}"' in text and (prompt in text or f"{model}/{digest(prompt)}" in text)
    others = any(f'"m{i}"' in text or f"m{i}/" in text for i in range(MODELS) if f"m{i}" != model)
    if not whole or others:
        found.wrong.append(f"{model} {prompt}: {text[:200]}")
