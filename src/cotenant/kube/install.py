"""Installs the shim's libraries on a node: a folder per build, never written twice, and a link to the newest."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.kube import names
from cotenant.native.libraries import DRIVER_SHIM, NVML_SHIM, library_path


def install(target: Path) -> Path:
    """Install the shims in `target` and point `current` at them.

    A file that a running pod has loaded is never changed: another build goes into another folder, and the link is
    replaced by a rename. Returns the folder. Raises InputError if it cannot be written.
    """
    return put({name: library_path(name) for name in (DRIVER_SHIM, NVML_SHIM)}, target)


def put(libraries: dict[str, Path], target: Path) -> Path:
    """Install files under the given names, all of them or none."""
    digest = hashlib.sha256()
    for name, path in sorted(libraries.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    folder = target / digest.hexdigest()[:16]
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            fresh = target / f".{folder.name}.{os.getpid()}"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            for name, path in libraries.items():
                _copy(path, fresh / name)
            try:
                fresh.rename(folder)
            except OSError:
                if not folder.exists():  # if the folder exists now, another process has installed the same build
                    raise
                shutil.rmtree(fresh)
        # after a power failure a file may have its name without its contents, so the contents are compared
        for name, path in libraries.items():
            if not (folder / name).is_file() or (folder / name).read_bytes() != path.read_bytes():
                _copy(path, folder / name)
        link = target / f".{names.CURRENT}.{os.getpid()}"
        link.unlink(missing_ok=True)
        # a relative link also works in a container in which the folder is mounted at another path
        link.symlink_to(folder.name)
        link.rename(target / names.CURRENT)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", file=target) from None
    return folder


def _copy(source: Path, target: Path) -> None:
    """Copy a file. The contents are written under another name and synced before the rename, since a pod that loads an
    empty shim would run without limits.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, part)
        part.chmod(0o755)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except OSError:
        part.unlink(missing_ok=True)
        raise
