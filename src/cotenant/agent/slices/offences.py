"""Counts how often tenants have changed their own time slices."""

from __future__ import annotations

from collections import Counter

from cotenant.devices.channel_groups import ChannelGroup

# A tenant is reported when the agent has found the time slice of one of its groups changed for the third time. One
# change is not the tenant's: libcuda itself sets the time slice once.
OFFENCES = 3


class Offences:
    """For each channel group, how often its time slice differed from the one that the agent had set."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, int]] = Counter()  # key: tenant, client and handle of the group
        self._not_set: set[tuple[str, int, int]] = set()  # groups whose last time slice the driver has refused

    def set(self, tenant: str, group: ChannelGroup, *, refused: bool) -> None:
        """Record that the agent has set a group's time slice, or that the driver has refused that."""
        (self._not_set.add if refused else self._not_set.discard)((tenant, group.client, group.group))

    def found(self, tenant: str, group: ChannelGroup) -> bool:
        """Record that a group does not have the time slice that it should have. Returns whether its tenant is to be
        reported. A time slice that the driver has refused is no offence.
        """
        key = (tenant, group.client, group.group)
        if key in self._not_set:
            return False
        self._counts[key] += 1
        return self._counts[key] == OFFENCES

    def forget(self, tenant: str) -> None:
        """Forget a tenant that has left its GPUs."""
        self._not_set = {key for key in self._not_set if key[0] != tenant}
        for key in [key for key in self._counts if key[0] == tenant]:
            del self._counts[key]
