"""Standard output that is full or closed, and errors that quote odd input: still one sentence that can be shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import command, cotenant

GOOD = "id,arrival_s,gpus,duration_s,model\na,0,1,600,res50\nb,60,2,900,lstm\n"
FULL = Path("/dev/full")
COMMANDS = (
    ("policies",),
    ("policies", "--json"),
    ("trace", "inspect", "t.csv"),
    ("trace", "inspect", "t.csv", "--json"),
    ("trace", "generate", "--jobs", "5"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.csv").write_text(GOOD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(not FULL.is_char_device(), reason="no /dev/full here")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_disk_behind_standard_output_is_one_sentence(folder: Path, words: tuple[str, ...]) -> None:
    with FULL.open("w", encoding="utf-8") as full:
        done = subprocess.run(command(*words), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "cotenant: reading or writing failed: no space left on device\n"


def test_standard_output_may_be_closed(folder: Path) -> None:
    done = subprocess.run(
        command("policies", "--json"), preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("text", ["\0" * 300, "\x1b[31mred\x1b[0m\x07", "x" * 500_000, "\u202eabc"])
def test_what_a_sentence_quotes_can_be_shown(folder: Path, text: str) -> None:
    (folder / "odd.csv").write_text(f"{text}\n1\n", encoding="utf-8")
    done = cotenant("trace", "inspect", "native:odd.csv")
    assert done.code == 2
    sentence = done.err.removesuffix("\n")
    assert sentence.startswith("cotenant: odd.csv")
    assert sentence.isprintable()
    assert len(sentence) < 2100


@pytest.mark.parametrize("module", ["typer", "cotenant.core.logs"])
def test_an_interrupt_while_the_command_is_loaded_is_no_traceback(module: str) -> None:
    interrupted = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore the signal
sys.meta_path.insert(0, Interrupt())
sys.argv = ["cotenant", "policies"]
from cotenant.cli.start import main
main()
"""
    done = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stdout == ""
    assert done.stderr in ("", "cotenant: interrupted\n")
