"""Prints a notice on standard error before a planner or simulator is compiled, which takes a while."""

from __future__ import annotations

import sys

# Name of a compiled function: of those that every plan calls, the one that is called last. If it is in the compilation
# cache, the others are, too, and no notice is printed. Functions that only some plans need are compiled at their first
# use, without a notice.
PACKING = "adjust.widen"


def say_compiling_serving(kernel: str) -> None:
    """Print the notice about compiling if the kernel is not in the compilation cache."""
    from cotenant.policy.compiled import CACHED, cache_folder

    if not (CACHED and any(cache_folder().rglob(f"{kernel}*.nbc"))):
        print("compiling the planner and simulator for this machine, once (half a minute)", file=sys.stderr, flush=True)
