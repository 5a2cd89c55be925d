"""A real Prometheus scrapes agent, server and fleet at once, and its tool finds nothing to complain about in any."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_setup import deployment, infer, plan
from server_thread import running

from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.session import Fleet, FleetOptions
from cotenant.observability.metrics import AGENT, FLEET, SERVER

TENANTS = [
    {"name": "notebooks", "request": 0.2, "limit": 0.5, "memory": "2GiB"},
    {"name": "team/vision", "request": 0.3, "memory": "4GiB"},
]
WITHIN_S = 60


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Prometheus:
    """A Prometheus that scrapes `targets` (job to URL) twice a second."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        jobs = [
            {"job_name": name, "scrape_interval": "500ms", "scrape_timeout": "500ms",
             "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc]}]}
            for name, url in targets.items()
        ]  # fmt: skip
        config = folder / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": jobs}))
        self.port = free_port()
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb",
             f"--web.listen-address=127.0.0.1:{self.port}"],
            stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, query: str, enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The result of a query once it is enough, or what there was when the time was over."""
        found: list[dict[str, Any]] = []
        until = time.monotonic() + WITHIN_S
        while not enough(found) and time.monotonic() < until:
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                address = f"http://127.0.0.1:{self.port}/api/v1/query?query={urllib.parse.quote(query)}"
                with urllib.request.urlopen(address, timeout=60) as answer:
                    found = json.load(answer)["data"]["result"]
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def doors(live_agent: Callable[..., Any], tmp_path: Path) -> Iterator[dict[str, str]]:
    """URLs of an agent with two tenants, a server that has answered once, a fleet with a job."""
    agent = live_agent(tenants=TENANTS)
    options = FleetOptions(tmp_path / "fleet", nodes=1, gpus_per_node=2, lease_s=0.5, grace_s=1.0, http="127.0.0.1:0")
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path)
    with Fleet(options) as fleet, running(services, plan=plan({"a": 8})) as server:
        assert fleet.live is not None
        fleet.submit(JobSpec(name="sleeper", command=("sleep", "300"), gpus=2))
        assert infer(server.http_url, "a")[0] == 200
        yield {"agent": agent.url, "server": server.http_url, "fleet": fleet.live.url}


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_scrapes_all_three(doors: dict[str, str], tmp_path: Path) -> None:
    prometheus = Prometheus(tmp_path, doors)
    try:
        up = prometheus.ask("up == 1", lambda rows: len(rows) == 3)
        assert {row["metric"]["job"] for row in up} == set(doors)
        limits = prometheus.ask("cotenant_tenant_limit_ratio", lambda rows: len(rows) == 2)
        assert {row["metric"]["tenant"]: float(row["value"][1]) for row in limits} == {
            "notebooks": 0.5, "team/vision": 1.0,
        }  # fmt: skip
        (answered,) = prometheus.ask('cotenant_server_request_seconds_count{service="a"}', bool)
        assert float(answered["value"][1]) == 1
        (begun,) = prometheus.ask("cotenant_fleet_wait_seconds_count == 1", bool)
        assert begun["metric"]["job"] == "fleet"
        # one histogram of each kind for which a dashboard asks for quantiles
        wait = prometheus.ask(
            "histogram_quantile(0.9, sum by (le, instance) (cotenant_fleet_wait_seconds_bucket))", bool
        )  # fmt: skip
        assert 0 < float(wait[0]["value"][1]) <= 60
    finally:
        prometheus.close()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_complain_about(doors: dict[str, str]) -> None:
    for name, metrics in (("agent", AGENT), ("server", SERVER), ("fleet", FLEET)):
        with urllib.request.urlopen(doors[name] + "/metrics", timeout=60) as answer:
            text = answer.read().decode()
        assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} == {m.name for m in metrics}
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), name
