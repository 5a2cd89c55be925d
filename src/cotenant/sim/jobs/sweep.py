"""Sweeps: run every combination of the options in a sweep file, on all cores or on a Ray cluster.

A run's folder is named by a hash of its options, and appears when the run is complete. So an interrupted sweep
continues where it stopped, and after a change of the file, the runs that are still part of it are kept.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cotenant.core.errors import InputError, WorkError
from cotenant.core.files import atomic_file, cannot_write
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.sweep_file import Point, Sweep, key_of, run_point
from cotenant.workloads.clusters.forms import parse_cluster
from cotenant.workloads.jobs.generate import Workload, generate

Progress = Callable[[int, int], None]
Failure = InputError | WorkError
OnDone = Callable[[Path, Failure | None], None]  #: gets a run's folder, and its error if it failed


@dataclass(frozen=True)
class Ran:
    """The runs of a sweep that has ended, in the sweep's order: the folders of finished runs, and for each failed run
    its values of the sweep's axes and its error.
    """

    folders: list[Path]
    failed: list[tuple[Point, Failure]]


def _start_worker() -> None:
    """End a worker process when its parent ends for any reason, because no process would read its results."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def compile_once() -> None:
    """Compile the simulator's event loop and policies with numba, and keep the machine code in a cache on disk,
    so that each worker process need not compile them.
    """
    from cotenant.policy.compiled import is_compiled
    from cotenant.policy.jobs.choice import JobPolicy
    from cotenant.policy.jobs.demand import build_workload
    from cotenant.sim.jobs.engine import warm_up

    if not is_compiled():
        trace = generate(Workload(jobs=1, rate_per_s=1.0), load_profiles().classes, load_profiles().iteration_s).trace
        workload = build_workload(trace.jobs, load_profiles(), parse_cluster("1x8"))
        warm_up(workload.demand, workload.nodes, JobPolicy().choice())


def run_sweep(
    sweep: Sweep,
    out: Path,
    base: Path,
    *,
    workers: int | None = None,
    address: str | None = None,
    progress: Progress | None = None,
    on_ready: Callable[[], None] | None = None,
) -> Ran:
    """Run the points that have no result yet. A run that fails does not keep the others from running; if all fail, the
    first one's error is raised.

    `workers`: number of concurrent runs; None: one for each core. `address`: address of the Ray cluster to use; None:
    this machine. `on_ready()` is called before the first run, if there is one; `progress(done, runs)` after each. After
    an interrupt (KeyboardInterrupt) finished runs are kept, unfinished ones are removed, and the next call continues.
    """
    points = list(sweep.points())
    folders = [out / "runs" / key_of(point, base) for point in points]
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(out, error) from None
    todo = [(p, f) for p, f in zip(points, folders, strict=True) if not (f / "run.json").exists()]
    done = len(points) - len(todo)
    errors: dict[Path, Failure] = {}
    if progress is not None:
        progress(done, len(points))
    if todo:
        if on_ready is not None:
            on_ready()
        count = itertools.count(done + 1)

        def on_done(folder: Path, error: Failure | None) -> None:
            if error is not None:
                errors[folder] = error
            if progress is not None:
                progress(next(count), len(points))

        if address is None:
            compile_once()
            _run_all(todo, base, min(workers or os.cpu_count() or 1, len(todo)), on_done)
        else:
            from cotenant.sim.jobs.sweep_ray import run_on_ray

            run_on_ray(todo, base, address, workers, on_done)
    failed = [
        ({name: p[name] for name in sweep.axes}, errors[f]) for p, f in zip(points, folders, strict=True) if f in errors
    ]
    if len(failed) == len(points):
        raise failed[0][1]
    with atomic_file(out / "sweep.json") as file:
        axes = {name: [str(value) for value in values] for name, values in sweep.axes.items()}
        runs = [
            {"folder": f"runs/{f.name}", **p, **({"error": str(errors[f])} if f in errors else {})}
            for p, f in zip(points, folders, strict=True)
        ]
        json.dump({"title": sweep.title, "axes": axes, "runs": runs}, file, indent=1, default=str)
    return Ran([folder for folder in folders if folder not in errors], failed)


def _run_all(todo: list[tuple[Point, Path]], base: Path, workers: int, on_done: OnDone) -> None:
    """Distribute the points of the sweep to worker processes. On an interrupt or an error that is not one of a run,
    stop them and remove unfinished runs.
    """
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        with _deaf_to_interrupt():
            folders: dict[Future[None], Path] = {pool.submit(run_point, p, f, base): f for p, f in todo}
        pending = set(folders)
        while pending:
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                error = future.exception()
                if error is not None and not isinstance(error, Failure):
                    raise error
                on_done(folders[future], error)
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        for _, folder in todo:
            for part in folder.parent.glob(f".{folder.name}.part-*"):
                shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, BrokenProcessPool):
            raise WorkError("a worker process was killed, perhaps for its memory; try fewer --workers") from None
        raise
    pool.shutdown()


@contextmanager
def _deaf_to_interrupt() -> Iterator[None]:
    """Return a context in which started processes ignore Ctrl-C, which a terminal sends to all of them: the parent
    stops them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
