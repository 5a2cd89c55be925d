"""Runs commands, records what they print, and draws docs/images/terminal.svg: a picture of the terminal in which the
lines appear one after the other when a browser shows it.

    python docs/site/recording.py docs/images/terminal.svg

The commands start an agent with the software GPU in a temporary folder; it is stopped at the end. The time between two
lines is that of the recording, but at most a second.
"""

from __future__ import annotations

import html
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS, FONT_PX, LINE_PX, PAD_PX = 108, 14, 19, 16
MOST_PAUSE_S, TYPED_S, HOLD_S = 1.0, 0.8, 8.0
COLOURS = {
    "31": "#ff7b72",
    "32": "#7ee787",
    "33": "#e3b341",
    "34": "#79c0ff",
    "35": "#d2a8ff",
    "36": "#76e3ea",
    "90": "#8b949e",
}
BUSY = """import subprocess, sys
subprocess.run([sys.executable, "-m", "cotenant.bench.workload", "busy"], input="run 60\\n", text=True, check=True)
"""  # a program that keeps the GPU busy
# (command that is typed, seconds from its start until the next command is typed); a command that ends in `&` runs in
# the background
SCRIPT = (
    ("cotenant agent --gpus soft --log-level error &", 2.0),
    ("cotenant run --name train --request 30% -- python busy.py &", 1.0),
    ("cotenant run --name eval --request 60% --memory 4GiB -- python busy.py &", 12.0),
    ("cotenant ps", 0.5),
    ("cotenant set train --limit 30%", 14.0),
    ("cotenant top --once", 0.0),
)
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


def recorded() -> list[tuple[float, str]]:
    """Run the commands of SCRIPT. Returns (seconds from the beginning, line) of all that is typed and printed."""
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        bin_folder = Path(folder) / "bin"
        bin_folder.mkdir()
        for name, module in (("cotenant", "-m cotenant.cli.main"), ("python", "")):
            (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (bin_folder / name).chmod(0o755)
        (Path(folder) / "busy.py").write_text(BUSY)
        env = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "COTENANT_DIR": f"{folder}/agent"}
        env |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "40"}
        env["COTENANT_SOFTGPU_STATE"] = f"{folder}/gpu"  # a GPU of its own, which no other agent manages
        running: list[subprocess.Popen[bytes]] = []
        now = 0.0
        for typed, wait_s in SCRIPT:
            lines.append((now, f"\x1b[32m$\x1b[0m {typed}"))
            now += TYPED_S
            began = time.monotonic()
            if typed.endswith("&"):
                words = shlex.split(typed.removesuffix("&"))
                quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                running.append(subprocess.Popen(words, env=env, cwd=folder, **quiet))
            else:
                lines += [(now + min(at, MOST_PAUSE_S), line) for at, line in printed(typed, env)]
            time.sleep(max(0.0, wait_s - (time.monotonic() - began)))
            now += MOST_PAUSE_S if wait_s else 0.0
        for process in reversed(running):
            process.terminate()
            process.wait(30)
    return lines


def printed(command: str, env: dict[str, str]) -> list[tuple[float, str]]:
    """Run a command in a terminal. Returns (seconds from its start, line) of each line that it prints."""
    began = time.monotonic()
    reader, writer = pty.openpty()
    process = subprocess.Popen(["bash", "-c", command], env=env, stdout=writer, stderr=writer, stdin=subprocess.DEVNULL)
    os.close(writer)
    found, rest = [], b""
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            break
        *whole, rest = (rest + part).split(b"\n")
        found += [(time.monotonic() - began, line.decode().rstrip("\r")) for line in whole]
    os.close(reader)
    process.wait()
    return found


def spans(line: str) -> str:
    """Return a line with its colours as SVG text. Each piece of text states its column, so that it is in the right
    place with any font.
    """
    made, style, column, at = [], "", 0, 0
    for match in [*ESCAPE.finditer(line), None]:
        text = line[at : match.start() if match else len(line)]
        if text.strip():
            x = PAD_PX + column * FONT_PX * 0.6
            made.append(f'<tspan x="{x:.1f}"{style}>{html.escape(text)}</tspan>')
        column += len(text)
        if match is None:
            break
        at = match.end()
        if match[2] == "m":
            codes = match[1].split(";")
            style = "" if codes in ([""], ["0"]) else _style(codes)
    return "".join(made)


def _style(codes: list[str]) -> str:
    colour = next((COLOURS[code] for code in codes if code in COLOURS), None)
    styles = [f'fill="{colour}"'] if colour else []
    styles += ['font-weight="bold"'] if "1" in codes else []
    styles += ['opacity=".65"'] if "2" in codes else []
    return "".join(f" {style}" for style in styles)


def drawn(lines: list[tuple[float, str]]) -> str:
    """Return the SVG, whose animation plays once: each line appears at its time and stays. If the reader has switched
    animations off, all lines are visible at once.
    """
    end = lines[-1][0] + HOLD_S
    width, height = PAD_PX * 2 + COLUMNS * FONT_PX * 0.6, PAD_PX * 2 + LINE_PX * len(lines)
    rules, texts = [], []
    for number, (at, line) in enumerate(lines):
        part = 100 * at / end
        rules.append(f"@keyframes k{number}{{0%,{part:.2f}%{{opacity:0}}{part + 0.01:.2f}%,100%{{opacity:1}}}}")
        y = PAD_PX + LINE_PX * (number + 0.75)
        texts.append(f'<text y="{y:.0f}" style="animation-name:k{number}">{spans(line)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="Two programs share a GPU at 30 and 60 percent, then the first is limited to 30 percent">'
        f"<style>text{{font:{FONT_PX}px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e6edf3;"
        f"white-space:pre;animation:{end:.1f}s step-end both}}"
        f"@media(prefers-reduced-motion:reduce){{text{{animation:none}}}}{''.join(rules)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{"".join(texts)}</svg>\n'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawn(recorded()))
