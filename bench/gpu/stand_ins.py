"""Stand-ins for numba on a machine that lacks it: the same functions, uncompiled."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any


def without_compiler() -> bool:
    """Install the stand-ins if numba is missing. Returns whether it is missing."""
    missing = importlib.util.find_spec("numba") is None
    if missing:

        def njit(*args: Any, **_: Any) -> Any:
            return args[0] if args else (lambda function: function)

        stand_in: Any = types.ModuleType("numba")
        stand_in.__version__, stand_in.config, stand_in.njit = "0", types.SimpleNamespace(), njit
        sys.modules["numba"] = stand_in
    return missing
