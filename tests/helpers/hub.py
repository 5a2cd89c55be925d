"""The real JupyterHub with its proxy on loopback, run as root with the shipped configuration. Users are named by
numbers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

from command import python_for_all
from kube_node import wait_for
from ports import reserved_ports

from cotenant.agent.ipc.client import ControlClient

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "jupyterhub" / "jupyterhub_config.py"
TOOLS = ("jupyterhub", "jupyterhub-singleuser", "configurable-http-proxy")
LONG_S = 240
TOKEN = "of-the-test-0123456789"
CONFIG = """
import os
from jupyterhub.spawner import LocalProcessSpawner
load_subconfig({example!r})

class ByNumber(LocalProcessSpawner):
    '''Users of this test are no users of this machine.'''

    def make_preexec_fn(self, name):
        uid = {uids!r}[name]

        def become():
            os.setgroups([])
            os.setgid(65534)
            os.setuid(uid)
            os.chdir(os.path.join({folder!r}, str(uid)))

        return become

    def user_env(self, env):
        env.update(USER=self.user.name, HOME=os.path.join({folder!r}, str({uids!r}[self.user.name])), SHELL="/bin/sh")
        return env

c.JupyterHub.spawner_class = ByNumber
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.bind_url = "http://127.0.0.1:{ports[0]}"
c.JupyterHub.hub_port = {ports[1]}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
c.ConfigurableHTTPProxy.pid_file = {folder!r} + "/proxy.pid"
c.JupyterHub.db_url = "sqlite:///" + {folder!r} + "/hub.sqlite"
c.JupyterHub.cookie_secret_file = {folder!r} + "/cookie_secret"
c.JupyterHub.allow_named_servers = True
c.Spawner.start_timeout = c.Spawner.http_timeout = {long_s}  # of a machine with other work
c.JupyterHub.services = [dict(name="test", api_token={token!r})]
c.JupyterHub.load_roles = [dict(name="test", services=["test"], scopes=["admin:users", "admin:servers"])]
c.Spawner.environment = dict(COTENANT_DIR={agent!r}, JUPYTERHUB_SINGLEUSER_APP="jupyter_server.serverapp.ServerApp")
"""


def missing() -> str:
    """Why a hub cannot run on this machine; empty if it can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not on the PATH: {', '.join(absent)}; `make test-clusters` installs them"
    if os.geteuid() != 0:
        return "only root can start servers of several users"
    try:
        subprocess.run(["jupyterhub-singleuser", "--version"], user=65534, cwd="/", capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "other users may not run this jupyterhub-singleuser: install it with a Python that they may run"
    return ""


class Hub:
    """The hub, its proxy, and an agent with two software GPUs whose configuration is `tenants`."""

    def __init__(self, folder: Path, uids: dict[str, int], tenants: str) -> None:
        self.folder = folder
        folder.chmod(0o755)
        for uid in uids.values():
            (folder / str(uid)).mkdir()
            os.chown(folder / str(uid), uid, 65534)
        tools = folder / "bin"
        tools.mkdir()
        python, _ = python_for_all()
        (tools / "cotenant").write_text(f'#!/bin/sh\n{python} -m cotenant.cli.main "$@"\n')
        (tools / "cotenant").chmod(0o755)
        self.agent = folder / "agent"
        declared = folder / "agent.yaml"
        declared.write_text(tenants)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reserved = contextlib.ExitStack()
        try:
            self._start(tools, uids, str(declared))
        except BaseException:
            self.close()
            raise

    def _start(self, tools: Path, uids: dict[str, int], declared: str) -> None:
        folder, agent = self.folder, str(self.agent)
        soft = {"COTENANT_SOFTGPU_STATE": str(folder / "soft"), "COTENANT_SOFTGPU_COUNT": "2"}
        self._run([str(tools / "cotenant"), "agent", "--gpus", "soft", "--dir", agent, "--config", declared,
                   "--socket-mode", "666"], os.environ | soft)  # fmt: skip
        wait_for((self.agent / "control.sock").exists, LONG_S, "the agent listens")
        ports = self._reserved.enter_context(reserved_ports(3))
        self.url = f"http://127.0.0.1:{ports[0]}"
        config = folder / "hub.py"
        config.write_text(
            CONFIG.format(example=str(EXAMPLE), uids=uids, folder=str(folder), ports=ports, token=TOKEN,
                          agent=agent, long_s=LONG_S)
        )  # fmt: skip
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "COTENANT_DIR": agent}
        environment.pop("PYTHONPATH", None)
        hub = self._run(["jupyterhub", "-f", str(config)], environment)
        wait_for(lambda: self._up(hub), LONG_S, "the hub answers")

    def _run(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            started = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        self._processes.append(started)
        return started

    def _up(self, hub: subprocess.Popen[bytes]) -> bool:
        assert hub.poll() is None, self.said()
        try:
            return bool(self.api("GET", "/"))
        except OSError:
            return False

    def said(self) -> str:
        """The logs of the hub, its servers and the agent."""
        return (self.folder / "log").read_text()

    def api(self, method: str, path: str, data: Any = None) -> Any:
        """The hub's REST interface."""
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(f"{self.url}/hub/api{path}", body, method=method)
        request.add_header("Authorization", f"token {TOKEN}")
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            text = answer.read()
        return json.loads(text) if text else {}

    def tenant(self, name: str) -> dict[str, Any]:
        """The tenant's row in the agent's list."""
        with ControlClient(self.agent) as client:
            rows = {row["name"]: row for row in client.call("list")["tenants"]}
        found: dict[str, Any] = rows[name]
        return found

    def servers(self, user: str) -> dict[str, bool]:
        """Names of the servers of a user, and whether each is ready."""
        found = self.api("GET", f"/users/{urllib.parse.quote(user)}")["servers"]
        return {name: server["ready"] for name, server in found.items()}

    def close(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._reserved.close()


class Browser:
    """A user who logs in and fills in the spawn form."""

    def __init__(self, hub: Hub, user: str) -> None:
        self.hub, self.user, self.cookies = hub, user, CookieJar()
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))
        self.post("/hub/login", username=user, password="any")

    def get(self, path: str) -> str:
        """The text of a page, even if it is an error page."""
        return self._open(path, None)

    def post(self, path: str, **form: str) -> str:
        """Send a form; returns the page that answers it."""
        self.get(path)
        token = next(cookie.value for cookie in self.cookies if cookie.name == "_xsrf" and cookie.path == "/hub/")
        body = urllib.parse.urlencode(form | {"_xsrf": token or ""}).encode()
        return self._open(path, body)

    def _open(self, path: str, body: bytes | None) -> str:
        try:
            with self.opener.open(self.hub.url + path, body, timeout=LONG_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()
