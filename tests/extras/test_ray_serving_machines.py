"""Serving over Ray on machines with addresses, clocks and disks of their own; links, nodes and the head fail."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import serve_setup
import yaml
from netlab import Machine
from ray_lab import LONG_S, RayLab
from waiting import wait_for

from cotenant.core.serving import Gpulet, Seat, ServingPlan

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(1800)]
NAMES = ("a", "b", "c")
PORT = 8000
BRIDGE = "core.ray_bridge"


class Clients:
    """Three programs beside a server that ask, one request after the other, and note what came of each."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.heard: list[tuple[int, str]] = []  # status and message; status 0 means that there was no answer
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(name,), daemon=True) for name in NAMES]
        for thread in self._threads:
            thread.start()

    def _ask(self, model: str) -> None:
        with self.machine.network():
            while not self._over.wait(0.2):
                try:
                    status, _, answer = serve_setup.infer(f"http://127.0.0.1:{PORT}", model, timeout=LONG_S)
                except (OSError, http.client.HTTPException) as error:
                    self.heard.append((0, repr(error)))
                    continue
                sentence = answer.get("error", "") if isinstance(answer, dict) else str(answer)
                self.heard.append((status, sentence))

    def answered(self, count: int) -> None:
        """Wait until so many more requests were answered."""
        seen = len(self.heard)
        wait_for(lambda: sum(status == 200 for status, _ in self.heard[seen:]) >= count, LONG_S, "answers")

    def refused(self, why: str) -> None:
        """Wait until the next requests are refused so."""
        seen = len(self.heard)
        wait_for(lambda: sum(why in sentence for _, sentence in self.heard[seen:]) >= 10, LONG_S, why)

    def end(self) -> list[tuple[int, str]]:
        """Ask no more; all that was heard."""
        self._over.set()
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), "a request got no answer"
        return self.heard


class Setting:
    """Ray's head on h, the server on g, and n; a GPU of each, which all serve all models."""

    def __init__(self, folder: Path) -> None:
        self.cluster = RayLab(folder, ("h", "g", "n"), offsets_s={"n": 5400}, small="n")
        self.lab = self.cluster.lab
        services = [{"name": name, "rate_rps": 5, "slo_ms": 10000} for name in NAMES]
        content = serve_setup.deployment(services, folder, gpus=3, autoscale=False, verify=False)
        (folder / "services.yaml").write_text(yaml.safe_dump(content))
        seats = tuple(Seat(name, name, 1, 10.0) for name in NAMES)
        lets = tuple(Gpulet(gpu, "X", "100%", 100.0, 0, 60.0, seats) for gpu in range(3))
        plan = ServingPlan("test", 3, lets, rates_rps=dict.fromkeys(NAMES, 5.0))
        (folder / "plan.json").write_text(json.dumps(plan.to_dict()))
        self.server = self.cluster.ours(
            "g", "serve", str(folder / "services.yaml"), "--plan", str(folder / "plan.json"), "--http",
            f"127.0.0.1:{PORT}", "--grpc", "none", "--address", self.cluster.address, word=f"127.0.0.1:{PORT}",
        )  # fmt: skip

    def serving(self) -> int:
        """GPUs that serve now."""
        with self.lab.machines["g"].network():
            _, _, status = serve_setup.ask(f"http://127.0.0.1:{PORT}", "/cotenant/status", timeout=LONG_S)
        return sum(let["state"] == "serving" for let in status["gpulets"])

    def until(self, gpus: int, what: str) -> None:
        """Wait until so many GPUs serve."""
        wait_for(lambda: self.serving() == gpus, LONG_S, what)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    try:
        yield made
    finally:
        made.cluster.end()


def _failures(setting: Setting) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """What fails on the way to n, and what mends it."""
    lab, cluster = setting.lab, setting.cluster

    def cut(source: str, target: str) -> None:
        lab.link(source, target).cut = True

    return {
        "cut off": (lambda: lab.isolate("n"), lab.heal),
        "deaf": (lambda: cut("g", "n"), lab.heal),
        "mute": (lambda: cut("n", "g"), lab.heal),
        "dead": (lambda: cluster.kill("n"), lambda: cluster.ray("n")),
    }


def test_every_request_is_answered_or_refused_whatever_fails(setting: Setting) -> None:
    cluster, lab = setting.cluster, setting.lab
    setting.until(3, "all GPUs serve")
    clients = Clients(lab.machines["g"])
    clients.answered(30)
    for what, (fail, mend) in _failures(setting).items():
        fail()
        setting.until(2, f"a node that is {what} is missed")
        clients.answered(30)  # answered by the nodes that are left
        mend()
        setting.until(3, f"the node that was {what} serves again")
    for link in lab.both("g", "n"):
        link.delay_s, link.loss = 0.1, 0.02
    clients.answered(60)
    lab.heal()
    filler = cluster.filler()
    clients.answered(30)
    filler.unlink()
    setting.until(3, "all GPUs serve")
    bridge = cluster.pids("g", BRIDGE)
    cluster.kill("g", BRIDGE, signal.SIGTERM)  # systemd sends the signal to all processes of a service
    clients.answered(30)
    assert cluster.pids("g", BRIDGE) == bridge
    cluster.kill("g", BRIDGE)
    wait_for(lambda: not cluster.pids("g", BRIDGE) & bridge and cluster.pids("g", BRIDGE), LONG_S, "another bridge")
    setting.until(3, "all GPUs serve")
    for name in ("h", "n"):
        cluster.kill(name)
    setting.until(0, "Ray ends itself a minute after its head")
    clients.refused("no GPU can be used now")
    for name in ("h", "g", "n"):
        cluster.ray(name)
    setting.until(3, "all GPUs of the new cluster serve")
    clients.answered(30)
    heard = clients.end()
    assert all(status == 200 or (status in (500, 503) and sentence) for status, sentence in heard), heard
    setting.server.send_signal(signal.SIGTERM)
    assert setting.server.wait(LONG_S) == 0
    print("\n", Counter(heard))
