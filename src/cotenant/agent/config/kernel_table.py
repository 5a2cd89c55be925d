"""Table of a tenant's kernels (work class, duration, SMs), in which the shim looks up each launch.

The table has a row for each kernel, grid and block in a file of `cotenant profile kernels`. The row's key is a hash
(FNV-1a, 64 bits) of the kernel's name, grid and block. A launch with a grid or block that the file does not contain
uses a row for the name alone. A class or number of SMs in that row is unknown unless it is the same in all rows of that
name; the duration is unknown if there are several. The table is part of the tenant's description as text; processes get
it from the agent as a sealed memfd.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence

from cotenant.abi.floor import KERNEL, KERNEL_NAME, WorkClass
from cotenant.core.errors import InputError
from cotenant.profiles.kernels.profile import CLASS_NAMES, KernelRow

# largest number of entries of a table: a tenant's description, with its table, must fit into one message to the control
# socket
MOST = 2048
_SHAPE = struct.Struct("=6I")
_LONGEST_NS, _MOST_SMS = (1 << 32) - 1, (1 << 16) - 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def hashed(data: bytes) -> int:
    """FNV-1a, 64 bits."""
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    return value


def most_class(rows: Iterable[KernelRow]) -> str:
    """The work class whose kernels take most of the time; it is used for launches of many kernels at once (CUDA
    graphs).
    """
    times = dict.fromkeys(range(1, len(CLASS_NAMES)), 0)
    for row in rows:
        times[row.work_class] += row.total_ns
    return CLASS_NAMES[max(times, key=lambda kind: times[kind])]


def compiled(rows: Sequence[KernelRow]) -> str:
    """Return the table as text. If it would have more than MOST rows, those with the longest total time are kept."""
    weighed: dict[int, tuple[int, KernelRow]] = {}
    by_name: dict[bytes, list[KernelRow]] = {}
    for row in sorted(rows, key=lambda row: -row.total_ns):
        name = row.name.encode()[:KERNEL_NAME]
        by_name.setdefault(name, []).append(row)
        if row.shape:
            weighed.setdefault(hashed(name + _SHAPE.pack(*row.shape)), (row.total_ns, row))
    for name, same in by_name.items():
        weighed[hashed(name)] = (sum(row.total_ns for row in same), _agreed(same))
    kept = sorted(weighed, key=lambda key: -weighed[key][0])[:MOST]
    packed = []
    for key in sorted(kept):
        row = weighed[key][1]
        packed.append(KERNEL.pack(key, min(row.duration_ns, _LONGEST_NS), min(row.sms, _MOST_SMS), row.work_class))
    return base64.b64encode(b"".join(packed)).decode()


def _agreed(rows: Sequence[KernelRow]) -> KernelRow:
    """A row for all launches of a kernel, with the values that all its rows (one for each grid and block) share."""
    classes, sms = {row.work_class for row in rows}, {row.sms for row in rows}
    return KernelRow(
        rows[0].name,
        duration_ns=rows[0].duration_ns if len(rows) == 1 else 0,
        sms=sms.pop() if len(sms) == 1 else 0,
        work_class=classes.pop() if len(classes) == 1 else WorkClass.UNKNOWN,
    )


def entries_of(text: str) -> bytes:
    """The entries of a table. Raises InputError if the text is not a table."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b"?"
    valid = len(data) % KERNEL.size == 0 and len(data) <= MOST * KERNEL.size
    rows = list(KERNEL.iter_unpack(data)) if valid else []
    keys = [row[0] for row in rows]
    if not valid or keys != sorted(set(keys)) or any(not 1 <= row[-1] <= 3 for row in rows):
        raise InputError(
            "the text is not a kernel table: use the one that `cotenant run --kernel-profile` makes",
            field="kernels",
        )
    return data


def shared(data: bytes) -> int:
    """Returns a sealed memfd that contains the entries; the caller closes it."""
    fd = os.memfd_create("cotenant-kernels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
