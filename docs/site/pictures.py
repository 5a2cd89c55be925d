"""Takes the pictures of pages in the documentation with headless Chromium (`chromium` and its driver are on the path):

    python docs/site/pictures.py live           docs/howto/images/live.png, in five minutes
    python docs/site/pictures.py live-server    docs/howto/images/live-server.png, in one minute
    python docs/site/pictures.py report         docs/images/report.webp

Everything runs on the software GPU in a temporary folder, and is stopped at the end. The other pictures are of a fleet
(live-fleet.png, by hand) and of a terminal (terminal.svg, by recording.py).
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
WIDTH_PX = 1280
COTENANT = (sys.executable, "-m", "cotenant.cli.main")
READY_WITHIN_S = 60.0

AGENT = """
gpus: soft
tenants:
  - {name: train-resnet, request: 40%, memory: 6GiB}
  - {name: web, request: 30%, memory: 4GiB, latency_sensitive: true}
  - {name: notebooks, request: 20%, limit: 50%, memory: 2GiB}
"""
BUSY = (("-m", "cotenant.bench.workload", "busy"), "run 3600\n")
# tenant -> options of `cotenant run`, arguments of Python, and what the program reads
TENANTS = {
    "train-resnet": ((), *BUSY),
    "batch-scoring": (("--limit", "30%"), *BUSY),
    "web": ((), ("-m", "cotenant.bench.ls_client", "driver", "4"), "run 3600 40 1 0 0\n"),
}
HISTORY_S = 300.0  # the chart of the last hour then has some minutes

SERVICES = """
gpus: {count: 2, model: RTX2080Ti}
backend: timed
services:
  - {name: resnet50, rate_rps: 60, slo_ms: 108}
  - {name: googlenet, rate_rps: 40, slo_ms: 66}
  - {name: vgg16, rate_rps: 20, slo_ms: 500}
"""
LOAD_S = 40.0


@contextlib.contextmanager
def running(words: Sequence[str], env: dict[str, str], reads: str = "") -> Iterator[subprocess.Popen[str]]:
    """A program in the background, which reads a text and then waits for more."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, text=True, **quiet) as process:
        assert process.stdin is not None
        process.stdin.write(reads)
        process.stdin.flush()
        try:
            yield process
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answering(port: int) -> None:
    """Wait until something listens on the port."""
    end = time.monotonic() + READY_WITHIN_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if time.monotonic() > end:
            raise SystemExit(f"nothing listens on port {port}")
        time.sleep(0.2)


@contextlib.contextmanager
def browser(height_px: int) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    size = {"width": WIDTH_PX, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield driver
    finally:
        driver.quit()


def photographed(url: str, shows: str, height_px: int = 0, kind: str = "png") -> bytes:
    """A picture of a page, once it shows a text; of the whole page without a height."""
    with browser(height_px or 400) as driver:
        driver.get(url)
        end = time.monotonic() + READY_WITHIN_S
        while shows not in driver.execute_script("return document.body.innerText"):
            if time.monotonic() > end:
                raise SystemExit(f"{url} does not show {shows!r}")
            time.sleep(0.2)
        time.sleep(1.0)  # until the page's transitions have ended
        if not height_px:
            height_px = driver.execute_script("return document.documentElement.scrollHeight")
        form = {"format": kind, "captureBeyondViewport": True} | ({"quality": 90} if kind == "webp" else {})
        form["clip"] = {"x": 0, "y": 0, "width": WIDTH_PX, "height": height_px, "scale": 1}
        return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", form)["data"])


def live(folder: Path) -> bytes:
    env = os.environ | {"COTENANT_DIR": str(folder / "agent"), "COTENANT_SOFTGPU_STATE": str(folder / "gpu")}
    (folder / "agent.yaml").write_text(AGENT)
    port = free_port()
    agent = (*COTENANT, "agent", "--config", str(folder / "agent.yaml"), "--http", f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(agent, env))
        answering(port)
        for name, (options, program, reads) in TENANTS.items():
            words = (*COTENANT, "run", "--name", name, *options, "--", sys.executable, *program)
            stack.enter_context(running(words, env, reads))
        time.sleep(HISTORY_S)
        return photographed(f"http://127.0.0.1:{port}", "on the GPU")


def live_server(folder: Path) -> bytes:
    env = os.environ | {"COTENANT_DIR": str(folder / "agent")}
    (folder / "services.yaml").write_text(SERVICES)
    port = free_port()
    address, services = f"127.0.0.1:{port}", str(folder / "services.yaml")
    with running((*COTENANT, "serve", services, "--http", address, "--grpc", "none"), env):
        answering(port)
        load = ("load", "--url", f"http://{address}", "--services", services, "--duration", f"{2 * LOAD_S:g}s")
        with running((*COTENANT, *load), env):
            time.sleep(LOAD_S)
            return photographed(f"http://{address}", "serving")


def report(folder: Path) -> bytes:
    subprocess.run((*COTENANT, "demo", "--out", str(folder / "demo")), check=True, stdout=subprocess.DEVNULL)
    page = (folder / "demo/report.html").as_uri()
    return photographed(page, "Completion times", height_px=1080, kind="webp")


PICTURES: dict[str, tuple[Path, Callable[[Path], bytes]]] = {
    "live": (DOCS / "howto/images/live.png", live),
    "live-server": (DOCS / "howto/images/live-server.png", live_server),
    "report": (DOCS / "images/report.webp", report),
}

if __name__ == "__main__":
    for each in sys.argv[1:]:
        file, take = PICTURES[each]
        with tempfile.TemporaryDirectory() as made:
            file.write_bytes(take(Path(made)))
