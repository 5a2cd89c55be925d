"""The decorator for functions that numba compiles (kernels), and the cache of their machine code.

numba notices a change of the file that contains a function but not of functions in other files that it calls. So the
code is stored in a user cache folder named by a hash of all kernel sources, which excludes stale hits.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from cotenant.core import folders
from cotenant.core.errors import WorkError
from cotenant.core.extras import needs

with needs("sim"):
    import numba

# These files are hashed, too, because numba compiles their constants into code. All files that contain "njit" or
# "policy.compiled" are hashed anyway.
_CONSTANTS = ("policy/jobs/arrays.py", "sim/jobs/state.py")
FORGET_AFTER_S = 30 * 86400  # compiled code of a version that was not used for a month is deleted


def source_hash() -> str:
    """Return a hash of all sources of compiled code and of everything else that affects it: numba, Python, processor,
    path.
    """
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(f"{numba.__version__} {platform.python_version()} {platform.machine()} {package}".encode())
    for folder in ("policy", "sim"):
        for file in sorted((package / folder).rglob("*.py")):
            source = file.read_bytes()
            if b"njit" in source or b"policy.compiled" in source or file.relative_to(package).as_posix() in _CONSTANTS:
                digest.update(source)
    digest.update((package / "core/events.py").read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder in which the machine code of this version of the kernels is cached."""
    return folders.cache_folder() / "kernels" / source_hash()


def _use_cache() -> bool:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".used").touch()
    except (OSError, WorkError):
        return False  # there is no writable home folder, so each process compiles the kernels in memory
    for old in folder.parent.iterdir():
        used = old / ".used"
        if used.exists() and time.time() - used.stat().st_mtime > FORGET_AFTER_S:
            shutil.rmtree(old, ignore_errors=True)
    numba.config.CACHE_DIR = str(folder)
    return True


CACHED = _use_cache()


def is_compiled() -> bool:
    """Whether the training simulator's kernel is in the cache, so that a first run need not compile it."""
    return CACHED and any(cache_folder().rglob("kernel.advance*.nbc"))


# options with which numba compiles ordinary functions
jit: Any = numba.njit(cache=CACHED, nogil=True)

# The kernels of training simulation allocate nothing, so they are compiled without reference counting (_nrt). Counting
# took four fifths of the time of a decision, because each array that was taken out of a tuple was counted up and down.
_BARE: Any = {"cache": CACHED, "nogil": True, "no_cfunc_wrapper": True, "_nrt": False}
# options with which numba compiles functions that Python code calls
bare: Any = numba.njit(**_BARE)
# Functions that only other kernels call. They are compiled without the wrapper that unpacks Python's arguments, which
# is most of a small function's code. Calling one from Python crashes, so tests call them through a function under
# `bare`.
inner: Any = numba.njit(**_BARE, no_cpython_wrapper=True)
# options with which numba compiles small functions that run often, for which passing the arrays in tuples would take
# longer than their work
inlined: Any = numba.njit(**_BARE, no_cpython_wrapper=True, inline="always")
