"""Frees PyTorch's cached memory before a tenant is evicted. Python imports this module when it starts a program of a
tenant that was started with --empty-cache.

PyTorch keeps freed blocks of GPU memory in a cache, and an eviction would copy them, too. When the program has imported
torch, this module calls torch.cuda.empty_cache after optimizer steps, in the program's own thread. COTENANT_EMPTY_CACHE
says after which steps: after each one (`iteration`), or only after the last one before the tenant's turn on the GPU
ends (`turn`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MODE = os.environ.get("COTENANT_EMPTY_CACHE", "off")
NEVER = 2**64 - 1
_ask: Callable[[], int] | None = None


def _turn_left_s() -> float:
    """Return the seconds until this tenant's turn on the GPU ends; infinite without the shim, or while no other tenant
    waits.
    """
    global _ask
    if _ask is None:
        try:
            call = ctypes.CDLL(None).cotenant_turn_left_ns
            call.restype = ctypes.c_uint64
            _ask = call
        except (AttributeError, OSError):
            _ask = _never
    left_ns = _ask()
    return float("inf") if left_ns == NEVER else left_ns / 1e9


def _never() -> int:
    return NEVER


class _Steps:
    """Frees PyTorch's cached memory; called after every optimizer step of the program."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._last_s = time.monotonic()
        self._emptied = False

    def __call__(self, *_: Any) -> None:
        now_s = time.monotonic()
        step_s, self._last_s = now_s - self._last_s, now_s
        due = True
        if MODE == "turn":
            ends_soon = _turn_left_s() < 1.5 * step_s
            due, self._emptied = ends_soon and not self._emptied, ends_soon
        cuda = self._torch.cuda
        # freeing the cache is not allowed while a CUDA graph is captured
        if due and cuda.is_initialized() and not cuda.is_current_stream_capturing():
            cuda.empty_cache()


def _torch_is_there(torch: Any) -> None:
    optimizer = None
    with contextlib.suppress(ImportError):  # the program may have a module named torch that is not PyTorch
        optimizer = importlib.import_module("torch.optim.optimizer")
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register is not None:  # PyTorch has this function from version 2.1 on
        register(_Steps(torch))
    else:
        print("cotenant: --empty-cache needs PyTorch 2.1 or later: the cache is kept", file=sys.stderr)


class _Finder:
    """An import hook that acts only when the program imports torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _torch_is_there(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _next_sitecustomize() -> None:
    """Run the installation's own sitecustomize, which this module hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if MODE in ("turn", "iteration"):
    sys.meta_path.insert(0, _Finder())
_next_sitecustomize()
