"""Kubernetes events for pods' owners, each written once."""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections import OrderedDict
from typing import Any

from cotenant.kube.client import ApiError, KubeApi

LOG = logging.getLogger(__name__)

COMPONENT = "cotenant"
MOST_REMEMBERED = 4096
MOST_SAID = 1000


class PodEvents:
    """Writes Kubernetes events (core/v1). A message about a pod is written only once, even if it is given again; write
    failures are logged.
    """

    def __init__(self, api: KubeApi, node: str) -> None:
        self._api = api
        self._node = node
        self._said: OrderedDict[tuple[str, str], None] = OrderedDict()

    def say(self, pod: dict[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """Write an event about a pod."""
        metadata = pod["metadata"]
        key = (metadata["uid"], f"{reason}: {message}")
        if key in self._said:
            return
        try:
            namespace = metadata["namespace"]
            event = pod_event(pod, self._node, reason, message, warning=warning)
            self._api.create(f"/api/v1/namespaces/{namespace}/events", event)
        except ApiError as error:
            if error.status != 409:  # status 409: a previous plugin has already written this event
                LOG.warning(f"pod {metadata['namespace']}/{metadata['name']}: {reason}: {message} (no event: {error})")
            # after status 400 to 428 the event is not written again: the error would occur again, for example because
            # the namespace is being deleted; after any other error `say` may try again
            if not 400 <= error.status < 429:
                return
        self._said[key] = None
        if len(self._said) > MOST_REMEMBERED:
            self._said.popitem(last=False)


def pod_event(pod: dict[str, Any], node: str, reason: str, message: str, *, warning: bool) -> dict[str, Any]:
    """Return the object of a Kubernetes event. Its name is derived from its content, so that writing it again is a
    conflict instead of a second event.
    """
    metadata = pod["metadata"]
    digest = hashlib.sha256(f"{metadata['uid']}\0{reason}\0{message}".encode()).hexdigest()[:16]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name'][:230].rstrip('-.')}.{digest}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:MOST_SAID],
        "source": {"component": COMPONENT, "host": node},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
