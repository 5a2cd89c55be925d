"""The names that `--policy` of a simulation takes: elastic and partition policies."""

from __future__ import annotations

import difflib

from cotenant.core.errors import InputError
from cotenant.policy.elastic.registry import ELASTIC
from cotenant.policy.jobs.ordering import ORDERINGS
from cotenant.policy.mig.decide import POLICIES


def check_policy(name: str) -> None:
    """Raise InputError, with the nearest known name, unless `name` is that of an elastic or partition policy."""
    known = (*ELASTIC, *POLICIES)
    if name in known:
        return
    near = difflib.get_close_matches(name.lower(), known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    if name in ORDERINGS:
        hint = f"it is an ordering, --ordering {name}; "
    raise InputError(f"unknown policy {name!r}; {hint}known: {', '.join(known)}", field="policy")
