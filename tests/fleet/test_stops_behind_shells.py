"""Stops that reach a shell first: the programs behind it get the signal, too, and the time to save their state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_orders import PYTHON, Node
from waiting import wait_for

from cotenant.fleet.executors.local import LocalExecutor
from cotenant.fleet.nodes import pretend_nodes

EPOCHS = itertools.count(1)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    made = LocalExecutor(tmp_path_factory.mktemp("local"), pretend_nodes(2, 2, "A100-40GB", 40 << 30, 6.0, 125 * 10**9))
    yield made
    made.shutdown()


@pytest.fixture
def node(executor: LocalExecutor, tmp_path: Path) -> Node:
    return Node(executor, tmp_path, next(EPOCHS))


def until_log(node: Node, name: str, text: str) -> None:
    file = node.folder / "jobs" / name.removesuffix(".0") / "log-0-0.txt"
    wait_for(lambda: file.exists() and text in file.read_text(), what=f"{text!r} in {file}")


@pytest.mark.parametrize(
    "wrapper",
    [
        "cd . ; {program}", "{program} | cat", "{program} | tee log; true", "({program}) 2>&1 | tee log | cat",
        "cat /dev/zero | {program}", "setsid {program} & wait", "sh -c '{program}; true'; true",
        "trap 'exit 0' TERM; {program} & wait", "trap 'echo cleaning' TERM; {program}; exit $?",
    ],
    ids=[
        "in front", "in a pipeline", "before tee", "in a subshell", "at the end of a pipeline", "in its own session",
        "two deep", "that leaves it", "that waits for it",
    ],
)
def test_a_stop_reaches_the_program_behind_a_shell(node: Node, wrapper: str) -> None:
    """SIGTERM ends the shell, or the shell catches it; the program behind it gets the signal, too, and the time to save
    its state, and to print what it does."""
    ended = stopped_behind(node, wrapper)
    assert (ended["code"], ended["asked"], ended["killed"]) == (75, "stop", False)


@pytest.mark.parametrize("end", ["", "; true"])
def test_the_end_of_a_pipeline_does_not_make_a_stopped_job_successful(node: Node, end: str) -> None:
    """A shell that catches SIGTERM ends with the exit status of tee, 0, though the program has only saved its state."""
    ended = stopped_behind(node, "trap 'echo cleaning' TERM; {program} | tee log" + end)
    assert (ended["code"], ended["asked"], ended["killed"]) == (143, "stop", False)


def test_a_stop_reaches_the_program_of_a_launcher_in_a_session_of_its_own(node: Node) -> None:
    """The launcher dies of SIGTERM and leaves the program."""
    start = f"import subprocess; subprocess.Popen(['{PYTHON}', 'program.py'], start_new_session=True).wait()"
    ended = stopped_behind(node, f'exec {PYTHON} -c "{start}"')
    assert (ended["code"], ended["asked"], ended["killed"]) == (75, "stop", False)


def stopped_behind(node: Node, wrapper: str) -> Any:
    """Stop a program that saves its state behind a shell; returns how the job ended."""
    (node.folder / "program.py").write_text(
        "import signal, sys, time\n"
        "def leave(*_):\n"
        "    print('saving', flush=True); time.sleep(0.5); print('saved', flush=True)\n"
        "    open('saved', 'w').close(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('set', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    name = node.start("sh", "-c", wrapper.format(program=f"{PYTHON} program.py"), grace_s=10.0)
    until_log(node, name, "set")
    node.exchange({"do": "stop", "attempt": name, "why": "preempt"})
    ended = node.ended(name)
    assert (node.folder / "saved").exists(), (ended, "it had the time to save its state")
    return ended


def test_a_shell_that_has_saved_counts_whatever_it_leaves(node: Node) -> None:
    """Its own exit status says that the state was saved, though a monitor in the background dies of SIGTERM."""
    # the monitor says itself that it is there: before it is a program of its own, it has the shell's handlers
    name = node.start("sh", "-c", "trap 'exit 75' TERM; sh -c 'echo set; exec sleep 600' & wait", grace_s=20.0)
    until_log(node, name, "set")
    node.exchange({"do": "stop", "attempt": name, "why": "preempt"})
    ended = node.ended(name)
    assert (ended["code"], ended["asked"], ended["killed"]) == (75, "stop", False)
