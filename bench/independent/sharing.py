"""Shares, co-location, copies and swap measured with the programs of plain.py and the command line alone.

    python bench/independent/sharing.py [--soft] [--rounds N] STEP...   shares, together, colocation, copies, swap, jobs

`cotenant` must be on the path, with a Python that has PyTorch on a card. Prints a line per figure: median and range.
"""

from __future__ import annotations

import bisect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOFT = "--soft" in sys.argv
PLAIN = [sys.executable, str(Path(__file__).with_name("plain.py"))]
TAIL = ["--soft"] if SOFT else []
ROUNDS, SECONDS = (3, 8) if SOFT else (5, 20)
ARGUMENTS = [a for a in sys.argv[1:] if a != "--soft"]
if ARGUMENTS[:1] == ["--rounds"]:
    ROUNDS, ARGUMENTS = int(ARGUMENTS[1]), ARGUMENTS[2:]
GIB = 1 << 30


@contextmanager
def agent(*options: str) -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="independent-")
    os.environ |= {"COTENANT_DIR": folder, "COTENANT_SOFTGPU_STATE": f"{folder}/gpu"}
    gpus = "soft" if SOFT else os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    command = ["cotenant", "agent", "--gpus", gpus, *options]
    with open(f"{folder}/log", "w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        while subprocess.run(["cotenant", "ps"], capture_output=True).returncode:
            assert process.poll() is None, Path(f"{folder}/log").read_text()
            time.sleep(0.2)
        try:
            yield
        finally:
            process.terminate()


def tenant(name: str, options: list[str], *program: object) -> subprocess.Popen[str]:
    command = ["cotenant", "run", "--name", name, *options, "--", *PLAIN, *map(str, program), *TAIL]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, process.args
    return json.loads(out.splitlines()[-1])


def done_between(marks: list[tuple[float, int]], begin: float, end: float) -> float:
    """Units of work done in an interval. A unit that is partly in the interval counts in proportion to its time."""
    times = [t for t, _ in marks]

    def at(t: float) -> float:
        i = bisect.bisect_right(times, t)
        if not 0 < i < len(marks):
            return marks[min(i, len(marks) - 1)][1]
        (t0, n0), (t1, n1) = marks[i - 1], marks[i]
        return n0 + (n1 - n0) * (t - t0) / (t1 - t0)

    return at(end) - at(begin)


def say(what: str, values: list[float]) -> None:
    print(
        f"{what}: {statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f}, {len(values)} values)",
        flush=True,
    )


def alone(kind: str = "work") -> float:
    """Units of work per second of one tenant that is alone and has no limit."""
    marks = result(tenant("alone", [], kind, SECONDS))
    return (marks[-1][1]) / (marks[-1][0] - marks[0][0])


def windows(marks: list[tuple[float, int]], rate: float, begin: float, end: float, length: float = 2.0) -> list[float]:
    starts = [begin + 0.1 * i for i in range(int((end - begin - length) * 10))]
    return [done_between(marks, s, s + length) / length / rate for s in starts]


def shares() -> None:
    """Measure a tenant limited to 25 %, and three with 20, 30 and 50 %: their work relative to that of one alone, in
    all windows of 2 s."""
    with agent():
        rate = alone()
        marks = result(tenant("limited", ["--limit", "25%"], "work", SECONDS))
        say("limit 25 %, of one alone, windows of 2 s", windows(marks, rate, marks[0][0], marks[-1][0]))
        parts = {"a": 20, "b": 30, "c": 50}
        running = [tenant(n, ["--request", f"{p}%", "--limit", f"{p}%"], "work", SECONDS) for n, p in parts.items()]
        found = dict(zip(parts, map(result, running), strict=True))
        begin, end = max(m[0][0] for m in found.values()), min(m[-1][0] for m in found.values())
        for name, marks in found.items():
            say(f"request and limit {parts[name]} %, windows of 2 s", windows(marks, rate, begin, end))
        total = sum(done_between(m, begin, end) for m in found.values()) / (end - begin) / rate
        say("the three together, of one alone", [total])


def together() -> None:
    """Measure two tenants at the same time, relative to one alone, round by round."""
    found = []
    with agent():
        for _ in range(ROUNDS):
            rate = alone()
            pair = [tenant(n, ["--request", "50%"], "work", SECONDS) for n in "ab"]
            marks = [result(p) for p in pair]
            begin, end = max(m[0][0] for m in marks), min(m[-1][0] for m in marks)
            found.append(sum(done_between(m, begin, end) for m in marks) / (end - begin) / rate)
    say("two tenants together, of one alone", found)


def colocation() -> None:
    """Measure a service with best-effort work that never ends: latencies relative to those alone, and how much the
    best-effort work gets."""
    mechanism = ["--mechanism", "time"] if SOFT else []
    with agent():
        p50, p99, left = [], [], []
        for _ in range(ROUNDS):
            rate = alone()
            first = result(tenant("service", ["--latency-sensitive", *mechanism], "serve", 100, SECONDS))
            work = tenant("work", ["--best-effort", *mechanism], "work", SECONDS + 4)
            second = result(tenant("service", ["--latency-sensitive", *mechanism], "serve", 100, SECONDS))
            marks = result(work)
            p50.append(second[len(second) // 2] - first[len(first) // 2])
            p99.append(second[len(second) * 99 // 100] - first[len(first) * 99 // 100])
            left.append(marks[-1][1] / (marks[-1][0] - marks[0][0]) / rate)
    say("service beside work, p50 over alone, ms", p50)
    say("service beside work, p99 over alone, ms", p99)
    say("work beside the service (100 requests/s of 1 ms leave 0.90), of alone", left)


def copies() -> None:
    """Measure two tenants of weights 1 and 3 that copy all the time."""
    mechanism = [] if SOFT else ["--mechanism", "mps"]
    heavy, both = [], []
    with agent("--copy-period-bytes", "64MiB"):
        for _ in range(ROUNDS):
            rate = alone("copy")
            pair = [tenant(f"w{w}", ["--copy-weight", str(w), *mechanism], "copy", SECONDS) for w in (1, 3)]
            light, weighty = (result(p) for p in pair)
            begin, end = max(light[0][0], weighty[0][0]), min(light[-1][0], weighty[-1][0])
            one, three = (done_between(m, begin, end) / (end - begin) for m in (light, weighty))
            heavy.append(three / (one + three))
            both.append((one + three) / rate)
    say("copies of weight 3 beside weight 1, its part", heavy)
    say("both together, of one alone", both)


def swap() -> None:
    """Move a tenant's memory off the GPU and back by the command line; prints the seconds, and whether the contents are
    unchanged."""
    size = (256 << 20) if SOFT else 24 * GIB
    with agent():
        holder = tenant("holder", ["--oversubscribe", "swap", "--memory", f"{size // GIB + 2}GiB"], "hold", size)
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "there\n"
        seconds: dict[str, list[float]] = {"park": [], "resume": []}
        for _ in range(2 * ROUNDS):
            for verb, found in seconds.items():
                answer = subprocess.run(
                    ["cotenant", verb, "holder", "--json"], capture_output=True, text=True, check=True
                )
                found.append(json.loads(answer.stdout)["seconds"])
            holder.stdin.write("check\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "intact\n"
        holder.communicate()
    for verb, found in seconds.items():
        say(f"{verb} of {size / GIB:g} GiB, seconds", found)


def jobs() -> None:
    """Measure two jobs that each use 70 % of the memory that tenants share and always have work, relative to one alone;
    the first move is included."""
    # MiB of a context, and MiB that the contexts leave to the jobs
    context, room, seconds = (256, 256, 30) if SOFT else (640, 38 << 10, 60)
    size = (room * 7 // 10) << 20
    file = Path(tempfile.mkdtemp(prefix="independent-")) / "agent.yaml"
    file.write_text(f"gpu_memory: {room + 2 * context}MiB\n")
    options = ["--oversubscribe", "swap", "--memory", f"{(size >> 20) + 2 * context}MiB"]
    found, moves = list[float](), list[float]()
    with agent("--config", str(file)):
        for _ in range(ROUNDS):
            alone_marks = result(tenant("alone", [], "round", size, seconds // 3))["marks"]
            rate = alone_marks[-1][1] / (alone_marks[-1][0] - alone_marks[0][0])
            pair = [tenant(n, options, "round", size, seconds) for n in "ab"]
            time.sleep(seconds * 0.8)
            listed = json.loads(subprocess.run(["cotenant", "ps", "--json"], capture_output=True, check=True).stdout)
            moves.append(sum(row["gpus"][0]["residency"]["moves_in"] for row in listed["tenants"]))
            answers = [result(p) for p in pair]
            assert all(a["whole"] for a in answers)
            begin, end = max(a["marks"][0][0] for a in answers), min(a["marks"][-1][0] for a in answers)
            found.append(sum(done_between(a["marks"], begin, end) for a in answers) / (end - begin) / rate)
    say("two jobs of 70 % of the memory, of one alone", found)
    say("moves in before 80 % of the time", moves)


if __name__ == "__main__":
    steps = {step.__name__: step for step in (shares, together, colocation, copies, swap, jobs)}
    for name in ARGUMENTS or list(steps):
        steps[name]()
