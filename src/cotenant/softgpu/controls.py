"""Control of channel groups on the software GPU: its library answers the ioctl calls of /dev/nvidiactl."""

from __future__ import annotations

import ctypes
import os

from cotenant.native.libraries import SOFT_DRIVER, library_path


class SoftIoctl:
    """Callable like fcntl.ioctl. The descriptor is not of /dev/nvidiactl, but of the file through which a program and
    the software GPU share the GPU's state.
    """

    def __init__(self, path: str = "") -> None:
        """Load the library of the software GPU. `path`: path of the compiled library; "": find it, and compile it first
        if that is needed.
        """
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
