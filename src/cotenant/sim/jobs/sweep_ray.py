"""Runs a sweep as tasks of a Ray cluster. Files that a machine of the cluster lacks are sent with the tasks, and
records are sent back. Ray places the tasks, and repeats a task whose worker or machine died."""

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
RETRIES = 3  # a run is repeated this often if its worker dies
AHEAD = 2  # number of runs that are submitted to Ray for each running one, so that no machine waits for work

Files = dict[str, bytes]


def run_on_ray(
    todo: Sequence[tuple[Point, Path]], base: Path, address: str, workers: int | None,
    on_done: Callable[[Path, InputError | WorkError | None], None],
) -> None:
    """Run the points of a sweep on the Ray cluster at `address` ("auto": the one of this machine).

    `workers`: limit of concurrent runs; None: the cluster's number of CPUs. `on_done(folder, error)` is called
    after each run, with its error if it failed.
    WorkError if the cluster cannot be reached, or repeatedly loses a run's worker; InputError for an invalid
    address.
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
        stored: dict[str, Any] = {}  # hash of a file -> reference to its contents in Ray's object store
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
                # this error comes from Ray itself, because errors of a run are returned as results
                except Exception as error:
                    why = f"run {folder.name} cannot run on the cluster, or {RETRIES + 1} workers died during it"
                    raise WorkError(f"{why}: {_first_line(error)}") from None
                if isinstance(found, InputError | WorkError):
                    on_done(folder, found)
                    continue
                _write(folder, found)
                on_done(folder, None)
    finally:
        for reference in running:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def check_listens(address: str) -> None:
    """Raise WorkError if no process listens at HOST:PORT, because Ray would retry for minutes and then end this
    process."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{address!r} is not HOST:PORT of a Ray cluster, or auto", field="address")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise WorkError(f"cannot reach Ray at {address}: {_first_line(error)}") from None


def run_packed(
    point: Point, base: str, program: str, digests: dict[str, str], *contents: bytes
) -> Files | InputError | WorkError:
    """Run a sweep point on this machine. Returns the files of its record, or its error.

    `digests` and `contents`: hashes and contents of the files that the point names, by option and in the same order.
    `program`: version of the program that started the sweep.
    """
    if version("cotenant") != program:
        return WorkError(f"{os.uname().nodename} has cotenant {version('cotenant')}; the sweep runs with {program}")
    with tempfile.TemporaryDirectory(prefix="cotenant-sweep-") as name:
        folder = Path(name)
        # copy -> original path, for files that this machine lacks or has in another version
        copies: dict[Path, Path] = {}
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
    for copy, path in copies.items():  # the record must name the original paths, not those of the copies
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
