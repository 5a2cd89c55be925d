"""Measures how long admission, binding and freeing take on a node of eight GPUs that fills and empties."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from kube_node import Node
from pods import pod, share
from waiting import wait_for

PODS, GPUS = 96, 8


def test_ninety_six_pods_on_eight_gpus() -> None:
    node = Node(Path(tempfile.mkdtemp(prefix="cotk-")), GPUS, memory_gib=80)
    try:
        node.start_plugin()
        node.ready()
        began = time.monotonic()
        admissions = []
        for number in range(PODS):
            before = time.monotonic()
            node.schedule(pod(f"p{number}", annotations=share("8%", memory="6Gi")))
            admissions.append(time.monotonic() - before)
        wait_for(lambda: len(node.held()) == PODS, 60)
        bound_s = time.monotonic() - began
        before = time.monotonic()
        for thing in list(node.kubelet.pods.values()):
            node.finish(thing)
        wait_for(lambda: not node.held(), 60)
        freed_s = time.monotonic() - before
    finally:
        node.close()
    print(
        f"\n{PODS} pods: admission {statistics.median(admissions) * 1e3:.1f} ms median, {max(admissions) * 1e3:.0f} ms"
        f" most; all bound {bound_s:.1f} s after the first came; all free {freed_s:.1f} s after they ended"
    )
    assert bound_s < 30
    assert freed_s < 15
