"""Names of tenants' namespaces and servers under MPS control protocol 3."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection

from cotenant.agent.mechanisms.proof import Place

SERVER = "agent"  # name of the MPS server of all tenants that have no weight
DEFAULT = "default"
# Names that no tenant's namespace may have. RESERVED: the daemon's default namespace and server, the agent's server,
# and the daemon's sockets, which lie beside the folders of namespaces. UID_SERVER: beginning of the names that the
# daemon gives to the servers of users whose programs name no namespace.
RESERVED, UID_SERVER = (DEFAULT, SERVER, "control"), "uid_"
# tenants' names that can be names of namespaces as they are; a namespace's name is part of a socket's path, which is
# limited to 107 bytes
SHORT = re.compile(r"[a-z0-9_]{1,16}")


def short_name(name: str, attempt: int = 0) -> str:
    """Name of a tenant's namespace: the tenant's own name if it is short, otherwise its beginning and a hash.
    `attempt`: above 0 for another hash, because another tenant has the first one.
    """
    if SHORT.fullmatch(name) and name not in RESERVED and not name.startswith(UID_SERVER) and not attempt:
        return name
    plain = re.sub(r"[^a-z0-9_]", "_", name.lower())[:9]
    return f"{plain}_{hashlib.sha256((name + '/' * attempt).encode()).hexdigest()[:6]}"


def free_place(name: str, taken: Collection[Place], *, weighted: bool) -> Place:
    """Return the MPS server for a new tenant, and a namespace that no other tenant has. Users choose tenants' names, so
    two names can lead to the same short name; in a common namespace each tenant could change the other tenant's limits.
    """
    attempt = 0
    while True:
        space = short_name(name, attempt)
        place = Place(space, "tenant") if weighted else Place(SERVER, space)
        if place not in taken:
            return place
        attempt += 1
