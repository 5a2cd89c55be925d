"""Finds the job that `cotenant explain` names: in the folder of a run or fleet, or by id in the running fleet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.core.errors import InputError

if TYPE_CHECKING:
    from cotenant.core.record.record import Record


def record_at(run: Path, job: str | None) -> tuple[Record, str | None, str]:
    """Return the record of a run, the id of the job to explain, and for a job of a fleet the error of its last start.

    `run` is the folder of a run or of a fleet, or the id of a job of the fleet. Raises InputError if it is none of
    these.
    """
    from cotenant.core.record.reader import read_record

    if not run.is_dir() and job is None and str(run) == run.name:
        from cotenant.core.folders import fleet_folder
        from cotenant.fleet.controller.recording import error_of, record_of
        from cotenant.fleet.store.jobs import is_fleet

        folder = fleet_folder()
        if is_fleet(folder):
            record = record_of(folder)
            if str(run) in record.jobs["id"].to_list():
                return record, str(run), error_of(folder, str(run))
            if not run.exists():
                raise InputError(f"{run} is neither a run's folder nor a job of the fleet in {folder}", field="RUN")
    if run.is_dir():
        from cotenant.fleet.store.jobs import is_fleet

        if is_fleet(run):
            from cotenant.fleet.controller.recording import error_of, record_of

            return record_of(run), job, "" if job is None else error_of(run, job)
    return read_record(run), job, ""
