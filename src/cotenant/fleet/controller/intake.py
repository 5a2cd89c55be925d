"""Job admission: checks that a job could run on this fleet and that no other job uses its folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from cotenant.core.errors import InputError
from cotenant.fleet.controller.planners import Planner
from cotenant.fleet.controller.profiles import keep_profiles
from cotenant.fleet.jobs import JobSpec, check_spec
from cotenant.fleet.nodes import NodeSpec
from cotenant.fleet.state import Job

PROFILES_FOLDER = "profiles"


def admit(
    specs: Sequence[JobSpec], open_jobs: Collection[Job], planner: Planner, nodes: Iterable[NodeSpec], folder: Path,
    now_s: float,
) -> list[JobSpec]:  # fmt: skip
    """Return the admitted jobs as they are stored. Raises InputError that names the field of the first job that cannot
    be admitted.
    """
    nodes = tuple(nodes)
    for spec in specs:
        check_spec(spec)
    _check_folders(specs, open_jobs)
    kept = keep_profiles(specs, folder / PROFILES_FOLDER)
    for spec in kept:
        planner.check(Job(-1, spec.name, spec, now_s), nodes)
    return kept


def _check_folders(specs: Sequence[JobSpec], open_jobs: Collection[Job]) -> None:
    """Raise an error if two jobs have the same folder, since they would mix up leases and overwrite each other's
    checkpoints.
    """
    own = [os.path.realpath(spec.job_dir) for spec in specs if spec.job_dir is not None]
    if not own:
        return
    taken = {os.path.realpath(job.spec.job_dir): job.id for job in open_jobs if job.spec.job_dir is not None}
    for path in own:
        if path in taken:
            whose = f"job {taken[path]}, which has not ended" if taken[path] else "another of these jobs"
            raise InputError(f"{path} is the folder of {whose}; choose another", field="job_dir")
        taken[path] = ""
