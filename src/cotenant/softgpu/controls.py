"""The software GPU's controls on channel groups: the ioctl calls of /dev/nvidiactl, answered by its own library."""

from __future__ import annotations

import ctypes
import os

from cotenant.native.libraries import SOFT_DRIVER, library_path


class SoftIoctl:
    """Has the signature of fcntl.ioctl. The file is the state file that a program has open."""

    def __init__(self, path: str = "") -> None:
        """`path`: the library, if it is already built."""
        self.path = path or str(library_path(SOFT_DRIVER))
        self._call = ctypes.CDLL(self.path, use_errno=True).cotenant_soft_ioctl
        self._call.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]

    def __call__(self, fd: int, request: int, data: bytearray) -> int:
        held = (ctypes.c_char * len(data)).from_buffer(data)
        try:
            if self._call(fd, request, ctypes.addressof(held)) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            del held
        return 0
