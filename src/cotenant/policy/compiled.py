"""The decorator of compiled kernels, and where their machine code is kept between runs.

numba notices a change of the file that holds a function but not of the functions it calls in other files. So the code
lives in a user cache folder named after a hash of all kernel sources: a stale hit is impossible.
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

# beside every file that says "njit" or "compiled": constants that numba freezes into code
_CONSTANTS = ("policy/jobs/arrays.py", "sim/jobs/state.py")
FORGET_AFTER_S = 30 * 86400  # code of versions that nobody has used for a month


def source_hash() -> str:
    """Hash of every source of compiled code and of what else makes it: numba, Python, processor, place."""
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
    """The folder for this version of the kernels."""
    return folders.cache_folder() / "kernels" / source_hash()


def _use_cache() -> bool:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".used").touch()
    except (OSError, WorkError):
        return False  # a read-only home, or none: compile in memory, every time
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


# ordinary compiled functions
jit: Any = numba.njit(cache=CACHED, nogil=True)

# The training kernels allocate nothing, so they go without reference counts (_nrt): every array taken out of a tuple
# would be counted up and down again, which was four fifths of the time of a decision.
_BARE: Any = {"cache": CACHED, "nogil": True, "no_cfunc_wrapper": True, "_nrt": False}
# functions that Python calls
bare: Any = numba.njit(**_BARE)
# functions that only kernels call: without the wrapper that unpacks Python's arguments, which is most of their code.
# Called from Python they crash; a test calls them from a function of its own under `bare`.
inner: Any = numba.njit(**_BARE, no_cpython_wrapper=True)
# for small functions on the hot path: a call passes every array of its tuples, which costs more than the work
inlined: Any = numba.njit(**_BARE, no_cpython_wrapper=True, inline="always")
