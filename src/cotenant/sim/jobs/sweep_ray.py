"""A sweep's runs as tasks of a Ray cluster. Files that its machines lack travel with them, and so do the records.

Ray places the tasks, and does one again whose worker or machine died.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.core.extras import needs
from cotenant.core.files import AtomicFolder
from cotenant.core.record.schema import RUN_FILE
from cotenant.sim.jobs.sweep_file import Point, digest_of, paths_of, run_point

CONNECT_S = 10.0
RETRIES = 3  # of a run whose worker dies each time
AHEAD = 2  # runs that are handed to Ray per run under way, so that no machine waits for the next

Files = dict[str, bytes]


def run_on_ray(
    todo: Sequence[tuple[Point, Path]], base: Path, address: str, workers: int | None, on_done: Callable[[], None]
) -> None:
    """Run the points into their folders on the Ray cluster at `address` ("auto": the one of this machine).

    `workers`: at most so many at once; None: what the cluster has CPUs for. `on_done()` is called after each. WorkError
    where the cluster cannot be reached or loses a run's worker again and again; InputError as the run raises it, or
    for a wrong address.
    """
    with needs("ray"):
        import ray
    started = not ray.is_initialized()
    if started:
        check_listens(address)
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="cotenant")
        except Exception as error:
            raise WorkError(f"cannot reach Ray at {address}: {_first_line(error)}") from None
    running: dict[Any, Path] = {}
    try:
        at_once = workers or AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        remote = ray.remote(run_packed).options(num_cpus=1, max_retries=RETRIES)
        stored: dict[str, Any] = {}  # contents in Ray's store, by digest
        rest = list(reversed(todo))
        while rest or running:
            while rest and len(running) < at_once:
                point, folder = rest.pop()
                files = {name: path for name, path in paths_of(point, base).items() if path.is_file()}
                digests = {name: digest_of(path) for name, path in files.items()}
                for name, path in files.items():
                    if digests[name] not in stored:
                        stored[digests[name]] = ray.put(path.read_bytes())
                kept = [stored[digest] for digest in digests.values()]
                running[remote.remote(point, str(base), version("cotenant"), digests, *kept)] = folder
            for reference in ray.wait(list(running), num_returns=1)[0]:
                folder = running.pop(reference)
                try:
                    found = ray.get(reference)
                except Exception as error:  # Ray's own: the run's own errors are answers
                    why = f"run {folder.name} cannot be done there, or was lost {RETRIES + 1} times with its worker"
                    raise WorkError(f"{why}: {_first_line(error)}") from None
                if isinstance(found, Exception):
                    raise found
                _write(folder, found)
                on_done()
    finally:
        for reference in running:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def check_listens(address: str) -> None:
    """WorkError where nothing listens at HOST:PORT: Ray itself would try for minutes, then end the process."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{address!r} is not HOST:PORT of a Ray cluster, or auto", field="address")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise WorkError(f"cannot reach Ray at {address}: {_first_line(error)}") from None


def run_packed(point: Point, base: str, program: str, digests: dict[str, str], *contents: bytes) -> Files | Exception:
    """Run the point on this machine: the files of its record, or the error that it ended with.

    `digests` and `contents`: the files that it names, by option, in the same order. `program`: the version that the
    sweep runs with.
    """
    if version("cotenant") != program:
        return WorkError(f"{os.uname().nodename} has cotenant {version('cotenant')}; the sweep runs with {program}")
    with tempfile.TemporaryDirectory(prefix="cotenant-sweep-") as name:
        folder = Path(name)
        copies: dict[Path, Path] = {}  # of files that this machine does not have, or other ones of that name: originals
        read = dict(point)
        for (option, digest), content in zip(digests.items(), contents, strict=True):
            path = paths_of(point, Path(base))[option]
            if digest_of(path) != digest:
                copy = folder / option / path.name
                copy.parent.mkdir()
                copy.write_bytes(content)
                copies[copy] = path
                form, colon, _ = str(point[option]).rpartition(":")
                read[option] = f"{form}{colon}{copy}"
        try:
            run_point(read, folder / "run", Path(base), shown=point)
        except (InputError, WorkError) as error:
            return error
        files = {file.name: file.read_bytes() for file in (folder / "run").iterdir()}
    for copy, path in copies.items():  # the record names the files that the sweep names
        files[RUN_FILE] = files[RUN_FILE].replace(_in_json(copy), _in_json(path))
    return files


def _in_json(path: Path) -> bytes:
    return json.dumps(str(path), ensure_ascii=False)[1:-1].encode()


def _write(path: Path, files: Files) -> None:
    folder = AtomicFolder(path, replaceable=RUN_FILE)
    try:
        for name, content in files.items():
            (folder.part / name).write_bytes(content)
    except OSError as error:
        folder.discard()
        raise WorkError(f"{path}: the record could not be written: {error}") from error
    folder.commit()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
