"""The names that `--policy` of a simulation takes: elastic and partition policies."""

from __future__ import annotations

from cotenant.core.errors import InputError, unknown_name
from cotenant.policy.elastic.registry import ELASTIC
from cotenant.policy.jobs.ordering import ORDERINGS
from cotenant.policy.mig.decide import POLICIES


def check_policy(name: str) -> None:
    """Raise InputError, with the nearest known name, unless `name` is that of an elastic or partition policy."""
    known = (*ELASTIC, *POLICIES)
    if name in known:
        return
    if name in ORDERINGS:
        what = f"unknown policy {name!r}; it is an ordering, --ordering {name}; known: {', '.join(known)}"
        raise InputError(what, field="policy")
    raise unknown_name("policy", name, known, "policy")
