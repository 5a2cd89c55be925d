"""Green contexts, CUDA contexts on a subset of a GPU's SMs, by the driver's API (12.4 and newer) through ctypes.

The SMs are divided into pieces; a context has successive pieces from a start position that each process is given.
Contexts of two processes that have no pieces in common run concurrently if both processes are MPS clients.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from cotenant.devices.nvidia import DRIVER

SM_RESOURCE, DEFAULT_STREAM, NON_BLOCKING = 1, 0x1, 0x1
# size of a CUdevResource: its type, padding, the resource itself, and space for later driver versions
RESOURCE_BYTES = 144
_SM_COUNT_AT = 96
WHOLE = 1.0 - 1e-9  # a fraction of at least this means all SMs; it is below 1 because of rounding errors


class GreenError(RuntimeError):
    """Raised if the driver refuses a call, or has no green contexts."""


@dataclass(frozen=True)
class GreenContext:
    """One green context: its number of SMs, its handle, and the handle of a stream on it (CUstream)."""

    sms: int
    context: int
    stream: int


class _Resource(ctypes.Structure):
    """The structure CUdevResource: an int for the type, 92 bytes of padding, and the SM resource, which begins with the
    number of SMs."""

    _fields_ = (
        ("type", ctypes.c_int), ("padding", ctypes.c_char * (_SM_COUNT_AT - 4)), ("sm_count", ctypes.c_uint),
        ("rest", ctypes.c_char * (RESOURCE_BYTES - _SM_COUNT_AT - 4)),
    )  # fmt: skip


def span(start: float, fraction: float, pieces: int) -> tuple[int, int]:
    """First piece and number of pieces (at least one) for a share of `fraction` that begins at `start`. The beginning
    and the end are each rounded to the nearest border between pieces; the length is not rounded. So shares that do not
    overlap have no pieces in common."""
    # a share that would extend beyond the last SM ends at the last SM and begins earlier instead
    if start + fraction > WHOLE + 2e-9:
        count = max(1, min(pieces, round(fraction * pieces)))
        return min(pieces - count, round(start * pieces)), count
    first = min(pieces - 1, round(start * pieces))
    return first, max(1, round(min(1.0, start + fraction) * pieces) - first)


class GreenContexts:
    """The green contexts of this process on one GPU, created on first use and kept. Needs a current CUDA context."""

    def __init__(self, device: int = 0, start: float = 0.0, library: str = DRIVER) -> None:
        """`start`: position at which this process's contexts begin, as a fraction of the SMs."""
        self._cuda = ctypes.CDLL(library)
        self._device, self._start = device, start
        self._contexts: dict[tuple[int, int], GreenContext] = {}  # (index of first piece, number of pieces) -> context
        self._whole = _Resource()
        self._call("cuDeviceGetDevResource", device, ctypes.byref(self._whole), SM_RESOURCE)
        self.sms = int(self._whole.sm_count)
        self._group = self._smallest()
        self._pieces = self._cut()

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._cuda, name, None)
        if function is None:
            raise GreenError(f"this driver has no {name}")
        code = function(*arguments)
        if code != 0:
            raise GreenError(f"{name} failed with CUDA error {code}")

    def _smallest(self) -> int:
        """Number of SMs of the smallest piece that the GPU's architecture allows."""
        count = ctypes.c_uint(1)
        piece, rest = _Resource(), _Resource()
        self._call(
            "cuDevSmResourceSplitByCount", ctypes.byref(piece), ctypes.byref(count), ctypes.byref(self._whole),
            ctypes.byref(rest), ctypes.c_uint(0), ctypes.c_uint(1),
        )  # fmt: skip
        return max(1, int(piece.sm_count))

    def _cut(self) -> list[_Resource]:
        """Divide the SMs into pieces of the smallest size. The driver may make fewer pieces than requested, so the SMs
        left over may be as many as a piece has, or more.
        """
        count = ctypes.c_uint(self.sms // self._group)
        pieces = (_Resource * count.value)()
        rest = _Resource()
        self._call(
            "cuDevSmResourceSplitByCount", pieces, ctypes.byref(count), ctypes.byref(self._whole), ctypes.byref(rest),
            ctypes.c_uint(0), ctypes.c_uint(self._group),
        )  # fmt: skip
        return list(pieces[: count.value])

    def of(self, fraction: float) -> GreenContext:
        """Return the green context with a fraction of the SMs; it is created at its first use."""
        first, count = (0, 0) if fraction >= WHOLE else span(self._start, fraction, len(self._pieces))
        if (first, count) not in self._contexts:
            if count == 0:  # all SMs in one context, also those that belong to no piece
                self._contexts[first, count] = self._open((_Resource * 1)(self._whole), 1, self.sms)
            else:
                chosen = (_Resource * count)(*self._pieces[first : first + count])
                self._contexts[first, count] = self._open(chosen, count, count * self._group)
        return self._contexts[first, count]

    def _open(self, chosen: object, count: int, sms: int) -> GreenContext:
        described, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevResourceGenerateDesc", ctypes.byref(described), chosen, ctypes.c_uint(count))
        self._call(
            "cuGreenCtxCreate", ctypes.byref(context), described, ctypes.c_int(self._device),
            ctypes.c_uint(DEFAULT_STREAM),
        )  # fmt: skip
        self._call(
            "cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(NON_BLOCKING), ctypes.c_int(0)
        )
        return GreenContext(sms, int(context.value or 0), int(stream.value or 0))
