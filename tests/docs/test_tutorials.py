"""The commands of each tutorial run as they are written, on the software GPU."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
# steps for a new clone, which `make test` has already done
SET_UP = re.compile(r"^(?:make |source ).*\n", re.MULTILINE)
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


def commands(page: str) -> str:
    """The indented blocks of a page, as one script; blocks between fences show output."""
    unfenced = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", unfenced, re.MULTILINE)
    return SET_UP.sub("", "\n".join(textwrap.dedent(block) for block in blocks))


def free_port() -> str:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return str(door.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_commands_of_a_tutorial_run(path: Path, tmp_path: Path) -> None:
    """With ports that are free here, since those of the page may be taken."""
    script = commands(path.read_text())
    for port in set(PORT.findall(script)):
        script = re.sub(rf"(?<=127\.0\.0\.1:){port}\b", free_port(), script)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, program in (("python", ""), ("cotenant", " -m cotenant.cli.main")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{program} "$@"\n')
        (programs / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COTENANT_DIR": str(tmp_path / "agent"),
    }
    ends = "trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT\n"  # runs also when a command in the middle fails
    log = tmp_path / "log"
    with log.open("w") as out:
        done = subprocess.run(
            ["bash", "-emo", "pipefail", "-c", ends + script],
            cwd=tmp_path,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-4000:]


def test_each_tutorial_has_commands() -> None:
    assert len(TUTORIALS) == 4
    for path in TUTORIALS:
        assert commands(path.read_text()).count("cotenant ") >= 4, path.name
