"""Registers the node's resources with the kubelet, in a thread of its own.

A restarted kubelet checks again whether it can admit the running pods. It has no units to offer until they are
registered again, and until then rejects pods that need some. So registration waits neither for the agent nor for the
API server.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from cotenant.core.errors import WorkError
from cotenant.kube.plugin.folderwatch import FolderWatch
from cotenant.kube.plugin.resource import KUBELET_SOCKET, ResourcePlugin
from cotenant.kube.plugin.state import PluginState

LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0  # the folder is checked this often even without an event of the watch
# the kubelet's socket file exists before the kubelet listens on it, and no event tells when it does, so registering is
# tried again after this time
RETRY_S = 0.2


class Registrar:
    """Keeps the node's resources registered with the kubelet. With `by_claims`, GPUs are offered by resource claims
    (DRA), so nothing is registered.

    `met`: the node's resources at the last success; None: no success yet with the kubelet that runs now, or there is no
    kubelet. `fault`: why the last try failed; empty if it did not.
    """

    def __init__(self, folder: Path, state: PluginState, *, by_claims: bool, every_s: float = LOOK_EVERY_S) -> None:
        self.fault = ""
        self.met: list[str] | None = None
        self._folder, self._state, self._by_claims, self._every_s = folder, state, by_claims, every_s
        self._plugins: dict[str, ResourcePlugin] = {}
        # device, inode and change time of the kubelet's socket with which the resources were registered
        self._kubelet: tuple[int, int, int] | None = None
        self._watch = FolderWatch(folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)

    def start(self) -> None:
        """Register the node's resources with the kubelet, and again whenever the kubelet restarts."""
        self._thread.start()

    def look(self) -> None:
        """Check again now, since the node's resources have changed."""
        self._watch.wake()

    def stop(self) -> None:
        """End the thread, and stop the device plugin of every resource."""
        self._stop.set()
        self._watch.wake()
        if self._thread.is_alive():
            self._thread.join()
        for plugin in self._plugins.values():
            plugin.stop()
        self._watch.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._meet()
                self.fault = ""
            # after any error the loop tries again, since no pod could start without this thread
            except (WorkError, OSError) as error:
                self.fault = str(error)
            self._watch.wait(min(self._every_s, RETRY_S) if self.fault else self._every_s)

    def _meet(self) -> None:
        """Serve all resources, and register them with a new kubelet. When a kubelet starts, it removes the plugins'
        sockets from the folder and creates a new socket of its own there.
        """
        kubelet = self._folder / KUBELET_SOCKET
        try:
            found = kubelet.stat()
        except OSError:
            self._kubelet = self.met = None
            raise WorkError(f"{kubelet}: there is no kubelet yet") from None
        identity = (found.st_dev, found.st_ino, found.st_ctime_ns)
        if identity != self._kubelet:
            for known in self._plugins.values():
                known.stop()
            self._plugins.clear()
            self._kubelet = self.met = None
        resources = self._state.inventory.resources()
        # if claims are used nothing is registered, since a GPU must not be offered in two ways
        for resource in () if self._by_claims else resources:
            plugin = self._plugins.get(resource)
            if plugin is not None and plugin.path.exists():
                continue
            if plugin is not None:
                plugin.stop()
            fresh = ResourcePlugin(resource, self._state, self._folder)
            try:
                fresh.start()
                fresh.register(kubelet)
            except WorkError:
                fresh.stop()
                raise
            self._plugins[resource] = fresh
            LOG.info("registered %s: %d devices", resource, len(self._state.inventory.of(resource)))
        self._kubelet = identity
        if resources != self.met:
            self.met = resources
            self._state.kick.set()
