"""The node's pods as the API server lists them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Set
from typing import Any

from cotenant.core.errors import InputError
from cotenant.kube.binding.orders import PodKey, ended
from cotenant.kube.client import ApiError, KubeApi
from cotenant.kube.shares import shares_of

LOG = logging.getLogger(__name__)
# Longest time between two listings of the pods. A process may connect before the plugin has announced its pod to the
# agent. The agent then lets it wait up to 8 s, so this must be less.
LIST_EVERY_S = 5.0


class NodePods:
    """Pods of one node, from the last successful listing. `with_devices`: pods that have devices from the kubelet."""

    def __init__(self, api: KubeApi, node: str, list_every_s: float = LIST_EVERY_S) -> None:
        self.by_key: dict[PodKey, dict[str, Any]] = {}
        self.with_devices: Set[PodKey] = frozenset()
        self.fault = ""  # why the last listing failed; empty if it did not
        self.node, self._api, self._list_every_s = node, api, list_every_s
        self._listed_s = self._failed_s = -1e9
        self._asked = self._answered = 0  # numbers of the last listing that was begun, and of the one in `by_key`
        self._lock = threading.Lock()

    def by_uid(self) -> dict[str, dict[str, Any]]:
        """UID -> pod."""
        return {pod["metadata"]["uid"]: pod for pod in self.by_key.values()}

    def expire(self) -> None:
        """Make the next `refresh` ask the API server for the pods."""
        self._listed_s = -1e9

    def refresh(self, needed: Iterable[PodKey], *, force: bool = False) -> bool:
        """List the pods if a needed pod is unknown or the last listing is old. Returns whether the list is fresh."""
        known = all(key in self.by_key for key in needed)
        if known and not force and time.monotonic() - self._listed_s < self._list_every_s:
            return False
        with self._lock:
            self._asked += 1
            number = self._asked
        try:
            mine = {"fieldSelector": f"spec.nodeName={self.node}"}
            # resourceVersion 0 reads from the API server's cache, which may lack a pod that has just arrived
            answer = self._api.get("/api/v1/pods", **mine, **({} if force else {"resourceVersion": "0"}))
        except ApiError as error:
            self._failed_s = time.monotonic()
            if self.fault != (fault := str(error)):
                LOG.warning(fault)
            self.fault = fault
            return False
        if self.fault:
            LOG.info("the API server answers again")
        self.fault = ""
        self._listed_s = time.monotonic()
        listed = [(pod["metadata"], pod) for pod in answer.get("items") or []]
        with self._lock:
            # another thread's listing that began later may have been answered earlier, and may have more pods
            if number > self._answered:
                self._answered = number
                self.by_key = {(metadata["namespace"], metadata["name"]): pod for metadata, pod in listed}
        return True

    def waiting(self, fresh: bool) -> list[tuple[int, int]]:
        """Return (share units, memory units) of each container that waits for devices. `fresh`: list the pods first.
        Called by the threads that answer the kubelet."""
        # after a failed listing the pods are not listed again soon, since the kubelet waits for the answer
        if fresh and time.monotonic() - self._failed_s > LIST_EVERY_S:
            self.refresh((), force=True)
        found = []
        for key, pod in self.by_key.items():
            if key in self.with_devices or ended(pod):
                continue
            with contextlib.suppress(InputError):
                found += [(share.units, share.memory_units) for share in shares_of(pod) if not share.whole]
        return found
