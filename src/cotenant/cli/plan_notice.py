"""Prints a notice on standard error before a planner or simulator is compiled, which takes a while."""

from __future__ import annotations

import sys

# Name of a compiled function, the last one that every plan needs. If it is in the compilation cache, no notice is
# printed. Functions that only some plans need are compiled at their first use.
PACKING = "adjust.widen"


def say_compiling_serving(kernel: str) -> None:
    """Print the notice about compiling if the kernel is not in the compilation cache."""
    from cotenant.policy.compiled import CACHED, cache_folder

    if not (CACHED and any(cache_folder().rglob(f"{kernel}*.nbc"))):
        print("compiling the planner and simulator for this machine, once (half a minute)", file=sys.stderr, flush=True)
