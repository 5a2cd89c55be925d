"""A word on standard error before the first plan or simulated request, which compile for a while."""

from __future__ import annotations

import sys

PACKING = "adjust.widen"  # the last step of every plan; what only hard ones need is compiled when they do


def say_compiling_serving(kernel: str) -> None:
    """Say so when a kernel is not in the cache yet."""
    from cotenant.policy.compiled import CACHED, cache_folder

    if not (CACHED and any(cache_folder().rglob(f"{kernel}*.nbc"))):
        print("compiling the planner and simulator for this machine, once (half a minute)", file=sys.stderr, flush=True)
