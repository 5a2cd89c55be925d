"""Chooses the GPUs of a job. The policy only decides how many the job gets on each node. No GPU is assigned twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.mig import Mig
from cotenant.fleet.nodes import NodeSpec
from cotenant.fleet.state import Assignment, GpuShare

EPSILON = 1e-6


class GpuChooser:
    """The set of assigned GPUs, either in one plan or by all running jobs."""

    def __init__(self, nodes: Iterable[NodeSpec]) -> None:
        given = tuple(nodes)
        self._gpus = {node.name: node.gpus for node in given}
        self._plain = {node.name: [gpu.uuid for gpu in node.plain_gpus] for node in given}
        self._taken: dict[str, float] = {}  # UUID of a GPU or MIG instance -> fraction of it that is assigned
        self._mechanism: dict[str, str] = {}

    def free(self, share: GpuShare) -> bool:
        """Return whether this GPU, or this fraction of it, is not assigned to a job."""
        if share.instance is not None:
            return share.instance not in self._taken
        taken = self._taken.get(share.uuid, 0.0)
        if taken and not mechanisms.mix(self._mechanism[share.uuid], share.mechanism):
            return False
        return taken + share.fraction <= 1 + EPSILON

    def hold(self, assignment: Assignment) -> None:
        """Mark all GPUs of a running job as taken, also on unresponsive nodes."""
        for place in assignment.places:
            for share in place.gpus:
                self._take(share)

    def keep(self, assignment: Assignment) -> bool:
        """Take all GPUs of an assignment, or none of them; returns whether all GPUs existed and were free."""
        shares = [(place.node, share) for place in assignment.places for share in place.gpus]
        for node, share in shares:
            known = any(gpu.uuid == share.uuid for gpu in self._gpus.get(node, ()))
            if not known or not self.free(share):
                return False
        for _, share in shares:
            self._take(share)
        return True

    def count_free(self, node: str) -> int:
        """Return how many GPUs of a node are entirely free."""
        return sum(uuid not in self._taken for uuid in self._plain.get(node, ()))

    def choose(self, node: str, gpus: float, mechanism: str) -> tuple[GpuShare, ...] | None:
        """Choose whole GPUs, lowest number first, or a fraction of one GPU, preferably of one that is shared already.
        Returns None if not enough is free.
        """
        plain = self._plain.get(node, [])
        if gpus < 1:
            # GPUs that have jobs already come first; among those the order stays, because sorting is stable
            for uuid in sorted(plain, key=lambda u: u not in self._taken):
                share = GpuShare(uuid, gpus, mechanism)
                if self.free(share):
                    self._take(share)
                    return (share,)
            return None
        shares = tuple(GpuShare(uuid) for uuid in plain if uuid not in self._taken)[: round(gpus)]
        if len(shares) < round(gpus):
            return None
        for share in shares:
            self._take(share)
        return shares

    def choose_instance(self, node: str, wanted: str) -> GpuShare | None:
        """Find a MIG instance of a profile, such as 2g or 2g.20gb, that is not assigned."""
        for gpu in self._gpus.get(node, ()):
            for instance in gpu.instances:
                if instance.satisfies(wanted) and instance.uuid not in self._taken:
                    fraction = int(instance.profile[0]) / 7
                    share = GpuShare(gpu.uuid, fraction, Mig.name, instance.profile, instance.uuid)
                    self._take(share)
                    return share
        return None

    def give_back(self, chosen: Iterable[tuple[GpuShare, ...]]) -> None:
        """Make the GPUs that were chosen for an assignment free again."""
        for shares in chosen:
            for share in shares:
                key = share.instance or share.uuid
                left = self._taken[key] - share.fraction
                if left > EPSILON:
                    self._taken[key] = left
                else:
                    del self._taken[key]

    def _take(self, share: GpuShare) -> None:
        key = share.instance or share.uuid
        self._taken[key] = self._taken.get(key, 0.0) + share.fraction
        self._mechanism[key] = share.mechanism


class Room:
    """The CPU cores and the memory of nodes that are not assigned yet."""

    def __init__(self, nodes: Iterable[NodeSpec], assigned: Iterable[Assignment]) -> None:
        given = tuple(nodes)
        self._cpus = {node.name: node.cpus for node in given}
        self._memory = {node.name: float(node.memory_bytes) for node in given}
        for assignment in assigned:
            self.hold(assignment)

    def hold(self, assignment: Assignment) -> None:
        """Subtract the CPU and the memory of a running job."""
        for place in assignment.places:
            if place.node in self._cpus:
                self._cpus[place.node] -= place.cpus
                self._memory[place.node] -= place.memory_bytes

    def take(self, assignment: Assignment) -> bool:
        """Take all CPU and memory of an assignment, or none of it; returns whether all of it was free."""
        for place in assignment.places:
            if place.cpus > self._cpus[place.node] + EPSILON:
                return False
            if place.memory_bytes > self._memory[place.node] + EPSILON * place.memory_bytes:
                return False
        self.hold(assignment)
        return True
