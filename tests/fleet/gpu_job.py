"""A job on the software GPU that knows nothing of any loop: holds memory, runs kernels for so long, checks contents."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shim"))

from cuda_calls import byref, c_size_t, c_uint64, cu, function, launch, start

seconds = float(sys.argv[1])
kernel = function(start(), b"busy")
pointer = c_uint64()
cu("cuMemAlloc_v2", byref(pointer), c_size_t(200 << 20))
data = os.urandom(1 << 16)
cu("cuMemcpyHtoD_v2", pointer, data, c_size_t(len(data)))
print(f"pid {os.getpid()}", flush=True)
steps, end = 0, time.monotonic() + 120
worked = 0.0
while worked < seconds and time.monotonic() < end:
    began = time.monotonic()
    launch(kernel)
    cu("cuCtxSynchronize")
    time.sleep(0.002)
    worked += min(0.05, time.monotonic() - began)  # time in which the program was moved out of the GPU is no work
    steps += 1
back = ctypes.create_string_buffer(len(data))
cu("cuMemcpyDtoH_v2", back, pointer, c_size_t(len(data)))
print("intact" if back.raw == data else "corrupt", flush=True)
sys.exit(0 if back.raw == data else 9)
