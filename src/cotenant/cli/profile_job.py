"""`cotenant profile job`: measure how a training job's speed depends on cores and memory, from a few runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.core.errors import InputError
from cotenant.core.files import check_writable, write_text
from cotenant.core.units import number_or_nan, parse_memory, parse_seconds

if TYPE_CHECKING:
    from cotenant.profiles.training.job_runs import JobRuns
    from cotenant.profiles.training.optimistic import CpuPoint, DataSet

Text = str | None


def job(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="The command of a job that trains through cotenant.loop.")
    ],
    cpus: Annotated[
        Text,
        typer.Option("--cpus", metavar="1-24", help="Range of cores to measure (default: 1 to all of this machine)."),
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", min=1, help="GPUs that the job uses; the profile holds figures per GPU.")
    ] = 1,
    dataset: Annotated[
        Text, typer.Option("--dataset", metavar="PATH|SIZE", help="Data read per epoch: a path or a size.")
    ] = None,
    storage: Annotated[
        str, typer.Option("--storage-mbps", metavar="auto|N", help="Read speed of the storage; auto measures it.")
    ] = "auto",
    memory_speed: Annotated[
        str, typer.Option("--memory-mbps", metavar="auto|N", help="Read speed of memory; auto measures it.")
    ] = "auto",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of each run.")] = 50,
    warm: Annotated[int, typer.Option("--warm", min=1, help="Steps of each run before the timed ones.")] = 5,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Largest number of runs, without the warm-up run.")] = 8,
    name: Annotated[
        Text, typer.Option("--name", help="Name of the model in the profile (default: the program's).")
    ] = None,
    pretend_cores: Annotated[
        bool, typer.Option("--pretend-cores", help="Tell the job its number of cores without enforcing it.")
    ] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="Time limit of each run.")] = "10min",
    out: Annotated[
        Text, typer.Option("--out", metavar="F.json", help="Profile to write, for simulate --profiles.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure a training job's speed with few and many cores, compute how much slower it is if less memory caches its
    data set, and write its profile.

    The job must train through cotenant.loop, which times the steps and ends the job.
    """
    from cotenant.profiles.training.job_runs import JobRuns
    from cotenant.profiles.training.optimistic import profile_table, sweep

    least, most = _cores(cpus, gpus, pretend_cores)
    check_writable(out)
    size = _size(dataset)
    speeds = [_speed(text, field) for text, field in ((storage, "storage-mbps"), (memory_speed, "memory-mbps"))]
    title = name or _title(command)
    job_runs = JobRuns(
        command, float(gpus), warm=warm, steps=steps, timeout_s=parse_seconds(timeout, field="timeout"),
        pretend=pretend_cores,
    )  # fmt: skip
    job_runs.step_s(most)  # this run is not measured; it fills the page cache
    points = sweep(lambda n: _told(job_runs, n, quiet=as_json), least, most, gpus, runs)
    data = _data_set(size, dataset, speeds, job_runs)
    content = profile_table(title, points, float(gpus), data, more=_measured(points, data, steps))
    text = json.dumps(content, indent=1)
    if out is not None:
        write_text(Path(out), text + "\n")
    _show(content, points, out, as_json)


def _cores(text: Text, gpus: int, pretend: bool) -> tuple[int, int]:
    from cotenant.profiles.training.job_runs import usable_cores

    here = len(usable_cores())
    if text is None:
        return min(gpus, here), max(gpus, here)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise InputError(f"must be a range of cores such as 1-24, not {text!r}", field="cpus")
    if most > here and not pretend:
        if least > here:
            raise InputError(f"{least} cores are requested but only {here} are available here", field="cpus")
        typer.echo(
            f"cotenant: {most} cores are requested but {here} are available here: the profile ends at "
            f"{here} and assumes that more do not help (--pretend-cores goes further for a job that only "
            "pretends to compute)",
            err=True,
        )
        most = here
    return least, most


def _size(dataset: Text) -> int:
    """Return the size of the job's data set in bytes; 0 if the job has none."""
    from cotenant.profiles.training.read_speeds import dataset_bytes

    if dataset is None:
        return 0
    if not Path(dataset).exists():
        try:
            return parse_memory(dataset, field="dataset")
        except InputError:
            raise InputError(f"{dataset!r} is neither a file, a folder nor a size", field="dataset") from None
    return dataset_bytes(Path(dataset))


def _speed(text: str, field: str) -> float | None:
    """Parse a read speed in 10^6 bytes/s; None: the speed is to be measured."""
    if text == "auto":
        return None
    value = number_or_nan(text)
    if not 0 < value < float("inf"):
        raise InputError(f"must be auto or a number above 0, not {text!r}", field=field)
    return value


def _title(command: list[str]) -> str:
    scripts = [word for word in command if word.endswith(".py")]
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1].rsplit(".", 1)[-1]
    return Path(scripts[0] if scripts else command[0]).stem


def _told(job_runs: JobRuns, cpus: int, *, quiet: bool) -> float:
    step_s = job_runs.step_s(cpus)
    if not quiet:
        typer.echo(f"{cpus} core{'s' if cpus > 1 else ''}: {step_s * 1000:.4g} ms per step", err=True)
    return step_s


def _data_set(size: int, dataset: Text, speeds: list[float | None], job_runs: JobRuns) -> DataSet | None:
    from cotenant.profiles.training.optimistic import DataSet
    from cotenant.profiles.training.read_speeds import memory_mbps, storage_mbps

    resident = int(job_runs.raw.get("resident_bytes") or 0)
    if not size:
        return DataSet(0, 1, 1.0, 1.0, resident)
    per_epoch = job_runs.raw.get("steps_per_epoch")
    if not per_epoch:
        raise InputError("the loader does not report the steps per epoch, so the data per step is unknown",
                         field="dataset")  # fmt: skip
    where = Path(dataset) if dataset and Path(dataset).exists() else None
    return DataSet(size, int(per_epoch), speeds[0] or storage_mbps(where), speeds[1] or memory_mbps(), resident)


def _measured(points: list[CpuPoint], data: DataSet | None, steps: int) -> dict[str, Any]:
    """Return how the profile was measured, for readers of the file."""
    return {
        "measured": {
            "runs": [{"cpus": p.cpus, "step_s": p.step_s} for p in points],
            "steps": steps,
            "dataset_bytes": data.bytes if data else 0,
            "storage_mbps": data.storage_mbps if data and data.bytes else None,
            "memory_mbps": data.memory_mbps if data and data.bytes else None,
        }
    }


def _show(content: dict[str, Any], points: list[CpuPoint], out: Text, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**content, "out": out, "runs": len(points)}))
        return
    if out is None:
        print(json.dumps(content, indent=1))
        return
    print(f"{len(points)} runs; wrote {out}")
