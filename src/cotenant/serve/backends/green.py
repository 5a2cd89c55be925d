"""Green contexts: a process's own pieces of a GPU's SMs, by the driver's API through ctypes. Standard library only.

A ladder is one context per size; which SMs a rung has depends on where it starts, so workers of one GPU that start at
different places (and run under MPS, which lets them run at once) have disjoint ones. CUDA driver API 12.4 and newer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

SM_RESOURCE, DEFAULT_STREAM, NON_BLOCKING = 1, 0x1, 0x1
RESOURCE_BYTES = 144  # a CUdevResource: type, padding, the resource itself, room for more
_SM_COUNT_AT = 96


class GreenError(RuntimeError):
    """The driver refused, or has no green contexts."""


@dataclass(frozen=True)
class Rung:
    """One green context: its SMs, and a stream on it (a CUstream handle)."""

    sms: int
    context: int
    stream: int


class _Resource(ctypes.Structure):
    """CUdevResource: an int that says what it is, 92 bytes of padding, the SM resource, whose first word counts."""

    _fields_ = (
        ("type", ctypes.c_int), ("padding", ctypes.c_char * (_SM_COUNT_AT - 4)), ("sm_count", ctypes.c_uint),
        ("rest", ctypes.c_char * (RESOURCE_BYTES - _SM_COUNT_AT - 4)),
    )  # fmt: skip


class Ladder:
    """Green contexts of one device, made when first asked for and kept. Needs a current CUDA context."""

    def __init__(self, device: int = 0, start: float = 0.0, library: str = "libcuda.so.1") -> None:
        """`start`: the fraction of the SMs at which this worker's rungs begin."""
        self._cuda = ctypes.CDLL(library)
        self._device, self._start = device, start
        self._rungs: dict[int, Rung] = {}
        self._whole = _Resource()
        self._call("cuDeviceGetDevResource", device, ctypes.byref(self._whole), SM_RESOURCE)
        self.sms = int(self._whole.sm_count)
        self._group = self._smallest()

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._cuda, name, None)
        if function is None:
            raise GreenError(f"this driver has no {name}")
        code = function(*arguments)
        if code != 0:
            raise GreenError(f"{name} failed with CUDA error {code}")

    def _smallest(self) -> int:
        """SMs of the smallest piece: the whole is cut by what the architecture allows."""
        count = ctypes.c_uint(1)
        piece, rest = _Resource(), _Resource()
        self._call(
            "cuDevSmResourceSplitByCount", ctypes.byref(piece), ctypes.byref(count), ctypes.byref(self._whole),
            ctypes.byref(rest), ctypes.c_uint(0), ctypes.c_uint(1),
        )  # fmt: skip
        return max(1, int(piece.sm_count))

    def sms_of(self, fraction: float) -> int:
        """SMs for a fraction of the GPU: whole pieces, at least one, never more than there are."""
        pieces = max(1, round(fraction * self.sms / self._group))
        return min(self.sms, pieces * self._group)

    def rung(self, fraction: float) -> Rung:
        """The context of a fraction."""
        wanted = self.sms_of(fraction)
        if wanted not in self._rungs:
            self._rungs[wanted] = self._make(wanted)
        return self._rungs[wanted]

    def _make(self, wanted: int) -> Rung:
        if wanted == self.sms:  # cutting would leave some out
            return self._open((_Resource * 1)(self._whole), 1, wanted)
        pieces = self.sms // self._group
        count = ctypes.c_uint(pieces)
        cut = (_Resource * pieces)()
        rest = _Resource()
        self._call(
            "cuDevSmResourceSplitByCount", cut, ctypes.byref(count), ctypes.byref(self._whole), ctypes.byref(rest),
            ctypes.c_uint(0), ctypes.c_uint(self._group),
        )  # fmt: skip
        found = int(count.value)
        needed = min(found, -(-wanted // self._group))
        first = min(found - needed, round(self._start * found))
        chosen = (_Resource * needed)(*[cut[first + i] for i in range(needed)])
        return self._open(chosen, needed, needed * self._group)

    def _open(self, chosen: object, count: int, sms: int) -> Rung:
        described, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevResourceGenerateDesc", ctypes.byref(described), chosen, ctypes.c_uint(count))
        self._call(
            "cuGreenCtxCreate", ctypes.byref(context), described, ctypes.c_int(self._device),
            ctypes.c_uint(DEFAULT_STREAM),
        )  # fmt: skip
        self._call(
            "cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(NON_BLOCKING), ctypes.c_int(0)
        )
        return Rung(sms, int(context.value or 0), int(stream.value or 0))
